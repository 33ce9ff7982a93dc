package netgate

import (
	"net/netip"
	"slices"
	"time"

	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/netpolicy/dnsproxy"
)

// Pin is an address that an allowed name led to, and until when it is open.
type Pin struct {
	Name  string     `json:"name"`
	Addr  netip.Addr `json:"addr"`
	Until time.Time  `json:"until"`
}

// pins are the addresses that are open by name. They are for the holder of
// Guard.mu.
type pins struct {
	most int
	by   map[netip.Addr]map[string]time.Time
	n    int
}

func newPins(most int) pins { return pins{most: most, by: map[netip.Addr]map[string]time.Time{}} }

// adopt takes over pins of earlier, as far as a policy still allows them.
func (p *pins) adopt(old []Pin, policy *netpolicy.Policy, now time.Time) {
	for _, o := range old {
		if o.Until.After(now) {
			p.add(o.Name, o.Addr, o.Until, now)
		}
	}
	p.judge(policy)
}

func (p *pins) add(name string, addr netip.Addr, until, now time.Time) {
	names := p.by[addr]
	if names == nil {
		names = map[string]time.Time{}
		p.by[addr] = names
	}
	old, known := names[name]
	if !known {
		if p.n >= p.most {
			p.makeRoom(now)
		}
		p.n++
		p.by[addr] = names // making room may have dropped it
	}
	if until.After(old) {
		names[name] = until
	}
}

// makeRoom drops what has expired, and if that is nothing the tenth that
// expires first.
func (p *pins) makeRoom(now time.Time) {
	all := p.list()
	slices.SortFunc(all, func(a, b Pin) int { return a.Until.Compare(b.Until) })
	for i, pin := range all {
		if i >= p.most/10 && pin.Until.After(now) {
			return
		}
		p.drop(pin.Addr, pin.Name)
	}
}

func (p *pins) drop(addr netip.Addr, name string) {
	names := p.by[addr]
	delete(names, name)
	p.n--
	if len(names) == 0 {
		delete(p.by, addr)
	}
}

// judge drops what a policy does not allow on any port.
func (p *pins) judge(policy *netpolicy.Policy) {
	for _, pin := range p.list() {
		if !policy.Resolve(pin.Name).Allow || !policy.Decide(netpolicy.Query{Name: pin.Name, Addr: pin.Addr}).Allow {
			p.drop(pin.Addr, pin.Name)
		}
	}
}

func (p *pins) list() []Pin {
	var all []Pin
	for addr, names := range p.by {
		for name, until := range names {
			all = append(all, Pin{name, addr, until})
		}
	}
	return all
}

// names returns the names that have led to an address and still hold, in order.
func (p *pins) names(addr netip.Addr, now time.Time) []string {
	var found []string
	for name, until := range p.by[addr] {
		if until.After(now) {
			found = append(found, name)
		}
	}
	slices.Sort(found)
	return found
}

// pin opens addresses for the DNS proxy.
func (gd *Guard) pin(pin dnsproxy.Pin) error {
	now := gd.gate.now()
	gd.mu.Lock()
	if pin.Policy != gd.policy {
		gd.mu.Unlock()
		return dnsproxy.ErrPolicyChanged
	}
	for _, addr := range pin.Addrs {
		gd.pins.add(pin.Name, addr, pin.Until, now)
	}
	gd.mu.Unlock()
	gd.changed()
	return nil
}

// Pins returns what is open by name, for the sandbox's next guard and for those
// of its copies.
func (gd *Guard) Pins() []Pin {
	now := gd.gate.now()
	gd.mu.Lock()
	defer gd.mu.Unlock()
	return slices.DeleteFunc(gd.pins.list(), func(p Pin) bool { return !p.Until.After(now) })
}

// grant is what the guard says of a flow. With neither it is denied.
type grant struct {
	direct bool     // its address is open by itself
	names  []string // that led to its address, and are allowed on its port
	why    netpolicy.Decision
}

func (g grant) allowed() bool { return g.direct || len(g.names) > 0 }

// judge decides on a flow, under mu.
func (gd *Guard) judge(to netip.AddrPort, proto netpolicy.Proto, now time.Time) grant {
	if to.Addr().Is4In6() {
		return grant{why: netpolicy.Decision{Why: "an IPv4 address written as IPv6 is never open"}}
	}
	q := netpolicy.Query{Addr: to.Addr(), Port: to.Port(), Proto: proto}
	d := gd.policy.Decide(q)
	g := grant{direct: d.Allow, why: d}
	if g.direct {
		return g
	}
	for _, name := range gd.pins.names(to.Addr(), now) {
		q.Name = name
		if d := gd.policy.Decide(q); d.Allow {
			g.names = append(g.names, name)
			g.why = d
		} else if len(g.names) == 0 && g.why.Rule == "" {
			g.why = d
		}
	}
	return g
}
