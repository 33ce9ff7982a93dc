package apiserver_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

func (u *user) snapshot(id, name string, filesOnly bool) (*opendsecv1.Image, error) {
	res, err := u.sandboxes.CreateSnapshot(u.c.t.Context(), connect.NewRequest(&opendsecv1.CreateSnapshotRequest{Id: id, Name: name, FilesOnly: filesOnly}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetImage(), nil
}

func (u *user) mustSnapshot(id, name string, filesOnly bool) *opendsecv1.Image {
	u.c.t.Helper()
	image, err := u.snapshot(id, name, filesOnly)
	if err != nil {
		u.c.t.Fatal(err)
	}
	return image
}

func (u *user) image(name string) (*opendsecv1.Image, error) {
	res, err := u.images.GetImage(u.c.t.Context(), connect.NewRequest(&opendsecv1.GetImageRequest{Name: name}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetImage(), nil
}

func from(image string) func(*opendsecv1.CreateSandboxRequest) {
	return func(r *opendsecv1.CreateSandboxRequest) { r.Spec.Image = image }
}

func small(r *opendsecv1.CreateSandboxRequest) {
	r.Spec.CpuCoresLimit, r.Spec.MemoryLimitMb, r.Spec.DiskLimitMb, r.Spec.PidsLimit = 0.5, 256, 2048, 64
}

func TestSnapshotIsAnImage(t *testing.T) {
	c := newCluster(t, 2)
	dev := c.developer()
	sb := dev.mustCreate(small)
	image := dev.mustSnapshot(sb.GetId(), "root/demo/walk:1", false)
	info := image.GetSnapshot()
	if image.GetName() != "root/demo/walk:1" || image.GetKind() != "memory" || image.GetSize() != 42<<20 || image.GetCreatedAt() == nil ||
		image.GetSource() != "sandbox "+sb.GetId() || image.GetConfig().GetUser() != "app" || image.GetArchitecture() != "amd64" {
		t.Errorf("got %v", image)
	}
	if info.GetBackend() != "gvisor" || info.GetVirtualization() != "systrap" || info.GetMemoryLimitMb() != 256 || info.GetPidsLimit() != 64 ||
		!slices.Equal(info.GetNodes(), []string{sb.GetNode()}) || !slices.Equal(info.GetCpuFeatures(), []string{"avx2"}) {
		t.Errorf("got %v", info)
	}
	eventually(t, "its node reports it", func() bool {
		list, err := dev.images.ListImages(t.Context(), connect.NewRequest(&opendsecv1.ListImagesRequest{Project: "root/demo"}))
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(list.Msg.GetImages(), func(m *opendsecv1.Image) bool { return m.GetName() == "root/demo/walk:1" })
		return i >= 0 && slices.Equal(list.Msg.GetImages()[i].GetSnapshot().GetNodes(), []string{sb.GetNode()})
	})
	// A further name is the same snapshot.
	if _, err := dev.images.TagImage(t.Context(), connect.NewRequest(&opendsecv1.TagImageRequest{Name: "root/demo/walk:1", NewName: "root/demo/run:1"})); err != nil {
		t.Fatal(err)
	}
	if m, err := dev.image("root/demo/run:1"); err != nil || m.GetSnapshot().GetBackend() != "gvisor" || m.GetDigest() != image.GetDigest() {
		t.Errorf("got %v, %v", m, err)
	}
	// Of a paused one too, and of files, which says nothing of memory.
	dev.mustPause(sb.GetId())
	files := dev.mustSnapshot(sb.GetId(), "root/demo/files:1", true)
	if files.GetKind() != "files" || files.GetSnapshot() != nil {
		t.Errorf("got %v", files)
	}
	res, err := dev.sandboxes.PackDiff(t.Context(), connect.NewRequest(&opendsecv1.PackDiffRequest{Id: sb.GetId(), Name: "root/demo/diff"}))
	if err != nil || res.Msg.GetImage().GetKind() != "files" || res.Msg.GetImage().GetName() != "root/demo/diff:latest" {
		t.Errorf("got %v, %v", res, err)
	}
}

// A snapshot goes on as the machine that it was taken of, or is refused with the
// field that is not so. It starts before its node's next report.
func TestStartFromMemory(t *testing.T) {
	c := newCluster(t, 3)
	dev := c.developer()
	source := dev.mustCreate(small)
	image := dev.mustSnapshot(source.GetId(), "root/demo/walk:1", false)
	for range 3 {
		sb := dev.mustCreate(from("root/demo/walk:1"))
		s := sb.GetSpec()
		if sb.GetNode() != source.GetNode() || sb.GetImageDigest() != image.GetDigest() || sb.GetParent() != "" || s.GetBackend() != "gvisor" ||
			s.GetCpuCoresLimit() != 0.5 || s.GetMemoryLimitMb() != 256 || s.GetDiskLimitMb() != 2048 || s.GetPidsLimit() != 64 {
			t.Errorf("got %v", sb)
		}
	}
	dev.mustCreate(small, from("root/demo/walk:1"), func(r *opendsecv1.CreateSandboxRequest) { r.Spec.Backend = "gvisor" })
	for field, tc := range map[string]struct {
		change func(*opendsecv1.SandboxSpec)
		says   string
	}{
		"spec.cpu_cores_limit": {func(s *opendsecv1.SandboxSpec) { s.CpuCoresLimit = 1 }, "0.5"},
		"spec.memory_limit_mb": {func(s *opendsecv1.SandboxSpec) { s.MemoryLimitMb = 512 }, "256"},
		"spec.disk_limit_mb":   {func(s *opendsecv1.SandboxSpec) { s.DiskLimitMb = 10240 }, "2048"},
		"spec.pids_limit":      {func(s *opendsecv1.SandboxSpec) { s.PidsLimit = 1024 }, "64"},
	} {
		_, err := dev.create(from("root/demo/walk:1"), func(r *opendsecv1.CreateSandboxRequest) { tc.change(r.Spec) })
		if p := wantProblem(t, err, fault.InvalidArgument, field); !strings.Contains(p.Message, tc.says) {
			t.Errorf("%q does not say %s", p.Message, tc.says)
		}
	}
	for _, backend := range []string{"sim", "container"} {
		_, err := dev.create(from("root/demo/walk:1"), func(r *opendsecv1.CreateSandboxRequest) { r.Spec.Backend = backend })
		if p := wantProblem(t, err, fault.Unsupported, "spec.backend"); !slices.Equal(p.Backends, []sandbox.Backend{sandbox.GVisor}) {
			t.Errorf("named %v", p.Backends)
		}
	}
	// What keeps its node from starting it reaches the caller.
	for _, e := range c.edges {
		e.SetHooks(edgetest.Hooks{Create: func(context.Context, sandbox.ID) error {
			return fault.New(fault.Unsupported, "this node's CPU lacks avx2")
		}})
	}
	_, err := dev.create(from("root/demo/walk:1"))
	if p := wantProblem(t, err, fault.Unsupported, ""); !strings.Contains(p.Message, "lacks avx2") {
		t.Errorf("got %q", p.Message)
	}
}

// What was made of a sandbox starts where it is. A plain image may be anywhere.
func TestStartWhereTheContentIs(t *testing.T) {
	c := newCluster(t, 2)
	dev, admin := c.developer(), c.admin()
	source := dev.mustCreate(small)
	dev.mustSnapshot(source.GetId(), "root/demo/memory:1", false)
	dev.mustSnapshot(source.GetId(), "root/demo/files:1", true)
	for range 3 {
		if sb := dev.mustCreate(from("root/demo/files:1"), onSim); sb.GetNode() != source.GetNode() {
			t.Errorf("it is on %s", sb.GetNode())
		}
	}
	if _, err := admin.cluster.SetNodeDrain(t.Context(), connect.NewRequest(&opendsecv1.SetNodeDrainRequest{Node: source.GetNode(), Drain: true})); err != nil {
		t.Fatal(err)
	}
	dev.mustCreate()
	for _, name := range []string{"root/demo/memory:1", "root/demo/files:1"} {
		_, err := dev.create(from(name))
		if p := wantProblem(t, err, fault.Capacity, ""); !strings.Contains(p.Message, "on "+source.GetNode()+" only, for image "+name) {
			t.Errorf("got %q", p.Message)
		}
	}
	// A node that fails is not replaced by one without the content.
	if _, err := admin.cluster.SetNodeDrain(t.Context(), connect.NewRequest(&opendsecv1.SetNodeDrainRequest{Node: source.GetNode()})); err != nil {
		t.Fatal(err)
	}
	for _, e := range c.edges {
		if e.Name == source.GetNode() {
			e.SetHooks(edgetest.Hooks{Create: func(context.Context, sandbox.ID) error { return errors.New("a broken disk") }})
		}
	}
	_, err := dev.create(from("root/demo/files:1"))
	wantProblem(t, err, fault.Internal, "")
}

func TestStartOfContentThatIsNowhere(t *testing.T) {
	c := newCluster(t, 2)
	name, err := sandbox.ParseImageName("root/demo/old:1")
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.db.PutImage(t.Context(), store.Image{
		Name: name, Digest: edgetest.Digest("old"), Kind: "files", Config: []byte(`{}`), Snapshot: []byte(`{"nodes":["node-1"]}`),
		CreatedAt: time.Now().Add(-time.Hour),
	})
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.developer().create(from("root/demo/old:1"))
	if p := wantProblem(t, err, fault.Capacity, ""); !strings.Contains(p.Message, "no node has image root/demo/old:1") {
		t.Errorf("got %q", p.Message)
	}
	c.edges[1].SetReport(func(r *edgev1.NodeReport) { r.Images = append(r.Images, edgetest.Digest("old")) })
	eventually(t, "it can be started where it is reported", func() bool {
		sb, err := c.developer().create(from("root/demo/old:1"))
		return err == nil && sb.GetNode() == "node-2"
	})
}

// A name that is taken again lets go of the content that had it.
func TestSnapshotTakesAName(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	first := dev.mustSnapshot(id, "root/demo/walk:1", false)
	second := dev.mustSnapshot(id, "root/demo/walk:1", false)
	if first.GetDigest() == second.GetDigest() || !slices.Equal(c.edges[0].DeletedImages(), []string{first.GetDigest()}) {
		t.Errorf("removed %v; want %s", c.edges[0].DeletedImages(), first.GetDigest())
	}
	if m, err := dev.image("root/demo/walk:1"); err != nil || m.GetDigest() != second.GetDigest() {
		t.Errorf("got %v, %v", m, err)
	}
	if _, err := dev.images.DeleteImage(t.Context(), connect.NewRequest(&opendsecv1.DeleteImageRequest{Name: "root/demo/walk:1"})); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(c.edges[0].DeletedImages(), second.GetDigest()) {
		t.Errorf("removed %v", c.edges[0].DeletedImages())
	}
}

func TestSnapshotThatFails(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	for field, call := range map[string]func() error{
		"name": func() error { _, err := dev.snapshot(id, "walk", false); return err },
		"id":   func() error { _, err := dev.snapshot("", "root/demo/walk", false); return err },
	} {
		wantProblem(t, call(), fault.InvalidArgument, field)
	}
	_, err := c.admin().snapshot(id, "root/nowhere/walk", false)
	wantProblem(t, err, fault.NotFound, "name")
	for _, kind := range []fault.Kind{fault.Capacity, fault.Unsupported, fault.Internal} {
		c.edges[0].SetHooks(failing(edgetest.Snapshot, fault.New(kind, "no")))
		_, err := dev.snapshot(id, "root/demo/walk:1", false)
		wantProblem(t, err, kind, "")
		_, err = dev.image("root/demo/walk:1")
		wantProblem(t, err, fault.NotFound, "name")
	}
	dev.is(id, running)
}

// Content whose name cannot be recorded does not stay.
func TestSnapshotThatCannotBeRecorded(t *testing.T) {
	c := newCluster(t, 1)
	admin := c.admin()
	id := admin.mustCreate().GetId()
	for _, filesOnly := range []bool{false, true} {
		if _, err := admin.identity.CreateProject(t.Context(), connect.NewRequest(&opendsecv1.CreateProjectRequest{Path: "root/brief"})); err != nil {
			t.Fatal(err)
		}
		before := len(c.edges[0].DeletedImages())
		c.edges[0].SetHooks(edgetest.Hooks{State: func(ctx context.Context, _ edgetest.Op, _ sandbox.ID) error {
			return c.db.Change(ctx, store.Audit{Time: time.Now(), Action: "test"}, func(ch *store.Change) error {
				return ch.DeleteProject(ctx, "root/brief")
			})
		}})
		_, err := admin.snapshot(id, "root/brief/walk:1", filesOnly)
		if p := problem(err); p.Kind != fault.NotFound {
			t.Errorf("got %v", err)
		}
		if removed := c.edges[0].DeletedImages(); len(removed) != before+1 {
			t.Errorf("removed %v", removed)
		}
	}
}

// A snapshot that its caller does not wait for gets its name all the same.
func TestSnapshotGoesOnWithoutItsCaller(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	entered, hold := make(chan struct{}), make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{State: func(ctx context.Context, _ edgetest.Op, _ sandbox.ID) error {
		close(entered)
		<-hold
		return ctx.Err()
	}})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := dev.sandboxes.CreateSnapshot(ctx, connect.NewRequest(&opendsecv1.CreateSnapshotRequest{Id: id, Name: "root/demo/walk:1"}))
		failed <- err
	}()
	<-entered
	cancel()
	if err := <-failed; connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("got %v", err)
	}
	close(hold)
	eventually(t, "it has its name", func() bool { _, err := dev.image("root/demo/walk:1"); return err == nil })
}
