package apiserver

import (
	"context"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// checkRules reads the network rules of a wish.
func checkRules(s *sandbox.Spec) error { return checkNetwork("spec.network_rules", s.NetworkRules) }

func checkNetwork(field string, rules map[string]bool) error {
	if _, err := netpolicy.Parse(rules); err != nil {
		return fault.Invalid(field, "%w", err)
	}
	return nil
}

// warnings says what the caller of a sandbox should know.
func warnings(sb *sandbox.Sandbox) []string {
	if sb.Spec.Backend != sandbox.Sim {
		return nil
	}
	for _, open := range sb.Spec.NetworkRules {
		if open {
			return []string{"network rules are kept and open nothing: the backend sim has no network"}
		}
	}
	return nil
}

// updateNetwork replaces the rules of a sandbox: in the record, which forks and
// the next resume go by, and on its node. When the node cannot be told, the call
// fails and may be repeated.
func (s *Server) updateNetwork(ctx context.Context, id string, rules map[string]bool) (*sandbox.Sandbox, error) {
	if err := checkNetwork("network_rules", rules); err != nil {
		return nil, err
	}
	return s.inTurn(ctx, id, sandbox.Running, func(ctx context.Context, sb *sandbox.Sandbox) (*sandbox.Sandbox, error) {
		address, err := s.nodes.of(ctx, sb.Node)
		if err != nil {
			return nil, err
		}
		if err := s.edges.updateNetwork(ctx, address, sb.ID, rules); err != nil {
			return nil, err
		}
		return s.deps.DB.UpdateSandbox(ctx, sb.ID, func(r *sandbox.Sandbox) error {
			if r.End != nil {
				return ended(r.ID, *r.End)
			}
			r.Spec.NetworkRules = rules
			return nil
		})
	})
}

// checkTarget reads what an explanation is asked of.
func checkTarget(target string) error {
	if _, err := netpolicy.ParseQuery(target); err != nil {
		return fault.Invalid("target", "%w", err)
	}
	return nil
}
