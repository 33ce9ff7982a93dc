// Package cluster tests the programs as separate processes that know each
// other by certificate: each is killed in turn while sandboxes work.
package cluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/api/gen/edge/v1/edgev1connect"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/program/install"
	"github.com/kernflux/opendsec/internal/testenv"
)

// components are the programs, in the order in which they start.
var components = []string{"iam", "edge", "watcher", "apiserver"}

// cluster is an installation whose servers run as processes of their own.
type cluster struct {
	t     *testing.T
	bin   string
	in    *install.Installation
	procs map[string]*exec.Cmd

	http   *http
	ctx    context.Context
	client opendsecv1connect.SandboxServiceClient
	admin  *install.Admin
}

// programs returns the directory of the built programs: OPENDSEC_BIN, or a
// fresh build.
func programs(t *testing.T) string {
	if dir := os.Getenv("OPENDSEC_BIN"); dir != "" {
		return dir
	}
	dir := t.TempDir()
	build := exec.Command("make", "-s", "build", "BIN="+dir)
	build.Dir = "../.."
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return dir
}

// freePorts returns the first of three ports in a row that nobody uses.
func freePorts(t *testing.T) int {
	for range 50 {
		first, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		port := first.Addr().(*net.TCPAddr).Port
		free := port < 65000
		for add := 1; add < 3 && free; add++ {
			l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port+add)))
			if free = err == nil; free {
				l.Close()
			}
		}
		first.Close()
		if free {
			return port
		}
	}
	t.Fatal("no three free ports in a row")
	return 0
}

func start(t *testing.T) *cluster {
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	t.Cleanup(cancel)
	c := &cluster{t: t, bin: programs(t), procs: map[string]*exec.Cmd{}, ctx: ctx}
	dir, err := os.MkdirTemp("/var/tmp", "opendsec-cluster-") // t.TempDir may be on a file system that cannot hold machines
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	c.in, err = install.Init(ctx, install.Setup{
		Ops: filepath.Join(dir, "ops"), State: filepath.Join(dir, "state"), Programs: c.bin,
		Listen: net.JoinHostPort("127.0.0.1", strconv.Itoa(freePorts(t))),
	})
	if err != nil {
		t.Fatal(err)
	}
	if c.admin, err = c.in.Admin(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.admin.Close)
	t.Cleanup(c.end)
	for _, name := range components {
		c.run(name)
	}
	c.connect()
	c.ready()
	return c
}

