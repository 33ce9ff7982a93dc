package dnsproxy

import (
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// Verdict is what became of a query.
type Verdict string

// The verdicts.
const (
	Allowed Verdict = "allowed" // and answered, if only by that there is no such record
	Denied  Verdict = "denied"  // by the policy
	Limited Verdict = "limited" // by Limits.FreeLength, NameBits or Bits
	Refused Verdict = "refused" // malformed, or of a kind that is not answered
	Failed  Verdict = "failed"  // no upstream answered, or the addresses could not be pinned
)

// Entry is a query in a sandbox's log.
type Entry struct {
	Time    time.Time
	Name    string // "" if it could not be read
	Type    string // "AAAA"
	Verdict Verdict
	Rule    string // that decided, "" if none did
	Why     string
	Addrs   []netip.Addr // in the answer
	Took    time.Duration
}

// Counters count a sandbox's queries.
type Counters struct {
	Queries uint64 // all
	Allowed, Denied, Limited, Refused,
	Failed uint64 // by verdict
	Delayed uint64 // that had to wait for Limits.Rate
	Dropped uint64 // addresses taken out of answers
}

// EventKind says what was refused.
type EventKind string

// The kinds of events.
const (
	DeniedName    EventKind = "name"    // a name that the rules do not allow
	DeniedLink    EventKind = "link"    // a name in the chain of an allowed one, which a rule denies
	DeniedAddress EventKind = "address" // an address in the answer to an allowed name
	DeniedQuery   EventKind = "query"   // by the limits
)

// Event tells of something that a sandbox was refused.
type Event struct {
	Sandbox sandbox.ID
	Time    time.Time
	Kind    EventKind
	Name    string     // that was asked for
	Type    string     // of record
	Link    string     // of DeniedLink
	Addr    netip.Addr // of DeniedAddress
	Rule    string     // "" if none decided
	Why     string
}

// record is the newest entries of a log, and the counters.
type record struct {
	mu      sync.Mutex
	entries []Entry // a ring once it is full
	next    int     // where the next entry goes
	size    int
	count   Counters
}

func newRecord(size int) *record { return &record{size: max(size, 1)} }

// add keeps an entry and counts it.
func (r *record) add(e Entry, dropped int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count.Queries++
	r.count.Dropped += uint64(dropped)
	switch e.Verdict {
	case Allowed:
		r.count.Allowed++
	case Denied:
		r.count.Denied++
	case Limited:
		r.count.Limited++
	case Refused:
		r.count.Refused++
	case Failed:
		r.count.Failed++
	}
	if len(r.entries) < r.size {
		r.entries = append(r.entries, e)
		return
	}
	r.entries[r.next] = e
	r.next = (r.next + 1) % r.size
}

func (r *record) delayed() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count.Delayed++
}

// Log returns the newest queries, the oldest of them first.
func (h *Handle) Log() []Entry {
	r := h.record
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Concat(r.entries[r.next:], r.entries[:r.next])
}

// Counters returns what was counted so far.
func (h *Handle) Counters() Counters {
	h.record.mu.Lock()
	defer h.record.mu.Unlock()
	return h.record.count
}
