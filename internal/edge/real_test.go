package edge

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"golang.org/x/sys/unix"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/api/gen/edge/v1/edgev1connect"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/builtin"
	"github.com/kernflux/opendsec/internal/backend/gvisor/patch"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/image"
	"github.com/kernflux/opendsec/internal/image/imagetest"
	"github.com/kernflux/opendsec/internal/netgate"
	"github.com/kernflux/opendsec/internal/netgate/gatetest"
	"github.com/kernflux/opendsec/internal/netpolicy/dnsproxy"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/testenv"
)

// The tests of this file run an edge as a process of its own, with the real
// backends and agent, the image store and network slots, so that it can be killed.

// nodeEnv tells the test's binary to be such an edge, on that directory.
const nodeEnv = "OPENDSEC_TEST_EDGE"

func TestMain(m *testing.M) {
	if dir := os.Getenv(nodeEnv); dir != "" {
		if err := beNode(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// beNode is the edge's process: it serves without TLS on a socket in dir.
func beNode(dir string) (err error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))
	state := filepath.Join(dir, "state")
	prefix := backend.Prefix(state)
	images, err := image.Open(log, filepath.Join(state, "images"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, images.Close(false)) }()
	agent, err := image.PackAgent(ctx, filepath.Join(dir, "agent"), filepath.Join(state, "agent"))
	if err != nil {
		return err
	}
	gate, err := netgate.New(log, netgate.Config{DNS: dnsproxy.Config{Upstreams: []string{gatetest.Resolver}}})
	if err != nil {
		return err
	}
	slots := netslot.NewPool(log, prefix, 4, gate.Furnish)
	backends, err := builtin.Open(builtin.Options{
		Log: log, StateDir: state, Prefix: prefix, Agent: agent, Slots: slots, SentryPath: filepath.Join(dir, "opendsec-sentry"), ReadyMachines: 2,
	})
	if err != nil {
		return err
	}
	defer func() {
		for _, b := range backends {
			err = errors.Join(err, b.Close())
		}
	}()
	e := New(Config{Name: "real", StateDir: state, AgentPath: filepath.Join(dir, "agent"), CPUOvercommit: 100, DiskReserveMB: 16}, Deps{
		Backends: backends, Agent: agent, Images: images, Slots: slots, Gate: gate, Log: log,
	})
	socket := filepath.Join(dir, "socket")
	if err := os.Remove(socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	ln, err := net.Listen("unix", socket)
	if err != nil {
		return err
	}
	srv := &http.Server{Handler: e.routes(), Protocols: cleartext()}
	go srv.Serve(ln)
	defer srv.Close()
	return e.Run(ctx)
}

func cleartext() *http.Protocols {
	p := new(http.Protocols)
	p.SetUnencryptedHTTP2(true)
	return p
}

// realNode is the edge's process as a test sees it.
type realNode struct {
	node
	t       *testing.T
	dir     string
	digest  string
	backend sandbox.Backend // of what it is asked to make
	proc    *exec.Cmd
}

// newRealNode builds the programs and an image, and starts an edge.
func newRealNode(t *testing.T) *realNode {
	dir, err := os.MkdirTemp("/var/tmp", "opendsec-edge-")
	if err != nil {
		t.Fatal(err)
	}
	return newRealNodeIn(t, dir)
}

// newRealNodeIn is newRealNode in an empty directory, which it removes.
func newRealNodeIn(t *testing.T, dir string) *realNode {
	if os.Getuid() != 0 {
		t.Fatal("this test makes sandboxes and must run as root")
	}
	n := &realNode{t: t, dir: dir, backend: sandbox.Container}
	n.url = "http://edge"
	n.http = &http.Client{Transport: &http.Transport{
		Protocols: cleartext(),
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", filepath.Join(dir, "socket"))
		},
	}}
	n.client = edgev1connect.NewEdgeClient(n.http, n.url)
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", filepath.Join(dir, "agent"), "github.com/kernflux/opendsec/cmd/opendsec-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the agent: %v\n%s", err, out)
	}
	if err := patch.Build(filepath.Join(dir, "opendsec-sentry"), "-s -w"); err != nil {
		t.Fatal(err)
	}
	store := n.store()
	n.digest = importBusybox(t, store, dir)
	if err := store.Close(false); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(n.tearDown)
	n.launch()
	return n
}

func (n *realNode) store() *image.Store {
	n.t.Helper()
	store, err := image.Open(slog.New(slog.DiscardHandler), filepath.Join(n.dir, "state", "images"))
	if err != nil {
		n.t.Fatal(err)
	}
	return store
}