// run starts a program; its log is kept for a failed test.
func (c *cluster) run(name string) {
	log, err := os.OpenFile(filepath.Join(c.in.StateDir(), name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(filepath.Join(c.bin, "opendsec-"+name), "-config", filepath.Join(c.in.Ops, name+".json"))
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.procs[name] = cmd
}

// kill ends a program as a crash would, and returns when it is gone.
func (c *cluster) kill(name string) {
	if err := c.procs[name].Process.Kill(); err != nil {
		c.t.Fatalf("kill %s: %v", name, err)
	}
	_ = c.procs[name].Wait() // it was killed, and says so
	delete(c.procs, name)
}

// end stops the programs, removes what is on the host and checks that it is gone.
func (c *cluster) end() {
	if c.t.Failed() {
		for _, name := range components {
			b, _ := os.ReadFile(filepath.Join(c.in.StateDir(), name+".log"))
			c.t.Logf("--- log of %s\n%s", name, b[max(0, len(b)-6000):])
		}
	}
	// The test's own context has ended.
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := c.admin.StopAll(ctx); err != nil {
		c.t.Errorf("stop what the test left: %v", err)
	}
	for name, cmd := range c.procs {
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			c.t.Errorf("end %s: %v", name, err)
		}
		if err := cmd.Wait(); err != nil {
			c.t.Errorf("%s: %v", name, err)
		}
	}
	if err := c.in.Edge.RemoveFromHost(); err != nil {
		c.t.Error(err)
	}
	testenv.NothingLeft(c.t, c.in.StateDir(), backend.Prefix(c.in.Edge.StateDir))
}

// connect makes the clients of a caller, with the admin's token.
func (c *cluster) connect() {
	vars, err := install.ReadEnv(c.in.EnvFile())
	if err != nil {
		c.t.Fatal(err)
	}
	c.http = &http{env: map[string]string{}}
	for _, v := range vars {
		c.http.env[v[0]] = v[1]
	}
	id, err := mtls.Load(c.in.IAM.PKI, mtls.RoleIAM)
	if err != nil {
		c.t.Fatal(err)
	}
	c.http.client = daemon.Client(id.ClientConfig(mtls.RoleAPIServer))
	c.t.Cleanup(c.http.client.CloseIdleConnections)
	c.client = opendsecv1connect.NewSandboxServiceClient(c.http, c.http.env["OPENDSEC_ADDR"])
}

// ready waits until the node takes sandboxes again.
func (c *cluster) ready() {
	c.eventually("the node is healthy", func() error {
		res, err := c.admin.Cluster.GetStatus(c.ctx, connect.NewRequest(&opendsecv1.GetStatusRequest{}))
		if err != nil {
			return err
		}
		for _, n := range res.Msg.GetNodes() {
			if n.GetHealthy() {
				return nil
			}
			err = errors.Join(err, fmt.Errorf("node %s: %s", n.GetName(), n.GetReason()))
		}
		return errors.Join(err, errors.New("no healthy node"))
	})
}

// eventually waits for something that happens by itself.
func (c *cluster) eventually(what string, f func() error) {
	c.t.Helper()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		err := f()
		if err == nil {
			return
		}
		select {
		case <-c.ctx.Done():
			c.t.Fatalf("%s: %v", what, err)
		case <-tick.C:
		}
	}
}

// shell runs a line in a sandbox and returns its output.
func (c *cluster) shell(id, line string) (string, error) {
	stdin := false
	client := processconnect.NewProcessClient(c.http, c.http.env["OPENDSEC_ADDR"]+"/sandboxes/"+id)
	stream, err := client.Start(c.ctx, connect.NewRequest(&process.StartRequest{Process: &process.ProcessConfig{Args: []string{"-c", line}}, Stdin: &stdin}))
	if err != nil {
		return "", err
	}
	defer stream.Close()
	var out strings.Builder
	for stream.Receive() {
		ev := stream.Msg().GetEvent()
		out.Write(ev.GetData().GetStdout())
		if end := ev.GetEnd(); end != nil {
			if end.GetExitCode() != 0 {
				return out.String(), errors.New(end.GetStatus())
			}
			return out.String(), nil
		}
	}
	return out.String(), errors.Join(stream.Err(), io.ErrUnexpectedEOF)
}

func (c *cluster) create(kind string) *opendsecv1.Sandbox {
	c.t.Helper()
	res, err := c.client.CreateSandbox(c.ctx, connect.NewRequest(&opendsecv1.CreateSandboxRequest{
		Project: "root", Spec: &opendsecv1.SandboxSpec{Image: "root/small", Backend: kind, User: "root"}}))
	if err != nil {
		c.t.Fatalf("create on %s: %v", kind, err)
	}
	return res.Msg.GetSandbox()
}

