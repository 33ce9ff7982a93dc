package apiserver_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpcreflect"
	"google.golang.org/protobuf/types/known/durationpb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func TestStop(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	for range 3 {
		sb, err := dev.stop(id)
		if err != nil {
			t.Fatal(err)
		}
		if sb.GetState() != opendsecv1.State_STATE_STOPPED || sb.GetEnd().GetReason() != "stopped" || sb.GetEnd().GetDomain() != opendsecv1.Domain_DOMAIN_USER {
			t.Errorf("got %v", sb)
		}
	}
	if live := c.edges[0].Live(); len(live) > 0 {
		t.Errorf("the edge has %v", live)
	}
	_, err := dev.sandboxes.RefreshSandbox(t.Context(), connect.NewRequest(&opendsecv1.RefreshSandboxRequest{Id: id}))
	if p := wantProblem(t, err, fault.SandboxEnded, ""); p.End == nil || p.End.Reason != "stopped" {
		t.Errorf("got %+v", p)
	}
}

// A node that is gone does not keep a sandbox from being stopped: the wish is
// recorded, and the watcher carries it out when the node is back.
func TestStopOnANodeThatIsGone(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	c.edges[0].Kill()
	for range 2 {
		sb, err := dev.stop(id)
		if err != nil || sb.GetState() != opendsecv1.State_STATE_STOPPING || sb.GetEnd() != nil {
			t.Fatalf("got %v, %v", sb, err)
		}
	}
	c.edges[0].Serve(t)
	var sb *opendsecv1.Sandbox
	eventually(t, "the API can stop it again", func() bool {
		var err error
		if sb, err = dev.stop(id); err != nil {
			t.Fatal(err)
		}
		return sb.GetState() == opendsecv1.State_STATE_STOPPED
	})
	if len(c.edges[0].Live()) > 0 {
		t.Error("the machine is still there")
	}
}

func TestStopThatTheNodeCannotDo(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	c.edges[0].SetHooks(edgetest.Hooks{Destroy: func(context.Context, sandbox.ID) error { return errors.New("busy") }})
	if sb, err := dev.stop(id); err != nil || sb.GetState() != opendsecv1.State_STATE_STOPPING {
		t.Fatalf("got %v, %v", sb, err)
	}
	c.edges[0].SetHooks(edgetest.Hooks{})
	if sb, err := dev.stop(id); err != nil || sb.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Fatalf("got %v, %v", sb, err)
	}
}

func TestSetTTLRefreshAndMetrics(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	sb := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.TtlLifetime = durationpb.New(time.Hour) })
	id := sandbox.ID(sb.GetId())
	res, err := dev.sandboxes.SetTTL(t.Context(), connect.NewRequest(&opendsecv1.SetTTLRequest{Id: sb.GetId(), TtlRunningStop: durationpb.New(time.Minute)}))
	if err != nil {
		t.Fatal(err)
	}
	if s := res.Msg.GetSandbox().GetSpec(); s.GetTtlRunningStop().AsDuration() != time.Minute || s.GetTtlLifetime().AsDuration() != time.Hour {
		t.Errorf("got %v", s)
	}
	if d := c.edges[0].Deadlines(id); d.GetTtlRunningStop().AsDuration() != time.Minute || d.GetTtlLifetime().AsDuration() != time.Hour {
		t.Errorf("the edge got %v", d)
	}
	res, err = dev.sandboxes.SetTTL(t.Context(), connect.NewRequest(&opendsecv1.SetTTLRequest{Id: sb.GetId(), TtlLifetime: durationpb.New(0)}))
	if err != nil || res.Msg.GetSandbox().GetSpec().GetTtlLifetime() != nil || c.edges[0].Deadlines(id).GetTtlLifetime() != nil {
		t.Errorf("0 is not never: %v, %v", res, err)
	}
	_, err = dev.sandboxes.SetTTL(t.Context(), connect.NewRequest(&opendsecv1.SetTTLRequest{Id: sb.GetId(), TtlLifetime: durationpb.New(-1)}))
	wantProblem(t, err, fault.InvalidArgument, "ttl_lifetime")

	if _, err := dev.sandboxes.RefreshSandbox(t.Context(), connect.NewRequest(&opendsecv1.RefreshSandboxRequest{Id: sb.GetId()})); err != nil || c.edges[0].Touched(id) != 1 {
		t.Errorf("refresh: %v, touched %d times", err, c.edges[0].Touched(id))
	}
	m, err := dev.sandboxes.GetMetrics(t.Context(), connect.NewRequest(&opendsecv1.GetMetricsRequest{Id: sb.GetId()}))
	if err != nil || m.Msg.GetMetrics().GetPids() != 3 {
		t.Errorf("metrics: %v, %v", m, err)
	}
}

