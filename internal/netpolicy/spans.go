package netpolicy

import (
	"net/netip"
	"slices"
)

// Span is a range of ports of one protocol, both ends included.
type Span struct {
	Proto    Proto
	From, To uint16
}

// Spans returns all ports on which Decide allows a name, an address or both,
// TCP first, without overlap, in order.
func (p *Policy) Spans(name string, addr netip.Addr) []Span {
	c, wrong := p.candidates(Query{Name: name, Addr: addr})
	if wrong != "" {
		return nil
	}
	return c.spans()
}

func (c *candidates) spans() []Span {
	if c.blank() {
		return nil
	}
	steps := c.steps()
	var spans []Span
	for _, proto := range protos {
		open := false
		for i, from := range steps {
			if !c.judge(from, proto).allow {
				open = false
				continue
			}
			to := uint16(maxPort)
			if i+1 < len(steps) {
				to = steps[i+1] - 1
			}
			if open {
				spans[len(spans)-1].To = to
			} else {
				spans = append(spans, Span{proto, from, to})
			}
			open = true
		}
	}
	return spans
}

// blank reports whether no port can be open, at a glance.
func (c *candidates) blank() bool {
	return len(c.names) == 0 && len(c.nets) == 0 && (len(c.any) == 0 || c.closed != nil)
}

// steps returns the ports at which the answer may change, in order, the first
// being 1: between two of them each port is answered as the first of them.
func (c *candidates) steps() []uint16 {
	steps := []uint16{1, dnsPort, dnsPort + 1, quicPort, quicPort + 1, dotPort, dotPort + 1}
	add := func(rs []*rule) {
		for _, r := range rs {
			steps = append(steps, r.lo)
			if r.hi < maxPort {
				steps = append(steps, r.hi+1)
			}
		}
	}
	add(c.any)
	for _, levels := range [][][]*rule{c.names, c.nets, c.inner} {
		for _, level := range levels {
			add(level)
		}
	}
	if len(c.any) > 0 && c.p != nil {
		add(c.p.deny)
	}
	slices.Sort(steps)
	return slices.Compact(steps)
}

// judgeAny decides whether some port is allowed. A refusal is that of the port
// whose reason says most.
func (c *candidates) judgeAny(proto Proto) Decision {
	var refusal *verdict
	for _, want := range protos {
		if proto != "" && proto != want {
			continue
		}
		for _, port := range c.steps() {
			v := c.judge(port, want)
			if v.allow {
				return c.say(v)
			}
			if port != dnsPort && (refusal == nil || refusal.rule == nil && v.rule != nil) {
				refusal = &v
			}
		}
	}
	return c.say(*refusal) // there is a step besides port 53
}

// Region is a range of addresses of one family, both ends included, that may be
// reached on some ports without any name.
type Region struct {
	From, To netip.Addr
	Spans    []Span
}

// Direct returns all that may be reached without a name: for an address and a
// port in it, and for no other, Decide allows a Query without a name. The
// regions are in order and do not overlap; IPv4 comes first.
func (p *Policy) Direct() []Region {
	if p == nil || !slices.ContainsFunc(p.all(), func(r *rule) bool { return r.allow }) {
		return nil
	}
	var regions []Region
	for _, family := range []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")} {
		regions = append(regions, p.direct(family)...)
	}
	return regions
}

// all returns the rules that a query without a name may meet.
func (p *Policy) all() []*rule {
	all := slices.Clone(p.any)
	for _, rs := range p.nets {
		all = append(all, rs...)
	}
	return all
}

// direct returns the regions of one family.
func (p *Policy) direct(family netip.Prefix) []Region {
	starts := p.borders(family)
	var regions []Region
	var public []Span // of all addresses of which no rule and no range speaks
	known := false
	for i, from := range starts {
		c, wrong := p.candidates(Query{Addr: from})
		var spans []Span
		switch plain := wrong == "" && c.plain(); {
		case plain && known:
			spans = public
		case plain:
			public, known = c.spans(), true
			spans = public
		case wrong == "":
			spans = c.spans()
		}
		if len(spans) == 0 {
			continue
		}
		to := last(family)
		if i+1 < len(starts) {
			to = starts[i+1].Prev()
		}
		if n := len(regions) - 1; n >= 0 && regions[n].To.Next() == from && slices.Equal(regions[n].Spans, spans) {
			regions[n].To = to
			continue
		}
		regions = append(regions, Region{from, to, spans})
	}
	return regions
}

// borders returns the addresses at which the answer may change, in order, the
// first being the family's first.
func (p *Policy) borders(family netip.Prefix) []netip.Addr {
	starts := []netip.Addr{family.Addr()}
	add := func(n netip.Prefix) {
		if n.Addr().BitLen() != family.Addr().BitLen() {
			return
		}
		starts = append(starts, n.Masked().Addr())
		if next := last(n).Next(); next.IsValid() {
			starts = append(starts, next)
		}
	}
	g := p.guard()
	for _, r := range g.ranges {
		add(r.Prefix)
	}
	for _, n := range g.never {
		add(n)
	}
	for _, rs := range p.nets {
		for _, n := range g.forms(rs[0].prefix) {
			add(n)
		}
	}
	slices.SortFunc(starts, netip.Addr.Compare)
	return slices.Compact(starts)
}

// last returns the last address of a CIDR.
func last(n netip.Prefix) netip.Addr {
	a := n.Addr().AsSlice()
	for i := range a {
		if bits := n.Bits() - 8*i; bits < 8 {
			a[i] |= 0xff >> max(bits, 0)
		}
	}
	end, _ := netip.AddrFromSlice(a)
	return end
}
