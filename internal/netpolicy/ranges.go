package netpolicy

import (
	"fmt"
	"net/netip"
	"slices"
)

// Range is a range of addresses that a name or "*" never leads to. A rule opens
// addresses of it only if its own CIDR lies within the range.
type Range struct {
	Prefix netip.Prefix
	What   string // "private"
	open   bool   // an exception: the addresses are public after all
}

// ranges are the ranges, the same on every host. The longest that holds an
// address counts. Ranges for documentation are not among them: mirrors and test
// networks use them.
var ranges = []Range{
	v("0.0.0.0/8", "this network"),
	v("10.0.0.0/8", "private"),
	v("100.64.0.0/10", "carrier-grade NAT"),
	v("100.100.100.200/32", "cloud metadata"),
	v("127.0.0.0/8", "loopback"),
	v("168.63.129.16/32", "cloud metadata"),
	v("169.254.0.0/16", "link-local"),
	v("169.254.169.253/32", "cloud metadata"),
	v("169.254.169.254/32", "cloud metadata"),
	v("169.254.170.2/32", "cloud metadata"),
	v("169.254.170.23/32", "cloud metadata"),
	v("172.16.0.0/12", "private"),
	v("192.0.0.0/24", "protocol assignments"),
	v("192.0.0.192/32", "cloud metadata"),
	v("192.88.99.0/24", "6to4 relay"),
	v("192.168.0.0/16", "private"),
	v("224.0.0.0/4", "multicast"),
	v("240.0.0.0/4", "reserved"),
	v("255.255.255.255/32", "broadcast"),

	v("::/3", "reserved"),
	v("::/96", "IPv4-compatible"),
	v("::/128", "unspecified"),
	v("::1/128", "loopback"),
	v("::ffff:0:0/96", "IPv4-mapped"),
	v("64:ff9b:1::/48", "local NAT64"),
	v("100::/64", "discard"),
	v("2001::/23", "protocol assignments"),
	v("2001::/32", "Teredo"),
	v("2002::/16", "6to4"),
	v("4000::/2", "reserved"),
	v("8000::/1", "reserved"),
	v("fc00::/7", "private"),
	v("fd00:ec2::/32", "cloud metadata"),
	v("fd20:ce::254/128", "cloud metadata"),
	v("fe80::/10", "link-local"),
	v("fec0::/10", "site-local"),
	v("ff00::/8", "multicast"),
}

func v(prefix, what string) Range { return Range{netip.MustParsePrefix(prefix), what, false} }

// Ranges returns the ranges in the order of the documentation.
func Ranges() []Range { return slices.Clone(ranges) }

var (
	nat64 = netip.MustParsePrefix("64:ff9b::/96")
	sixTo = netip.MustParsePrefix("2002::/16")
)

// guard is what keeps addresses closed on a host.
type guard struct {
	ranges []Range        // the longest first, those of IPv4 in the forms of IPv6 too
	never  []netip.Prefix // likewise
	nat64  []netip.Prefix
}

// everywhere is the guard of a host of which nothing is known.
var everywhere = mustGuard(Host{})

func mustGuard(h Host) guard {
	g, err := newGuard(h)
	if err != nil {
		panic(err)
	}
	return g
}

func newGuard(h Host) (guard, error) {
	g := guard{nat64: []netip.Prefix{nat64}}
	for _, p := range h.NAT64 {
		if !p.IsValid() || !p.Addr().Is6() || p.Bits() != 96 || p.Masked() != p {
			return guard{}, fmt.Errorf("NAT64 prefix %s: want an IPv6 prefix of 96 bits", p)
		}
		if p != nat64 {
			g.nat64 = append(g.nat64, p)
		}
	}
	for _, p := range g.nat64 { // as public as the IPv4 addresses in them
		g.ranges = append(g.ranges, Range{p, "NAT64", true})
	}
	for _, r := range ranges {
		for _, p := range g.forms(r.Prefix) {
			g.ranges = append(g.ranges, Range{p, r.What, r.open})
		}
	}
	for _, a := range h.Own {
		a = a.Unmap().WithZone("")
		if !a.IsValid() {
			return guard{}, fmt.Errorf("own address %s: not an address", a)
		}
		for _, p := range g.forms(netip.PrefixFrom(a, a.BitLen())) {
			g.ranges = append(g.ranges, Range{p, "of this host", false})
		}
	}
	for _, p := range h.Never {
		if !p.IsValid() || p.Masked() != p || p.Addr().Is4In6() {
			return guard{}, fmt.Errorf("closed range %s: want a CIDR without bits below its length", p)
		}
		g.never = append(g.never, g.forms(p)...)
	}
	// Of two of one length the later one, which is the host's own, comes first.
	slices.Reverse(g.ranges)
	slices.SortStableFunc(g.ranges, func(a, b Range) int { return b.Prefix.Bits() - a.Prefix.Bits() })
	return g, nil
}

// forms returns a CIDR, and if it is of IPv4 those of IPv6 whose packets a
// translator or a relay sends to it.
func (g guard) forms(p netip.Prefix) []netip.Prefix {
	if !p.Addr().Is4() {
		return []netip.Prefix{p}
	}
	all := []netip.Prefix{p, embedIn(sixTo, 2, p)}
	for _, n := range g.nat64 {
		all = append(all, embedIn(n, 12, p))
	}
	return all
}

// embedIn returns the part of outer, an IPv6 prefix, whose addresses hold those
// of inner from a byte on.
func embedIn(outer netip.Prefix, at int, inner netip.Prefix) netip.Prefix {
	a, four := outer.Addr().As16(), inner.Addr().As4()
	copy(a[at:], four[:])
	return netip.PrefixFrom(netip.AddrFrom16(a), 8*at+inner.Bits())
}

// embedded returns the IPv4 address that packets to a go to in the end, none
// if there is no such.
func (g guard) embedded(a netip.Addr) netip.Addr {
	if !a.Is6() {
		return netip.Addr{}
	}
	b := a.As16()
	if sixTo.Contains(a) {
		return netip.AddrFrom4([4]byte(b[2:6]))
	}
	for _, n := range g.nat64 {
		if n.Contains(a) {
			return netip.AddrFrom4([4]byte(b[12:]))
		}
	}
	return netip.Addr{}
}

// guard returns the policy's own, or that of an unknown host.
func (p *Policy) guard() guard {
	if p == nil || p.host.ranges == nil {
		return everywhere
	}
	return p.host
}

// guarded returns the range that keeps an address closed, nil for none.
func (p *Policy) guarded(a netip.Addr) *Range {
	g := p.guard()
	i := slices.IndexFunc(g.ranges, func(r Range) bool { return r.Prefix.Contains(a) })
	if i < 0 || g.ranges[i].open {
		return nil
	}
	return &g.ranges[i]
}

// never returns the range that no rule opens and that holds an address.
func (p *Policy) never(a netip.Addr) (netip.Prefix, bool) {
	for _, n := range p.guard().never {
		if n.Contains(a) {
			return n, true
		}
	}
	return netip.Prefix{}, false
}

// within reports whether inner is a part of outer.
func within(inner, outer netip.Prefix) bool {
	return inner.Bits() >= outer.Bits() && outer.Contains(inner.Addr())
}
