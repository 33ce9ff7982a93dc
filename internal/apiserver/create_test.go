package apiserver_test

import (
	"context"
	"errors"
	"math"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/edgetest"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

func TestCreateFillsDefaultsAndChooses(t *testing.T) {
	c := newCluster(t, 1)
	sb := c.developer().mustCreate()
	if sb.GetState() != opendsecv1.State_STATE_RUNNING || sb.GetNode() != "node-1" || sb.GetCaller() != "demo" ||
		sb.GetProject() != "root/demo" || sb.GetImageDigest() != edgetest.Digest(rootImage) || sb.GetStartedAt() == nil {
		t.Errorf("got %v", sb)
	}
	s := sb.GetSpec()
	if s.GetBackend() != "gvisor" || s.GetCpuCoresLimit() != 1 || s.GetMemoryLimitMb() != 512 || s.GetDiskLimitMb() != 10240 ||
		s.GetPidsLimit() != 1024 || s.GetOnIdle() != opendsecv1.OnIdle_ON_IDLE_STOP || s.GetTtlLifetime() != nil {
		t.Errorf("got spec %v", s)
	}
	if len(sb.GetWarnings()) > 0 {
		t.Errorf("warned of %v", sb.GetWarnings())
	}
	req := c.edges[0].Request(sandbox.ID(sb.GetId()))
	if req.GetSpec().GetMemoryLimitMb() != 512 || req.GetImageDigest() != sb.GetImageDigest() || !req.GetCreatedAt().AsTime().Equal(sb.GetCreatedAt().AsTime()) {
		t.Errorf("the edge got %v", req)
	}
}

// Every refusal names the field that is wrong, and leaves nothing behind.
func TestCreateNamesTheWrongField(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	long := strings.Repeat("x", 300)
	many := map[string]string{}
	for i := range 70 {
		many["k"+strings.Repeat("a", i%60)+string(rune('a'+i/60))] = ""
	}
	for name, tc := range map[string]struct {
		change func(*opendsecv1.SandboxSpec)
		field  string
		kind   fault.Kind // InvalidArgument unless given
	}{
		"no image":                {func(s *opendsecv1.SandboxSpec) { s.Image = "" }, "spec.image", ""},
		"image without project":   {func(s *opendsecv1.SandboxSpec) { s.Image = "py:1" }, "spec.image", ""},
		"image out of its tree":   {func(s *opendsecv1.SandboxSpec) { s.Image = "root/../py" }, "spec.image", ""},
		"image that is not there": {func(s *opendsecv1.SandboxSpec) { s.Image = "root/py:9" }, "spec.image", fault.NotFound},
		"image of another":        {func(s *opendsecv1.SandboxSpec) { s.Image = otherImage }, "spec.image", fault.NotFound},
		"backend":                 {func(s *opendsecv1.SandboxSpec) { s.Backend = "docker" }, "spec.backend", ""},
		"backend that fails here": {func(s *opendsecv1.SandboxSpec) { s.Backend = "container" }, "spec.backend", fault.Unsupported},
		"NaN cores":               {func(s *opendsecv1.SandboxSpec) { s.CpuCoresLimit = math.NaN() }, "spec.cpu_cores_limit", ""},
		"infinite cores":          {func(s *opendsecv1.SandboxSpec) { s.CpuCoresLimit = math.Inf(1) }, "spec.cpu_cores_limit", ""},
		"negative cores":          {func(s *opendsecv1.SandboxSpec) { s.CpuCoresLimit = -1 }, "spec.cpu_cores_limit", ""},
		"crumbs of cores":         {func(s *opendsecv1.SandboxSpec) { s.CpuCoresLimit = 0.01 }, "spec.cpu_cores_limit", ""},
		"more cores than a node":  {func(s *opendsecv1.SandboxSpec) { s.CpuCoresLimit = 5 }, "spec.cpu_cores_limit", ""},
		"absurd cores":            {func(s *opendsecv1.SandboxSpec) { s.CpuCoresLimit = 1e300 }, "spec.cpu_cores_limit", ""},
		"little memory":           {func(s *opendsecv1.SandboxSpec) { s.MemoryLimitMb = 63 }, "spec.memory_limit_mb", ""},
		"negative memory":         {func(s *opendsecv1.SandboxSpec) { s.MemoryLimitMb = math.MinInt64 }, "spec.memory_limit_mb", ""},
		"more memory than a node": {func(s *opendsecv1.SandboxSpec) { s.MemoryLimitMb = 1 << 20 }, "spec.memory_limit_mb", ""},
		"absurd memory":           {func(s *opendsecv1.SandboxSpec) { s.MemoryLimitMb = math.MaxInt64 }, "spec.memory_limit_mb", ""},
		"little disk":             {func(s *opendsecv1.SandboxSpec) { s.DiskLimitMb = 1 }, "spec.disk_limit_mb", ""},
		"absurd disk":             {func(s *opendsecv1.SandboxSpec) { s.DiskLimitMb = math.MaxInt64 }, "spec.disk_limit_mb", ""},
		"more disk than a node":   {func(s *opendsecv1.SandboxSpec) { s.DiskLimitMb = 1 << 30 }, "spec.disk_limit_mb", ""},
		"few pids":                {func(s *opendsecv1.SandboxSpec) { s.PidsLimit = 1 }, "spec.pids_limit", ""},
		"absurd pids":             {func(s *opendsecv1.SandboxSpec) { s.PidsLimit = 1 << 40 }, "spec.pids_limit", ""},
		"idle of nothing":         {func(s *opendsecv1.SandboxSpec) { s.TtlRunningStop = durationpb.New(0) }, "spec.ttl_running_stop", ""},
		"idle too short":          {func(s *opendsecv1.SandboxSpec) { s.TtlRunningStop = durationpb.New(time.Millisecond) }, "spec.ttl_running_stop", ""},
		"negative lifetime":       {func(s *opendsecv1.SandboxSpec) { s.TtlLifetime = durationpb.New(-time.Hour) }, "spec.ttl_lifetime", ""},
		"no duration":             {func(s *opendsecv1.SandboxSpec) { s.TtlLifetime = &durationpb.Duration{Seconds: 1, Nanos: -1} }, "spec.ttl_lifetime", ""},
		"eternal lifetime":        {func(s *opendsecv1.SandboxSpec) { s.TtlLifetime = &durationpb.Duration{Seconds: 1 << 36} }, "spec.ttl_lifetime", ""},
		"on_idle":                 {func(s *opendsecv1.SandboxSpec) { s.OnIdle = 7 }, "spec.on_idle", ""},
		"env name":                {func(s *opendsecv1.SandboxSpec) { s.Env = map[string]string{"A=B": "c"} }, "spec.env", ""},
		"env name that is none":   {func(s *opendsecv1.SandboxSpec) { s.Env = map[string]string{"": "c"} }, "spec.env", ""},
		"env value":               {func(s *opendsecv1.SandboxSpec) { s.Env = map[string]string{"A": "b\x00"} }, "spec.env", ""},
		"much env":                {func(s *opendsecv1.SandboxSpec) { s.Env = map[string]string{"A": strings.Repeat("b", 65<<10)} }, "spec.env", ""},
		"workdir":                 {func(s *opendsecv1.SandboxSpec) { s.Workdir = "tmp" }, "spec.workdir", ""},
		"user":                    {func(s *opendsecv1.SandboxSpec) { s.User = "a b" }, "spec.user", ""},
		"hostname":                {func(s *opendsecv1.SandboxSpec) { s.Hostname = "-a" }, "spec.hostname", ""},
		"hostname's dots":         {func(s *opendsecv1.SandboxSpec) { s.Hostname = "a..b" }, "spec.hostname", ""},
		"long hostname":           {func(s *opendsecv1.SandboxSpec) { s.Hostname = strings.Repeat("a", 64) }, "spec.hostname", ""},
		"label key":               {func(s *opendsecv1.SandboxSpec) { s.Labels = map[string]string{"A B": ""} }, "spec.labels", ""},
		"long label":              {func(s *opendsecv1.SandboxSpec) { s.Labels = map[string]string{"a": long} }, "spec.labels", ""},
		"many labels":             {func(s *opendsecv1.SandboxSpec) { s.Labels = many }, "spec.labels", ""},
		"much metadata":           {func(s *opendsecv1.SandboxSpec) { s.Metadata = map[string]string{"a": strings.Repeat("b", 16<<10)} }, "spec.metadata", ""},
		"rule": {func(s *opendsecv1.SandboxSpec) {
			s.NetworkRules = &opendsecv1.NetworkRules{Rules: map[string]bool{"http://a.b/": true}}
		}, "spec.network_rules", ""},
		"rule's port": {func(s *opendsecv1.SandboxSpec) {
			s.NetworkRules = &opendsecv1.NetworkRules{Rules: map[string]bool{"a.com:0": true}}
		}, "spec.network_rules", ""},
		"rule for what is never open": {func(s *opendsecv1.SandboxSpec) {
			s.NetworkRules = &opendsecv1.NetworkRules{Rules: map[string]bool{"127.0.0.1:80": true}}
		}, "spec.network_rules", ""},
		"rule's CIDR": {func(s *opendsecv1.SandboxSpec) {
			s.NetworkRules = &opendsecv1.NetworkRules{Rules: map[string]bool{"10.0.0.0/33": true}}
		}, "spec.network_rules", ""},
		"rule's address": {func(s *opendsecv1.SandboxSpec) {
			s.NetworkRules = &opendsecv1.NetworkRules{Rules: map[string]bool{"10.0.0.400": true}}
		}, "spec.network_rules", ""},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := dev.create(func(r *opendsecv1.CreateSandboxRequest) { tc.change(r.Spec) })
			kind := tc.kind
			if kind == "" {
				kind = fault.InvalidArgument
			}
			wantProblem(t, err, kind, tc.field)
		})
	}
	_, err := dev.create(func(r *opendsecv1.CreateSandboxRequest) { r.IdempotencyKey = long })
	wantProblem(t, err, fault.InvalidArgument, "idempotency_key")
	_, err = dev.create(func(r *opendsecv1.CreateSandboxRequest) { r.Project = "" })
	wantProblem(t, err, fault.InvalidArgument, "project")
	_, err = dev.create(func(r *opendsecv1.CreateSandboxRequest) { r.Spec = nil })
	wantProblem(t, err, fault.InvalidArgument, "spec.image")
	for _, count := range []uint32{0, 101, math.MaxUint32} {
		_, err := dev.sandboxes.CreateSandboxes(t.Context(), connect.NewRequest(&opendsecv1.CreateSandboxesRequest{Project: "root/demo", Spec: spec(), Count: count}))
		wantProblem(t, err, fault.InvalidArgument, "count")
	}
	if live := c.edges[0].Live(); len(live) > 0 {
		t.Errorf("the edge has %v", live)
	}
	if all := c.records(); len(all) > 0 {
		t.Errorf("the records have %v", all)
	}
}

