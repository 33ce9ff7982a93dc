package edge

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/types/known/durationpb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func TestCreateAndDestroy(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	n := startNode(t, w, dir, nil)
	id := n.make(t, func(r *edgev1.CreateSandboxRequest) { r.Spec.Env = map[string]string{"A": "own", "B": "2"} })

	m := w.machine(id)
	want := map[string]string{"PATH": "/bin", "A": "own", "B": "2"}
	if diff := cmp.Diff(want, m.hello.GetEnv()); diff != "" {
		t.Error(diff)
	}
	if m.hello.GetHostname() != string(id) || m.hello.GetDefaultUser() != "web" || m.hello.GetDefaultWorkdir() != "/srv" || len(m.hello.GetToken()) < 20 || len(m.hello.GetEntropy()) != 64 {
		t.Errorf("identity %v", m.hello)
	}
	again, err := n.client.CreateSandbox(t.Context(), connect.NewRequest(request(id)))
	if err != nil || again.Msg.GetStatus().GetState() != opendsecv1.State_STATE_RUNNING || again.Msg.GetStatus().GetBackend() != "container" {
		t.Errorf("a repeated create gave %v, %v", again, err)
	}
	if _, err := n.client.GetMetrics(t.Context(), connect.NewRequest(&edgev1.GetMetricsRequest{Id: string(id)})); err != nil {
		t.Error(err)
	}
	st := n.kill(t, id)
	if st.GetState() != opendsecv1.State_STATE_STOPPED || st.GetEnd().GetReason() != sandbox.ReasonStopped {
		t.Errorf("got %v", st)
	}
	if st = n.kill(t, id); st.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Errorf("a second stop gave %v", st)
	}
	if st = n.kill(t, sandbox.NewID()); st != nil {
		t.Errorf("a stop of an unknown one gave %v", st)
	}
	_, err = n.client.CreateSandbox(t.Context(), connect.NewRequest(request(id)))
	if f := fault.Of(fault.FromConnect(err)); f == nil || f.Kind != fault.SandboxEnded || f.End == nil {
		t.Errorf("a create with the id of an ended one gave %v", err)
	}
	w.empty(t)
	if _, err := n.client.ForgetEnded(t.Context(), connect.NewRequest(&edgev1.ForgetEndedRequest{Ids: []string{string(id)}})); err != nil {
		t.Fatal(err)
	}
	if left, _ := os.ReadDir(filepath.Join(dir, "sandboxes")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
	if n.used != (sandbox.Resources{}) {
		t.Errorf("still counted: %+v", n.used)
	}
}

func TestFailedCreateLeavesNothing(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	n := startNode(t, w, dir, nil)
	w.onCreate = func(context.Context, *machine) error { return errors.New("no luck") }
	_, err := n.client.CreateSandbox(t.Context(), connect.NewRequest(request(sandbox.NewID())))
	if f := fault.Of(fault.FromConnect(err)); f.Kind != fault.Internal || f.DomainOf() != sandbox.Infra {
		t.Errorf("got %+v", f)
	}
	// The machine dies before its agent answers.
	w.onCreate = func(_ context.Context, m *machine) error {
		m.end(backend.Exit{OutOfMemory: true})
		return nil
	}
	_, err = n.client.CreateSandbox(t.Context(), connect.NewRequest(request(sandbox.NewID())))
	if f := fault.Of(fault.FromConnect(err)); f.Kind != fault.SandboxEnded || f.DomainOf() != sandbox.Quota || f.End.Reason != sandbox.ReasonMemory {
		t.Errorf("got %+v", f)
	}
	w.empty(t)
	if left, _ := os.ReadDir(filepath.Join(dir, "sandboxes")); len(left) != 0 || n.count() != 0 {
		t.Errorf("left behind: %v and %d", left, n.count())
	}
}

