package runedge

import (
	"fmt"
	"log/slog"
	"net/netip"
	"sync"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netgate"
	"github.com/kernflux/opendsec/internal/netpolicy/dnsproxy"
)

// Network says how sandboxes reach out, as far as their rules let them. The zero
// value of a field takes its default.
type Network struct {
	// DNS are the resolvers to ask, "ADDR" or "ADDR:PORT". Default those of
	// /etc/resolv.conf.
	DNS []string `json:"dns,omitempty"`
	// Never are CIDRs that no rule opens, such as the addresses of the cluster's
	// own machines.
	Never []string `json:"never,omitempty"`
	// BandwidthMbit bounds each sandbox, in Mbit/s each way. Default 1000.
	BandwidthMbit float64 `json:"bandwidth_mbit,omitempty"`
	// Connections is how many TCP connections to the outside a sandbox may have
	// open. Default 1024.
	Connections int `json:"connections,omitempty"`
	// PacketsPerSecond is how many a sandbox may send. Default 200,000.
	PacketsPerSecond uint64 `json:"packets_per_second,omitempty"`
	// ConnectionsPerSecond is how many a sandbox may begin, after the first 1000.
	// Default 200.
	ConnectionsPerSecond uint64 `json:"connections_per_second,omitempty"`
}

func (n Network) faults() []error {
	var faults []error
	for _, s := range n.DNS {
		if _, err := dnsproxy.ParseUpstream(s); err != nil {
			faults = append(faults, fmt.Errorf("network.dns: %w", err))
		}
	}
	if _, err := n.never(); err != nil {
		faults = append(faults, err)
	}
	if n.BandwidthMbit < 0 || n.Connections < 0 {
		faults = append(faults, fmt.Errorf("network: bandwidth_mbit and connections must not be negative"))
	}
	return faults
}

func (n Network) never() ([]netip.Prefix, error) {
	var all []netip.Prefix
	for _, s := range n.Never {
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Masked() != p || p.Addr().Is4In6() {
			return nil, fmt.Errorf("network.never: %q is not a CIDR, such as 203.0.113.0/24", s)
		}
		all = append(all, p)
	}
	return all, nil
}

func (n Network) open(log *slog.Logger) (*netgate.Gate, error) {
	never, err := n.never()
	if err != nil {
		return nil, err
	}
	return netgate.New(log, netgate.Config{
		DNS: dnsproxy.Config{Upstreams: n.DNS}, Never: never,
		Limits: netgate.Limits{
			Bandwidth: n.BandwidthMbit * 1e6 / 8, Conns: n.Connections, Packets: n.PacketsPerSecond, Flows: n.ConnectionsPerSecond,
		},
	})
}

// furnish makes a gate of each new slot. Where the kernel cannot, slots are
// closed all the same, and sandboxes that want more are refused.
func furnish(log *slog.Logger, gate *netgate.Gate) func(backend.Slot) error {
	var once sync.Once
	return func(slot backend.Slot) error {
		if err := gate.Furnish(slot); err != nil {
			once.Do(func() { log.Error("sandboxes with network rules cannot be made on this node", "error", err) })
		}
		return nil
	}
}
