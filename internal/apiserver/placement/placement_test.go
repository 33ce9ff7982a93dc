package placement

import (
	"strings"
	"testing"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

const digest = "sha256:aa"

func ptr[T any](v T) *T { return &v }

// node returns a healthy, empty node with gvisor and sim.
func node(name string, change ...func(*Node)) Node {
	n := Node{
		Name: name, Healthy: true, Cores: 2,
		Backends: []Backend{{Name: sandbox.GVisor, Available: true}, {Name: sandbox.Sim, Available: true, Pause: true},
			{Name: sandbox.Container, Reason: "runc is not installed"}},
		Capacity: sandbox.Resources{CPU: 16, MemoryMB: 4096, DiskMB: 100000, Sandboxes: 100},
	}
	for _, c := range change {
		c(&n)
	}
	return n
}

func TestChoose(t *testing.T) {
	limits := sandbox.Limits{CPU: 1, MemoryMB: 512, DiskMB: 1024, PIDs: 100}
	half := func(n *Node) { n.Used = sandbox.Resources{CPU: 8, MemoryMB: 2048, DiskMB: 10, Sandboxes: 4} }
	full := func(n *Node) { n.Used = sandbox.Resources{CPU: 1, MemoryMB: 4000, Sandboxes: 1} }
	drained := func(n *Node) { n.Drained = true }
	sick := func(n *Node) { n.Healthy, n.Reason = false, "no report for 12s" }
	hasImage := func(n *Node) { n.Images = []string{"sha256:bb", digest} }
	noDisk := func(n *Node) { n.Capacity.DiskMB, n.Used.DiskMB = 0, 5000 }

	for name, c := range map[string]struct {
		req      Request
		nodes    []Node
		projects []Project
		want     string     // the node
		kind     fault.Kind // or the error
		field    string
		text     []string // parts of the error
	}{
		"the emptier": {nodes: []Node{node("a", half), node("b")}, want: "b"},
		"by name":     {nodes: []Node{node("b"), node("a")}, want: "a"},
		"with image":  {nodes: []Node{node("a"), node("b", half, hasImage)}, want: "b"},
		"image but full": {
			nodes: []Node{node("a"), node("b", full, hasImage)}, want: "a",
		},
		"not the drained":          {nodes: []Node{node("a", drained), node("b", half)}, want: "b"},
		"not the sick":             {nodes: []Node{node("a", sick), node("b", half)}, want: "b"},
		"not the avoided":          {req: Request{Avoid: []string{"a"}}, nodes: []Node{node("a"), node("b", half)}, want: "b"},
		"disk that is not counted": {nodes: []Node{node("a", noDisk)}, want: "a"},
		"by name of backend":       {req: Request{Backend: sandbox.Sim}, nodes: []Node{node("a")}, want: "a"},
		"pause on sim":             {req: Request{Backend: sandbox.Sim, NeedsPause: "spec.on_idle"}, nodes: []Node{node("a")}, want: "a"},
		"only where it is":         {req: Request{Only: &Only{[]string{"b", "c"}, "image root/a:1"}}, nodes: []Node{node("a"), node("b", half)}, want: "b"},
		"where it is and full": {req: Request{Only: &Only{[]string{"b"}, "image root/a:1"}}, nodes: []Node{node("a"), node("b", full)}, kind: fault.Capacity,
			text: []string{"no node has room", "the emptiest, b", "it can be on b only, for image root/a:1"}},
		"where it is and drained": {req: Request{Only: &Only{[]string{"a"}, "sandbox sb-x"}}, nodes: []Node{node("a", drained), node("b")}, kind: fault.Capacity,
			text: []string{"a is drained", "it can be on a only, for sandbox sb-x"}},
		"where it is and no backend": {req: Request{Backend: sandbox.Container, Only: &Only{[]string{"a"}, "image root/a:1"}}, nodes: []Node{node("a"), node("b")},
			kind: fault.Unsupported, field: "spec.backend", text: []string{"it can be on a only"}},
		"nowhere": {req: Request{Only: &Only{Thing: "image root/a:1"}}, nodes: []Node{node("a")}, kind: fault.Capacity, text: []string{"no node has image root/a:1"}},
		"quota before place": {req: Request{Only: &Only{Thing: "image root/a:1"}}, nodes: []Node{node("a")}, kind: fault.QuotaExceeded,
			projects: []Project{{Path: "root", Quota: Quota{Sandboxes: ptr(int64(0))}}}},
		"cannot wake by itself": {req: Request{Backend: sandbox.GVisor, NeedsPause: "spec.auto_resume"}, nodes: []Node{node("a")}, kind: fault.Unsupported,
			field: "spec.auto_resume", text: []string{"cannot pause", "use sim"}},
		"no nodes":    {kind: fault.Capacity, text: []string{"no node has reported"}},
		"all avoided": {req: Request{Avoid: []string{"a"}}, nodes: []Node{node("a")}, kind: fault.Capacity, text: []string{"a failed to make it"}},
		"all sick": {nodes: []Node{node("a", sick), node("b", drained)}, kind: fault.Capacity,
			text: []string{"a is not healthy (no report for 12s)", "b is drained"}},
		"full": {nodes: []Node{node("a", full)}, kind: fault.Capacity,
			text: []string{"1 cores, 512 MiB memory and 1024 MiB disk", "15 cores, 96 MiB memory, 100000 MiB disk, 99 sandboxes free"}},
		"backend that works nowhere": {req: Request{Backend: sandbox.Container}, nodes: []Node{node("a")}, kind: fault.Unsupported,
			field: "spec.backend", text: []string{"runc is not installed", "use gvisor, sim"}},
		"cannot pause": {req: Request{Backend: sandbox.GVisor, NeedsPause: "spec.on_idle"}, nodes: []Node{node("a")}, kind: fault.Unsupported,
			field: "spec.on_idle", text: []string{"use sim"}},
		"auto is never sim": {
			nodes: []Node{node("a", func(n *Node) { n.Backends = []Backend{{Name: sandbox.Sim, Available: true}} })},
			kind:  fault.Unsupported, field: "spec.backend",
		},
		"more cores than a machine has": {req: Request{Limits: sandbox.Limits{CPU: 3, MemoryMB: 64}}, nodes: []Node{node("a")},
			kind: fault.InvalidArgument, field: "spec.cpu_cores_limit", text: []string{"at most 2"}},
		"more memory than a machine has": {req: Request{Limits: sandbox.Limits{CPU: 1, MemoryMB: 1 << 40}}, nodes: []Node{node("a")},
			kind: fault.InvalidArgument, field: "spec.memory_limit_mb", text: []string{"at most 4096"}},
		"more disk than a machine has": {req: Request{Limits: sandbox.Limits{CPU: 1, MemoryMB: 64, DiskMB: 1 << 62}}, nodes: []Node{node("a")},
			kind: fault.InvalidArgument, field: "spec.disk_limit_mb", text: []string{"at most 100000"}},
		"too large for the healthy, not for the sick": {
			req:   Request{Limits: sandbox.Limits{CPU: 4, MemoryMB: 64}},
			nodes: []Node{node("a"), node("b", sick, func(n *Node) { n.Cores = 8 })}, kind: fault.Capacity,
		},
		"quota of sandboxes": {nodes: []Node{node("a")}, kind: fault.QuotaExceeded,
			projects: []Project{{Path: "root/demo"}, {Path: "root", Quota: Quota{Sandboxes: ptr(int64(4))}, Used: sandbox.Resources{Sandboxes: 4}}},
			text:     []string{"quota sandboxes of project root is 4", "4 are in use"}},
		"quota of cores": {nodes: []Node{node("a")}, kind: fault.QuotaExceeded,
			projects: []Project{{Path: "root/demo", Quota: Quota{CPU: ptr(1.5)}, Used: sandbox.Resources{CPU: 1}}}, text: []string{"cpu_cores"}},
		"quota of memory": {nodes: []Node{node("a")}, kind: fault.QuotaExceeded,
			projects: []Project{{Path: "root/demo", Quota: Quota{MemoryMB: ptr(int64(1000))}, Used: sandbox.Resources{MemoryMB: 512}}}, text: []string{"memory_mb"}},
		"within quota": {nodes: []Node{node("a")}, want: "a",
			projects: []Project{{Path: "root/demo", Quota: Quota{Sandboxes: ptr(int64(5)), CPU: ptr(1.3), MemoryMB: ptr(int64(1024))},
				Used: sandbox.Resources{Sandboxes: 4, CPU: 0.1 + 0.2, MemoryMB: 512}}}},
	} {
		t.Run(name, func(t *testing.T) {
			req := c.req
			if req.Backend == "" {
				req.Backend = sandbox.Auto
			}
			if req.Limits == (sandbox.Limits{}) {
				req.Limits = limits
			}
			req.ImageDigest = digest
			got, err := Choose(req, c.nodes, c.projects)
			if c.kind == "" {
				if err != nil || got != c.want {
					t.Fatalf("got %q, %v; want %q", got, err, c.want)
				}
				return
			}
			if !fault.Is(err, c.kind) {
				t.Fatalf("got %q, %v; want an error of kind %s", got, err, c.kind)
			}
			if f := fault.Of(err).Field; f != c.field {
				t.Errorf("field %q; want %q", f, c.field)
			}
			for _, part := range c.text {
				if !strings.Contains(err.Error(), part) {
					t.Errorf("%q does not say %q", err, part)
				}
			}
		})
	}
}

// Spreading fills nodes evenly: no node is used twice before all were once.
func TestChooseSpreads(t *testing.T) {
	nodes := []Node{node("a"), node("b"), node("c")}
	counts := map[string]int{}
	for range 9 {
		name, err := Choose(Request{Backend: sandbox.Auto, Limits: sandbox.Limits{CPU: 1, MemoryMB: 128}}, nodes, nil)
		if err != nil {
			t.Fatal(err)
		}
		counts[name]++
		for i := range nodes {
			if nodes[i].Name == name {
				nodes[i].Used = nodes[i].Used.Add(sandbox.Resources{CPU: 1, MemoryMB: 128, Sandboxes: 1})
			}
		}
	}
	if counts["a"] != 3 || counts["b"] != 3 || counts["c"] != 3 {
		t.Errorf("got %v; want three on each", counts)
	}
}

func TestWake(t *testing.T) {
	limits := sandbox.Limits{CPU: 1, MemoryMB: 512, DiskMB: 1024, PIDs: 100}
	for name, c := range map[string]struct {
		node     Node
		projects []Project
		kind     fault.Kind // "" when it may
		text     string
	}{
		"room":    {node: node("a")},
		"drained": {node: node("a", func(n *Node) { n.Drained = true })}, // it is there already
		"exactly": {node: node("a", func(n *Node) { n.Used = sandbox.Resources{CPU: 15, MemoryMB: 4096 - 512} })},
		"full": {node: node("a", func(n *Node) { n.Used.MemoryMB = 4096 - 511 }), kind: fault.Capacity,
			text: "node a has no room for 1 cores, 512 MiB memory and 1024 MiB disk, which the sandbox needs to run again; it has 16 cores, 511 MiB memory"},
		"quota": {node: node("a"), projects: []Project{{Path: "root/demo"}, {Path: "root", Quota: Quota{CPU: ptr(2.0)}, Used: sandbox.Resources{CPU: 1.5}}},
			kind: fault.QuotaExceeded, text: "quota cpu_cores of project root"},
	} {
		err := Wake(limits, c.node, c.projects)
		if c.kind == "" && err != nil || c.kind != "" && (!fault.Is(err, c.kind) || !strings.Contains(err.Error(), c.text)) {
			t.Errorf("%s: got %v; want %q, %q", name, err, c.kind, c.text)
		}
	}
}
