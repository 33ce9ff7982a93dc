package apiserver_test

import (
	"fmt"
	"maps"
	"strings"
	"sync"
	"testing"

	"connectrpc.com/connect"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func TestNetworkOfSandbox(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	rules := map[string]bool{"pypi": true, "github.com:443": true, "10.0.0.0/8": false}
	sb := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.NetworkRules = &opendsecv1.NetworkRules{Rules: rules} })
	if len(sb.GetWarnings()) > 0 || !maps.Equal(sb.GetSpec().GetNetworkRules().GetRules(), rules) {
		t.Errorf("got warnings %q, rules %v", sb.GetWarnings(), sb.GetSpec().GetNetworkRules().GetRules())
	}
	rules = map[string]bool{"example.com": true}
	res, err := dev.sandboxes.UpdateNetwork(t.Context(), connect.NewRequest(&opendsecv1.UpdateNetworkRequest{Id: sb.GetId(), NetworkRules: rules}))
	if err != nil || !maps.Equal(res.Msg.GetSandbox().GetSpec().GetNetworkRules().GetRules(), rules) {
		t.Fatalf("update: %v, %v", res, err)
	}
	if got := c.edges[0].Request(sandbox.ID(sb.GetId())).GetSpec().GetNetworkRules().GetRules(); !maps.Equal(got, rules) {
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

func rules(given map[string]bool) func(*opendsecv1.CreateSandboxRequest) {
	return func(r *opendsecv1.CreateSandboxRequest) { r.Spec.NetworkRules = &opendsecv1.NetworkRules{Rules: given} }
}

// A start from an image that was made of a sandbox goes on with that one's rules,
// in the same project and unless it gives its own.
func TestStartHasTheRulesOfItsSource(t *testing.T) {
	c := newCluster(t, 1)
	dev, admin := c.developer(), c.admin()
	had := map[string]bool{"pypi": true, "10.0.0.0/8": false}
	source := dev.mustCreate(rules(had))
	dev.mustSnapshot(source.GetId(), "root/demo/memory:1", false)
	dev.mustSnapshot(source.GetId(), "root/demo/files:1", true)
	admin.mustSnapshot(source.GetId(), "root/shared:1", true)
	for name, newName := range map[string]string{"root/demo/files:1": "root/demo/again:1", "root/demo/memory:1": "root/other/memory:1"} {
		if _, err := admin.images.TagImage(t.Context(), connect.NewRequest(&opendsecv1.TagImageRequest{Name: name, NewName: newName})); err != nil {
			t.Fatal(err)
		}
	}
	// What the source may reach later is its own affair.
	_, err := dev.sandboxes.UpdateNetwork(t.Context(), connect.NewRequest(&opendsecv1.UpdateNetworkRequest{
		Id: source.GetId(), NetworkRules: map[string]bool{"*": true},
	}))
	if err != nil {
		t.Fatal(err)
	}
	own, closed := map[string]bool{"example.com": true}, map[string]bool{}
	other := func(r *opendsecv1.CreateSandboxRequest) { r.Project = "root/other" }
	for name, tc := range map[string]struct {
		image  string
		change func(*opendsecv1.CreateSandboxRequest)
		want   map[string]bool
	}{
		"memory":                    {"root/demo/memory:1", func(*opendsecv1.CreateSandboxRequest) {}, had},
		"files":                     {"root/demo/files:1", func(*opendsecv1.CreateSandboxRequest) {}, had},
		"a further name":            {"root/demo/again:1", func(*opendsecv1.CreateSandboxRequest) {}, had},
		"a name in another project": {"root/shared:1", func(*opendsecv1.CreateSandboxRequest) {}, had},
		"rules of its own":          {"root/demo/memory:1", rules(own), own},
		"closed":                    {"root/demo/files:1", rules(closed), closed},
		"closed, with memory":       {"root/demo/memory:1", rules(nil), closed},
		"from another project":      {"root/shared:1", other, closed},
		"tagged to another project": {"root/other/memory:1", other, closed},
		"a plain image":             {rootImage, func(*opendsecv1.CreateSandboxRequest) {}, closed},
	} {
		sb := admin.mustCreate(from(tc.image), tc.change)
		record, node := sb.GetSpec().GetNetworkRules().GetRules(), c.edges[0].Request(sandbox.ID(sb.GetId())).GetSpec().GetNetworkRules().GetRules()
		if !maps.Equal(record, tc.want) || !maps.Equal(node, tc.want) {
			t.Errorf("%s: the record has the rules %v, the node %v; want %v", name, record, node, tc.want)
		}
	}
	// The rules are seen by who sees the source's project.
	for who, u := range map[string]*user{"developer": dev, "stranger": c.stranger()} {
		m, err := u.image("root/shared:1")
		if err != nil {
			t.Fatal(err)
		}
		if shown := m.GetNetworkRules() != nil; shown != (u == dev) || shown && !maps.Equal(m.GetNetworkRules().GetRules(), had) {
			t.Errorf("the %s sees %v", who, m.GetNetworkRules())
		}
	}
	// With a key, closed is not the same as not given.
	dev.mustCreate(from("root/demo/files:1"), withKey("k"))
	_, err = dev.create(from("root/demo/files:1"), withKey("k"), rules(closed))
	wantProblem(t, err, fault.InvalidArgument, "idempotency_key")
}

// Of changes at the same time one is the last, on the node and in the record,
// whichever server they came by.
func TestNetworkUpdatesAtTheSameTime(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	servers := []opendsecv1connect.SandboxServiceClient{
		dev.sandboxes, opendsecv1connect.NewSandboxServiceClient(c.http, c.api(), connect.WithInterceptors(bearer(dev.token))),
	}
	for range 20 {
		var all sync.WaitGroup
		for i := range 8 {
			all.Go(func() {
				rules := map[string]bool{fmt.Sprintf("n%d.example.com", i): true}
				if _, err := servers[i%2].UpdateNetwork(t.Context(), connect.NewRequest(&opendsecv1.UpdateNetworkRequest{Id: id, NetworkRules: rules})); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		sb, err := dev.get(id)
		if err != nil {
			t.Fatal(err)
		}
		node := c.edges[0].Request(sandbox.ID(id)).GetSpec().GetNetworkRules().GetRules()
		if record := sb.GetSpec().GetNetworkRules().GetRules(); !maps.Equal(record, node) {
			t.Fatalf("the record has the rules %v, the node %v", record, node)
		}
	}
}

func TestSimHasNoNetwork(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	for allow, warned := range map[bool]int{true: 1, false: 0} {
		sb := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) {
			r.Spec.Backend, r.Spec.NetworkRules = "sim", &opendsecv1.NetworkRules{Rules: map[string]bool{"*": allow}}
		})
		if len(sb.GetWarnings()) != warned {
			t.Errorf("rules {*: %v}: warned of %q", allow, sb.GetWarnings())
		}
	}
}
