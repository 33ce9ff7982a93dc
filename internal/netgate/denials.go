package netgate

import (
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/netpolicy/dnsproxy"
)

// DenialKind says what was denied.
type DenialKind string

// The kinds of denials.
const (
	DeniedName     DenialKind = "name"    // a name that was to be resolved
	DeniedAnswer   DenialKind = "answer"  // an address or alias that an allowed name led to
	DeniedQuery    DenialKind = "query"   // a DNS query over its limits
	DeniedAddress  DenialKind = "address" // a connection or datagram to an address
	DeniedHost     DenialKind = "host"    // a connection by name that asked for another name, or for none
	DeniedLimit    DenialKind = "limit"   // a flow over the limits
	DeniedByChange DenialKind = "change"  // an open flow, by a change of the rules
)

// Denial is something that a sandbox was denied.
type Denial struct {
	Time  time.Time // the last one
	Count int       // how many alike came one after the other
	Kind  DenialKind
	Name  string     // "" for none
	Addr  netip.Addr // zero for none
	Port  uint16     // 0 for none
	Proto netpolicy.Proto
	Rule  string // that decided, "" if none did
	Why   string
}

// alike reports whether two denials differ in their time only.
func (d Denial) alike(o Denial) bool {
	d.Time, d.Count = o.Time, o.Count
	return d == o
}

// denials are the newest of a sandbox.
type denials struct {
	most int

	mu    sync.Mutex
	list  []Denial // the oldest first
	total uint64
}

func newDenials(most int) *denials { return &denials{most: most} }

func (l *denials) add(d Denial) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.total++
	// A sandbox that tries a few things again and again fills no more than them.
	for i := len(l.list) - 1; i >= max(0, len(l.list)-8); i-- {
		if l.list[i].alike(d) {
			d.Count += l.list[i].Count
			l.list = append(slices.Delete(l.list, i, i+1), d)
			return
		}
	}
	if len(l.list) >= l.most {
		l.list = slices.Delete(l.list, 0, 1)
	}
	l.list = append(l.list, d)
}

func (gd *Guard) deny(d Denial) {
	d.Time, d.Count = gd.gate.now(), 1
	gd.denials.add(d)
}

// deniedByDNS takes what the DNS proxy refused.
func (gd *Guard) deniedByDNS(e dnsproxy.Event) {
	d := Denial{Name: e.Name, Addr: e.Addr, Rule: e.Rule, Why: e.Why}
	switch e.Kind {
	case dnsproxy.DeniedName:
		d.Kind = DeniedName
	case dnsproxy.DeniedQuery:
		d.Kind = DeniedQuery
	default:
		d.Kind = DeniedAnswer
	}
	gd.deny(d)
}

// Denied returns the newest denials, the oldest of them first, and how many
// there were in all.
func (gd *Guard) Denied() (newest []Denial, total uint64) {
	gd.denials.mu.Lock()
	defer gd.denials.mu.Unlock()
	return slices.Clone(gd.denials.list), gd.denials.total
}

// Usage is what a sandbox's network has done since its guard was opened.
type Usage struct {
	Sent, Received uint64 // bytes that TCP and UDP carried
	Flows          int    // that are open
	Denied         uint64
}

type counts struct{ sent, received atomic.Uint64 }

// Usage measures.
func (gd *Guard) Usage() Usage {
	u := Usage{Sent: gd.counts.sent.Load(), Received: gd.counts.received.Load()}
	_, u.Denied = gd.Denied()
	gd.mu.Lock()
	u.Flows = len(gd.flows)
	gd.mu.Unlock()
	return u
}
