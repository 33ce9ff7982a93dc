package gvisor

import (
	"bufio"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
)

// guestPort is where the test's program listens inside.
const guestPort = 7000

// guestPatience bounds a request to it.
const guestPatience = 2 * time.Minute

var guestOnce = sync.OnceValues(func() ([]byte, error) {
	dir, err := os.MkdirTemp("", "guest")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "guest")
	out, err := exec.Command("cc", "-static", "-O2", "-pthread", "-o", path, "testdata/guest.c", "testdata/files.c", "testdata/waits.c").CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("build testdata/*.c, which needs gcc and libc6-dev: %w\n%s", err, out)
	}
	return os.ReadFile(path)
})

// guest makes a machine in which the test's program runs.
func (w *world) guest() *being {
	w.Helper()
	program, err := guestOnce()
	if err != nil {
		w.Fatal(err)
	}
	m := w.create(nil)
	if err := m.c.WriteFile(w.Context(), agentclient.File{Path: "/guest", Mode: 0o755}, strings.NewReader(string(program))); err != nil {
		w.Fatal(err)
	}
	m.run("/guest >/tmp/guest-log 2>&1 &")
	return m
}

// ask asks the test's program.
func (m *being) ask(format string, args ...any) string {
	m.Helper()
	said, err := m.request(fmt.Sprintf(format, args...))
	if err != nil {
		m.Fatalf("ask %s: %v", fmt.Sprintf(format, args...), err)
	}
	return said
}

func (m *being) request(line string) (string, error) {
	ctx, cancel := context.WithTimeout(m.Context(), guestPatience)
	defer cancel()
	var c net.Conn
	for {
		var err error
		if c, err = m.i.Dial(ctx, guestPort); err == nil {
			break
		}
		if ctx.Err() != nil || m.i.s.exited() {
			return "", fmt.Errorf("reach it: %w", err)
		}
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	c.SetDeadline(deadline)
	if _, err := fmt.Fprintln(c, line); err != nil {
		return "", err
	}
	said, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(said), err
}

// live takes a live snapshot, of which machines are made until the end of f.
func (m *being) live(f func(*backend.Snapshot)) {
	m.Helper()
	s, err := m.i.Snapshot(m.Context(), backend.SnapshotOptions{Dir: m.TempDir(), Memory: true, Live: true})
	if err != nil {
		m.Fatal(err)
	}
	defer m.b.Withdraw(s)
	f(&s)
}

// fork makes a copy of a running machine.
func (m *being) fork() (child *being) {
	m.Helper()
	m.live(func(s *backend.Snapshot) { child = m.create(s) })
	return child
}

// destroy removes the machine.
func (m *being) destroy() {
	m.Helper()
	if err := m.i.Destroy(context.Background()); err != nil {
		m.Fatal(err)
	}
}

// tend does at once what is done in the background.
func (w *world) tend() {
	w.b.tendOnce(make(chan struct{}), true)
	w.b.tendOnce(make(chan struct{}), true) // what the first made possible
}

// sums asks for all sums, by the area.
func (m *being) sums() map[string]string {
	m.Helper()
	said := map[string]string{}
	for _, word := range strings.Fields(m.ask("sums")) {
		name, value, _ := strings.Cut(word, "=")
		said[name] = value
	}
	return said
}