func TestRefusals(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	for name, c := range map[string]struct {
		adapt func(*edgev1.CreateSandboxRequest)
		kind  fault.Kind
		field string
	}{
		"unknown backend": {func(r *edgev1.CreateSandboxRequest) { r.Spec.Backend = "gvisor" }, fault.Unsupported, "spec.backend"},
		"too many cores":  {func(r *edgev1.CreateSandboxRequest) { r.Spec.CpuCoresLimit = 10000 }, fault.InvalidArgument, "spec.cpu_cores_limit"},
		"no memory":       {func(r *edgev1.CreateSandboxRequest) { r.Spec.MemoryLimitMb = 0 }, fault.InvalidArgument, "spec.memory_limit_mb"},
		"all of memory":   {func(r *edgev1.CreateSandboxRequest) { r.Spec.MemoryLimitMb = 1 << 40 }, fault.Capacity, ""},
		"a path as an id": {func(r *edgev1.CreateSandboxRequest) { r.Id = "../../etc" }, fault.InvalidArgument, "id"},
		"no image":        {func(r *edgev1.CreateSandboxRequest) { r.ImageDigest = "" }, fault.InvalidArgument, "image_digest"},
		"negative deadline": {func(r *edgev1.CreateSandboxRequest) {
			r.Spec.TtlLifetime = durationpb.New(-time.Second)
		}, fault.InvalidArgument, "spec.ttl_lifetime"},
	} {
		t.Run(name, func(t *testing.T) {
			req := request(sandbox.NewID())
			c.adapt(req)
			_, err := n.client.CreateSandbox(t.Context(), connect.NewRequest(req))
			f := fault.Of(fault.FromConnect(err))
			if f == nil || f.Kind != c.kind || f.Field != c.field {
				t.Errorf("got %+v, want kind %s of field %q", f, c.kind, c.field)
			}
			if c.kind == fault.Unsupported && c.field == "spec.backend" && len(f.Backends) != 1 {
				t.Errorf("backends that can: %v", f.Backends)
			}
		})
	}
	w.empty(t)
}