func TestEachServerMayDie(t *testing.T) {
	c := start(t)
	c.importImage()
	var boxes []*opendsecv1.Sandbox
	for _, kind := range []string{"gvisor", "container"} {
		sb := c.create(kind)
		boxes = append(boxes, sb)
		if _, err := c.shell(sb.GetId(), `(i=0; while :; do i=$((i+1)); echo $i >> /count; sleep 0.02; done) >/dev/null 2>&1 &`); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range components {
		before := make([]int, len(boxes))
		for i, sb := range boxes {
			before[i] = c.counted(sb)
		}
		c.kill(name)
		c.run(name)
		c.ready()
		for i, sb := range boxes {
			c.eventually("the command goes on after "+name+" was killed", func() error {
				if n := c.counted(sb); n <= before[i] {
					return fmt.Errorf("it stands at %d, as before", n)
				}
				return nil
			})
		}
		c.create("gvisor") // and new ones can be made
	}
	if err := c.admin.StopAll(c.ctx); err != nil {
		t.Fatal(err)
	}
	c.noLeaks()
}

// counted returns how far a sandbox's command has come, each number once.
func (c *cluster) counted(sb *opendsecv1.Sandbox) int {
	c.t.Helper()
	var n int
	c.eventually("read the count of "+sb.GetId(), func() error {
		out, err := c.shell(sb.GetId(), "cat /count")
		if err != nil {
			return err
		}
		lines := strings.Fields(out)
		for i, l := range lines {
			if l != strconv.Itoa(i+1) {
				c.t.Fatalf("line %d of the count is %q", i+1, l)
			}
		}
		if n = len(lines); n == 0 {
			return errors.New("nothing yet")
		}
		return nil
	})
	return n
}

// noLeaks waits for what is removed in the background, and fails on the rest.
func (c *cluster) noLeaks() {
	c.t.Helper()
	c.eventually("leaks", func() error {
		res, err := c.admin.Cluster.FindLeaks(c.ctx, connect.NewRequest(&opendsecv1.FindLeaksRequest{}))
		if err != nil {
			return err
		}
		for _, l := range res.Msg.GetLeaks() {
			err = errors.Join(err, fmt.Errorf("%s %s: %s", l.GetKind(), l.GetName(), l.GetDetail()))
		}
		return err
	})
}

func TestCyclesStayFlat(t *testing.T) {
	c := start(t)
	c.importImage()
	edge := c.procs["edge"].Process.Pid
	cycle := func(i int) {
		sb := c.create([]string{"gvisor", "container"}[i%2])
		if out, err := c.shell(sb.GetId(), "echo "+strconv.Itoa(i)); err != nil || out != strconv.Itoa(i)+"\n" {
			t.Fatalf("cycle %d: %q, %v", i, out, err)
		}
		if _, err := c.client.StopSandbox(c.ctx, connect.NewRequest(&opendsecv1.StopSandboxRequest{Id: sb.GetId()})); err != nil {
			t.Fatal(err)
		}
	}
	for i := range 30 { // fills pools and caches
		cycle(i)
	}
	c.noLeaks()
	files, memory := usage(t, edge)
	for i := range 200 {
		cycle(i)
	}
	c.noLeaks()
	files2, memory2 := usage(t, edge)
	// Pools refill in the background, so a few descriptors come and go.
	if files2 > files+30 {
		t.Errorf("the edge had %d files open before 200 cycles and has %d after", files, files2)
	}
	if memory2 > memory+48<<10 {
		t.Errorf("the edge had %d KiB before 200 cycles and has %d after", memory, memory2)
	}
	t.Logf("files %d, then %d; memory %d KiB, then %d", files, files2, memory, memory2)
}

// usage returns the open files and the resident memory, in KiB, of a process.
func usage(t *testing.T, pid int) (files, memory int) {
	t.Helper()
	fds, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	if err != nil {
		t.Fatal(err)
	}
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(status), "\n") {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			if memory, err = strconv.Atoi(f[1]); err != nil {
				t.Fatal(err)
			}
		}
	}
	return len(fds), memory
}

func TestRolesAreKept(t *testing.T) {
	c := start(t)
	for _, role := range []string{mtls.RoleIAM, mtls.RoleWatcher} {
		id, err := mtls.Load(c.in.IAM.PKI, role)
		if err != nil {
			t.Fatal(err)
		}
		client := daemon.Client(id.ClientConfig(mtls.RoleEdge))
		defer client.CloseIdleConnections()
		_, err = edgev1connect.NewEdgeClient(client, "https://"+c.in.Edge.Listen).CreateSandbox(c.ctx, connect.NewRequest(&edgev1.CreateSandboxRequest{}))
		if connect.CodeOf(err) != connect.CodePermissionDenied {
			t.Errorf("the role %s asked an edge for a sandbox and got %v; want permission denied", role, err)
		}
	}
}
