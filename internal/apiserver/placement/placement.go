// Package placement decides whether and where a sandbox is made. Choose is a
// pure function of what is asked, the nodes and the quotas; the caller runs it
// inside the transaction that also inserts the record, which is what makes
// admission exact. Nothing here talks to a node or a database.
package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Request is what is to be placed.
type Request struct {
	Backend     sandbox.Backend // Auto leaves the choice to the node
	Limits      sandbox.Limits
	NeedsPause  string   // the spec's field that needs a backend that can pause, "" for none
	ImageDigest string   // nodes that have it are preferred
	Only        *Only    // nil when any node will do
	Avoid       []string // nodes on which an attempt has failed
}

// Only says that what is placed needs something that few nodes have.
type Only struct {
	Nodes []string // those that have it
	Thing string   // what it is, "image root/walk:1"
}

// Node is a machine as its last report and the records say.
type Node struct {
	Name     string
	Healthy  bool
	Reason   string // why it is not healthy
	Drained  bool
	Backends []Backend
	Images   []string // digests in its store
	Cores    float64  // the most that one sandbox can use; 0 means unknown
	Capacity sandbox.Resources
	Used     sandbox.Resources
}

// Backend is what a node says about one kind of machine.
type Backend struct {
	Name      sandbox.Backend
	Available bool
	Reason    string // why it is not available
	Pause     bool
}

// Project is a project whose quota binds the sandbox: its own or one above.
type Project struct {
	Path  sandbox.Project
	Quota Quota
	Used  sandbox.Resources // of its sandboxes and of those below it
}

// Quota limits what a project's sandboxes use together; nil means no limit.
type Quota struct {
	Sandboxes *int64
	CPU       *float64 // cores
	MemoryMB  *int64   // MiB
}

// Choose returns the name of the node that is to make the sandbox. Its error
// is QuotaExceeded when a quota of a project does not allow it, Unsupported or
// InvalidArgument when no node could ever hold it, and Capacity when none can
// at present.
func Choose(req Request, nodes []Node, projects []Project) (string, error) {
	want := req.Limits.Resources()
	for _, p := range projects {
		if err := admit(want, p); err != nil {
			return "", err
		}
	}
	if len(nodes) == 0 {
		return "", fault.New(fault.Capacity, "no node has reported yet: see `opendsecctl status`")
	}
	if req.Only == nil {
		return choose(req, nodes)
	}
	nodes = filter(nodes, func(n Node) bool { return slices.Contains(req.Only.Nodes, n.Name) })
	if len(nodes) == 0 {
		return "", fault.New(fault.Capacity, "no node has %s: see `opendsecctl node list` for nodes that are away", req.Only.Thing)
	}
	node, err := choose(req, nodes)
	if err != nil {
		told := *fault.Of(err)
		told.Message += fmt.Sprintf("; it can be on %s only, for %s", names(nodes), req.Only.Thing)
		return "", &told
	}
	return node, nil
}

// choose is Choose after the quotas, of nodes that have what is needed.
func choose(req Request, nodes []Node) (string, error) {
	want := req.Limits.Resources()
	able := filter(nodes, func(n Node) bool { return canRun(n, req) })
	if len(able) == 0 {
		return "", unsupported(req, nodes)
	}
	fits := filter(able, func(n Node) bool { return everFits(req.Limits, n) == "" })
	if len(fits) == 0 {
		return "", tooLarge(req.Limits, able)
	}
	up := filter(fits, func(n Node) bool {
		return n.Healthy && !n.Drained && !slices.Contains(req.Avoid, n.Name)
	})
	if len(up) == 0 {
		return "", fault.New(fault.Capacity, "no node can take it at present: %s", why(fits, req.Avoid))
	}
	free := filter(up, func(n Node) bool { return fitsNow(want, n) })
	if len(free) == 0 {
		return "", full(want, up)
	}
	return slices.MinFunc(free, func(a, b Node) int { return better(a, b, req.ImageDigest, want) }).Name, nil
}

// Wake says why a sandbox that is paused on a node may not run again there:
// QuotaExceeded for a quota of a project, Capacity for the node's room. What
// the node and the projects use is without the sandbox.
func Wake(l sandbox.Limits, n Node, projects []Project) error {
	want := l.Resources()
	for _, p := range projects {
		if err := admit(want, p); err != nil {
			return err
		}
	}
	if fitsNow(want, n) {
		return nil
	}
	return fault.New(fault.Capacity,
		"node %s has no room for %.4g cores, %d MiB memory and %d MiB disk, which the sandbox needs to run again; it has %s free: stop or pause others there",
		n.Name, want.CPU, want.MemoryMB, want.DiskMB, freeText(n, room(n)))
}

