package container

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// stock is a backend with a pool of one container.
type stock struct {
	*host
	place backendtest.Place
}

func newStock(t *testing.T) *stock {
	dir := t.TempDir()
	s := &stock{host: &host{TB: t, dir: dir}}
	s.rootfs, s.agent = backendtest.Rootfs(t)
	s.place = backendtest.Place{Log: slog.New(slog.NewTextHandler(t.Output(), nil)), StateDir: dir, Prefix: backend.Prefix(dir), Agent: s.agent}
	s.backend = s.another()
	t.Cleanup(func() {
		if err := s.backend.Close(); err != nil {
			t.Error(err)
		}
		s.clean()
	})
	return s
}

// another opens the backend as another process does.
func (s *stock) another() *Backend {
	b, err := Open(Options{
		Log: s.place.Log, StateDir: s.dir, Prefix: s.place.Prefix, Agent: s.agent, Slots: backendtest.Slots(s.TB, s.place), Ready: 1,
	})
	if err != nil {
		s.Fatal(err)
	}
	return b
}

// clean wants nothing on the host.
func (s *stock) clean() {
	s.Helper()
	left, err := s.backend.Audit(context.Background(), nil)
	if err != nil || len(left) > 0 {
		s.Errorf("left: %v, %v", left, err)
	}
}

func (s *stock) config() backend.Config {
	id := sandbox.NewID()
	state := filepath.Join(s.dir, string(id))
	if err := os.Mkdir(state, 0o700); err != nil {
		s.Fatal(err)
	}
	return backend.Config{ID: id, Hostname: "tested", Limits: trialLimits, Rootfs: s.rootfs, Agent: s.agent, StateDir: state}
}

// wait returns the container that is ready, and what it is before it is taken.
func (s *stock) wait() (*ready, record) {
	s.Helper()
	k := keyOf(backend.Config{Limits: trialLimits, Rootfs: s.rootfs, Agent: s.agent})
	s.backend.pool.Want(k, time.Now())
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); <-time.After(10 * time.Millisecond) {
		if have := s.backend.pool.Ready(k); len(have) > 0 {
			return have[0], have[0].made
		}
	}
	s.Fatal("no container is made ahead")
	return nil, record{}
}

// sandbox makes a sandbox of the container that is ready.
func (s *stock) sandbox() (cfg backend.Config, i *instance) {
	s.Helper()
	_, was := s.wait()
	cfg = s.config()
	made, err := s.backend.Create(s.Context(), cfg)
	if err != nil {
		s.Fatal(err)
	}
	i = made.(*instance)
	if i.record.Name != was.ID || i.process.identity != was.Process {
		s.Errorf("container %+v was not made of the one that was ready: %+v", i.record, was)
	}
	return cfg, i
}

// gone wants a container's process to have ended.
func (s *stock) gone(was record, what string) {
	s.Helper()
	p, err := openProcess(was.Process)
	if err == nil {
		p.fd.Close()
	}
	if !errors.Is(err, backend.ErrGone) {
		s.Errorf("%s still runs: %v", what, err)
	}
}

func (s *stock) end(i *instance) {
	s.Helper()
	if err := i.Destroy(context.Background()); err != nil {
		s.Error(err)
	}
	s.backend.slots.Release(i.record.Slot)
}

// A container that was made ahead is the sandbox's in all that can be seen.
func TestTakesWhatIsReady(t *testing.T) {
	s := newStock(t)
	cfg, i := s.sandbox()
	defer s.end(i)
	if err := i.answers(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := s.client(i)
	if got := sh(t, c, "cat /proc/sys/kernel/hostname"); got != "tested\n" {
		t.Errorf("its host name is %q", got)
	}
	if own, err := os.Hostname(); err != nil || own == "tested" {
		t.Errorf("this host's name is %q, %v", own, err)
	}
	if file, err := backingFile(i.record.Loop); err != nil || file != filepath.Join(cfg.StateDir, diskFile) {
		t.Errorf("its disk is %s, %v", file, err)
	}
	sh(t, c, "echo kept > /file")
	snap := s.snapshot(i)
	if snap.Limits != trialLimits {
		t.Errorf("its snapshot is of %+v", snap.Limits)
	}
	left, err := s.backend.Audit(t.Context(), []sandbox.ID{cfg.ID})
	if err != nil || len(left) > 0 {
		t.Errorf("the audit takes for left: %v, %v", left, err)
	}
}

// One that ended by itself is not given away.
func TestDeadIsNotTaken(t *testing.T) {
	s := newStock(t)
	have, was := s.wait()
	if err := unix.Kill(have.made.Process.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := have.process.wait(); err != nil {
		t.Fatal(err)
	}
	i, err := s.backend.Create(t.Context(), s.config())
	if err != nil {
		t.Fatal(err)
	}
	defer s.end(i.(*instance))
	if i.(*instance).process.identity == was.Process {
		t.Error("a container that has ended became a sandbox's")
	}
	if err := i.(*instance).answers(t.Context()); err != nil {
		t.Error(err)
	}
}

// An image that is forgotten has no containers ready.
func TestForgetsImage(t *testing.T) {
	s := newStock(t)
	have, was := s.wait()
	s.backend.Forget(s.rootfs.Tree + "-of-another")
	if have.ended() {
		t.Error("the container of another image was ended")
	}
	s.backend.Forget(filepath.Dir(s.rootfs.Tree))
	s.gone(was, "the container of a forgotten image")
}

// A killed process's pool is ended by the next run, and nothing else is.
func TestSweepsReady(t *testing.T) {
	s := newStock(t)
	cfg, used := s.sandbox()
	_, pooled := s.wait()
	if err := s.backend.disks.Close(); err != nil { // they are not the matter here
		t.Fatal(err)
	}
	second := s.another()
	defer func() {
		if err := second.Close(); err != nil {
			t.Error(err)
		}
	}()
	back, err := second.Recover(t.Context(), used.Handle())
	if err != nil {
		t.Fatal(err)
	}
	s.gone(pooled, "what the first run held ready")
	for name, known := range map[string][]sandbox.ID{"known": {cfg.ID}, "unknown": nil} {
		left, err := second.Audit(t.Context(), known)
		if err != nil || len(left) > 0 != (known == nil) {
			t.Errorf("audit of a sandbox that is %s: %v, %v", name, left, err)
		}
		if slices.ContainsFunc(left, func(l backend.Leftover) bool { return l.ID != cfg.ID }) {
			t.Errorf("not all of %v is said to be of %s", left, cfg.ID)
		}
	}
	if err := back.(*instance).answers(t.Context()); err != nil {
		t.Errorf("the container of a sandbox: %v", err)
	}
	if err := back.Destroy(t.Context()); err != nil {
		t.Error(err)
	}
	s.end(used)
}