func TestConcurrentCreatesNeverOversell(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), func(c *Config) { c.MaxSandboxes = 7 })
	var wg sync.WaitGroup
	var mu sync.Mutex
	var made []sandbox.ID
	refused := 0
	for range 40 {
		wg.Go(func() {
			id := sandbox.NewID()
			_, err := n.client.CreateSandbox(t.Context(), connect.NewRequest(request(id)))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				made = append(made, id)
			case fault.Is(fault.FromConnect(err), fault.Capacity):
				refused++
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(made) != 7 || refused != 33 || len(w.all()) != 7 {
		t.Errorf("made %d, refused %d, machines %d", len(made), refused, len(w.all()))
	}
	for _, id := range made {
		n.kill(t, id)
	}
	n.make(t, nil)
}

// A stop may come at any moment of a create.
func TestDestroyDuringCreate(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	n := startNode(t, w, dir, nil)
	for range 50 {
		id := sandbox.NewID()
		created := make(chan error, 1)
		go func() {
			_, err := n.client.CreateSandbox(context.Background(), connect.NewRequest(request(id)))
			created <- err
		}()
		delay := time.After(time.Duration(rand.IntN(4000)) * time.Microsecond)
		<-delay
		n.kill(t, id)
		if err := <-created; err == nil {
			// The stop came first, to a sandbox that was not there, or after the create's answer.
			n.kill(t, id)
		} else if !fault.Is(fault.FromConnect(err), fault.SandboxEnded) {
			t.Errorf("create ended with %v", err)
		}
		if m := w.machine(id); m != nil {
			t.Errorf("the machine of %s lives", id)
		}
	}
	w.empty(t)
	if n.used != (sandbox.Resources{}) {
		t.Errorf("still counted: %+v", n.used)
	}
}

func TestCreateIsUndoneWhenItsCallersGo(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	inside := make(chan struct{})
	w.onCreate = func(ctx context.Context, _ *machine) error {
		inside <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	id := sandbox.NewID()
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() {
		_, err := n.client.CreateSandbox(ctx, connect.NewRequest(request(id)))
		first <- err
	}()
	<-inside
	b := n.find(id)
	cancel()
	if err := <-first; connect.CodeOf(err) != connect.CodeCanceled {
		t.Errorf("got %v", err)
	}
	<-b.ended
	w.empty(t)
}

func TestStopIsBoundedAndGoesOn(t *testing.T) {
	w := newWorld(t)
	var mu sync.Mutex
	busy := true
	w.onDestroy = func(*machine) error {
		mu.Lock()
		defer mu.Unlock()
		if busy {
			return errors.New("busy")
		}
		return nil
	}
	n := startNode(t, w, t.TempDir(), func(c *Config) { c.StopTimeout = 1 })
	id := n.make(t, nil)
	if st := n.kill(t, id); st.GetState() != opendsecv1.State_STATE_STOPPING {
		t.Errorf("got %v", st)
	}
	mu.Lock()
	busy = false
	mu.Unlock()
	<-n.find(id).ended
	w.empty(t)
}

func TestMachineEndsByItself(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	stream, err := n.client.Watch(t.Context(), connect.NewRequest(&edgev1.WatchRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if !stream.Receive() || !stream.Msg().GetComplete() || stream.Msg().GetNode().GetName() != "n1" {
		t.Fatalf("first report %v, %v", stream.Msg(), stream.Err())
	}
	id := n.make(t, nil)
	w.machine(id).end(backend.Exit{OutOfMemory: true, Detail: "8 MiB over"})
	for stream.Receive() {
		for _, s := range stream.Msg().GetSandboxes() {
			if s.GetState() == opendsecv1.State_STATE_FAILED {
				if s.GetEnd().GetReason() != sandbox.ReasonMemory || s.GetEnd().GetDomain() != opendsecv1.Domain_DOMAIN_QUOTA {
					t.Errorf("got %v", s)
				}
				w.empty(t)
				return
			}
		}
	}
	t.Fatal(stream.Err())
}

func TestDeadlines(t *testing.T) {
	w := newWorld(t)
	n := startNode(t, w, t.TempDir(), nil)
	soon := durationpb.New(50 * time.Millisecond)
	idle := n.make(t, func(r *edgev1.CreateSandboxRequest) { r.Spec.TtlRunningStop = soon })
	old := n.make(t, func(r *edgev1.CreateSandboxRequest) { r.Spec.TtlLifetime = durationpb.New(300 * time.Millisecond) })
	busy := n.make(t, nil)
	m := w.machine(busy)
	m.mu.Lock()
	m.running = 1
	m.mu.Unlock()
	if _, err := n.client.SetDeadlines(t.Context(), connect.NewRequest(&edgev1.SetDeadlinesRequest{Id: string(busy), TtlRunningStop: soon})); err != nil {
		t.Fatal(err)
	}
	<-n.find(idle).ended
	<-n.find(old).ended
	for id, reason := range map[sandbox.ID]string{idle: sandbox.ReasonIdle, old: sandbox.ReasonLifetime} {
		if end := n.find(id).end(); end.Reason != reason || end.Domain != sandbox.Policy || end.State() != sandbox.Stopped {
			t.Errorf("got %+v, want %s", end, reason)
		}
	}
	if end := n.find(busy).end(); end != nil {
		t.Errorf("a sandbox with a running command ended: %+v", end)
	}
	m.mu.Lock()
	m.running, m.ended = 0, time.Now()
	m.mu.Unlock()
	<-n.find(busy).ended
	w.empty(t)
}

func TestRestartFindsSandboxesAgain(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	first := startNode(t, w, dir, nil)
	lives := first.make(t, func(r *edgev1.CreateSandboxRequest) { r.Spec.TtlLifetime = durationpb.New(time.Hour) })
	dies := first.make(t, nil)
	ended := first.make(t, nil)
	first.kill(t, ended)
	first.stop()
	w.machine(dies).end(backend.Exit{})

	second := startNode(t, w, dir, nil)
	stream, err := second.client.Watch(t.Context(), connect.NewRequest(&edgev1.WatchRequest{}))
	if err != nil || !stream.Receive() {
		t.Fatal(err, stream.Err())
	}
	got := map[string]string{}
	<-second.find(dies).ended
	for _, b := range second.all() {
		got[string(b.id)] = string(b.status().State)
	}
	want := map[string]string{string(lives): "running", string(dies): "failed", string(ended): "stopped"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if end := second.find(dies).end(); end.Reason != sandbox.ReasonLost || end.Domain != sandbox.Infra {
		t.Errorf("got %+v", end)
	}
	if d, _, _ := second.find(lives).deadlines(); d.Lifetime != time.Hour {
		t.Errorf("deadlines %+v", d)
	}
	if out := second.run(t, lives, "token"); out == "" {
		t.Error("the agent does not answer")
	}
	second.kill(t, lives)
	w.empty(t)
}

// What an edge had begun when it was killed is undone by the next.
func TestRestartUndoesHalfMadeSandboxes(t *testing.T) {
	w := newWorld(t)
	dir := t.TempDir()
	first := startNode(t, w, dir, nil)
	id := first.make(t, nil)
	first.stop()
	data, err := os.ReadFile(filepath.Join(dir, "sandboxes", string(id), "journal.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, change := range [][2]string{{`"phase":"running"`, `"phase":"creating"`}, {`"started_at"`, `"started_not"`}} {
		data = []byte(replaceOnce(t, string(data), change[0], change[1]))
	}
	if err := os.WriteFile(filepath.Join(dir, "sandboxes", string(id), "journal.json"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	stray := filepath.Join(dir, "sandboxes", "sb-zzzzzzzzzzzz", "machine")
	if err := os.MkdirAll(stray, 0o700); err != nil {
		t.Fatal(err)
	}
	second := startNode(t, w, dir, nil)
	if b := second.find(id); b != nil {
		<-b.ended
	}
	w.empty(t)
	second.stop()
	if left, _ := os.ReadDir(filepath.Join(dir, "sandboxes")); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestOneEdgePerDirectory(t *testing.T) {
	dir := t.TempDir()
	startNode(t, newWorld(t), dir, nil)
	e := New(Config{Name: "n2", StateDir: dir, AgentPath: "/agent"}, Deps{Log: quietLog(t)})
	if err := e.Run(t.Context()); err == nil {
		t.Error("a second edge ran on the same directory")
	}
}

func TestConfigNamesAllFaults(t *testing.T) {
	err := Config{Name: "No", StateDir: "x", CPUOvercommit: -1}.Validate()
	want := `name: "No" must be 1 to 63 of [a-z0-9.-], such as node-1
state_dir: "x" must be an absolute path of a directory of its own
agent_path: "" must be the absolute path of the agent's binary
cpu_overcommit: -1 must be 0.01 to 1000, or 0 for the default`
	if err == nil || err.Error() != want {
		t.Errorf("got %v", err)
	}
}

func TestImportSendsProgressAndTheImage(t *testing.T) {
	n := startNode(t, newWorld(t), t.TempDir(), nil)
	stream, err := n.client.ImportImage(t.Context(), connect.NewRequest(&edgev1.ImportImageRequest{
		Request: &opendsecv1.ImportImageRequest{Source: "oci:/x"},
	}))
	if err != nil {
		t.Fatal(err)
	}
	var last *opendsecv1.ImportImageResponse
	for stream.Receive() {
		last = stream.Msg().GetProgress()
	}
	if stream.Err() != nil || last.GetStep() != "done" || last.GetImage().GetDigest() != testDigest {
		t.Errorf("got %v, %v", last, stream.Err())
	}
	// An edge that stops ends what it builds.
	built, err := n.client.BootstrapImage(t.Context(), connect.NewRequest(&edgev1.BootstrapImageRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	go n.stop()
	for built.Receive() {
	}
	if !fault.Is(fault.FromConnect(built.Err()), fault.Unavailable) {
		t.Errorf("got %v", built.Err())
	}
}

// What an agent refuses of its identity is said of the create's own field.
func TestRefusedIdentityNamesTheField(t *testing.T) {
	for agents, field := range map[string]string{"default_user": "spec.user", "default_workdir": "spec.workdir"} {
		for _, asked := range []string{"", "asked"} {
			w := newWorld(t)
			w.onHello = func(*machine) error { return fault.ToConnect(fault.Invalid(agents, "nobody knows it")) }
			n := startNode(t, w, t.TempDir(), nil)
			req := request(sandbox.NewID())
			req.Spec.User, req.Spec.Workdir = asked, asked
			_, err := n.client.CreateSandbox(t.Context(), connect.NewRequest(req))
			got := fault.Of(fault.FromConnect(err))
			if got == nil || got.Kind != fault.InvalidArgument || got.Field != field || got.Domain != sandbox.User {
				t.Errorf("an agent that refuses the %s: %+v, want one of the field %s", agents, got, field)
				continue
			}
			if strings.Contains(got.Message, "image root/py:latest") != (asked == "") || !strings.Contains(got.Message, "nobody knows it") {
				t.Errorf("an agent that refuses the %s, asked for %q: %s", agents, asked, got.Message)
			}
			n.stop()
			w.empty(t)
		}
	}
}
