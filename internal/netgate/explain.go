package netgate

import (
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

// Explain says whether the sandbox may reach something now, and why, by what
// decides on its flows. target is read by netpolicy.ParseQuery.
func (gd *Guard) Explain(target string) (netpolicy.Decision, error) {
	q, err := netpolicy.ParseQuery(target)
	if err != nil {
		return netpolicy.Decision{}, err
	}
	now := gd.gate.now()
	gd.mu.Lock()
	defer gd.mu.Unlock()
	if q.Name != "" || q.Port == 0 {
		d := gd.policy.Decide(q)
		if q.Addr.IsValid() && !d.Allow {
			return gd.explainAddr(q, d, now), nil
		}
		return d, nil
	}
	return gd.explainAddr(q, netpolicy.Decision{}, now), nil
}

// explainAddr is Explain of an address, which may be open by the names that led
// to it. d is what is said of it without them.
func (gd *Guard) explainAddr(q netpolicy.Query, d netpolicy.Decision, now time.Time) netpolicy.Decision {
	if q.Port == 0 {
		for _, name := range gd.pins.names(q.Addr, now) {
			q.Name = name
			if by := gd.policy.Decide(q); by.Allow {
				return ledHere(by, []string{name})
			}
		}
		return d
	}
	if q.Proto == "" {
		q.Proto = netpolicy.TCP
	}
	g := gd.judge(netip.AddrPortFrom(q.Addr, q.Port), q.Proto, now)
	if g.direct || len(g.names) == 0 {
		return g.why
	}
	return ledHere(g.why, g.names)
}

func ledHere(d netpolicy.Decision, names []string) netpolicy.Decision {
	d.Why = fmt.Sprintf("%s led this sandbox to the address: %s", strings.Join(names, ", "), d.Why)
	return d
}