func importBusybox(t *testing.T, store *image.Store, dir string) string {
	program, err := os.ReadFile(testenv.Program(t, "busybox", "busybox-static"))
	if err != nil {
		t.Fatal(err)
	}
	busybox := imagetest.File("bin/busybox", string(program))
	busybox.Mode = 0o755
	entries := []imagetest.Entry{
		imagetest.Dir("bin"), imagetest.Dir("etc"), imagetest.Dir("root"), imagetest.Dir("tmp"), imagetest.Dir("srv"), busybox,
		imagetest.File("etc/passwd", "root:x:0:0:root:/root:/bin/sh\napp:x:1000:1000::/srv:/bin/sh\n"),
		imagetest.File("etc/group", "root:x:0:\napp:x:1000:\n"),
	}
	for _, applet := range []string{"sh", "cat", "head", "sleep", "echo", "id", "dd", "mkdir", "rm", "sync", "tail"} {
		entries = append(entries, imagetest.Symlink("bin/"+applet, "busybox"))
	}
	path, err := layout.Write(filepath.Join(dir, "oci"), empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendImage(imagetest.Image(t, [][]byte{imagetest.Tar(t, entries...)})); err != nil {
		t.Fatal(err)
	}
	art, err := store.Import(t.Context(), image.ImportOptions{Source: "oci:" + filepath.Join(dir, "oci")}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return art.Digest
}

// launch starts the edge's process and waits until it answers.
func (n *realNode) launch() {
	n.t.Helper()
	log, err := os.OpenFile(filepath.Join(n.dir, "log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		n.t.Fatal(err)
	}
	defer log.Close()
	n.proc = exec.Command("/proc/self/exe")
	n.proc.Env = append(os.Environ(), nodeEnv+"="+n.dir)
	n.proc.Stdout, n.proc.Stderr = log, log
	if err := n.proc.Start(); err != nil {
		n.t.Fatal(err)
	}
	// The socket comes before the edge is ready, and calls wait for that.
	for begin := time.Now(); ; {
		stream, err := n.client.Watch(n.t.Context(), connect.NewRequest(&edgev1.WatchRequest{}))
		if err == nil && stream.Receive() {
			stream.Close()
			return
		}
		if time.Since(begin) > 30*time.Second {
			n.t.Fatalf("the edge does not answer: %v", err)
		}
		<-time.After(5 * time.Millisecond)
	}
}

// kill9 ends the edge's process as a crash would.
func (n *realNode) kill9() {
	n.t.Helper()
	n.signal(syscall.SIGKILL)
	_ = n.proc.Wait() // killed, as it says
}

func (n *realNode) signal(sig syscall.Signal) {
	n.t.Helper()
	if err := n.proc.Process.Signal(sig); err != nil {
		n.t.Fatal(err)
	}
}

// tearDown ends everything and checks that nothing is left on the host.
func (n *realNode) tearDown() {
	for _, s := range n.sandboxes() {
		n.kill(n.t, sandbox.ID(s.GetId()))
	}
	n.signal(syscall.SIGTERM)
	if err := n.proc.Wait(); err != nil {
		n.t.Errorf("the edge ended with %v", err)
	}
	if err := n.store().Close(true); err != nil {
		n.t.Error(err)
	}
	state := filepath.Join(n.dir, "state")
	prefix := backend.Prefix(state)
	slots, err := netslot.List(prefix)
	if err != nil || len(slots) > 0 {
		n.t.Errorf("network slots are left: %v, %v", slots, err)
	}
	for _, pattern := range []string{"/sys/fs/cgroup/" + prefix, "/sys/fs/cgroup/*/" + prefix} {
		if groups, _ := filepath.Glob(pattern); len(groups) > 0 {
			n.t.Errorf("control groups are left: %v", groups)
		}
	}
	if left := processesOf(n.dir, prefix); len(left) > 0 {
		n.t.Errorf("processes are left: %v", left)
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || bytes.Contains(mounts, []byte(n.dir)) {
		n.t.Errorf("mounts are left, %v", err)
	}
	if n.t.Failed() {
		log, _ := os.ReadFile(filepath.Join(n.dir, "log"))
		n.t.Logf("log of the edge:\n%s", log[max(0, len(log)-20000):])
	}
	if err := os.RemoveAll(n.dir); err != nil {
		n.t.Error(err)
	}
}

// processesOf lists the processes whose command line or control group names
// one of the marks.
func processesOf(marks ...string) []string {
	procs, _ := filepath.Glob("/proc/[0-9]*")
	var found []string
	for _, p := range procs {
		cmd, _ := os.ReadFile(filepath.Join(p, "cmdline"))
		group, _ := os.ReadFile(filepath.Join(p, "cgroup"))
		for _, m := range marks {
			if bytes.Contains(cmd, []byte(m)) || bytes.Contains(group, []byte("/"+m+"/")) {
				found = append(found, filepath.Base(p)+" "+strings.ReplaceAll(string(cmd), "\x00", " "))
			}
		}
	}
	return found
}

func (n *realNode) request(id sandbox.ID) *edgev1.CreateSandboxRequest {
	req := request(id)
	req.ImageDigest = n.digest
	req.Spec.User = "root"
	req.Spec.PidsLimit = 64
	req.Spec.Backend = string(n.backend)
	return req
}

func (n *realNode) create() sandbox.ID {
	n.t.Helper()
	id := sandbox.NewID()
	if _, err := n.client.CreateSandbox(n.t.Context(), connect.NewRequest(n.request(id))); err != nil {
		n.t.Fatal(err)
	}
	return id
}

// sandboxes returns what the edge reports.
func (n *realNode) sandboxes() []*edgev1.SandboxStatus {
	n.t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stream, err := n.client.Watch(ctx, connect.NewRequest(&edgev1.WatchRequest{}))
	if err != nil {
		n.t.Fatal(err)
	}
	defer stream.Close()
	if !stream.Receive() {
		n.t.Fatal(stream.Err())
	}
	return stream.Msg().GetSandboxes()
}

// living returns the ids of the sandboxes that live.
func (n *realNode) living() []string {
	var ids []string
	for _, s := range n.sandboxes() {
		if s.GetState() == opendsecv1.State_STATE_RUNNING {
			ids = append(ids, s.GetId())
		}
	}
	return ids
}

// shell runs a line and hands its output to sink.
func (n *realNode) shell(id sandbox.ID, line string, sink io.Writer) (exit int32) {
	n.t.Helper()
	stream, err := n.begin(id, line)
	if err != nil {
		n.t.Fatal(err)
	}
	defer stream.Close()
	exit = -1
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		if out := event.GetData().GetStdout(); out != nil {
			_, _ = sink.Write(out)
		}
		if event.GetEnd() != nil {
			exit = event.GetEnd().GetExitCode()
		}
	}
	if stream.Err() != nil {
		n.t.Fatal(stream.Err())
	}
	return exit
}

func (n *realNode) begin(id sandbox.ID, line string) (*connect.ServerStreamForClient[process.StartResponse], error) {
	client := processClient(n.http, n.url, id)
	return client.Start(n.t.Context(), connect.NewRequest(&process.StartRequest{
		Process: &process.ProcessConfig{Args: []string{"-c", line}},
	}))
}

func (n *realNode) leaks(recorded []string, repair bool) []*opendsecv1.Leak {
	n.t.Helper()
	res, err := n.client.FindLeaks(context.Background(), connect.NewRequest(&edgev1.FindLeaksRequest{Recorded: recorded, Repair: repair}))
	if err != nil {
		n.t.Fatal(err)
	}
	return res.Msg.GetLeaks()
}

func (n *realNode) noLeaks(recorded []string) {
	n.t.Helper()
	for _, l := range n.leaks(recorded, false) {
		n.t.Errorf("leak: %v", l)
	}
}

func TestRealSandbox(t *testing.T) {
	n := newRealNode(t)
	id := n.create()
	var out bytes.Buffer
	if exit := n.shell(id, "id -u; echo $A; cat /proc/sys/kernel/hostname; exit 3", &out); exit != 3 || out.String() != "0\n1\n"+string(id)+"\n" {
		t.Errorf("got exit %d, %q", exit, out.String())
	}
	n.noLeaks([]string{string(id)})
	if st := n.kill(t, id); st.GetState() != opendsecv1.State_STATE_STOPPED {
		t.Errorf("got %v", st)
	}
	n.noLeaks(nil)
}

// A gigabyte of output goes through without being kept anywhere.
func TestRealOutputIsStreamed(t *testing.T) {
	n := newRealNode(t)
	id := n.create()
	n.shell(id, "head -c 1000000 /dev/zero", io.Discard)
	before := n.peakMemory()
	var got count
	n.shell(id, "head -c 1073741824 /dev/zero", &got)
	if got != 1<<30 {
		t.Errorf("got %d bytes", got)
	}
	if grown := n.peakMemory() - before; grown > 48<<20 {
		t.Errorf("the edge's memory grew by %d MiB", grown>>20)
	}
}

type count int64

func (c *count) Write(p []byte) (int, error) { *c += count(len(p)); return len(p), nil }

// peakMemory returns the most that the edge's process has had resident, in bytes.
func (n *realNode) peakMemory() int64 {
	n.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", n.proc.Process.Pid))
	if err != nil {
		n.t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, "VmHWM:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			if err != nil {
				n.t.Fatal(err)
			}
			return kib << 10
		}
	}
	n.t.Fatal("no VmHWM")
	return 0
}

// A crash of the edge is no end of what runs.
func TestRealKillAndFindAgain(t *testing.T) {
	n := newRealNode(t)
	id := n.create()
	stream, err := n.begin(id, "echo begun; while [ ! -e /tmp/go ]; do sleep 0.02; done; echo done > /tmp/out; sleep 1000")
	if err != nil {
		t.Fatal(err)
	}
	for stream.Receive() && stream.Msg().GetEvent().GetData() == nil {
	}
	n.kill9()
	n.launch()
	if got := n.living(); !slices.Equal(got, []string{string(id)}) {
		t.Fatalf("found %v", got)
	}
	var out bytes.Buffer
	n.shell(id, "echo > /tmp/go; while [ ! -s /tmp/out ]; do sleep 0.02; done; cat /tmp/out", &out)
	if out.String() != "done\n" {
		t.Errorf("the command did not go on: %q", out.String())
	}
	n.noLeaks([]string{string(id)})
	n.kill(t, id)
	n.noLeaks(nil)
}

// The edge is killed at random moments while it makes and removes sandboxes.
func TestRealKillAtAnyMoment(t *testing.T) {
	n := newRealNode(t)
	for range 8 {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				id := sandbox.NewID()
				_, err := n.client.CreateSandbox(context.Background(), connect.NewRequest(n.request(id)))
				if err == nil && rand.IntN(2) == 0 {
					// Fails when the edge is killed meanwhile, as it may.
					_, _ = n.client.DestroySandbox(context.Background(), connect.NewRequest(&edgev1.DestroySandboxRequest{Id: string(id)}))
				}
			})
		}
		<-time.After(time.Duration(20+rand.IntN(400)) * time.Millisecond)
		n.kill9()
		wg.Wait()
		n.launch()
		living := n.living()
		for _, id := range living {
			n.shell(sandbox.ID(id), "true", io.Discard)
		}
		n.noLeaks(living)
	}
}

