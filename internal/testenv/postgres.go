// Package testenv gives tests the real programs that they run against: what is
// missing on a machine fails the test and says what to install, it is never
// skipped. Nothing but tests imports it.
package testenv

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// PostgresServer is a PostgreSQL server of a test's own, in a directory of its
// own, reached through a socket in it.
type PostgresServer struct {
	bin  string
	dir  string
	attr *syscall.SysProcAttr
	made atomic.Int64
}

// Postgres starts a server that ends with the test. A machine without
// PostgreSQL fails the test.
func Postgres(t testing.TB) *PostgresServer {
	t.Helper()
	p := &PostgresServer{bin: postgresBin(t), attr: postgresUser(t)}
	var err error
	// Not t.TempDir: the server's user must be able to reach it, and the
	// path of a socket is short.
	if p.dir, err = os.MkdirTemp("", "opendsec-pg-"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(p.dir); err != nil {
			t.Error(err)
		}
	})
	if c := p.attr.Credential; c != nil {
		if err := os.Chown(p.dir, int(c.Uid), int(c.Gid)); err != nil {
			t.Fatal(err)
		}
	}
	p.run(t, "initdb", "--pgdata="+p.data(), "--username=postgres", "--auth=trust", "--no-sync", "--encoding=UTF8", "--locale=C.UTF-8")
	p.start(t)
	return p
}

// Database makes an empty database and returns its URL.
func (p *PostgresServer) Database(t testing.TB) string {
	t.Helper()
	name := "test" + strconv.FormatInt(p.made.Add(1), 10)
	p.run(t, "createdb", "--host="+p.dir, "--username=postgres", name)
	return fmt.Sprintf("postgres://postgres@/%s?host=%s", name, p.dir)
}

func (p *PostgresServer) data() string { return filepath.Join(p.dir, "data") }

// postgresBin returns the directory of PostgreSQL's programs: Debian keeps
// those of a server out of PATH.
func postgresBin(t testing.TB) string {
	t.Helper()
	found, err := filepath.Glob("/usr/lib/postgresql/*/bin/initdb")
	if err != nil {
		t.Fatal(err)
	}
	if path, err := exec.LookPath("initdb"); err == nil && len(found) == 0 {
		found = append(found, path)
	}
	if len(found) == 0 {
		t.Fatal("this test needs PostgreSQL: apt-get install -y postgresql")
	}
	return filepath.Dir(found[len(found)-1])
}

// postgresUser says as whom the programs run: PostgreSQL refuses to run as root.
func postgresUser(t testing.TB) *syscall.SysProcAttr {
	t.Helper()
	attr := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getuid() != 0 {
		return attr
	}
	u, err := user.Lookup("postgres")
	if err != nil {
		t.Fatalf("this test runs PostgreSQL as the user postgres: %v; apt-get install -y postgresql", err)
	}
	uid, uerr := strconv.ParseUint(u.Uid, 10, 32)
	gid, gerr := strconv.ParseUint(u.Gid, 10, 32)
	if uerr != nil || gerr != nil {
		t.Fatalf("user postgres has the ids %q and %q", u.Uid, u.Gid)
	}
	attr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}
	return attr
}

func (p *PostgresServer) command(name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(context.Background(), filepath.Join(p.bin, name), args...)
	cmd.Dir = p.dir
	cmd.SysProcAttr = p.attr
	return cmd
}

func (p *PostgresServer) run(t testing.TB, name string, args ...string) {
	t.Helper()
	// The kernel ties Pdeathsig to the thread that started the program.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if out, err := p.command(name, args...).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", name, err, out)
	}
}

// start starts the server and returns when it answers.
func (p *PostgresServer) start(t testing.TB) {
	t.Helper()
	// A test's data need not outlive it, so nothing is synced.
	cmd := p.command("postgres", "-D", p.data(), "-F", "-c", "listen_addresses=", "-c", "unix_socket_directories="+p.dir)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	started, ended := make(chan error, 1), make(chan struct{})
	ready := make(chan error, 1)
	go func() {
		defer close(ended)
		runtime.LockOSThread() // for Pdeathsig, as long as the server runs
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			ready <- untilReady(stderr)
			_ = cmd.Wait() // it ends by our signal
		}
	}()
	if err := <-started; err != nil {
		t.Fatalf("start PostgreSQL: %v", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGQUIT) // it may have ended
		<-ended
	})
	select {
	case err := <-ready:
		if err != nil {
			t.Fatal(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("PostgreSQL did not start within a minute")
	}
}

// untilReady reads the server's log until it says that it answers, and lets
// the rest of the log go.
func untilReady(log io.Reader) error {
	lines, seen := bufio.NewScanner(log), strings.Builder{}
	for lines.Scan() {
		fmt.Fprintln(&seen, lines.Text())
		if strings.Contains(lines.Text(), "ready to accept connections") {
			go func() { _, _ = io.Copy(io.Discard, log) }()
			return nil
		}
	}
	return fmt.Errorf("PostgreSQL ended:\n%s", seen.String())
}
