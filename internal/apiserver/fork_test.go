package apiserver_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// fork copies a sandbox, once unless a change says otherwise.
func (u *user) fork(id string, change ...func(*opendsecv1.ForkSandboxRequest)) ([]*opendsecv1.CreateResult, error) {
	req := &opendsecv1.ForkSandboxRequest{Id: id}
	for _, c := range change {
		c(req)
	}
	res, err := u.sandboxes.ForkSandbox(u.c.t.Context(), connect.NewRequest(req))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetResults(), nil
}

func times(n uint32) func(*opendsecv1.ForkSandboxRequest) {
	return func(r *opendsecv1.ForkSandboxRequest) { r.Count = n }
}

func allOrNone(r *opendsecv1.ForkSandboxRequest) { r.AllOrNone = true }

func forkKey(key string) func(*opendsecv1.ForkSandboxRequest) {
	return func(r *opendsecv1.ForkSandboxRequest) { r.IdempotencyKey = key }
}

// sort tells the ids of what was made from the kinds of the errors.
func sortResults(t *testing.T, results []*opendsecv1.CreateResult) (ids []string, kinds []string) {
	t.Helper()
	for _, r := range results {
		if e := r.GetError(); e != nil {
			kinds = append(kinds, e.GetKind())
			if e.GetMessage() == "" || e.GetRequestId() == "" {
				t.Errorf("an error without its words: %v", e)
			}
			continue
		}
		if r.GetSandbox().GetState() != running {
			t.Errorf("got %v", r)
		}
		ids = append(ids, r.GetSandbox().GetId())
	}
	slices.Sort(ids)
	return ids, kinds
}

// copiesOf returns the records of a sandbox's copies.
func (c *cluster) copiesOf(id string) []*sandbox.Sandbox {
	return slices.DeleteFunc(c.records(), func(sb *sandbox.Sandbox) bool { return string(sb.Parent) != id })
}

func TestForkCopiesWhatWasAskedFor(t *testing.T) {
	c := newCluster(t, 2)
	dev := c.developer()
	for range 3 { // so that placement would rather take the other node
		dev.mustCreate()
	}
	source := dev.mustCreate(func(r *opendsecv1.CreateSandboxRequest) {
		r.Spec.Labels, r.Spec.Env, r.Spec.Metadata = map[string]string{"task": "a"}, map[string]string{"A": "b"}, map[string]string{"c": "d"}
		r.Spec.Hostname, r.Spec.User, r.Spec.Workdir, r.Spec.CpuCoresLimit, r.Spec.MemoryLimitMb = "mine", "app", "/srv", 0.5, 256
	})
	if _, err := c.admin().cluster.GetStatus(t.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{})); err != nil {
		t.Fatal(err)
	}
	results, err := dev.fork(source.GetId(), times(3))
	if err != nil {
		t.Fatal(err)
	}
	ids, _ := sortResults(t, results)
	if len(slices.Compact(slices.Clone(ids))) != 3 || slices.Contains(ids, source.GetId()) {
		t.Errorf("got %v", ids)
	}
	for _, r := range results {
		sb := r.GetSandbox()
		s := sb.GetSpec()
		if sb.GetParent() != source.GetId() || sb.GetNode() != source.GetNode() || sb.GetProject() != "root/demo" || sb.GetImageDigest() != source.GetImageDigest() {
			t.Errorf("got %v", sb)
		}
		if s.GetHostname() != "" || s.GetImage() != rootImage || s.GetLabels()["task"] != "a" || s.GetEnv()["A"] != "b" || s.GetMetadata()["c"] != "d" ||
			s.GetUser() != "app" || s.GetWorkdir() != "/srv" || s.GetCpuCoresLimit() != 0.5 || s.GetMemoryLimitMb() != 256 || s.GetBackend() != "gvisor" {
			t.Errorf("got spec %v", s)
		}
	}
	edge := c.edges[slices.IndexFunc(c.edges, func(e *edgetest.Edge) bool { return e.Name == source.GetNode() })]
	forks := edge.Forks()
	if len(forks) != 1 || len(forks[0].GetChildren()) != 3 || forks[0].GetFilesOnly() || forks[0].GetId() != source.GetId() {
		t.Errorf("the node was asked %v", forks)
	}
	// A paused one can be copied, and stays paused; 0 is one copy.
	dev.mustPause(source.GetId())
	results, err = dev.fork(source.GetId())
	if ids, _ := sortResults(t, results); err != nil || len(ids) != 1 {
		t.Errorf("got %v, %v", results, err)
	}
	dev.is(source.GetId(), paused)
	_, err = dev.fork(source.GetId(), times(101))
	wantProblem(t, err, fault.InvalidArgument, "count")
	_, err = dev.fork("sb-000000000000")
	wantProblem(t, err, fault.NotFound, "id")
}