func (u *user) list(req *opendsecv1.ListSandboxesRequest) ([]string, string, error) {
	if req.Project == "" {
		req.Project = "root/demo"
	}
	res, err := u.sandboxes.ListSandboxes(u.c.t.Context(), connect.NewRequest(req))
	if err != nil {
		return nil, "", err
	}
	var ids []string
	for _, sb := range res.Msg.GetSandboxes() {
		ids = append(ids, sb.GetId())
	}
	return ids, res.Msg.GetNextPageToken(), nil
}

func TestList(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	var made []string
	for i := range 5 {
		sb := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) {
			r.Spec.Labels = map[string]string{"task": []string{"even", "odd"}[i%2]}
		})
		made = append([]string{sb.GetId()}, made...)
	}
	if _, err := dev.stop(made[0]); err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		req  *opendsecv1.ListSandboxesRequest
		want []string
	}{
		"those that live": {&opendsecv1.ListSandboxesRequest{}, made[1:]},
		"ended too":       {&opendsecv1.ListSandboxesRequest{Ended: true}, made},
		"stopped":         {&opendsecv1.ListSandboxesRequest{States: []opendsecv1.State{opendsecv1.State_STATE_STOPPED}}, made[:1]},
		"by label":        {&opendsecv1.ListSandboxesRequest{Labels: map[string]string{"task": "odd"}}, []string{made[1], made[3]}},
		"from above":      {&opendsecv1.ListSandboxesRequest{Project: "root"}, made[1:]},
	} {
		who := dev
		if tc.req.GetProject() == "root" {
			who = c.admin()
		}
		got, _, err := who.list(tc.req)
		if err != nil || !slices.Equal(got, tc.want) {
			t.Errorf("%s: got %v, %v; want %v", name, got, err, tc.want)
		}
	}
	var paged []string
	for token := ""; ; {
		ids, next, err := dev.list(&opendsecv1.ListSandboxesRequest{Ended: true, PageSize: 2, PageToken: token})
		if err != nil {
			t.Fatal(err)
		}
		paged = append(paged, ids...)
		if token = next; token == "" {
			break
		}
	}
	if !slices.Equal(paged, made) {
		t.Errorf("by pages %v; want %v", paged, made)
	}
	for field, req := range map[string]*opendsecv1.ListSandboxesRequest{
		"page_size": {PageSize: 1001}, "page_token": {PageToken: "x"}, "states": {States: []opendsecv1.State{99}},
		"labels": {Labels: map[string]string{"A B": ""}},
	} {
		_, _, err := dev.list(req)
		wantProblem(t, err, fault.InvalidArgument, field)
	}
}

