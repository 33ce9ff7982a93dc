package netgate

import (
	"net"
	"net/netip"
	"slices"
)

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