// records returns all sandboxes of the records, ended ones too.
func (c *cluster) records() []*sandbox.Sandbox {
	c.t.Helper()
	page, err := c.db.ListSandboxes(c.t.Context(), store.SandboxFilter{Ended: true, Limit: 1000})
	if err != nil {
		c.t.Fatal(err)
	}
	return page.Sandboxes
}

func TestUnknownImageSaysWhatToDo(t *testing.T) {
	c := newCluster(t, 1)
	_, err := c.developer().create(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.Image = "root/py:9" })
	for _, part := range []string{"root/py:9", "opendsecctl image import"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
	_, err = c.developer().create(func(r *opendsecv1.CreateSandboxRequest) { r.Spec.Backend = "docker" })
	for _, part := range []string{"docker", "auto", "gvisor", "container", "sim"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q does not say %q", err, part)
		}
	}
}

// Creates side by side never give out more than there is.
func TestParallelCreatesNeverOversell(t *testing.T) {
	c := newCluster(t, 2)
	const each = 10
	for _, e := range c.edges {
		e.SetReport(func(r *edgev1.NodeReport) { r.Capacity.MemoryMb = each * 512 })
	}
	admin := c.admin()
	eventually(t, "the smaller capacity is known", func() bool {
		res, err := admin.cluster.GetStatus(t.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		return res.Msg.GetNodes()[0].GetCapacity().GetMemoryMb() == each*512 && res.Msg.GetNodes()[1].GetCapacity().GetMemoryMb() == each*512
	})
	dev := c.developer()
	var mu sync.Mutex
	made, full := 0, 0
	var group sync.WaitGroup
	for range 64 {
		group.Go(func() {
			_, err := dev.create()
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				made++
			case problem(err).Kind == fault.Capacity:
				full++
			default:
				t.Error(err)
			}
		})
	}
	group.Wait()
	if made != 2*each || full != 64-2*each {
		t.Errorf("made %d and refused %d; want %d and %d", made, full, 2*each, 64-2*each)
	}
	for _, e := range c.edges {
		if n := len(e.Live()); n != each {
			t.Errorf("%s has %d; want %d", e.Name, n, each)
		}
	}
	// What is stopped is free again.
	if _, err := dev.stop(string(c.edges[0].Live()[0])); err != nil {
		t.Fatal(err)
	}
	dev.mustCreate()
}

