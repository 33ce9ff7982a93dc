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
	Time  time.Time       `json:"time"`  // the last one
	Count int             `json:"count"` // how many alike came one after the other
	Kind  DenialKind      `json:"kind"`
	Name  string          `json:"name,omitempty"` // "" for none
	Addr  netip.Addr      `json:"addr,omitzero"`  // zero for none
	Port  uint16          `json:"port,omitempty"` // 0 for none
	Proto netpolicy.Proto `json:"proto,omitempty"`
	Rule  string          `json:"rule,omitempty"` // that decided, "" if none did
	Why   string          `json:"why,omitempty"`
}

// alike reports whether two denials differ in their time only.
func (d Denial) alike(o Denial) bool {
	d.Time, d.Count = o.Time, o.Count
	return d == o
}

// maxDenials is how many denials of a sandbox are remembered.
const maxDenials = 256

// Denied is what a sandbox was denied in its life.
type Denied struct {
	Newest []Denial `json:"newest,omitempty"` // the oldest of them first
	Total  uint64   `json:"total"`
}

// Denials take what a sandbox is denied. They outlive the guards that serve it.
// Their methods may be called side by side.
type Denials struct {
	mu      sync.Mutex // guards what follows
	denied  Denied
	changed bool
}

// NewDenials returns denials that go on from earlier ones.
func NewDenials(before Denied) *Denials {
	n := before.Newest
	return &Denials{denied: Denied{slices.Clone(n[max(0, len(n)-maxDenials):]), before.Total}}
}

// Denied returns what was denied.
func (l *Denials) Denied() Denied {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Denied{slices.Clone(l.denied.Newest), l.denied.Total}
}

// Changed returns what was denied, if that is more than at the last call.
func (l *Denials) Changed() (d Denied, changed bool) {
	l.mu.Lock()
	changed, l.changed = l.changed, false
	l.mu.Unlock()
	if !changed {
		return Denied{}, false
	}
	return l.Denied(), true
}

func (l *Denials) add(d Denial) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.denied.Total++
	l.changed = true
	list := l.denied.Newest
	// A sandbox that tries a few things again and again fills no more than them.
	for i := len(list) - 1; i >= max(0, len(list)-8); i-- {
		if list[i].alike(d) {
			d.Count += list[i].Count
			l.denied.Newest = append(slices.Delete(list, i, i+1), d)
			return
		}
	}
	if len(list) >= maxDenials {
		list = slices.Delete(list, 0, 1)
	}
	l.denied.Newest = append(list, d)
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

// Usage is what a sandbox's network has done since its guard was opened.
type Usage struct {
	Sent, Received uint64 // bytes that TCP and UDP carried
	Flows          int    // that are open
}

type counts struct{ sent, received atomic.Uint64 }

// Usage measures.
func (gd *Guard) Usage() Usage {
	u := Usage{Sent: gd.counts.sent.Load(), Received: gd.counts.received.Load()}
	gd.mu.Lock()
	u.Flows = len(gd.flows)
	gd.mu.Unlock()
	return u
}
