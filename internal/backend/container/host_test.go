package container

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// host is a backend whose state is in a directory, and what it has made.
type host struct {
	testing.TB
	dir     string
	rootfs  backend.Rootfs
	agent   backend.Agent
	backend *Backend
	made    []*instance
}

// newHost opens a backend. At the test's end it destroys the containers that
// are left, and closes it.
func newHost(t testing.TB, dir string) *host {
	t.Helper()
	h := &host{TB: t, dir: dir}
	h.rootfs, h.agent = backendtest.Rootfs(t)
	h.open()
	t.Cleanup(func() {
		for _, i := range h.made {
			if err := i.Destroy(context.Background()); err != nil {
				t.Error(err)
			}
		}
		if err := h.backend.Close(); err != nil {
			t.Error(err)
		}
		devices, err := loopDevices()
		if err != nil {
			t.Error(err)
		}
		for dev, file := range devices {
			if below, err := filepath.Rel(dir, file); err == nil && filepath.IsLocal(below) {
				t.Errorf("loop device %s is left on %s", dev, file)
			}
		}
	})
	return h
}

func (h *host) open() {
	h.Helper()
	b, err := Open(Options{Log: slog.New(slog.NewTextHandler(h.Output(), nil)), StateDir: h.dir, Prefix: backend.Prefix(h.dir), Agent: h.agent})
	if err != nil {
		h.Fatal(err)
	}
	h.backend = b
}

// create makes a container, of a snapshot if that is not nil.
func (h *host) create(limits sandbox.Limits, from *backend.Snapshot) *instance {
	h.Helper()
	id := sandbox.NewID()
	state := filepath.Join(h.dir, string(id))
	if err := os.Mkdir(state, 0o700); err != nil {
		h.Fatal(err)
	}
	i, err := h.backend.Create(context.Background(), backend.Config{
		ID: id, Hostname: "tested", Limits: limits, Rootfs: h.rootfs, Agent: h.agent, StateDir: state, From: from,
	})
	if err != nil {
		h.Fatal(err)
	}
	h.made = append(h.made, i.(*instance))
	return i.(*instance)
}

// recover finds a container again, with a backend that is opened anew.
func (h *host) recover(i *instance) *instance {
	h.Helper()
	if err := h.backend.Close(); err != nil {
		h.Fatal(err)
	}
	h.open()
	back, err := h.backend.Recover(context.Background(), i.Handle())
	if err != nil {
		h.Fatal(err)
	}
	h.made = slices.DeleteFunc(h.made, func(m *instance) bool { return m == i })
	h.made = append(h.made, back.(*instance))
	return back.(*instance)
}

// snapshot takes a snapshot into a new directory beside the containers'.
func (h *host) snapshot(i *instance) *backend.Snapshot {
	h.Helper()
	dir, err := os.MkdirTemp(h.dir, "snapshot-")
	if err != nil {
		h.Fatal(err)
	}
	s, err := i.Snapshot(context.Background(), backend.SnapshotOptions{Dir: dir})
	if err != nil {
		h.Fatal(err)
	}
	return &s
}

// client greets the agent of a container without a slot and returns a client.
func (h *host) client(i *instance) *agentclient.Client {
	h.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	inside := backend.Slot{Name: "own", NetNS: fmt.Sprintf("/proc/%d/ns/net", i.process.PID), GuestAddr: "127.0.0.1/8"}
	c := agentclient.New(func(ctx context.Context) (net.Conn, error) {
		return netslot.Dial(ctx, inside, backend.AgentPort)
	}, "token")
	h.Cleanup(c.Close)
	if err := c.WaitReady(ctx); err != nil {
		h.Fatal(err)
	}
	if _, err := c.Hello(ctx, agentclient.Identity{
		Token: "token", SandboxID: i.record.ID, Hostname: "tested", Env: map[string]string{"PATH": "/bin"}, Now: time.Now(),
	}); err != nil {
		h.Fatal(err)
	}
	return c
}

// sh runs a line in a container and returns its output.
func sh(t testing.TB, c *agentclient.Client, line string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	res, err := c.Run(ctx, agentclient.Shell(line))
	if err != nil || res.ExitCode != 0 {
		t.Fatalf("%q: %v, exit code %d: %s", line, err, res.ExitCode, res.Stderr)
	}
	return string(res.Stdout)
}

// mountXFS mounts a new XFS with reflinks and returns where.
func mountXFS(t testing.TB, mb int64) string {
	t.Helper()
	top := t.TempDir()
	image, dir := filepath.Join(top, "xfs"), filepath.Join(top, "state")
	for _, err := range []error{os.WriteFile(image, nil, 0o600), os.Truncate(image, mb<<20), os.Mkdir(dir, 0o755)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for _, args := range [][]string{{"mkfs.xfs", "-q", "-m", "reflink=1", image}, {"mount", "-t", "xfs", "-o", "loop", image, dir}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v (apt-get install xfsprogs): %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() {
		// Namespaces of threads that just ended hold it for a moment.
		deadline := time.Now().Add(10 * time.Second)
		for {
			err := unix.Unmount(dir, 0)
			if err == nil {
				return
			}
			if time.Now().After(deadline) {
				t.Errorf("unmount %s: %v", dir, err)
				_ = unix.Unmount(dir, unix.MNT_DETACH) // so that the rest can be removed
				return
			}
			<-time.After(20 * time.Millisecond)
		}
	})
	return dir
}

// eachDisk runs a test with state on this machine's file system and on XFS.
func eachDisk(t *testing.T, f func(*testing.T, *host)) {
	t.Run("plain", func(t *testing.T) { f(t, newHost(t, t.TempDir())) })
	t.Run("xfs", func(t *testing.T) { f(t, newHost(t, mountXFS(t, 2000))) })
}

// inBackground runs a line in a container until the test ends it.
func inBackground(t testing.TB, c *agentclient.Client, line string) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	started := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		cmd := agentclient.Shell(line)
		cmd.OnStart = func(int) { close(started) }
		_, _ = c.Run(ctx, cmd) // it is cancelled, or its container ends
	})
	select {
	case <-started:
	case <-time.After(time.Minute):
		t.Errorf("%q does not start", line)
	}
	stop = sync.OnceFunc(func() {
		cancel()
		wg.Wait()
	})
	t.Cleanup(stop)
	return stop
}