func TestQuotasBindProjectsBelow(t *testing.T) {
	c := newCluster(t, 1)
	admin, dev := c.admin(), c.developer()
	two := int64(2)
	_, err := admin.identity.SetQuota(t.Context(), connect.NewRequest(&opendsecv1.SetQuotaRequest{Path: "root", Quota: &opendsecv1.Quota{Sandboxes: &two}}))
	if err != nil {
		t.Fatal(err)
	}
	dev.mustCreate()
	dev.mustCreate()
	_, err = dev.create()
	p := wantProblem(t, err, fault.QuotaExceeded, "")
	if p.DomainOf() != sandbox.Quota || !strings.Contains(p.Message, "project root") || !strings.Contains(p.Message, "sandboxes") {
		t.Errorf("got %s, domain %s", p.Message, p.DomainOf())
	}
}

func withKey(key string) func(*opendsecv1.CreateSandboxRequest) {
	return func(r *opendsecv1.CreateSandboxRequest) { r.IdempotencyKey = key }
}

func TestIdempotencyKeyMakesOne(t *testing.T) {
	c := newCluster(t, 1)
	dev, other := c.developer(), c.admin()
	hold := make(chan struct{})
	var once sync.Once
	c.edges[0].SetHooks(edgetest.Hooks{Create: func(context.Context, sandbox.ID) error { <-hold; return nil }})
	ids := make(chan string, 8)
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			sb, err := dev.create(withKey("k"))
			if err != nil {
				t.Error(err)
				return
			}
			ids <- sb.GetId()
		})
	}
	eventually(t, "a create is recorded", func() bool { return len(c.records()) > 0 })
	once.Do(func() { close(hold) })
	group.Wait()
	close(ids)
	first := ""
	for id := range ids {
		if first == "" {
			first = id
		}
		if id != first {
			t.Errorf("got %s and %s with one key", first, id)
		}
	}
	if n := len(c.edges[0].Live()); n != 1 {
		t.Errorf("the edge has %d sandboxes; want 1", n)
	}
	if sb := other.mustCreate(withKey("k")); sb.GetId() == first {
		t.Error("another caller's key gave the same sandbox")
	}
	_, err := dev.create(withKey("k"), func(r *opendsecv1.CreateSandboxRequest) { r.Spec.CpuCoresLimit = 2 })
	wantProblem(t, err, fault.InvalidArgument, "idempotency_key")
}

// A create whose server died is finished by the call that repeats it.
func TestARepeatGoesOnWithWhatADeadServerBegan(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	sb := dev.mustCreate(withKey("k"))
	// As if the server had died between recording it and asking the node.
	_, err := c.db.UpdateSandbox(t.Context(), sandbox.ID(sb.GetId()), func(r *sandbox.Sandbox) error {
		r.State, r.StartedAt = sandbox.Pending, time.Time{}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	again := dev.mustCreate(withKey("k"))
	if again.GetId() != sb.GetId() || again.GetState() != opendsecv1.State_STATE_RUNNING {
		t.Errorf("got %s, %s; want %s, running", again.GetId(), again.GetState(), sb.GetId())
	}
	if n := len(c.edges[0].Live()); n != 1 {
		t.Errorf("the edge has %d sandboxes; want 1", n)
	}
}

// A call that failed may be repeated with its key.
func TestIdempotencyKeyIsFreeAfterAFailure(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	c.edges[0].SetHooks(edgetest.Hooks{Create: func(context.Context, sandbox.ID) error { return errors.New("a broken disk") }})
	_, err := dev.create(withKey("k"))
	wantProblem(t, err, fault.Internal, "")
	c.edges[0].SetHooks(edgetest.Hooks{})
	sb := dev.mustCreate(withKey("k"))
	if again := dev.mustCreate(withKey("k")); again.GetId() != sb.GetId() {
		t.Errorf("got %s, then %s", sb.GetId(), again.GetId())
	}
}

func TestFailedCreateIsRecordedWithItsDomain(t *testing.T) {
	for name, tc := range map[string]struct {
		fails  error
		domain sandbox.Domain
		kind   fault.Kind
	}{
		"ours":    {errors.New("a broken disk"), sandbox.Infra, fault.Internal},
		"theirs":  {fault.Invalid("spec.user", "there is no user x in the image"), sandbox.User, fault.InvalidArgument},
		"a limit": {fault.New(fault.Unavailable, "the agent did not answer"), sandbox.Infra, fault.Unavailable},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCluster(t, 1)
			c.edges[0].SetHooks(edgetest.Hooks{Create: func(context.Context, sandbox.ID) error { return tc.fails }})
			_, err := c.developer().create()
			if p := problem(err); p.Kind != tc.kind {
				t.Errorf("got %v; want %s", err, tc.kind)
			}
			all := c.records()
			if len(all) != 1 || all[0].State != sandbox.Failed || all[0].End.Domain != tc.domain || all[0].End.Reason != sandbox.ReasonStart {
				t.Fatalf("recorded %+v", all)
			}
		})
	}
}

