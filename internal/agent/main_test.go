package agent_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
)

// program is the agent, built as it is shipped.
var program string

func TestMain(m *testing.M) {
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "agent-test-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	program = filepath.Join(dir, "agent")
	build := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w -X main.version=test", "-o", program, "../../cmd/opendsec-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		fmt.Fprintf(os.Stderr, "build the agent: %v\n%s", err, out)
		return 1
	}
	return m.Run()
}

const token = "secret of the test"

// running is an agent that runs.
type running struct {
	*agentclient.Client
	t      testing.TB
	pid    int // of the agent, as seen from here
	socket string
}

// start runs the agent as an ordinary process and gives it an identity.
func start(t testing.TB) *running {
	t.Helper()
	r := launch(t, nil)
	r.hello(agentclient.Identity{Env: map[string]string{"SANDBOX": "yes"}})
	return r
}

// launch runs the agent, by the command that wrap makes of its own, and waits
// until it serves. It ends with the test; by SIGTERM and without an error, unless
// wrap makes a machine for it.
func launch(t testing.TB, wrap func(args []string) *exec.Cmd) *running {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("these tests need root, as the agent does")
	}
	r := &running{t: t, socket: "@opendsec-agent-test-" + rand.Text()}
	args := []string{program, "-listen", "unix:" + r.socket}
	own := wrap != nil // it is process 1 of namespaces of its own
	if !own {
		wrap = func(args []string) *exec.Cmd { return exec.Command(args[0], args[1:]...) }
	}
	cmd := wrap(args)
	var log bytes.Buffer
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r.pid = cmd.Process.Pid
	r.Client = agentclient.New(r.dial, token)
	t.Cleanup(func() {
		r.Close()
		end := syscall.SIGTERM
		if own { // process 1 drops what is polite
			end = syscall.SIGKILL
		}
		if err := cmd.Process.Signal(end); err != nil {
			t.Errorf("end the agent: %v", err)
		}
		if err := cmd.Wait(); err != nil && !own {
			t.Errorf("the agent ended with %v and said:\n%s", err, log.String())
		}
	})
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if err := r.WaitReady(ctx); err != nil {
		t.Fatalf("%v; the agent said:\n%s", err, log.String())
	}
	return r
}

func (r *running) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", r.socket)
}

func (r *running) hello(id agentclient.Identity) {
	r.t.Helper()
	if _, err := r.Hello(r.t.Context(), id); err != nil {
		r.t.Fatalf("Hello: %v", err)
	}
}

// sh runs a line in the shell and wants it to end well.
func (r *running) sh(line string) string {
	r.t.Helper()
	res := r.result(agentclient.Shell(line))
	if res.ExitCode != 0 {
		r.t.Fatalf("%s: exit %d, signal %v, stderr %q", line, res.ExitCode, res.Signal, res.Stderr)
	}
	return strings.TrimSuffix(string(res.Stdout), "\n")
}

func (r *running) result(cmd agentclient.Command) agentclient.Result {
	r.t.Helper()
	res, err := r.Run(r.t.Context(), cmd)
	if err != nil {
		r.t.Fatalf("Run(%q %q): %v", cmd.Path, cmd.Args, err)
	}
	return res
}

// call sends a plain HTTP request, with the token.
func (r *running) call(method, target string, header map[string]string, body io.Reader) (int, string, http.Header) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, "http://agent"+target, body)
	if err != nil {
		r.t.Fatal(err)
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := r.Transport().RoundTrip(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, target, err)
	}
	defer resp.Body.Close()
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, target, err)
	}
	return resp.StatusCode, string(data), resp.Header
}

// status reads a number of kB or a count from the agent's /proc status.
func (r *running) status(field string) int {
	r.t.Helper()
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.pid))
	if err != nil {
		r.t.Fatal(err)
	}
	for line := range strings.Lines(string(data)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				r.t.Fatal(err)
			}
			return n
		}
	}
	r.t.Fatalf("no %s in %s", field, data)
	return 0
}

// eventually waits until what is said becomes true.
func eventually(t testing.TB, what string, is func() bool) {
	t.Helper()
	limit := time.After(10 * time.Second)
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !is() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatalf("it did not come true in 10 s: %s", what)
		}
	}
}

// alive reports whether a process exists and is not a zombie.
func alive(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return false
	}
	rest := string(stat[bytes.LastIndexByte(stat, ')')+1:])
	return !strings.HasPrefix(rest, " Z")
}