func names(nodes []Node) string {
	words := make([]string, len(nodes))
	for i, n := range nodes {
		words[i] = n.Name
	}
	return strings.Join(words, ", ")
}

func filter(nodes []Node, keep func(Node) bool) []Node {
	var out []Node
	for _, n := range nodes {
		if keep(n) {
			out = append(out, n)
		}
	}
	return out
}

// admit checks one project's quota.
func admit(want sandbox.Resources, p Project) error {
	const slack = 1e-9 // sums of tenths are not exact
	q := p.Quota
	switch {
	case q.Sandboxes != nil && p.Used.Sandboxes+want.Sandboxes > *q.Sandboxes:
		return exceeded(p.Path, "sandboxes", fmt.Sprint(*q.Sandboxes), fmt.Sprint(p.Used.Sandboxes), fmt.Sprint(want.Sandboxes))
	case q.CPU != nil && p.Used.CPU+want.CPU > *q.CPU+slack:
		return exceeded(p.Path, "cpu_cores", fmt.Sprintf("%.4g", *q.CPU), fmt.Sprintf("%.4g", p.Used.CPU), fmt.Sprintf("%.4g", want.CPU))
	case q.MemoryMB != nil && want.MemoryMB > *q.MemoryMB-p.Used.MemoryMB:
		return exceeded(p.Path, "memory_mb", fmt.Sprint(*q.MemoryMB), fmt.Sprint(p.Used.MemoryMB), fmt.Sprint(want.MemoryMB))
	}
	return nil
}

func exceeded(p sandbox.Project, quota, limit, used, want string) error {
	return fault.New(fault.QuotaExceeded,
		"quota %s of project %s is %s, of which %s are in use; this asks for %s more: stop sandboxes, or have an admin raise it with `opendsecctl project quota`",
		quota, p, limit, used, want)
}

// canRun reports whether the node has a backend for req.
func canRun(n Node, req Request) bool {
	return slices.ContainsFunc(n.Backends, func(b Backend) bool {
		if !b.Available || (req.NeedsPause != "" && !b.Pause) {
			return false
		}
		if req.Backend == sandbox.Auto {
			return b.Name != sandbox.Sim
		}
		return b.Name == req.Backend
	})
}

// unsupported says why no node has the backend, and which could be had.
func unsupported(req Request, nodes []Node) error {
	var can []sandbox.Backend
	var reasons []string
	for _, n := range nodes {
		for _, b := range n.Backends {
			if b.Available && (b.Pause || req.NeedsPause == "") && !slices.Contains(can, b.Name) {
				can = append(can, b.Name)
			}
			if b.Name == req.Backend && !b.Available && b.Reason != "" {
				reasons = append(reasons, n.Name+": "+b.Reason)
			}
		}
	}
	slices.SortFunc(can, func(a, b sandbox.Backend) int {
		return cmp.Compare(slices.Index(sandbox.Backends, a), slices.Index(sandbox.Backends, b))
	})
	field, what := "spec.backend", fmt.Sprintf("backend %q works on no node", req.Backend)
	if req.NeedsPause != "" && slices.ContainsFunc(nodes, func(n Node) bool {
		return canRun(n, Request{Backend: req.Backend})
	}) {
		field, what = req.NeedsPause, fmt.Sprintf("backend %q cannot pause", req.Backend)
	}
	if len(reasons) > 0 {
		what += " (" + strings.Join(reasons, "; ") + ")"
	}
	todo := "none can"
	if len(can) > 0 {
		todo = "use " + join(can)
	}
	err := fault.New(fault.Unsupported, "%s: %s", what, todo)
	err.Field, err.Backends = field, can
	return err
}

func join(backends []sandbox.Backend) string {
	words := make([]string, len(backends))
	for i, b := range backends {
		words[i] = string(b)
	}
	return strings.Join(words, ", ")
}

// everFits returns the spec's field that is too large for the node even when
// it is empty, or "". A capacity of 0 is one that the node does not count.
func everFits(l sandbox.Limits, n Node) string {
	c := n.Capacity
	switch {
	case n.Cores > 0 && l.CPU > n.Cores, l.CPU > c.CPU:
		return "spec.cpu_cores_limit"
	case l.MemoryMB > c.MemoryMB:
		return "spec.memory_limit_mb"
	case c.DiskMB > 0 && l.DiskMB > c.DiskMB:
		return "spec.disk_limit_mb"
	}
	return ""
}