func TestAnotherNodeTakesWhatOneFails(t *testing.T) {
	c := newCluster(t, 2)
	fails := edgetest.Hooks{Create: func(context.Context, sandbox.ID) error { return errors.New("a broken disk") }}
	c.edges[0].SetHooks(fails)
	sb := c.developer().mustCreate()
	if sb.GetNode() != "node-2" {
		t.Errorf("it is on %s", sb.GetNode())
	}
	if all := c.records(); len(all) != 1 || all[0].Node != "node-2" {
		t.Errorf("recorded %+v", all)
	}
	// The caller's own fault is not tried again elsewhere.
	calls := 0
	for _, e := range c.edges {
		e.SetHooks(edgetest.Hooks{Create: func(context.Context, sandbox.ID) error {
			calls++
			return fault.Invalid("spec.user", "there is no such user")
		}})
	}
	_, err := c.developer().create()
	wantProblem(t, err, fault.InvalidArgument, "spec.user")
	if calls != 1 {
		t.Errorf("it was tried %d times", calls)
	}
}

func TestEdgeThatDiesMidCreate(t *testing.T) {
	c := newCluster(t, 2)
	entered := make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{Made: func(ctx context.Context, _ sandbox.ID) error {
		close(entered)
		<-ctx.Done()
		return ctx.Err()
	}})
	go func() {
		<-entered
		c.edges[0].Kill()
	}()
	sb := c.developer().mustCreate()
	if sb.GetNode() != "node-2" || sb.GetState() != opendsecv1.State_STATE_RUNNING {
		t.Errorf("got %s on %s", sb.GetState(), sb.GetNode())
	}
	c.edges[0].SetHooks(edgetest.Hooks{})
	c.edges[0].Serve(t) // for the cleanup, and as it would in life
}

func TestCallerThatGoesAwayLeavesNothing(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	entered := make(chan sandbox.ID, 1)
	c.edges[0].SetHooks(edgetest.Hooks{Made: func(ctx context.Context, id sandbox.ID) error {
		entered <- id
		<-ctx.Done()
		return ctx.Err()
	}})
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := dev.sandboxes.CreateSandbox(ctx, connect.NewRequest(&opendsecv1.CreateSandboxRequest{
			Project: "root/demo", Spec: spec(), IdempotencyKey: "k",
		}))
		failed <- err
	}()
	id := <-entered
	cancel()
	if err := <-failed; connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("got %v", err)
	}
	eventually(t, "the sandbox is ended", func() bool {
		sb, err := c.db.GetSandbox(t.Context(), id)
		return err == nil && sb.End != nil && sb.End.Domain == sandbox.User && len(c.edges[0].Live()) == 0
	})
	c.edges[0].SetHooks(edgetest.Hooks{})
	eventually(t, "the key is free", func() bool {
		sb, err := dev.create(withKey("k"))
		return err == nil && sb.GetId() != string(id)
	})
}

func TestStopDuringCreateWins(t *testing.T) {
	c := newCluster(t, 1)
	dev := c.developer()
	entered, hold := make(chan sandbox.ID, 1), make(chan struct{})
	c.edges[0].SetHooks(edgetest.Hooks{Create: func(_ context.Context, id sandbox.ID) error {
		entered <- id
		<-hold
		return nil
	}})
	failed := make(chan error, 1)
	go func() {
		_, err := dev.create()
		failed <- err
	}()
	id := <-entered
	stopped, err := dev.stop(string(id))
	if err != nil || stopped.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Fatalf("got %v, %v", stopped, err)
	}
	close(hold)
	if p := problem(<-failed); p.Kind != fault.SandboxEnded || p.End == nil {
		t.Errorf("got %+v", p)
	}
	eventually(t, "the machine is gone", func() bool { return len(c.edges[0].Live()) == 0 })
}

