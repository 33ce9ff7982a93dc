package apiserver

import (
	"context"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// checkRules reads the network rules of a wish.
func checkRules(s *sandbox.Spec) error { return checkNetwork("spec.network_rules", s.NetworkRules) }

func checkNetwork(field string, rules map[string]bool) error {
	if err := netpolicy.Check(rules); err != nil {
		return fault.Invalid(field, "%w", err)
	}
	return nil
}

// rulesOfStart returns the network rules of a sandbox that starts from an image:
// those that are given, or, in the project of the sandbox that the image was made
// of, what that had. In other projects nobody has agreed to them.
func rulesOfStart(given map[string]bool, p sandbox.Project, m store.Image) map[string]bool {
	if given == nil && m.Network != nil && m.Network.Project == p {
		return m.Network.Rules
	}
	return given
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

// updateNetwork replaces the rules of a sandbox: on its node, and in the record,
// which forks go by. The node has the order of changes at the same time, also of
// other servers, so that the record comes to what is in force. When the node
// cannot be told, the call fails and may be repeated; when the record cannot be
// written, the watcher does it.
func (s *Server) updateNetwork(ctx context.Context, id string, rules map[string]bool) (*sandbox.Sandbox, error) {
	if err := checkNetwork("network_rules", rules); err != nil {
		return nil, err
	}
	return s.inTurn(ctx, id, sandbox.Running, func(ctx context.Context, sb *sandbox.Sandbox) (*sandbox.Sandbox, error) {
		address, err := s.nodes.of(ctx, sb.Node)
		if err != nil {
			return nil, err
		}
		revision, err := s.edges.updateNetwork(ctx, address, sb.ID, rules)
		if err != nil {
			return nil, err
		}
		return s.deps.DB.UpdateSandbox(ctx, sb.ID, func(r *sandbox.Sandbox) error {
			if r.End != nil {
				return ended(r.ID, *r.End)
			}
			r.FollowRules(rules, revision)
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
