package edge

import (
	"context"
	"errors"
	"maps"
	"strings"
	"testing"

	"connectrpc.com/connect"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/netgate"
)

// noGate is a node whose kernel lacks what rules need.
type noGate struct{}

func (noGate) Lack() error { return errors.New("the kernel needs nf_tables") }

func (noGate) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (noGate) Open(netgate.Sandbox) (*netgate.Guard, error) {
	return nil, errors.New("the kernel needs nf_tables")
}

// named gives slots that say where they are.
type named struct{ *world }

func (n named) Acquire(ctx context.Context) (backend.Slot, error) {
	slot, err := n.world.Acquire(ctx)
	slot.NetNS = "/run/netns/" + slot.Name
	return slot, err
}

func TestRulesThatCannotBeEnforced(t *testing.T) {
	w := newWorld(t)
	n := startNodeWith(t, w, t.TempDir(), nil, func(d *Deps) { d.Gate, d.Slots = noGate{}, named{w} })
	if warnings, unhealthy := n.health(); unhealthy != "" || !strings.Contains(strings.Join(warnings, "\n"), "cannot have network rules here: the kernel needs nf_tables") {
		t.Errorf("the node's health: %q, %q", warnings, unhealthy)
	}
	id := n.make(t, func(r *edgev1.CreateSandboxRequest) {
		r.Spec.NetworkRules = &opendsecv1.NetworkRules{Rules: map[string]bool{"*": false}}
	})
	req := request(id[:len(id)-1] + "z")
	req.Spec.NetworkRules = &opendsecv1.NetworkRules{Rules: map[string]bool{"example.com": true}}
	_, err := n.client.CreateSandbox(t.Context(), connect.NewRequest(req))
	if told := fault.Of(fault.FromConnect(err)); told.Kind != fault.Unavailable || told.Field != "spec.network_rules" || !strings.Contains(told.Error(), "nf_tables") {
		t.Errorf("create with rules: %v", err)
	}
	// Nor by a change.
	_, err = n.client.UpdateNetwork(t.Context(), connect.NewRequest(&edgev1.UpdateNetworkRequest{Id: string(id), NetworkRules: map[string]bool{"example.com": true}}))
	if err == nil || !strings.Contains(err.Error(), "nf_tables") {
		t.Errorf("update: %v", err)
	}
	res, err := n.client.ExplainNetwork(t.Context(), connect.NewRequest(&edgev1.ExplainNetworkRequest{Id: string(id), Target: "example.com"}))
	if err != nil || res.Msg.GetDecision().GetAllow() {
		t.Errorf("a change that failed was kept: %v, %v", res, err)
	}
	if _, err := n.client.UpdateNetwork(t.Context(), connect.NewRequest(&edgev1.UpdateNetworkRequest{Id: string(id)})); err != nil {
		t.Errorf("an update that opens nothing: %v", err)
	}
	n.kill(t, id)
}

// What a caller may ask of a sandbox that has no machine.
func TestNetworkOfPausedSandbox(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	id := n.make(t, func(r *edgev1.CreateSandboxRequest) {
		r.Spec.NetworkRules = &opendsecv1.NetworkRules{Rules: map[string]bool{"example.com": true}}
	})
	if _, err := n.pauseID(id); err != nil {
		t.Fatal(err)
	}
	changes := int64(0)
	for allow, rules := range map[bool]map[string]bool{false: {}, true: {"example.com": true}} {
		changed, err := n.client.UpdateNetwork(t.Context(), connect.NewRequest(&edgev1.UpdateNetworkRequest{Id: string(id), NetworkRules: rules}))
		if changes++; err != nil || changed.Msg.GetRevision() != changes {
			t.Fatalf("change %d: %v, %v", changes, changed, err)
		}
		told, err := n.client.GetSandbox(t.Context(), connect.NewRequest(&edgev1.GetSandboxRequest{Id: string(id)}))
		if s := told.Msg.GetStatus(); err != nil || s.GetNetworkRevision() != changes || !maps.Equal(s.GetNetworkRules().GetRules(), rules) {
			t.Errorf("after change %d it says %v, %v", changes, s, err)
		}
		res, err := n.client.ExplainNetwork(t.Context(), connect.NewRequest(&edgev1.ExplainNetworkRequest{Id: string(id), Target: "example.com:443"}))
		if err != nil || res.Msg.GetDecision().GetAllow() != allow {
			t.Errorf("under %v: %v, %v", rules, res, err)
		}
	}
	_, err := n.client.UpdateNetwork(t.Context(), connect.NewRequest(&edgev1.UpdateNetworkRequest{Id: string(id), NetworkRules: map[string]bool{"nope:x": true}}))
	if told := fault.Of(fault.FromConnect(err)); told.Kind != fault.InvalidArgument || told.Field != "network_rules" {
		t.Errorf("a wrong rule: %v", err)
	}
	n.kill(t, id)
}