// tooLarge names the field that no node can give, with the most that one can.
func tooLarge(l sandbox.Limits, nodes []Node) error {
	var cores float64
	var most sandbox.Resources
	for _, n := range nodes {
		c := n.Capacity.CPU
		if n.Cores > 0 {
			c = min(c, n.Cores)
		}
		cores = max(cores, c)
		most.MemoryMB = max(most.MemoryMB, n.Capacity.MemoryMB)
		most.DiskMB = max(most.DiskMB, n.Capacity.DiskMB)
	}
	switch {
	case l.CPU > cores:
		return fault.Invalid("spec.cpu_cores_limit", "cpu_cores_limit %.4g is more than any node has: at most %.4g", l.CPU, cores)
	case l.MemoryMB > most.MemoryMB:
		return fault.Invalid("spec.memory_limit_mb", "memory_limit_mb %d is more than any node has: at most %d", l.MemoryMB, most.MemoryMB)
	case most.DiskMB > 0 && l.DiskMB > most.DiskMB:
		return fault.Invalid("spec.disk_limit_mb", "disk_limit_mb %d is more than any node has: at most %d", l.DiskMB, most.DiskMB)
	default:
		field := everFits(l, nodes[0])
		return fault.Invalid(field, "no single node has %.4g cores with %d MiB memory and %d MiB disk", l.CPU, l.MemoryMB, l.DiskMB)
	}
}

// room returns what is free on a node, for the amounts that it counts.
func room(n Node) sandbox.Resources { return n.Capacity.Sub(n.Used) }

func fitsNow(want sandbox.Resources, n Node) bool {
	r := room(n)
	if n.Capacity.DiskMB == 0 {
		r.DiskMB = want.DiskMB
	}
	if n.Capacity.Sandboxes == 0 {
		r.Sandboxes = want.Sandboxes
	}
	return want.Fits(r)
}

// why says for each node what keeps it from taking a sandbox.
func why(nodes []Node, avoid []string) string {
	var out []string
	for _, n := range nodes {
		switch {
		case n.Drained:
			out = append(out, n.Name+" is drained")
		case !n.Healthy:
			out = append(out, fmt.Sprintf("%s is not healthy (%s)", n.Name, n.Reason))
		case slices.Contains(avoid, n.Name):
			out = append(out, n.Name+" failed to make it")
		}
	}
	return strings.Join(out, ", ")
}

// full says what was asked and what the emptiest node has free.
func full(want sandbox.Resources, nodes []Node) error {
	best := slices.MaxFunc(nodes, func(a, b Node) int { return cmp.Compare(freeShare(a, want), freeShare(b, want)) })
	r := room(best)
	return fault.New(fault.Capacity,
		"no node has room for %.4g cores, %d MiB memory and %d MiB disk: the emptiest, %s, has %s free: stop sandboxes, ask for less, or add a node",
		want.CPU, want.MemoryMB, want.DiskMB, best.Name, freeText(best, r))
}

func freeText(n Node, r sandbox.Resources) string {
	text := fmt.Sprintf("%.4g cores, %d MiB memory", r.CPU, r.MemoryMB)
	if n.Capacity.DiskMB > 0 {
		text += fmt.Sprintf(", %d MiB disk", r.DiskMB)
	}
	if n.Capacity.Sandboxes > 0 {
		text += fmt.Sprintf(", %d sandboxes", r.Sandboxes)
	}
	return text
}

// better orders nodes: those with the image first, then the emptier, then by
// name so that the choice is the same each time.
func better(a, b Node, digest string, want sandbox.Resources) int {
	if has := slices.Contains(a.Images, digest); has != slices.Contains(b.Images, digest) {
		if has {
			return -1
		}
		return 1
	}
	return cmp.Or(cmp.Compare(freeShare(b, want), freeShare(a, want)), cmp.Compare(a.Name, b.Name))
}

// freeShare is the smallest share that stays free after placing want, of the
// amounts that the node counts.
func freeShare(n Node, want sandbox.Resources) float64 {
	r, c := room(n).Sub(want), n.Capacity
	least := 1.0
	for _, s := range [][2]float64{
		{r.CPU, c.CPU}, {float64(r.MemoryMB), float64(c.MemoryMB)},
		{float64(r.DiskMB), float64(c.DiskMB)}, {float64(r.Sandboxes), float64(c.Sandboxes)},
	} {
		if s[1] > 0 {
			least = min(least, s[0]/s[1])
		}
	}
	return least
}
