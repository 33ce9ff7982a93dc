package apiserver

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/apiserver/placement"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// The kinds of image. One that was made of a sandbox is on the node of that
// sandbox and nowhere else.
const (
	kindOCI    = "oci"
	kindFiles  = "files"
	kindMemory = "memory"
)

// snapshot is what a start of an image that was made of a sandbox needs. For
// one of files nodes is all that is set.
type snapshot struct {
	backend sandbox.Backend
	limits  sandbox.Limits
	nodes   []string // where it was made; reports say where it is
}

// snapshotOf reads what is recorded of an image that was made of a sandbox.
func snapshotOf(m store.Image) (snapshot, error) {
	p, err := snapshotInfo(m)
	if err != nil {
		return snapshot{}, err
	}
	return snapshot{
		backend: sandbox.Backend(p.GetBackend()), nodes: p.GetNodes(),
		limits: sandbox.Limits{
			CPU: p.GetCpuCoresLimit(), MemoryMB: p.GetMemoryLimitMb(), DiskMB: p.GetDiskLimitMb(), PIDs: p.GetPidsLimit(),
		},
	}, nil
}

func snapshotInfo(m store.Image) (*opendsecv1.SnapshotInfo, error) {
	p := &opendsecv1.SnapshotInfo{}
	if len(m.Snapshot) == 0 {
		return p, nil
	}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(m.Snapshot, p); err != nil {
		return nil, fmt.Errorf("read what image %s was taken of: %w", m.Name, err)
	}
	return p, nil
}

// imageFromNode makes a record of what a node says of new content, but for the
// name and the time. Of what was made of a sandbox it keeps the node that has it.
func imageFromNode(p *opendsecv1.Image, node string) (store.Image, error) {
	config := p.GetConfig()
	if config == nil {
		config = &opendsecv1.ImageConfig{}
	}
	data, err := protojson.Marshal(config)
	if err != nil {
		return store.Image{}, fmt.Errorf("record an image's configuration: %w", err)
	}
	m := store.Image{
		Digest: p.GetDigest(), Kind: cmp.Or(p.GetKind(), kindOCI), Size: p.GetSize(), Architecture: p.GetArchitecture(),
		Source: p.GetSource(), Config: data,
	}
	if m.Kind == kindOCI {
		return m, nil
	}
	info := &opendsecv1.SnapshotInfo{}
	if p.GetSnapshot() != nil {
		info = proto.CloneOf(p.GetSnapshot())
	}
	info.Nodes = []string{node}
	if m.Snapshot, err = protojson.Marshal(info); err != nil {
		return store.Image{}, fmt.Errorf("record what an image was taken of: %w", err)
	}
	return m, nil
}

// imagesToProto renders images, those with memory with the nodes that have them.
func (s *Server) imagesToProto(ctx context.Context, images []store.Image) ([]*opendsecv1.Image, error) {
	var nodes []store.Node
	if slices.ContainsFunc(images, func(m store.Image) bool { return m.Kind == kindMemory }) {
		var err error
		if nodes, err = s.deps.DB.ListNodes(ctx); err != nil {
			return nil, err
		}
	}
	out := make([]*opendsecv1.Image, len(images))
	for i, m := range images {
		config := &opendsecv1.ImageConfig{}
		if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(m.Config, config); err != nil {
			return nil, fmt.Errorf("read the configuration of image %s: %w", m.Name, err)
		}
		out[i] = &opendsecv1.Image{
			Name: m.Name.String(), Digest: m.Digest, Kind: m.Kind, Size: m.Size, CreatedAt: timeToProto(m.CreatedAt),
			Source: m.Source, Architecture: m.Architecture, Config: config,
		}
		if m.Network != nil && callerOf(ctx).sees(m.Network.Project) {
			out[i].NetworkRules = &opendsecv1.NetworkRules{Rules: m.Network.Rules}
		}
		if m.Kind != kindMemory {
			continue
		}
		info, err := snapshotInfo(m)
		if err != nil {
			return nil, err
		}
		info.Nodes = s.nodes.holding(nodes, m, info.GetNodes())
		out[i].Snapshot = info
	}
	return out, nil
}

func (s *Server) imageToProto(ctx context.Context, m store.Image) (*opendsecv1.Image, error) {
	out, err := s.imagesToProto(ctx, []store.Image{m})
	if err != nil {
		return nil, err
	}
	return out[0], nil
}

// reportLag is how long after an image was made a node's report may not have
// it yet.
const reportLag = 10 * time.Second

// holding returns the nodes that have an image's content: their reports say so,
// or it was made there too lately for a report.
func (t *nodeTable) holding(nodes []store.Node, m store.Image, made []string) []string {
	var out []string
	for _, n := range nodes {
		late := slices.Contains(made, n.Name) && n.LastSeen.Before(m.CreatedAt.Add(reportLag))
		if late || slices.Contains(t.report(n).GetImages(), m.Digest) {
			out = append(out, n.Name)
		}
	}
	return out
}

// only returns the nodes to which sandboxes of an origin are bound: a copy to
// the node of its source, what starts from a sandbox's image to where that is.
// It is nil for others, since a node without a plain image says so itself.
func (t *nodeTable) only(usages []store.NodeUsage, from origin) *placement.Only {
	if from.source != nil {
		return &placement.Only{Nodes: []string{from.source.Node}, Thing: "sandbox " + string(from.source.ID)}
	}
	if from.image.Kind != kindFiles && from.image.Kind != kindMemory {
		return nil
	}
	snap, err := snapshotOf(from.image)
	if err != nil {
		snap = snapshot{} // then the reports alone count
	}
	nodes := make([]store.Node, len(usages))
	for i, u := range usages {
		nodes[i] = u.Node
	}
	return &placement.Only{Nodes: t.holding(nodes, from.image, snap.nodes), Thing: "image " + from.image.Name.String()}
}

// backendsThat returns the backends that have a feature somewhere, the
// strongest first, and whether a node says that one of its own lacks it. The
// one that only simulates is no help to whoever asks.
func (t *nodeTable) backendsThat(usages []store.NodeUsage, feature, node string, one sandbox.Backend) (can []sandbox.Backend, lacks bool) {
	for _, u := range usages {
		for _, b := range t.report(u.Node).GetBackends() {
			has := b.GetAvailable() && slices.Contains(b.GetFeatures(), feature)
			name := sandbox.Backend(b.GetName())
			if has && name != sandbox.Sim && !slices.Contains(can, name) {
				can = append(can, name)
			}
			lacks = lacks || u.Node.Name == node && name == one && !has
		}
	}
	slices.SortFunc(can, func(a, b sandbox.Backend) int {
		return cmp.Compare(slices.Index(sandbox.Backends, a), slices.Index(sandbox.Backends, b))
	})
	return can, lacks
}