// A backend without memory in its snapshots copies files, when asked to.
func TestForkWithoutMemory(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate(onSim).GetId()
	_, err := dev.fork(id, times(5))
	p := wantProblem(t, err, fault.Unsupported, "files_only")
	if !slices.Equal(p.Backends, []sandbox.Backend{sandbox.GVisor}) || !strings.Contains(p.Message, "sim") {
		t.Errorf("got %+v", p)
	}
	if copies := c.copiesOf(id); len(copies) > 0 {
		t.Errorf("recorded %v", copies)
	}
	results, err := dev.fork(id, func(r *opendsecv1.ForkSandboxRequest) { r.FilesOnly = true })
	if ids, _ := sortResults(t, results); err != nil || len(ids) != 1 || !c.edges[0].Forks()[0].GetFilesOnly() {
		t.Errorf("got %v, %v", results, err)
	}
}

// Copies are admitted together, on the node of their source and no other.
func TestForkIsAdmitted(t *testing.T) {
	c := newCluster(t, 2)
	dev, admin := c.developer(), c.admin()
	id := dev.mustCreate().GetId()
	three := int64(3)
	_, err := admin.identity.SetQuota(t.Context(), connect.NewRequest(&opendsecv1.SetQuotaRequest{Path: "root/demo", Quota: &opendsecv1.Quota{Sandboxes: &three}}))
	if err != nil {
		t.Fatal(err)
	}
	_, err = dev.fork(id, times(4), allOrNone)
	wantProblem(t, err, fault.QuotaExceeded, "")
	if copies := c.copiesOf(id); len(copies) > 0 {
		t.Errorf("recorded %v", copies)
	}
	results, err := dev.fork(id, times(4))
	if err != nil {
		t.Fatal(err)
	}
	ids, kinds := sortResults(t, results)
	if len(ids) != 2 || !slices.Equal(kinds, []string{"quota_exceeded", "quota_exceeded"}) {
		t.Errorf("made %v, and %v", ids, kinds)
	}
	many := int64(300)
	if _, err = admin.identity.SetQuota(t.Context(), connect.NewRequest(&opendsecv1.SetQuotaRequest{Path: "root/demo", Quota: &opendsecv1.Quota{Sandboxes: &many}})); err != nil {
		t.Fatal(err)
	}
	results, err = dev.fork(id, times(100))
	if err != nil {
		t.Fatal(err)
	}
	// 32 of memory's room on the one node, of which 3 are taken.
	if ids, kinds = sortResults(t, results); len(ids) != 29 || len(kinds) != 71 || kinds[0] != string(fault.Capacity) {
		t.Errorf("made %d, and %v", len(ids), kinds)
	}
	source, err := dev.get(id)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := admin.cluster.SetNodeDrain(t.Context(), connect.NewRequest(&opendsecv1.SetNodeDrainRequest{Node: source.GetNode(), Drain: true})); err != nil {
		t.Fatal(err)
	}
	_, err = dev.fork(id, allOrNone)
	if p := wantProblem(t, err, fault.Capacity, ""); !strings.Contains(p.Message, source.GetNode()+" is drained") || !strings.Contains(p.Message, "only, for sandbox "+id) {
		t.Errorf("got %q", p.Message)
	}
}

// failChildren refuses one in n copies.
func failChildren(n int) edgetest.Hooks {
	var mu sync.Mutex
	count := 0
	return edgetest.Hooks{State: func(_ context.Context, op edgetest.Op, _ sandbox.ID) error {
		mu.Lock()
		defer mu.Unlock()
		if op != edgetest.Child {
			return nil
		}
		if count++; count%n == 0 {
			return fault.New(fault.Capacity, "no disk is left for it")
		}
		return nil
	}}
}

func TestForkReportsEach(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	c.edges[0].SetHooks(failChildren(4))
	results, err := dev.fork(id, times(8))
	if err != nil {
		t.Fatal(err)
	}
	ids, kinds := sortResults(t, results)
	if len(ids) != 6 || !slices.Equal(kinds, []string{"capacity", "capacity"}) {
		t.Errorf("made %v, and %v", ids, kinds)
	}
	failed := 0
	for _, sb := range c.copiesOf(id) {
		if sb.State == sandbox.Failed && sb.End.Reason == sandbox.ReasonStart && sb.End.Domain == sandbox.Infra {
			failed++
		} else if sb.State != sandbox.Running {
			t.Errorf("recorded %+v", sb)
		}
	}
	if failed != 2 {
		t.Errorf("%d are recorded as failed", failed)
	}
	dev.is(id, running)
}

func TestForkAllOrNone(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	c.edges[0].SetHooks(failChildren(4))
	_, err := dev.fork(id, times(8), allOrNone, forkKey("k"))
	wantProblem(t, err, fault.Capacity, "")
	for _, sb := range c.copiesOf(id) {
		if sb.State.Alive() {
			t.Errorf("%s is recorded as %s", sb.ID, sb.State)
		}
	}
	if live := c.edges[0].Live(); !slices.Equal(live, []sandbox.ID{sandbox.ID(id)}) {
		t.Errorf("the node has %v", live)
	}
	c.edges[0].SetHooks(edgetest.Hooks{})
	results, err := dev.fork(id, times(8), allOrNone, forkKey("k"))
	if ids, _ := sortResults(t, results); err != nil || len(ids) != 8 {
		t.Errorf("repeated: %v, %v", results, err)
	}
}

// A fork that fails as a whole fails the call, and leaves no copy.
func TestForkThatFails(t *testing.T) {
	for name, tc := range map[string]struct {
		hooks func(*cluster) edgetest.Hooks
		kind  fault.Kind
	}{
		"the node refuses": {func(*cluster) edgetest.Hooks {
			return failing(edgetest.Fork, fault.New(fault.Capacity, "the disk is full"))
		}, fault.Capacity},
		"the node fails": {func(*cluster) edgetest.Hooks { return failing(edgetest.Fork, errors.New("a broken disk")) }, fault.Internal},
		"the node's word is lost": {func(*cluster) edgetest.Hooks {
			h := failing(edgetest.Fork, fault.New(fault.Unavailable, "the connection broke"))
			return edgetest.Hooks{StateDone: h.State}
		}, fault.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, 1)
			dev := c.developer()
			id := dev.mustCreate().GetId()
			c.edges[0].SetHooks(tc.hooks(c))
			_, err := dev.fork(id, times(3), forkKey("k"))
			wantProblem(t, err, tc.kind, "")
			copies := c.copiesOf(id)
			for _, sb := range copies {
				if sb.State != sandbox.Failed || sb.End.Reason != sandbox.ReasonStart {
					t.Errorf("recorded %+v", sb)
				}
			}
			if len(copies) != 3 {
				t.Errorf("%d are recorded", len(copies))
			}
			dev.is(id, running)
			c.edges[0].SetHooks(edgetest.Hooks{})
			results, err := dev.fork(id, times(3), forkKey("k"))
			if ids, _ := sortResults(t, results); err != nil || len(ids) != 3 {
				t.Errorf("repeated: %v, %v", results, err)
			}
		})
	}
}

func TestForkWhoseNodeDies(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	entered := make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{State: func(ctx context.Context, _ edgetest.Op, _ sandbox.ID) error {
		close(entered)
		<-ctx.Done()
		return ctx.Err()
	}})
	go func() {
		<-entered
		c.edges[0].Kill()
	}()
	_, err := dev.fork(id, times(3))
	wantProblem(t, err, fault.Unavailable, "")
	for _, sb := range c.copiesOf(id) {
		if sb.State.Alive() {
			t.Errorf("%s is recorded as %s", sb.ID, sb.State)
		}
	}
	c.edges[0].SetHooks(edgetest.Hooks{})
	c.edges[0].Serve(t)
}

func TestForkWhoseCallerGoesAway(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	entered := make(chan struct{}, 1)
	c.edges[0].SetHooks(edgetest.Hooks{StateDone: func(ctx context.Context, _ edgetest.Op, _ sandbox.ID) error {
		entered <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := dev.sandboxes.ForkSandbox(ctx, connect.NewRequest(&opendsecv1.ForkSandboxRequest{Id: id, Count: 3}))
		failed <- err
	}()
	<-entered
	cancel()
	if err := <-failed; connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("got %v", err)
	}
	eventually(t, "the copies are ended", func() bool {
		return len(c.edges[0].Live()) == 1 && !slices.ContainsFunc(c.copiesOf(id), func(sb *sandbox.Sandbox) bool { return sb.State.Alive() })
	})
}

func TestForkIdempotencyKey(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	id := dev.mustCreate().GetId()
	hold := make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{State: func(context.Context, edgetest.Op, sandbox.ID) error { <-hold; return nil }})
	all := make(chan []string, 4)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			results, err := dev.fork(id, times(2), forkKey("k"))
			if err != nil {
				t.Error(err)
			}
			ids, _ := sortResults(t, results)
			all <- ids
		})
	}
	eventually(t, "the copies are recorded", func() bool { return len(c.copiesOf(id)) == 2 })
	// Older than any plain start would be left alone: copies are never made anew.
	c.ahead.Store(int64(10 * time.Second))
	close(hold)
	group.Wait()
	close(all)
	first := <-all
	for ids := range all {
		if !slices.Equal(ids, first) || len(ids) != 2 {
			t.Errorf("got %v and %v with one key", first, ids)
		}
	}
	if len(c.edges[0].Forks()) != 1 {
		t.Errorf("the node was asked %d times", len(c.edges[0].Forks()))
	}
	_, err := dev.fork(id, times(3), forkKey("k"))
	wantProblem(t, err, fault.InvalidArgument, "idempotency_key")
	// What was made is told also when its source is gone.
	if _, err := dev.stop(id); err != nil {
		t.Fatal(err)
	}
	results, err := dev.fork(id, times(2), forkKey("k"))
	if ids, _ := sortResults(t, results); err != nil || !slices.Equal(ids, first) {
		t.Errorf("got %v, %v", results, err)
	}
	_, err = dev.fork(id, times(2))
	wantProblem(t, err, fault.SandboxEnded, "")
}

// A fork whose server died is not made up by fresh machines: its copies fail,
// and the key is free for another attempt. A server that was thought dead and
// comes back with copies ends them.
func TestARepeatOfAForkWhoseServerDied(t *testing.T) {
	for name, test := range map[string]struct {
		set  bool
		late time.Duration
	}{
		"each":                   {false, time.Hour},
		"all or none":            {true, time.Hour},
		"its node knows nothing": {false, 20 * time.Second},
		"nor of a set of them":   {true, 20 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			set := test.set
			c := newCluster(t, 1)
			first := c.developer()
			id := first.mustCreate().GetId()
			ask := func(u *user) ([]*opendsecv1.CreateResult, error) {
				return u.fork(id, times(2), forkKey("k"), func(r *opendsecv1.ForkSandboxRequest) { r.AllOrNone = set })
			}
			hold := make(chan struct{})
			c.edges[0].SetHooks(edgetest.Hooks{State: func(context.Context, edgetest.Op, sandbox.ID) error { <-hold; return nil }})
			lost := make(chan error, 1)
			go func() {
				results, err := ask(first)
				for _, r := range results {
					if r.GetSandbox() != nil {
						err = errors.New("it made " + r.GetSandbox().GetId())
					} else if err == nil {
						err = fault.FromInfo(r.GetError())
					}
				}
				lost <- err
			}()
			eventually(t, "the copies are recorded", func() bool { return len(c.copiesOf(id)) == 2 })

			c.url = c.api()
			second := c.developer()
			c.ahead.Store(int64(test.late))
			results, err := ask(second)
			if set {
				wantProblem(t, err, fault.Unavailable, "")
			} else if _, kinds := sortResults(t, results); err != nil || !slices.Equal(kinds, []string{"unavailable", "unavailable"}) {
				t.Errorf("got %v, %v", results, err)
			}
			if live := c.edges[0].Live(); len(live) != 1 {
				t.Errorf("the node has %v", live)
			}
			c.edges[0].SetHooks(edgetest.Hooks{})
			results, err = ask(second)
			made, _ := sortResults(t, results)
			if err != nil || len(made) != 2 {
				t.Errorf("got %v, %v", results, err)
			}
			close(hold)
			if p := problem(<-lost); p.Kind != fault.SandboxEnded {
				t.Errorf("the first call: %v", p)
			}
			want := append([]sandbox.ID{sandbox.ID(id)}, sandbox.ID(made[0]), sandbox.ID(made[1]))
			slices.Sort(want)
			if live := c.edges[0].Live(); !slices.Equal(live, want) {
				t.Errorf("the node has %v; want %v", live, want)
			}
			again, err := ask(second)
			if ids, _ := sortResults(t, again); err != nil || !slices.Equal(ids, made) {
				t.Errorf("got %v, %v", again, err)
			}
		})
	}
}
