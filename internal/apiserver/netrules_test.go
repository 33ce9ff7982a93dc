package apiserver_test

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func TestNetworkOfSandbox(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	rules := map[string]bool{"pypi": true, "github.com:443": true, "10.0.0.0/8": false}
	sb := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.NetworkRules = rules })
	if len(sb.GetWarnings()) > 0 || !maps.Equal(sb.GetSpec().GetNetworkRules(), rules) {
		t.Errorf("got warnings %q, rules %v", sb.GetWarnings(), sb.GetSpec().GetNetworkRules())
	}
	rules = map[string]bool{"example.com": true}
	res, err := dev.sandboxes.UpdateNetwork(t.Context(), connect.NewRequest(&opendsecv1.UpdateNetworkRequest{Id: sb.GetId(), NetworkRules: rules}))
	if err != nil || !maps.Equal(res.Msg.GetSandbox().GetSpec().GetNetworkRules(), rules) {
		t.Fatalf("update: %v, %v", res, err)
	}
	if got := c.edges[0].Request(sandbox.ID(sb.GetId())).GetSpec().GetNetworkRules(); !maps.Equal(got, rules) {
		t.Errorf("the edge has the rules %v", got)
	}
	_, err = dev.sandboxes.UpdateNetwork(t.Context(), connect.NewRequest(&opendsecv1.UpdateNetworkRequest{
		Id: sb.GetId(), NetworkRules: map[string]bool{"10.0.0.0/33": true},
	}))
	wantProblem(t, err, fault.InvalidArgument, "network_rules")
	if !strings.Contains(err.Error(), "10.0.0.0/33") {
		t.Errorf("the rule is not named: %v", err)
	}

	explained, err := dev.sandboxes.ExplainNetwork(t.Context(), connect.NewRequest(&opendsecv1.ExplainNetworkRequest{Id: sb.GetId(), Target: "example.com:443"}))
	if err != nil || explained.Msg.GetDecision().GetWhy() != "example.com:443" {
		t.Errorf("explain: %v, %v", explained, err)
	}
	_, err = dev.sandboxes.ExplainNetwork(t.Context(), connect.NewRequest(&opendsecv1.ExplainNetworkRequest{Id: sb.GetId(), Target: "example.com:http"}))
	wantProblem(t, err, fault.InvalidArgument, "target")
	denied, err := dev.sandboxes.ListDenied(t.Context(), connect.NewRequest(&opendsecv1.ListDeniedRequest{Id: sb.GetId()}))
	if err != nil || denied.Msg.GetTotal() != 1 || denied.Msg.GetDenials()[0].GetName() != "example.com" {
		t.Errorf("denied: %v, %v", denied, err)
	}
}

// Of changes at the same time one is the last, on the node and in the record.
func TestNetworkUpdatesAtTheSameTime(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	for range 20 {
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				rules := map[string]bool{fmt.Sprintf("n%d.example.com", i): true}
				if _, err := dev.sandboxes.UpdateNetwork(t.Context(), connect.NewRequest(&opendsecv1.UpdateNetworkRequest{Id: id, NetworkRules: rules})); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		sb, err := dev.get(id)
		if err != nil {
			t.Fatal(err)
		}
		node := c.edges[0].Request(sandbox.ID(id)).GetSpec().GetNetworkRules()
		if record := sb.GetSpec().GetNetworkRules(); !maps.Equal(record, node) {
			t.Fatalf("the record has the rules %v, the node %v", record, node)
		}
	}
}

func TestSimHasNoNetwork(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	for allow, warned := range map[bool]int{true: 1, false: 0} {
		sb := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) {
			r.Spec.Backend, r.Spec.NetworkRules = "sim", map[string]bool{"*": allow}
		})
		if len(sb.GetWarnings()) != warned {
			t.Errorf("rules {*: %v}: warned of %q", allow, sb.GetWarnings())
		}
	}
}
