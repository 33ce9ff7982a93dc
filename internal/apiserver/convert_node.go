package apiserver

import (
	"bytes"
	"context"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protojson"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/apiserver/placement"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// nodeTable reads what the watcher records of nodes: their addresses, and
// their reports, which it keeps as the JSON of edge.v1.NodeReport.
type nodeTable struct {
	db         *store.DB
	now        func() time.Time
	overcommit float64

	mu        sync.Mutex // guards what follows
	addresses map[string]string
	until     time.Time         // addresses are read anew after it
	parsed    map[string]report // by node
}

// report is a node's last report, read.
type report struct {
	raw []byte
	*edgev1.NodeReport
}

// addressFresh is how long addresses are used without reading them again.
const addressFresh = 2 * time.Second

// of returns the address of a node's edge.
func (t *nodeTable) of(ctx context.Context, node string) (string, error) {
	t.mu.Lock()
	address, ok := t.addresses[node]
	fresh := t.now().Before(t.until)
	t.mu.Unlock()
	if ok && fresh {
		return address, nil
	}
	nodes, err := t.db.ListNodes(ctx)
	if err != nil {
		return "", err
	}
	all := make(map[string]string, len(nodes))
	for _, n := range nodes {
		all[n.Name] = n.Address
	}
	t.mu.Lock()
	t.addresses, t.until = all, t.now().Add(addressFresh)
	t.mu.Unlock()
	if address, ok = all[node]; !ok {
		return "", fault.New(fault.Unavailable, "node %s is not known any more", node)
	}
	return address, nil
}

// report reads a node's report. A node that has not reported yet, or whose
// report cannot be read, is not healthy. What is returned is shared: it must
// not be changed.
func (t *nodeTable) report(n store.Node) *edgev1.NodeReport {
	t.mu.Lock()
	defer t.mu.Unlock()
	if r, ok := t.parsed[n.Name]; ok && bytes.Equal(r.raw, n.Report) {
		return r.NodeReport
	}
	r := report{raw: n.Report, NodeReport: &edgev1.NodeReport{}}
	if n.LastSeen.IsZero() {
		r.Unhealthy = "it has not reported yet"
	} else if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(n.Report, r.NodeReport); err != nil {
		r.NodeReport = &edgev1.NodeReport{Unhealthy: "its report cannot be read: " + err.Error()}
	}
	if t.parsed == nil {
		t.parsed = map[string]report{}
	}
	t.parsed[n.Name] = r
	return r.NodeReport
}

// placement renders nodes for the placement.
func (t *nodeTable) placement(nodes []store.NodeUsage) []placement.Node {
	out := make([]placement.Node, len(nodes))
	for i, n := range nodes {
		r := t.report(n.Node)
		capacity := resourcesFromProto(r.GetCapacity())
		out[i] = placement.Node{
			Name: n.Node.Name, Healthy: r.GetUnhealthy() == "", Reason: r.GetUnhealthy(), Drained: n.Node.Drained,
			Images: r.GetImages(), Cores: capacity.CPU / t.overcommit, Capacity: capacity, Used: n.Used,
		}
		for _, b := range r.GetBackends() {
			backend := placement.Backend{Name: sandbox.Backend(b.GetName()), Available: b.GetAvailable(), Reason: b.GetReason()}
			for _, f := range b.GetFeatures() {
				backend.Pause = backend.Pause || f == "pause"
			}
			out[i].Backends = append(out[i].Backends, backend)
		}
	}
	return out
}

// status renders a node for its admin.
func (t *nodeTable) status(n store.NodeUsage) *opendsecv1.Node {
	r := t.report(n.Node)
	return &opendsecv1.Node{
		Name: n.Node.Name, Healthy: r.GetUnhealthy() == "", Reason: r.GetUnhealthy(), Drained: n.Node.Drained,
		Backends: r.GetBackends(), Capacity: r.GetCapacity(), Used: resourcesToProto(n.Used),
		LastSeen: timeToProto(n.Node.LastSeen), Version: r.GetVersion(), Warnings: r.GetWarnings(),
	}
}

func resourcesFromProto(p *opendsecv1.Resources) sandbox.Resources {
	return sandbox.Resources{CPU: p.GetCpuCores(), MemoryMB: p.GetMemoryMb(), DiskMB: p.GetDiskMb(), Sandboxes: p.GetSandboxes()}
}

func resourcesToProto(r sandbox.Resources) *opendsecv1.Resources {
	return &opendsecv1.Resources{CpuCores: r.CPU, MemoryMb: r.MemoryMB, DiskMb: r.DiskMB, Sandboxes: r.Sandboxes}
}
