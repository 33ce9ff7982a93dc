package netgate

import (
	"net"
	"net/netip"
	"slices"
)

// closed are addresses that no rule opens: flows go out from the host itself,
// where these mean the host and nobody else.
var closed = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("224.0.0.0/4"),
	netip.MustParsePrefix("255.255.255.255/32"),
	netip.MustParsePrefix("::/127"),    // unspecified and loopback
	netip.MustParsePrefix("fe80::/10"), // would want a link's name
	netip.MustParsePrefix("ff00::/8"),
	netip.MustParsePrefix("192.0.0.0/29"), // the slots' own
	netip.MustParsePrefix("fd5e:c0de:5eed::/48"),
}

// host is what the node's own network is.
type host struct {
	own  []netip.Addr
	ipv6 bool // it has an address that reaches others
}

// measureHost looks at the node's interfaces.
func measureHost() host {
	var h host
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return h
	}
	for _, a := range addrs {
		p, err := netip.ParsePrefix(a.String())
		if err != nil {
			continue
		}
		addr := p.Addr().Unmap()
		h.own = append(h.own, addr)
		h.ipv6 = h.ipv6 || addr.Is6() && !addr.IsLoopback() && !addr.IsLinkLocalUnicast()
	}
	slices.SortFunc(h.own, netip.Addr.Compare)
	h.own = slices.Compact(h.own)
	return h
}

func (g *Gate) ipv4Only() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.host.ipv6
}