// Who may do what in root/demo. A project that is not theirs does not exist.
func TestAuthorization(t *testing.T) {
	c := newCluster(t, 1)
	id := c.developer().mustCreate().GetId()
	ctx := t.Context()
	users := map[string]*user{"viewer": c.viewer(), "developer": c.developer(), "admin": c.admin(), "stranger": c.stranger()}
	const (
		yes       fault.Kind = ""
		forbidden            = fault.PermissionDenied
		unknown              = fault.NotFound
	)
	for name, tc := range map[string]struct {
		call                                func(*user) error
		viewer, developer, admin, stranger_ fault.Kind
	}{
		"create":         {func(u *user) error { _, err := u.create(); return err }, forbidden, yes, yes, unknown},
		"create several": {func(u *user) error { _, err := u.createSet(1, true, ""); return err }, forbidden, yes, yes, unknown},
		"get":            {func(u *user) error { _, err := u.get(id); return err }, yes, yes, yes, unknown},
		"list":           {func(u *user) error { _, _, err := u.list(&opendsecv1.ListSandboxesRequest{}); return err }, yes, yes, yes, unknown},
		"metrics": {func(u *user) error {
			_, err := u.sandboxes.GetMetrics(ctx, connect.NewRequest(&opendsecv1.GetMetricsRequest{Id: id}))
			return err
		}, yes, yes, yes, unknown},
		"refresh": {func(u *user) error {
			_, err := u.sandboxes.RefreshSandbox(ctx, connect.NewRequest(&opendsecv1.RefreshSandboxRequest{Id: id}))
			return err
		}, forbidden, yes, yes, unknown},
		"ttl": {func(u *user) error {
			_, err := u.sandboxes.SetTTL(ctx, connect.NewRequest(&opendsecv1.SetTTLRequest{Id: id}))
			return err
		}, forbidden, yes, yes, unknown},
		"update network": {func(u *user) error {
			_, err := u.sandboxes.UpdateNetwork(ctx, connect.NewRequest(&opendsecv1.UpdateNetworkRequest{Id: id}))
			return err
		}, forbidden, yes, yes, unknown},
		"explain network": {func(u *user) error {
			_, err := u.sandboxes.ExplainNetwork(ctx, connect.NewRequest(&opendsecv1.ExplainNetworkRequest{Id: id, Target: "example.com"}))
			return err
		}, yes, yes, yes, unknown},
		"list denied": {func(u *user) error {
			_, err := u.sandboxes.ListDenied(ctx, connect.NewRequest(&opendsecv1.ListDeniedRequest{Id: id}))
			return err
		}, yes, yes, yes, unknown},
		"pause":            {func(u *user) error { _, err := u.pause(id); return err }, forbidden, yes, yes, unknown},
		"resume":           {func(u *user) error { _, err := u.resume(id); return err }, forbidden, yes, yes, unknown},
		"fork":             {func(u *user) error { _, err := u.fork(id); return err }, forbidden, yes, yes, unknown},
		"snapshot":         {func(u *user) error { _, err := u.snapshot(id, "root/demo/snap:1", false); return err }, forbidden, yes, yes, unknown},
		"snapshot to root": {func(u *user) error { _, err := u.snapshot(id, "root/snap:1", false); return err }, forbidden, unknown, yes, unknown},
		"pack diff": {func(u *user) error {
			_, err := u.sandboxes.PackDiff(ctx, connect.NewRequest(&opendsecv1.PackDiffRequest{Id: id, Name: "root/demo/diff:1"}))
			return err
		}, forbidden, yes, yes, unknown},
		"data plane": {func(u *user) error { return u.data(id, "/health") }, forbidden, yes, yes, unknown},
		"images": {func(u *user) error {
			_, err := u.images.ListImages(ctx, connect.NewRequest(&opendsecv1.ListImagesRequest{Project: "root/demo"}))
			return err
		}, yes, yes, yes, unknown},
		"image import":    {func(u *user) error { _, err := u.importImage("docker.io/library/a:1", "root/demo/a:1"); return err }, forbidden, yes, yes, unknown},
		"image from path": {func(u *user) error { _, err := u.importImage("docker-archive:/a.tar", "root/demo/a:2"); return err }, forbidden, forbidden, yes, unknown},
		"image bootstrap": {func(u *user) error { _, err := u.bootstrap("root/demo/deb:1"); return err }, forbidden, forbidden, yes, forbidden},
		"image of root": {func(u *user) error {
			_, err := u.images.GetImage(ctx, connect.NewRequest(&opendsecv1.GetImageRequest{Name: rootImage}))
			return err
		}, yes, yes, yes, yes},
		"image of another project": {func(u *user) error {
			_, err := u.images.GetImage(ctx, connect.NewRequest(&opendsecv1.GetImageRequest{Name: otherImage}))
			return err
		}, unknown, unknown, yes, yes},
		"tag root's image": {func(u *user) error {
			_, err := u.images.TagImage(ctx, connect.NewRequest(&opendsecv1.TagImageRequest{Name: rootImage, NewName: "root/demo/mine:1"}))
			return err
		}, forbidden, yes, yes, unknown},
		"tag into root": {func(u *user) error {
			_, err := u.images.TagImage(ctx, connect.NewRequest(&opendsecv1.TagImageRequest{Name: rootImage, NewName: "root/mine:1"}))
			return err
		}, unknown, unknown, yes, unknown},
		"delete root's image": {func(u *user) error {
			_, err := u.images.DeleteImage(ctx, connect.NewRequest(&opendsecv1.DeleteImageRequest{Name: rootImage}))
			return err
		}, forbidden, forbidden, yes, forbidden},
		"status": {func(u *user) error {
			_, err := u.cluster.GetStatus(ctx, connect.NewRequest(&opendsecv1.GetStatusRequest{}))
			return err
		}, forbidden, forbidden, yes, forbidden},
		"leaks": {func(u *user) error {
			_, err := u.cluster.FindLeaks(ctx, connect.NewRequest(&opendsecv1.FindLeaksRequest{}))
			return err
		}, forbidden, forbidden, yes, forbidden},
		"drain": {func(u *user) error {
			_, err := u.cluster.SetNodeDrain(ctx, connect.NewRequest(&opendsecv1.SetNodeDrainRequest{Node: "node-1"}))
			return err
		}, forbidden, forbidden, yes, forbidden},
		"version": {func(u *user) error {
			_, err := u.cluster.GetVersion(ctx, connect.NewRequest(&opendsecv1.GetVersionRequest{}))
			return err
		}, yes, yes, yes, yes},
		"who am I": {func(u *user) error {
			res, err := u.identity.WhoAmI(ctx, connect.NewRequest(&opendsecv1.WhoAmIRequest{}))
			if err == nil && res.Msg.GetCaller().GetName() != u.name {
				return errors.New("taken for " + res.Msg.GetCaller().GetName())
			}
			return err
		}, yes, yes, yes, yes},
		"image that is gone": {func(u *user) error {
			_, err := u.images.GetImage(ctx, connect.NewRequest(&opendsecv1.GetImageRequest{Name: "root/py:none"}))
			return err
		}, unknown, unknown, unknown, unknown},
	} {
		for who, want := range map[string]fault.Kind{"viewer": tc.viewer, "developer": tc.developer, "admin": tc.admin, "stranger": tc.stranger_} {
			if name == "delete root's image" && who == "admin" {
				continue // it can, and then the others would find nothing
			}
			err := tc.call(users[who])
			if want == yes && err != nil || want != yes && (err == nil || problem(err).Kind != want) {
				t.Errorf("%s by %s: got %v; want %q", name, who, err, want)
			}
		}
	}
	// The same for stopping, which only one of them can do.
	for _, who := range []string{"viewer", "stranger", "developer"} {
		_, err := users[who].stop(id)
		if (err == nil) != (who == "developer") {
			t.Errorf("stop by %s: %v", who, err)
		}
	}
}