func (u *user) createSet(count uint32, allOrNone bool, key string) ([]*opendsecv1.CreateResult, error) {
	res, err := u.sandboxes.CreateSandboxes(u.c.t.Context(), connect.NewRequest(&opendsecv1.CreateSandboxesRequest{
		Project: "root/demo", Spec: spec(), Count: count, AllOrNone: allOrNone, IdempotencyKey: key,
	}))
	if err != nil {
		return nil, err
	}
	return res.Msg.GetResults(), nil
}

func TestCreateSet(t *testing.T) {
	c := newCluster(t, 2)
	results, err := c.developer().createSet(8, true, "k")
	if err != nil || len(results) != 8 {
		t.Fatalf("got %v, %v", results, err)
	}
	seen := map[string]bool{}
	for _, r := range results {
		seen[r.GetSandbox().GetId()] = true
	}
	if len(seen) != 8 || len(c.edges[0].Live()) != 4 || len(c.edges[1].Live()) != 4 {
		t.Errorf("got %d sandboxes, %d and %d on the nodes", len(seen), len(c.edges[0].Live()), len(c.edges[1].Live()))
	}
	again, err := c.developer().createSet(8, true, "k")
	if err != nil || len(again) != 8 {
		t.Fatalf("got %v, %v", again, err)
	}
	for _, r := range again {
		if !seen[r.GetSandbox().GetId()] {
			t.Errorf("the repeated call gave the new sandbox %s", r.GetSandbox().GetId())
		}
	}
}

// failEvery fails one in n creates.
func failEvery(n int) edgetest.Hooks {
	var mu sync.Mutex
	count := 0
	return edgetest.Hooks{Create: func(context.Context, sandbox.ID) error {
		mu.Lock()
		defer mu.Unlock()
		if count++; count%n == 0 {
			return fault.Invalid("spec.user", "there is no such user")
		}
		return nil
	}}
}

func TestCreateSetAllOrNone(t *testing.T) {
	c := newCluster(t, 1)
	c.edges[0].SetHooks(failEvery(4))
	_, err := c.developer().createSet(4, true, "k")
	wantProblem(t, err, fault.InvalidArgument, "spec.user")
	if live := c.edges[0].Live(); len(live) > 0 {
		t.Errorf("left behind: %v", live)
	}
	for _, sb := range c.records() {
		if sb.State.Alive() {
			t.Errorf("%s is recorded as %s", sb.ID, sb.State)
		}
	}
	c.edges[0].SetHooks(edgetest.Hooks{})
	if again, err := c.developer().createSet(4, true, "k"); err != nil || len(again) != 4 {
		t.Errorf("repeated: %v, %v", again, err)
	}
}

func TestCreateSetReportsEach(t *testing.T) {
	c := newCluster(t, 1)
	c.edges[0].SetHooks(failEvery(4))
	results, err := c.developer().createSet(4, false, "")
	if err != nil {
		t.Fatal(err)
	}
	made, failed := 0, 0
	for _, r := range results {
		if r.GetSandbox() != nil {
			made++
		}
		if e := r.GetError(); e != nil {
			failed++
			if e.GetField() != "spec.user" || e.GetRequestId() == "" || e.GetMessage() == "" {
				t.Errorf("got %v", e)
			}
		}
	}
	if made != 3 || failed != 1 {
		t.Errorf("made %d, failed %d", made, failed)
	}
	// What does not fit is refused one by one.
	c.edges[0].SetHooks(edgetest.Hooks{})
	results, err = c.developer().createSet(100, false, "")
	if err != nil {
		t.Fatal(err)
	}
	made = 0
	for _, r := range results {
		if r.GetSandbox() != nil {
			made++
		} else if r.GetError().GetKind() != string(fault.Capacity) {
			t.Errorf("got %v", r.GetError())
		}
	}
	if made != 29 { // 32 of memory's room, 3 are taken
		t.Errorf("made %d; want 29", made)
	}
}
