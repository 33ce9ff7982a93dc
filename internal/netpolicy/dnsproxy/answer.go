package dnsproxy

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"github.com/miekg/dns"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

const (
	chainMost = 16  // links from a name to its addresses
	addrsMost = 128 // addresses in an answer
)

// judged is what of an upstream's answer may pass.
type judged struct {
	rcode   int
	records []dns.RR
	addrs   []netip.Addr  // among them
	until   time.Duration // the longest lifetime of an address
	denied  *netpolicy.Decision
	link    string // that was denied
	dropped []dropped
	end     string // the last name of the chain
	broken  string // what is wrong with the chain
}

// dropped is an address that may not pass.
type dropped struct {
	addr netip.Addr
	why  netpolicy.Decision
}

// judge takes out of an upstream's answer what was asked for and the policy
// allows: the chain of aliases from the name, and the records of the type at its
// end. All else is left: records of other names, other sections.
func (c Config) judge(p *netpolicy.Policy, q *query, m *dns.Msg) *judged {
	j := &judged{rcode: m.Rcode, end: q.name}
	shown := q.msg.Question[0].Name // in the sandbox's own case of letters
	if q.typ != dns.TypeCNAME {
		shown = c.follow(j, p, shown, m.Answer)
	}
	if j.denied != nil || j.broken != "" {
		return j
	}
	leads := p.Leads(q.name)
	for _, rr := range m.Answer {
		if rr.Header().Rrtype != q.typ || rr.Header().Class != dns.ClassINET || !named(rr, j.end) {
			continue
		}
		c.take(j, p, leads, rr, shown)
		if j.denied != nil {
			return j
		}
	}
	if len(j.dropped) > 0 && len(j.addrs) == 0 {
		j.records = nil // nothing to lead to
	}
	return j
}

// follow takes the aliases from j.end on, and returns the last name of them.
func (c Config) follow(j *judged, p *netpolicy.Policy, shown string, answer []dns.RR) string {
	for links := 0; ; links++ {
		i := slices.IndexFunc(answer, func(rr dns.RR) bool {
			return rr.Header().Rrtype == dns.TypeCNAME && rr.Header().Class == dns.ClassINET && named(rr, j.end)
		})
		if i < 0 {
			return shown
		}
		if links == chainMost {
			j.broken = fmt.Sprintf("the chain of aliases is longer than %d", chainMost)
			return shown
		}
		alias := answer[i].(*dns.CNAME)
		if !c.alias(j, p, alias, shown) {
			return shown
		}
		shown = dns.Fqdn(j.end)
	}
}

// alias takes one alias, and reports whether it may be followed.
func (c Config) alias(j *judged, p *netpolicy.Policy, alias *dns.CNAME, shown string) bool {
	target, ok := netpolicy.NormalName(alias.Target)
	if !ok {
		j.broken = fmt.Sprintf("the alias of %s leads to %.100q, which is not a domain name", j.end, alias.Target)
		return false
	}
	if d := p.Link(target); !d.Allow {
		j.denied, j.link = &d, target
		return false
	}
	j.records = append(j.records, &dns.CNAME{Hdr: c.header(alias, shown), Target: dns.Fqdn(target)})
	j.end = target
	return true
}

// take takes a record of the type that was asked for.
func (c Config) take(j *judged, p *netpolicy.Policy, leads func(netip.Addr) netpolicy.Decision, rr dns.RR, shown string) {
	var addr netip.Addr
	switch rr := rr.(type) {
	case *dns.CNAME:
		c.alias(j, p, rr, shown)
		return
	case *dns.A:
		addr, _ = netip.AddrFromSlice(rr.A.To4())
	case *dns.AAAA:
		addr, _ = netip.AddrFromSlice(rr.AAAA.To16())
	default:
		rr = dns.Copy(rr)
		*rr.Header() = c.header(rr, shown)
		j.records = append(j.records, rr)
		return
	}
	if !addr.IsValid() { // an empty record, which the library takes
		return
	}
	if len(j.addrs) == addrsMost || len(j.dropped) == addrsMost || slices.Contains(j.addrs, addr) {
		return
	}
	if d := leads(addr); !d.Allow {
		j.dropped = append(j.dropped, dropped{addr, d})
		return
	}
	h := c.header(rr, shown)
	j.addrs = append(j.addrs, addr)
	j.until = max(j.until, time.Duration(h.Ttl)*time.Second)
	if addr.Is4() {
		j.records = append(j.records, &dns.A{Hdr: h, A: addr.AsSlice()})
	} else {
		j.records = append(j.records, &dns.AAAA{Hdr: h, AAAA: addr.AsSlice()})
	}
}

// header returns a record's header as it goes out: of a name, its lifetime
// within bounds.
func (c Config) header(rr dns.RR, name string) dns.RR_Header {
	ttl := min(max(time.Duration(rr.Header().Ttl)*time.Second, c.MinTTL), c.MaxTTL)
	return dns.RR_Header{Name: name, Rrtype: rr.Header().Rrtype, Class: dns.ClassINET, Ttl: uint32(ttl / time.Second)}
}

// named reports whether a record is of a name, given in the normal form.
func named(rr dns.RR, name string) bool {
	n, ok := netpolicy.NormalName(rr.Header().Name)
	return ok && n == name
}

// addrsIn returns the addresses among records.
func addrsIn(records []dns.RR) []netip.Addr {
	var all []netip.Addr
	for _, rr := range records {
		var b []byte
		switch rr := rr.(type) {
		case *dns.A:
			b = rr.A.To4()
		case *dns.AAAA:
			b = rr.AAAA
		}
		if a, ok := netip.AddrFromSlice(b); ok {
			all = append(all, a)
		}
	}
	return all
}

// open reports whether an answer ends in an alias of which the upstream says
// nothing further.
func (j *judged) open(q *query, m *dns.Msg) bool {
	return (q.typ == dns.TypeA || q.typ == dns.TypeAAAA) && j.denied == nil && j.broken == "" && j.rcode == dns.RcodeSuccess &&
		j.end != q.name && len(j.addrs) == 0 && len(j.dropped) == 0 && len(m.Ns) == 0
}