func TestNobodyGetsInWithoutAToken(t *testing.T) {
	c := newCluster(t, 1)
	id := c.developer().mustCreate().GetId()
	for name, token := range map[string]string{"none": "", "wrong": "ods_x_y", "absurd": strings.Repeat("a", 5000)} {
		u := &user{c: c, token: token}
		u.connect()
		_, err := u.get(id)
		wantProblem(t, err, fault.Unauthenticated, "")
		if err := u.data(id, "/health"); problem(err).Kind != fault.Unauthenticated {
			t.Errorf("%s: the data plane said %v", name, err)
		}
		_, err = u.identity.WhoAmI(t.Context(), connect.NewRequest(&opendsecv1.WhoAmIRequest{}))
		wantProblem(t, err, fault.Unauthenticated, "")
		_, err = u.importImage("docker.io/a/b:1", "root/a:1")
		wantProblem(t, err, fault.Unauthenticated, "")
	}
}

func TestRevokedTokenEnds(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	dev.mustCreate()
	id := strings.Split(dev.token, "_")[1]
	if _, err := c.admin().identity.RevokeToken(t.Context(), connect.NewRequest(&opendsecv1.RevokeTokenRequest{Id: id})); err != nil {
		t.Fatal(err)
	}
	begin := time.Now()
	eventually(t, "the token is refused", func() bool {
		_, _, err := dev.list(&opendsecv1.ListSandboxesRequest{})
		return err != nil && problem(err).Kind == fault.Unauthenticated
	})
	if took := time.Since(begin); took > 4*time.Second {
		t.Errorf("it was accepted for %s", took)
	}
}

