package edge

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/api/gen/agent/v1/agentv1connect"
	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/api/gen/edge/v1/edgev1connect"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// world is what outlives an edge: machines, slots, images.
type world struct {
	t    *testing.T
	name sandbox.Backend

	mu       sync.Mutex
	machines map[sandbox.ID]*machine
	slots    map[string]bool
	nextSlot int
	users    int // of the image

	// Hooks of the tests; nil does nothing.
	onCreate   func(context.Context, *machine) error
	onDestroy  func(*machine) error
	onPause    func(*machine) error
	onSnapshot func(*machine) error
	onHello    func(*machine) error
	probeErr   error
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, name: sandbox.Container, machines: map[sandbox.ID]*machine{}, slots: map[string]bool{}}
	t.Cleanup(func() {
		for _, m := range w.all() {
			m.end(backend.Exit{})
		}
	})
	return w
}

func (w *world) all() []*machine {
	w.mu.Lock()
	defer w.mu.Unlock()
	var all []*machine
	for _, m := range w.machines {
		all = append(all, m)
	}
	return all
}

func (w *world) machine(id sandbox.ID) *machine {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.machines[id]
}

// empty reports what is left in the world.
func (w *world) empty(t *testing.T) {
	t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.machines) != 0 || len(w.slots) != 0 || w.users != 0 {
		t.Errorf("left behind: machines %v, slots %v, users of the image %d", w.machines, w.slots, w.users)
	}
}

// machine is a machine with an agent that is a server in the test's process.
type machine struct {
	w       *world
	cfg     backend.Config
	server  *httptest.Server
	done    chan struct{}
	exit    backend.Exit
	once    sync.Once
	mu      sync.Mutex
	hello   *agentv1.HelloRequest
	token   string // that its agent wants, "" before the first Hello
	memory  string // what a snapshot keeps
	paused  bool
	running uint32
	ended   time.Time
}

func (m *machine) end(exit backend.Exit) {
	m.once.Do(func() {
		m.exit = exit
		close(m.done)
		m.server.CloseClientConnections()
		m.server.Config.Close()
	})
}

func (m *machine) Handle() backend.Handle {
	data, _ := json.Marshal(m.cfg.ID)
	return backend.Handle{Backend: m.w.name, Data: data}
}

func (m *machine) Dial(ctx context.Context, _ int) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", m.server.Listener.Addr().String())
}

func (m *machine) Wait(ctx context.Context) (backend.Exit, error) {
	select {
	case <-m.done:
		return m.exit, nil
	case <-ctx.Done():
		return backend.Exit{}, ctx.Err()
	}
}

func (m *machine) Usage(context.Context) (backend.Usage, error) {
	return backend.Usage{CPU: time.Second, MemoryBytes: 5 << 20, PIDs: 3}, nil
}

func (m *machine) Destroy(context.Context) error {
	if f := m.w.onDestroy; f != nil {
		if err := f(m); err != nil {
			return err
		}
	}
	m.end(backend.Exit{})
	m.w.mu.Lock()
	defer m.w.mu.Unlock()
	delete(m.w.machines, m.cfg.ID)
	return os.RemoveAll(filepath.Join(m.cfg.StateDir, "disk"))
}

func (m *machine) Pause(context.Context) error {
	if f := m.w.onPause; f != nil {
		if err := f(m); err != nil {
			return err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = true
	return nil
}

func (m *machine) Resume(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.paused = false
	return nil
}

// saved is what a snapshot's file holds.
type saved struct{ Token, Memory string }

func (m *machine) Snapshot(ctx context.Context, o backend.SnapshotOptions) (backend.Snapshot, error) {
	m.mu.Lock()
	state := saved{m.token, m.memory}
	m.mu.Unlock()
	if !o.Memory {
		state.Token = ""
	}
	data, _ := json.Marshal(state)
	if err := os.WriteFile(filepath.Join(o.Dir, "state"), data, 0o600); err != nil {
		return backend.Snapshot{}, err
	}
	if f := m.w.onSnapshot; f != nil {
		if err := f(m); err != nil {
			return backend.Snapshot{}, err
		}
	}
	return backend.Snapshot{
		Backend: m.w.name, Dir: o.Dir, Memory: o.Memory, Size: int64(len(data)), Limits: m.cfg.Limits,
		Stamp: backend.Stamp{Agent: m.cfg.Agent.ID},
	}, ctx.Err()
}

func (m *machine) Diff(_ context.Context, w *os.File) error { return errors.New("has no files") }

func (w *world) CanRestore(s backend.Snapshot) error {
	if s.Stamp.Runtime != "" {
		return errors.New("it was made with " + s.Stamp.Runtime)
	}
	return nil
}

func (w *world) Prepare(backend.Config) {}

func (w *world) Withdraw(backend.Snapshot) {}

// remember gives the machine the state that it begins with.
func (m *machine) remember(from *backend.Snapshot) error {
	data, err := os.ReadFile(filepath.Join(from.Dir, "state"))
	if err != nil {
		return err
	}
	var state saved
	if err := json.Unmarshal(data, &state); err != nil {
		return err
	}
	m.token, m.memory = state.Token, state.Memory
	return nil
}

func (w *world) Name() sandbox.Backend { return w.name }
func (w *world) Close() error          { return nil }
func (w *world) Probe(context.Context) (backend.Features, error) {
	disk := w.name.PausesToDisk()
	return backend.Features{Pause: true, SnapshotMemory: disk, SnapshotFiles: true}, w.probeErr
}

func (w *world) Create(ctx context.Context, cfg backend.Config) (backend.Instance, error) {
	m := &machine{w: w, cfg: cfg, done: make(chan struct{})}
	if cfg.From != nil {
		if err := m.remember(cfg.From); err != nil {
			return nil, err
		}
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/health", func(rw http.ResponseWriter, _ *http.Request) { rw.WriteHeader(http.StatusNoContent) })
	mux.Handle(agentv1connect.NewAgentHandler(agentOf{m: m}))
	mux.Handle(processconnect.NewProcessHandler(processOf{m: m}))
	mux.HandleFunc("/files", m.files)
	mux.HandleFunc("/connect", m.connect)
	m.server = httptest.NewUnstartedServer(mux)
	m.server.Config.Protocols = new(http.Protocols)
	m.server.Config.Protocols.SetUnencryptedHTTP2(true)
	m.server.Config.Protocols.SetHTTP1(true)
	m.server.Start()
	if err := os.WriteFile(filepath.Join(cfg.StateDir, "disk"), nil, 0o600); err != nil {
		return nil, err
	}
	if w.onCreate != nil {
		if err := w.onCreate(ctx, m); err != nil {
			m.end(backend.Exit{})
			return nil, errors.Join(err, os.Remove(filepath.Join(cfg.StateDir, "disk")))
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.machines[cfg.ID] = m
	return m, nil
}

func (w *world) Recover(_ context.Context, h backend.Handle) (backend.Instance, error) {
	var id sandbox.ID
	if err := json.Unmarshal(h.Data, &id); err != nil {
		return nil, err
	}
	m := w.machine(id)
	if m == nil {
		return nil, backend.ErrGone
	}
	select {
	case <-m.done:
		return nil, errors.Join(backend.ErrGone, m.Destroy(context.Background()))
	default:
		return m, nil
	}
}

// files sends as many zero bytes as asked for, or counts what comes.
func (m *machine) files(rw http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodPost {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil {
			panic(http.ErrAbortHandler)
		}
		_, _ = io.WriteString(rw, strconv.FormatInt(n, 10)+" "+r.URL.RawQuery)
		return
	}
	n, _ := strconv.ParseInt(r.URL.Query().Get("size"), 10, 64)
	_, _ = io.CopyBuffer(struct{ io.Writer }{rw}, io.LimitReader(zeros{}, n), make([]byte, 64<<10))
}

// connect is a server that echoes, on each port below 9000.
func (m *machine) connect(rw http.ResponseWriter, r *http.Request) {
	if port, _ := strconv.Atoi(r.URL.Query().Get("port")); port >= 9000 {
		rw.WriteHeader(http.StatusBadGateway)
		_, _ = io.WriteString(rw, `{"code":502,"message":"nothing listens on it"}`)
		return
	}
	c, buffered, err := http.NewResponseController(rw).Hijack()
	if err != nil {
		return
	}
	defer c.Close()
	_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: opendsec-tcp\r\n\r\n")
	go func() {
		<-m.done
		c.Close()
	}()
	_, _ = io.Copy(c, buffered)
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

type agentOf struct {
	agentv1connect.UnimplementedAgentHandler
	m *machine
}

func (a agentOf) Hello(_ context.Context, req *connect.Request[agentv1.HelloRequest]) (*connect.Response[agentv1.HelloResponse], error) {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	if f := a.m.w.onHello; f != nil {
		if err := f(a.m); err != nil {
			return nil, err
		}
	}
	if a.m.token != "" && req.Header().Get("X-Access-Token") != a.m.token {
		return nil, connect.NewError(connect.CodeUnauthenticated, errors.New("not the present token"))
	}
	a.m.hello, a.m.token = req.Msg, req.Msg.GetToken()
	return connect.NewResponse(&agentv1.HelloResponse{Version: "fake"}), nil
}

func (a agentOf) Activity(context.Context, *connect.Request[agentv1.ActivityRequest]) (*connect.Response[agentv1.ActivityResponse], error) {
	a.m.mu.Lock()
	defer a.m.mu.Unlock()
	res := &agentv1.ActivityResponse{RunningCommands: a.m.running}
	if !a.m.ended.IsZero() {
		res.SinceLastEnd = durationpb.New(time.Since(a.m.ended))
	}
	return connect.NewResponse(res), nil
}

type processOf struct {
	processconnect.UnimplementedProcessHandler
	m *machine
}

// Start says what headers came and what is written, as the command asks.
func (p processOf) Start(ctx context.Context, req *connect.Request[process.StartRequest], stream *connect.ServerStream[process.StartResponse]) error {
	send := func(data string) error {
		return stream.Send(&process.StartResponse{Event: &process.ProcessEvent{Event: &process.ProcessEvent_Data{
			Data: &process.ProcessEvent_DataEvent{Output: &process.ProcessEvent_DataEvent_Stdout{Stdout: []byte(data)}},
		}}})
	}
	switch req.Msg.GetProcess().GetCmd() {
	case "token":
		return send(req.Header().Get("X-Access-Token") + " " + req.Header().Get("Authorization") + " " + req.Header().Get("Cookie"))
	case "hang":
		if err := send("begun"); err != nil {
			return err
		}
		<-ctx.Done()
		return ctx.Err()
	case "silent":
		<-ctx.Done()
		return ctx.Err()
	}
	return connect.NewError(connect.CodeInvalidArgument, errors.New("no such command"))
}

// Slots.

func (w *world) Run(ctx context.Context) error { <-ctx.Done(); return nil }

func (w *world) Holds(string) bool { return false }

func (w *world) Acquire(context.Context) (backend.Slot, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.nextSlot++
	slot := backend.Slot{Name: "slot-" + strconv.Itoa(w.nextSlot)}
	w.slots[slot.Name] = true
	return slot, nil
}

func (w *world) Release(slot backend.Slot) {
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.slots, slot.Name)
}

// pictures is the world's image store: one image.
type pictures struct{ w *world }

const testDigest = "sha256:1"

func (p pictures) Acquire(context.Context, string) (backend.Rootfs, image.Artifact, error) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	p.w.users++
	return backend.Rootfs{Digest: testDigest}, image.Artifact{Digest: testDigest, Config: image.Config{
		Env: []string{"PATH=/bin", "A=image"}, User: "web", Workdir: "/srv",
	}}, nil
}

func (p pictures) Release(string) {
	p.w.mu.Lock()
	defer p.w.mu.Unlock()
	p.w.users--
}

func (p pictures) Dir(digest string) (string, error) { return "/images/" + digest, nil }

func (p pictures) Get(string) (image.Artifact, error) {
	return image.Artifact{}, fault.New(fault.NotFound, "nothing is known of it")
}

// The images of states are the real store's.
func (p pictures) Begin() (*image.Draft, error) {
	return nil, errors.New("the test has no store")
}

func (p pictures) Sweep() error { return nil }

func (p pictures) Pack(context.Context, image.PackOptions) (image.Artifact, error) {
	return image.Artifact{}, errors.New("the test has no store")
}

func (p pictures) List() ([]image.Artifact, error) {
	return []image.Artifact{{Digest: testDigest}}, nil
}

func (p pictures) Import(ctx context.Context, o image.ImportOptions, report func(image.Progress)) (image.Artifact, error) {
	for i := range int64(1000) {
		report(image.Progress{Step: "pull", Detail: o.Source, Done: i, Total: 1000})
	}
	return image.Artifact{Digest: testDigest, Size: 7, Architecture: "amd64"}, nil
}

func (p pictures) Bootstrap(ctx context.Context, _ image.BootstrapOptions, report func(image.Progress)) (image.Artifact, error) {
	report(image.Progress{Step: "pull"})
	<-ctx.Done()
	return image.Artifact{}, ctx.Err()
}

func (p pictures) Delete(string) error { return nil }

// node is an edge that runs, with a client of it.
type node struct {
	*Edge
	client edgev1connect.EdgeClient
	url    string
	http   *http.Client
	stop   func()
}

// startNode runs an edge in the world, with its state in dir, until the test
// ends or stop is called.
func startNode(t *testing.T, w *world, dir string, adapt func(*Config)) *node {
	t.Helper()
	return startNodeAt(t, w, dir, adapt, nil)
}

// startNodeAt is startNode with a clock, nil for the machine's.
func startNodeAt(t *testing.T, w *world, dir string, adapt func(*Config), now func() time.Time) *node {
	t.Helper()
	return startNodeWith(t, w, dir, adapt, func(d *Deps) { d.Now = now })
}

// startNodeWith is startNode with other neighbours than the world's.
func startNodeWith(t *testing.T, w *world, dir string, adapt func(*Config), others func(*Deps)) *node {
	t.Helper()
	w.mu.Lock()
	w.users = 0 // the store counts users of its own process only
	w.mu.Unlock()
	cfg := Config{Name: "n1", StateDir: dir, AgentPath: "/agent", DiskReserveMB: 1}
	if adapt != nil {
		adapt(&cfg)
	}
	if err := cfg.Validate(); err != nil {
		t.Fatal(err)
	}
	deps := Deps{Backends: []backend.Backend{w}, Images: pictures{w}, Slots: w, Log: quietLog(t)}
	others(&deps)
	e := New(cfg, deps)
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- e.Run(ctx) }()
	server := httptest.NewUnstartedServer(e.routes())
	server.EnableHTTP2 = true
	server.StartTLS()
	n := &node{Edge: e, url: server.URL, http: server.Client()}
	n.client = edgev1connect.NewEdgeClient(n.http, n.url)
	n.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ran; err != nil {
			t.Errorf("the edge ended with %v", err)
		}
		server.Close()
	})
	t.Cleanup(n.stop)
	select {
	case <-e.Ready():
	case err := <-ran:
		t.Fatalf("the edge did not start: %v", err)
	}
	return n
}

func quietLog(t *testing.T) *slog.Logger {
	level := slog.LevelError + 1
	if testing.Verbose() {
		level = slog.LevelDebug
	}
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: level}))
}

func request(id sandbox.ID) *edgev1.CreateSandboxRequest {
	return &edgev1.CreateSandboxRequest{
		Id: string(id), Project: "root/demo", ImageDigest: testDigest, CreatedAt: timestamppb.Now(),
		Spec: &opendsecv1.SandboxSpec{
			Image: "root/py:latest", Backend: "auto", CpuCoresLimit: 1, MemoryLimitMb: 64, DiskLimitMb: 16, PidsLimit: 16,
		},
	}
}

func (n *node) make(t *testing.T, adapt func(*edgev1.CreateSandboxRequest)) sandbox.ID {
	t.Helper()
	id := sandbox.NewID()
	req := request(id)
	if adapt != nil {
		adapt(req)
	}
	if _, err := n.client.CreateSandbox(t.Context(), connect.NewRequest(req)); err != nil {
		t.Fatal(err)
	}
	return id
}

func (n *node) kill(t *testing.T, id sandbox.ID) *edgev1.SandboxStatus {
	t.Helper()
	res, err := n.client.DestroySandbox(context.Background(), connect.NewRequest(&edgev1.DestroySandboxRequest{Id: string(id)}))
	if err != nil {
		t.Fatal(err)
	}
	return res.Msg.GetStatus()
}
