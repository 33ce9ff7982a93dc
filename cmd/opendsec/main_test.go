package main

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// One installation through all that can happen to it.
func TestUpAndDown(t *testing.T) {
	m := newHost(t)
	m.fails([]string{"down", "--ops", m.ops}, "there is no installation in "+m.ops)
	m.fails([]string{"wait", "--ops", m.ops}, "there is no installation in "+m.ops)
	if out := m.ok(m.up()...); out != "" {
		t.Errorf("up says %q", out)
	}
	first := m.pid()
	boxes := m.sandboxes()
	used := m.mustCtl("sandbox", "list", "-q")
	m.ok("wait", "--ops", m.ops)

	t.Run("up twice", func(t *testing.T) {
		before, err := os.ReadFile(filepath.Join(m.ops, "apiserver.json"))
		if err != nil {
			t.Fatal(err)
		}
		want := []string{"running already, as process " + strconv.Itoa(first), "opendsec down --ops " + m.ops}
		m.fails(m.up(), want...)
		m.fails([]string{"up", "--ops", m.ops, "--listen", "127.0.0.1:1"}, want...)
		after, err := os.ReadFile(filepath.Join(m.ops, "apiserver.json"))
		if err != nil || string(after) != string(before) {
			t.Errorf("the refused up changed the configuration (%v): %s", err, after)
		}
		m.mustCtl("status")
	})

	t.Run("killed", func(t *testing.T) {
		m.kill()
		m.ok(m.up()...)
		if m.pid() == first {
			t.Error("the pid file has the dead process")
		}
		for _, id := range boxes[:2] {
			if out := m.mustCtl("sandbox", "exec", id, "echo", "still here"); out != "still here" {
				t.Errorf("%s says %q", id, out)
			}
		}
	})

	t.Run("the number is another process's", func(t *testing.T) {
		m.kill()
		other := exec.Command(filepath.Join(programs, "opendsec"), "wait", "--ops", m.ops, "--timeout", "1h")
		if err := other.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := other.Process.Kill(); err != nil {
				t.Errorf("the other process did not outlive it: %v", err)
			}
			_ = other.Wait() // it was killed, and says so
		}()
		pid := []byte(strconv.Itoa(other.Process.Pid) + "\n")
		if err := os.WriteFile(filepath.Join(m.state, "opendsec.pid"), pid, 0o600); err != nil {
			t.Fatal(err)
		}
		m.ok("down", "--ops", m.ops)
		if err := other.Process.Signal(syscall.Signal(0)); err != nil {
			t.Errorf("down ended another process: %v", err)
		}
	})

	t.Run("down twice, and up again", func(t *testing.T) {
		m.ok(m.up()...)
		m.ok("down", "--ops", m.ops)
		m.fails([]string{"wait", "--ops", m.ops, "--timeout", "200ms"}, "it is not ready")
		if out := m.ok("down", "--ops", m.ops); out != "" {
			t.Errorf("down of what is down says %q", out)
		}
		m.ok(m.up()...)
		if got := m.mustCtl("sandbox", "list", "-q"); got != used {
			t.Errorf("sandboxes are now %q, and were %q", got, used)
		}
	})

	t.Run("down with its sandboxes", func(t *testing.T) {
		m.ok("down", "--sandboxes", "--ops", m.ops)
		m.ok(m.up()...)
		if got := m.mustCtl("sandbox", "list", "-q"); got != "" {
			t.Errorf("sandboxes are left: %s", got)
		}
		m.mustCtl("sandbox", "run", "--backend", "container", "root/small")
		m.mustCtl("leaks")
	})

	t.Run("down with all, though it was killed", func(t *testing.T) {
		m.kill()
		m.ok("down", "--remove-all", "--ops", m.ops)
		m.nothingLeft()
		m.ok("down", "--remove-all", "--ops", m.ops)
		m.ok(m.up()...) // and it can begin anew
		m.mustCtl("sandbox", "run", "--rm", "--backend", "container", "root/small", "--", "echo", "hello")
	})
}

func TestUpWithATakenPort(t *testing.T) {
	m := newHost(t)
	for add, server := range []string{"apiserver", "iam", "edge"} {
		addr := net.JoinHostPort("127.0.0.1", strconv.Itoa(m.port+add))
		l, err := net.Listen("tcp", addr)
		if err != nil {
			t.Fatal(err)
		}
		start := time.Now()
		m.fails(m.up(), "it did not start: "+server+": listen on "+addr, "address already in use")
		if took := time.Since(start); took > 15*time.Second {
			t.Errorf("it took %s to say so", took)
		}
		l.Close()
	}
	l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(m.port)))
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	m.fails([]string{"down", "--sandboxes", "--ops", m.ops}, "apiserver: listen on ")
	if took := time.Since(start); took > 15*time.Second {
		t.Errorf("down took %s to say so", took)
	}
	l.Close()
}

func TestUpRefuses(t *testing.T) {
	m := newHost(t)
	m.fails([]string{"up", "--ops", "ops"}, `directory "ops": give an absolute path`)
	m.fails([]string{"init", "--ops", m.ops, "--state", m.state, "--listen", "nowhere"}, `listen address "nowhere": want host:port`)
	m.ok("init", "--ops", m.ops, "--state", m.state, "--listen", "127.0.0.1:"+strconv.Itoa(m.port))
	if _, err := os.Stat(filepath.Join(m.state, "opendsec.pid")); err == nil {
		t.Error("init started something")
	}
	m.fails([]string{"up", "--ops", m.ops, "--state", m.state + "2"}, "it cannot be moved by asking")
	path := filepath.Join(m.ops, "edge.json")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, command := range []string{"up", "down", "wait", "init"} {
		m.fails([]string{command, "--ops", m.ops}, "configuration "+path)
	}
	if err := os.WriteFile(path, whole, 0o600); err != nil {
		t.Fatal(err)
	}
	m.fails([]string{"up", "--ops", m.ops, "here"}, "unknown command", "here")
	m.fails([]string{"up", "--nosuch"}, "unknown flag: --nosuch")
}

func TestDoctor(t *testing.T) {
	m := newHost(t)
	out := m.ok("doctor", "--state", m.state)
	lines := strings.Split(strings.TrimSpace(out), "\n")
	for _, line := range lines {
		mark, rest, _ := strings.Cut(line, "] ")
		name, detail, told := strings.Cut(rest, ": ")
		if mark != "[ok" && mark != "[--" || name == "" || told && detail == "" {
			t.Errorf("line %q", line)
		}
	}
	for _, want := range []string{"[ok] system: Linux", "[ok] root", "[ok] runc: /", "[ok] mkfs.erofs: /", "kvm: "} {
		if !strings.Contains(out, want) {
			t.Errorf("%q is not in:\n%s", want, out)
		}
	}
	if _, err := os.Stat(m.state); err == nil {
		t.Error("doctor made the state directory")
	}
	if out := m.ok("doctor", "--only", "runc"); strings.Count(out, "\n") != 1 || !strings.HasPrefix(out, "[ok] runc: /") {
		t.Errorf("--only runc: %q", out)
	}
	m.fails([]string{"doctor", "--only", "nosuch"}, `--only "nosuch": want one of system, root, runc`)
	if out := m.ok("version"); out != "devel\n" && os.Getenv("OPENDSEC_BIN") == "" {
		t.Errorf("version: %q", out)
	}
}