// Things that nobody owns are found, whatever they are, and removed.
func TestRealLeaksAreFound(t *testing.T) {
	n := newRealNode(t)
	state := filepath.Join(n.dir, "state")
	prefix := backend.Prefix(state)
	ghost := sandbox.ID("sb-gh0stgh0stgh")
	lives := n.create()

	// A control group with a process in it.
	group, err := cgroup.New(prefix, "container-"+string(ghost), sandbox.Limits{CPU: 1, MemoryMB: 64, PIDs: 8})
	if err != nil {
		t.Fatal(err)
	}
	sleeper := exec.Command("sleep", "1000")
	// A mount in another process's mount namespace only, and a loop device.
	dir := filepath.Join(state, "sandboxes", string(ghost), "machine")
	if err := os.MkdirAll(filepath.Join(dir, "m"), 0o700); err != nil {
		t.Fatal(err)
	}
	mounter := exec.Command("unshare", "-m", "sh", "-c", `mount -t tmpfs none "$0" && echo ready && exec sleep 1000`, filepath.Join(dir, "m"))
	ready, err := mounter.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []*exec.Cmd{sleeper, mounter} {
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Wait() }()
		defer func() { _ = c.Process.Kill() }()
	}
	if err := group.Add(sleeper.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if _, err := ready.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	disk := filepath.Join(dir, "disk.ext4")
	if err := os.WriteFile(disk, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	loop, err := exec.Command("losetup", "--find", "--show", disk).Output()
	if err != nil {
		t.Fatal(err)
	}
	// A network slot.
	pool := netslot.NewPool(slog.New(slog.DiscardHandler), prefix, 0, nil)
	slot, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}

	want := map[string]bool{
		"cgroup " + prefix + "/container-" + string(ghost):         true,
		"process " + strconv.Itoa(sleeper.Process.Pid):             true,
		"mount " + filepath.Join(dir, "m"):                         true,
		"loop " + strings.TrimSpace(string(loop)):                  true,
		"netns " + slot.Name:                                       true,
		"file " + filepath.Join(state, "sandboxes", string(ghost)): true,
		"record sb-unkn0wnunkn":                                    true,
	}
	leaks := n.leaks([]string{string(lives), "sb-unkn0wnunkn"}, true)
	for _, l := range leaks {
		key := l.GetKind() + " " + l.GetName()
		if _, ok := want[key]; !ok {
			t.Errorf("not planted: %v", l)
		}
		if !l.GetRepaired() && l.GetKind() != "record" {
			t.Errorf("not removed: %v", l)
		}
		delete(want, key)
	}
	for key := range want {
		t.Errorf("not found: %s", key)
	}
	n.noLeaks([]string{string(lives)})
	if err := unix.Access(disk, unix.F_OK); err == nil {
		t.Errorf("%s is still there", disk)
	}
}
