package agent_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/agent"
	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
)

// machineOf runs the agent as process 1 of namespaces of its own, in the file
// tree that mount makes at $ROOT with the agent at /agent.
func machineOf(t *testing.T, mount string) *running {
	t.Helper()
	root := t.TempDir()
	return launch(t, func(args []string) *exec.Cmd {
		script := fmt.Sprintf(`set -e
mount -t tmpfs none %[1]s; mkdir %[1]s/upper %[1]s/work %[1]s/root; ROOT=%[1]s/root
%[2]s
mkdir -p $ROOT/proc; mount -t proc none $ROOT/proc
cp %[3]s $ROOT/agent; hostname fresh
exec chroot $ROOT /agent %[4]s`, root, mount, args[0], strings.Join(args[1:], " "))
		cmd := exec.Command("/bin/sh", "-c", script)
		cmd.Dir = "/"
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS | syscall.CLONE_NEWUTS, Unshareflags: syscall.CLONE_NEWNS}
		return cmd
	})
}

// debian is this machine's own tree, with all changes kept apart.
const debian = `mknod ${ROOT%/root}/upper/tmp c 0 0
mount -t overlay none -o lowerdir=/,upperdir=${ROOT%/root}/upper,workdir=${ROOT%/root}/work $ROOT
mount --bind /dev $ROOT/dev; rm -f $ROOT/etc/hosts; printf '10.1.1.1 other # name\n127.0.1.1 fresh' >$ROOT/etc/hosts`

func TestProcessOne(t *testing.T) {
	r := machineOf(t, debian)
	r.hello(agentclient.Identity{
		Hostname: "sb-abcdefghijkl", Now: time.Now(), Entropy: []byte("some chance"), User: "nobody", Workdir: "/srv/deep",
	})
	if got := r.sh("id -un; pwd; stat -c '%a %U' /tmp /srv/deep /nonexistent"); got != "nobody\n/srv/deep\n1777 root\n755 nobody\n755 nobody" {
		t.Errorf("user, directory and what was made:\n%s", got)
	}
	hosts := "10.1.1.1 other # name\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n127.0.1.1\tsb-abcdefghijkl"
	if got := r.sh("hostname; cat /etc/hostname; cat /etc/hosts"); got != "sb-abcdefghijkl\nsb-abcdefghijkl\n"+hosts {
		t.Errorf("names:\n%s", got)
	}

	// A second identity, as a fork gets it.
	r.hello(agentclient.Identity{Token: "second", Hostname: "sb-second"})
	if got := r.sh("hostname; grep -c 127.0.1.1 /etc/hosts; grep sb- /etc/hosts; id -un; pwd"); got != "sb-second\n1\n127.0.1.1\tsb-second\nroot\n/root" {
		t.Errorf("after the second identity:\n%s", got)
	}

	// A polite signal from inside does not end the machine, and what the agent
	// does about it is not handed down to commands.
	got := r.sh("kill -TERM 1; kill -INT 1; kill -QUIT 1; kill -HUP 1; awk '/^SigIgn/ {print $2}' /proc/self/status")
	ignored, err := strconv.ParseUint(got, 16, 64)
	if err != nil {
		t.Fatalf("ignored signals: %q", got)
	}
	for _, s := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP} {
		if ignored&(1<<(s-1)) != 0 {
			t.Errorf("commands ignore %v", s)
		}
	}

	// What nobody waits for is reaped.
	r.sh("for i in 1 2 3 4 5; do setsid sh -c 'sleep 0.05' & done")
	eventually(t, "no zombie and no stray is left", func() bool {
		return r.sh("ps -e -o stat=,comm= | grep -v -e agent -e ps -e bash -e sh -e grep; true") == ""
	})

	// Commands have Docker's capabilities and no more.
	if got := r.sh("grep -E 'Cap(Bnd|Prm|Inh|Amb)' /proc/self/status"); strings.ReplaceAll(got, "\t", " ") != "CapInh: 0000000000000000\nCapPrm: 00000000a80425fb\nCapBnd: 00000000a80425fb\nCapAmb: 0000000000000000" {
		t.Errorf("capabilities of a command:\n%s", got)
	}
	if res := r.result(agentclient.Shell("hostname other")); res.ExitCode == 0 {
		t.Error("a command set the host name")
	}
	// A command that is killed is gone at once, also to others in the machine.
	if got := r.sh("echo $(ps -o pid= -p 1)"); got != "1" {
		t.Errorf("process 1 is %q", got)
	}
}