func (u *user) importImage(source, name string) (*opendsecv1.Image, error) {
	stream, err := u.images.ImportImage(u.c.t.Context(), connect.NewRequest(&opendsecv1.ImportImageRequest{Source: source, Name: name}))
	return u.progress(stream, err)
}

func (u *user) bootstrap(name string) (*opendsecv1.Image, error) {
	stream, err := u.images.BootstrapImage(u.c.t.Context(), connect.NewRequest(&opendsecv1.BootstrapImageRequest{Distribution: "debian", Name: name}))
	return u.progress(stream, err)
}

// progress reads a stream of progress and returns the image at its end.
func (u *user) progress(stream *connect.ServerStreamForClient[opendsecv1.ImportImageResponse], err error) (*opendsecv1.Image, error) {
	if err != nil {
		return nil, err
	}
	defer stream.Close()
	var steps []string
	var image *opendsecv1.Image
	for stream.Receive() {
		steps = append(steps, stream.Msg().GetStep())
		image = stream.Msg().GetImage()
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	if !slices.Equal(steps, []string{"pull", "unpack", "done"}) {
		u.c.t.Errorf("got steps %v", steps)
	}
	return image, nil
}

func TestImages(t *testing.T) {
	c := newCluster(t, 1)
	admin, dev := c.admin(), c.developer()
	ctx := t.Context()
	image, err := dev.importImage("docker.io/library/python:3.12", "root/demo/py:1")
	if err != nil {
		t.Fatal(err)
	}
	if image.GetName() != "root/demo/py:1" || image.GetDigest() != edgetest.Digest("docker.io/library/python:3.12") ||
		image.GetConfig().GetUser() != "app" || image.GetSize() != 42 || image.GetSource() == "" || image.GetCreatedAt() == nil {
		t.Errorf("got %v", image)
	}
	sb := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.Image = "root/demo/py:1" })
	if sb.GetImageDigest() != image.GetDigest() {
		t.Errorf("made of %s", sb.GetImageDigest())
	}
	_, err = dev.importImage("docker.io/library/missing", "root/demo/py:2")
	wantProblem(t, err, fault.NotFound, "")
	for field, call := range map[string]func() error{
		"name":   func() error { _, err := dev.importImage("docker.io/a/b", "py"); return err },
		"source": func() error { _, err := dev.importImage("", "root/demo/py:1"); return err },
		"distribution": func() error {
			stream, err := admin.images.BootstrapImage(ctx, connect.NewRequest(&opendsecv1.BootstrapImageRequest{Distribution: "arch", Name: "root/arch:1"}))
			_, err = admin.progress(stream, err)
			return err
		},
	} {
		wantProblem(t, call(), fault.InvalidArgument, field)
	}
	_, err = admin.importImage("docker.io/a/b", "root/nowhere/py:1")
	wantProblem(t, err, fault.NotFound, "name")

	list, err := dev.images.ListImages(ctx, connect.NewRequest(&opendsecv1.ListImagesRequest{Project: "root/demo"}))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, i := range list.Msg.GetImages() {
		names = append(names, i.GetName())
	}
	if !slices.Contains(names, rootImage) || !slices.Contains(names, "root/demo/py:1") || slices.Contains(names, otherImage) {
		t.Errorf("root/demo sees %v", names)
	}

	tagged, err := dev.images.TagImage(ctx, connect.NewRequest(&opendsecv1.TagImageRequest{Name: "root/demo/py:1", NewName: "root/demo/py:latest"}))
	if err != nil || tagged.Msg.GetImage().GetDigest() != image.GetDigest() {
		t.Fatalf("got %v, %v", tagged, err)
	}
	// Content goes with its last name.
	for i, name := range []string{"root/demo/py:1", "root/demo/py:latest"} {
		if _, err := dev.images.DeleteImage(ctx, connect.NewRequest(&opendsecv1.DeleteImageRequest{Name: name})); err != nil {
			t.Fatal(err)
		}
		if gone := slices.Contains(c.edges[0].DeletedImages(), image.GetDigest()); gone != (i == 1) {
			t.Errorf("after deleting %s the content is gone: %v", name, gone)
		}
	}
	_, err = dev.images.DeleteImage(ctx, connect.NewRequest(&opendsecv1.DeleteImageRequest{Name: "root/demo/py:1"}))
	wantProblem(t, err, fault.NotFound, "name")
	// So does content whose name another took.
	if _, err := admin.bootstrap("root/demo/py:1"); err != nil {
		t.Fatal(err)
	}
	if _, err := dev.importImage("docker.io/library/python:3.13", "root/demo/py:1"); err != nil {
		t.Fatal(err)
	}
	if !slices.Contains(c.edges[0].DeletedImages(), edgetest.Digest("bootstrap:debian")) {
		t.Error("the content that lost its name is still there")
	}
}

func TestCluster(t *testing.T) {
	c := newCluster(t, 2)
	admin, dev := c.admin(), c.developer()
	ctx := t.Context()
	dev.mustCreate()
	res, err := admin.cluster.GetStatus(ctx, connect.NewRequest(&opendsecv1.GetStatusRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	n := res.Msg.GetNodes()[0]
	if n.GetName() != "node-1" || !n.GetHealthy() || n.GetUsed().GetSandboxes() != 1 || n.GetUsed().GetMemoryMb() != 512 ||
		n.GetCapacity().GetCpuCores() != 32 || len(n.GetBackends()) != 3 || n.GetVersion() != "test" {
		t.Errorf("got %v", n)
	}
	if _, err := admin.cluster.SetNodeDrain(ctx, connect.NewRequest(&opendsecv1.SetNodeDrainRequest{Node: "node-2", Drain: true})); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if sb := dev.mustCreate(); sb.GetNode() != "node-1" {
			t.Errorf("placed on the drained %s", sb.GetNode())
		}
	}
	_, err = admin.cluster.SetNodeDrain(ctx, connect.NewRequest(&opendsecv1.SetNodeDrainRequest{Node: "node-9", Drain: true}))
	wantProblem(t, err, fault.NotFound, "node")
}

func TestLeaksCompareRecordsWithNodes(t *testing.T) {
	c := newCluster(t, 1)
	admin, dev := c.admin(), c.developer()
	find := func(repair bool) []*opendsecv1.Leak {
		t.Helper()
		res, err := admin.cluster.FindLeaks(t.Context(), connect.NewRequest(&opendsecv1.FindLeaksRequest{Repair: repair}))
		if err != nil {
			t.Fatal(err)
		}
		return res.Msg.GetLeaks()
	}
	sb := dev.mustCreate()
	if leaks := find(false); len(leaks) > 0 {
		t.Errorf("found %v", leaks)
	}
	c.edges[0].Lose(sandbox.ID(sb.GetId()))
	leaks := find(true)
	if len(leaks) != 1 || leaks[0].GetName() != sb.GetId() || leaks[0].GetNode() != "node-1" || !leaks[0].GetRepaired() {
		t.Errorf("found %v", leaks)
	}
	if got, err := dev.get(sb.GetId()); err != nil || got.GetEnd().GetReason() != "lost" || got.GetEnd().GetDomain() != opendsecv1.Domain_DOMAIN_INFRA {
		t.Errorf("got %v, %v", got, err)
	}
	if leaks := find(false); len(leaks) > 0 {
		t.Errorf("after repair %v", leaks)
	}
	c.edges[0].Kill()
	if leaks := find(false); len(leaks) != 1 || leaks[0].GetKind() != "node" {
		t.Errorf("of a node that is gone: %v", leaks)
	}
	c.edges[0].Serve(t)
}

// curl works: plain JSON in, plain JSON out, errors with all their details.
func TestPlainJSON(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	post := func(path, body string) (int, map[string]any) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Authorization", "Bearer "+dev.token)
		res, err := c.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		data, err := io.ReadAll(res.Body)
		if err != nil {
			t.Fatal(err)
		}
		var out map[string]any
		if err := json.Unmarshal(data, &out); err != nil {
			t.Fatalf("%s: %q: %v", path, data, err)
		}
		return res.StatusCode, out
	}
	code, out := post("/opendsec.v1.SandboxService/CreateSandbox", `{"project":"root/demo","spec":{"image":"root/py","memoryLimitMb":"128"}}`)
	if code != http.StatusOK || out["sandbox"].(map[string]any)["state"] != "STATE_RUNNING" {
		t.Errorf("got %d, %v", code, out)
	}
	id := out["sandbox"].(map[string]any)["id"].(string)
	code, out = post("/opendsec.v1.SandboxService/CreateSandbox", `{"project":"root/demo","spec":{"image":"root/py","memoryLimitMb":"1"}}`)
	if code != http.StatusBadRequest || out["code"] != "invalid_argument" {
		t.Errorf("got %d, %v", code, out)
	}
	detail := out["details"].([]any)[0].(map[string]any)
	debug, ok := detail["debug"].(map[string]any)
	if detail["type"] != "opendsec.v1.ErrorInfo" || !ok || debug["field"] != "spec.memory_limit_mb" || debug["requestId"] == "" {
		t.Errorf("got detail %v", detail)
	}
	// Errors of the data plane and of unknown paths look alike.
	for path, want := range map[string]string{
		"/sandboxes/sb-000000000000/process.Process/List": "not_found", "/sandboxes/x/health": "not_found", "/nothing": "not_found",
		"/sandboxes/" + id + "/process.Process/List": "",
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url+path, strings.NewReader(`{}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Authorization", "Bearer "+dev.token)
		req.Header.Set("Content-Type", "application/json")
		res, err := c.http.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		data, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if (res.StatusCode == http.StatusOK) != (want == "") || !bytes.Contains(data, []byte(want)) {
			t.Errorf("%s: %d %s", path, res.StatusCode, data)
		}
	}
}

// Errors say the same in each of the protocols.
func TestErrorsInEveryProtocol(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	for name, options := range map[string][]connect.ClientOption{
		"connect": nil, "connect json": {connect.WithProtoJSON()}, "grpc": {connect.WithGRPC()}, "grpc-web": {connect.WithGRPCWeb()},
	} {
		t.Run(name, func(t *testing.T) {
			dev.connect(options...)
			_, err := dev.create(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.MemoryLimitMb = 1 })
			wantProblem(t, err, fault.InvalidArgument, "spec.memory_limit_mb")
			_, err = dev.get("sb-000000000000")
			wantProblem(t, err, fault.NotFound, "id")
			_, err = dev.importImage("docker.io/library/missing", "root/demo/a:1")
			wantProblem(t, err, fault.NotFound, "")
			_, err = dev.identity.CreateProject(t.Context(), connect.NewRequest(&opendsecv1.CreateProjectRequest{Path: "root/x"}))
			if p := problem(err); p.Kind != fault.PermissionDenied && p.Kind != fault.NotFound || p.RequestID == "" {
				t.Errorf("got %+v", p)
			}
			if sb := dev.mustCreate(); sb.GetState() != opendsecv1.State_STATE_RUNNING {
				t.Errorf("got %v", sb)
			}
		})
	}
}

func TestReflectionAndHealth(t *testing.T) {
	c := newCluster(t, 1)
	stream := grpcreflect.NewClient(c.http, c.url, connect.WithGRPC()).NewStream(t.Context())
	names, err := stream.ListServices()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"SandboxService", "ImageService", "ClusterService", "IdentityService"} {
		if !slices.ContainsFunc(names, func(n protoName) bool { return strings.HasSuffix(string(n), "."+want) }) {
			t.Errorf("%s is not listed in %v", want, names)
		}
	}
	if _, err := stream.Close(); err != nil {
		t.Error(err)
	}
	for path, body := range map[string]string{"/healthz": "ok\n"} {
		res, err := c.http.Get(c.url + path)
		if err != nil {
			t.Fatal(err)
		}
		data, _ := io.ReadAll(res.Body)
		res.Body.Close()
		if res.StatusCode != http.StatusOK || string(data) != body {
			t.Errorf("%s: %d %q", path, res.StatusCode, data)
		}
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, c.url+"/grpc.health.v1.Health/Check", strings.NewReader(`{}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	res, err := c.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if data, _ := io.ReadAll(res.Body); !bytes.Contains(data, []byte("SERVING")) {
		t.Errorf("health: %s", data)
	}
}