// An image may have nothing at all.
func TestEmptyImage(t *testing.T) {
	r := machineOf(t, "mkdir -p $ROOT")
	r.hello(agentclient.Identity{Hostname: "sb-empty", Entropy: []byte("x"), Env: map[string]string{"A": "b"}})
	res := r.result(agentclient.Command{Path: "/agent", Args: []string{"-no-such-flag"}})
	if res.ExitCode != 2 || !strings.Contains(string(res.Stderr), "flag") {
		t.Errorf("the program ended with %+v", res)
	}
	if _, err := r.Run(t.Context(), agentclient.Shell("true")); !fault.Is(err, fault.InvalidArgument) || !strings.Contains(err.Error(), "no shell") {
		t.Errorf("the shell = %v", err)
	}
	if err := r.WriteBytes(t.Context(), agentclient.File{Path: "made"}, []byte("x")); err != nil {
		t.Fatal(err)
	}
	for file, want := range map[string]string{"/etc/hostname": "sb-empty\n", "/root/made": "x"} {
		got, err := r.ReadFile(t.Context(), file, "")
		if err != nil || string(got) != want {
			t.Errorf("%s is %q, %v", file, got, err)
		}
	}
	if _, err := r.Run(t.Context(), agentclient.Command{Path: "true", User: "someone"}); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("an unknown user = %v", err)
	}
	if res, err := r.Run(t.Context(), agentclient.Command{Path: "/agent", Args: []string{"-x"}, User: "1000:1000"}); err != nil || res.ExitCode != 2 {
		t.Errorf("a number as user = %+v, %v", res, err)
	}
}

// The agent ends what it started when it is told to end.
func TestEndsCleanly(t *testing.T) {
	mark := filepath.Join(t.TempDir(), "mark")
	var pid int
	t.Run("run", func(t *testing.T) {
		r := start(t)
		_, pid = background(t, r, shell("trap 'echo polite >"+mark+"; exit' TERM; while :; do sleep 0.01; done"))
		_, stubborn := background(t, r, shell("trap '' TERM; while :; do sleep 0.01; done"))
		t.Cleanup(func() {}) // the agent ends with this subtest
		if !alive(pid) || !alive(stubborn) {
			t.Fatal("not running")
		}
	})
	if alive(pid) {
		t.Error("a command outlived the agent")
	}
	if data, err := os.ReadFile(mark); err != nil || string(data) != "polite\n" {
		t.Errorf("the command could not end politely: %q, %v", data, err)
	}
}

func TestIdentity(t *testing.T) {
	r := launch(t, nil)
	if _, err := r.Activity(t.Context()); !fault.Is(err, fault.Unavailable) {
		t.Errorf("a call before Hello = %v, want unavailable", err)
	}
	if status, body, _ := r.call("GET", "/files?path=/etc/passwd", nil, nil); status != 503 {
		t.Errorf("a file before Hello: %d %s", status, body)
	}
	if _, err := r.Hello(t.Context(), agentclient.Identity{User: "no such user"}); !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("Hello with an unknown user = %v", err)
	}
	info, err := r.Hello(t.Context(), agentclient.Identity{Env: map[string]string{"A": "b"}})
	if err != nil || info.Version != "test" || time.Since(info.Started) > time.Minute {
		t.Errorf("Hello = %+v, %v", info, err)
	}
	stranger := agentclient.New(r.dial, "wrong")
	defer stranger.Close()
	if _, err := stranger.Activity(t.Context()); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("a call with a wrong token = %v", err)
	}
	if _, err := stranger.Hello(t.Context(), agentclient.Identity{Token: "mine now"}); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("Hello with a wrong token = %v", err)
	}
	if err := stranger.Health(t.Context()); err != nil {
		t.Errorf("health without the token = %v", err)
	}
	if _, err := stranger.ReadFile(t.Context(), "/etc/passwd", ""); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("a file with a wrong token = %v", err)
	}
	if status, body, _ := r.call("GET", "/envs", nil, nil); status != 200 || body != `{"A":"b"}` {
		t.Errorf("/envs: %d %s", status, body)
	}
	if status, body, _ := r.call("GET", "/metrics", nil, nil); status != 200 || !strings.Contains(body, `"mem_total":`) || strings.Contains(body, `"disk_total":0`) {
		t.Errorf("/metrics: %d %s", status, body)
	}
	old := agentclient.New(r.dial, token)
	defer old.Close()
	r.hello(agentclient.Identity{Token: "second"})
	if _, err := r.Activity(t.Context()); err != nil {
		t.Errorf("with the new token: %v", err)
	}
	if _, err := old.Activity(t.Context()); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("with the old token: %v", err)
	}
}

func TestPort(t *testing.T) {
	if agent.Port != backend.AgentPort {
		t.Errorf("the agent listens on %d, and is looked for on %d", agent.Port, backend.AgentPort)
	}
}

// A transport's failure is no result of a command.
func TestConnectionThatBreaks(t *testing.T) {
	r := start(t)
	var conn net.Conn
	c := agentclient.New(func(ctx context.Context) (net.Conn, error) {
		var err error
		conn, err = r.dial(ctx)
		return conn, err
	}, token)
	defer c.Close()
	res, err := c.Run(t.Context(), agentclient.Command{Args: []string{"-c", "echo so far; exec sleep 60"}, Stdout: writerFunc(func(p []byte) (int, error) {
		return len(p), conn.Close()
	})})
	if !fault.Is(err, fault.Unavailable) || res.Signal != 0 || res.TimedOut {
		t.Errorf("Run = %+v, %v; want that the agent is unavailable", res, err)
	}
	if a, err := r.Activity(t.Context()); err != nil || a.RunningCommands != 1 {
		t.Errorf("Activity = %+v, %v; want the command to go on", a, err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }
