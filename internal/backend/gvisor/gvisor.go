// Package gvisor makes machines with gVisor: a kernel in user space, the
// sentry, answers the system calls of the sandbox, so the host's kernel sees
// none of its processes. It needs root and no KVM.
//
// The package starts the sentry itself (cmd/opendsec-sentry) and speaks to its
// control socket; there is no runsc program, no runsc state and no gofer. The
// root file system is the image's EROFS file under a writable layer in an
// unlinked file. Machines are made ahead, in a pool, up to the agent that waits
// to be told who it is. DESIGN.md says why, and what was measured.
//
// No other package imports gVisor's. What is done inside a machine is the
// agent's matter; what a machine may reach is the network slot's.
package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"sync"
	"time"

	"gvisor.dev/gvisor/pkg/log"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"

	"github.com/kernflux/opendsec/internal/ahead"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Options say how the backend works on this node.
type Options struct {
	Log *slog.Logger
	// StateDir is a directory of the backend's own, on the file system of the
	// sandboxes' state directories.
	StateDir string
	// Prefix begins the names of all that the backend makes on the host.
	Prefix string
	// SentryPath is the opendsec-sentry binary.
	SentryPath string
	// Slots gives machines their network.
	Slots Slots
	// Pool is how many machines are held ready in all, and besides, how many
	// sentries to restore snapshots in; 0 is none. Of what is wanted several at a
	// time there are more. A machine takes 16 MiB of memory, a sentry 10.
	Pool int
	// Load is what no machine is made ahead beside; the caller counts creates in it.
	// nil is none.
	Load *ahead.Load
	// DebugDir gets one log per sentry, for the search of a defect. Sentries
	// log nothing when it is "". It makes them much slower.
	DebugDir string
}

// Slots is what the backend asks of the pool of network slots.
type Slots interface {
	// Lend returns a slot that stays the pool's own, for a machine made ahead.
	Lend(ctx context.Context) (backend.Slot, error)
	// Hand says that a lent slot is a sandbox's now.
	Hand(slot backend.Slot)
	// Release gives back a lent slot.
	Release(slot backend.Slot)
}

// Backend makes gVisor machines.
type Backend struct {
	log  *slog.Logger
	opts Options
	conf *config.Config
	pool *ahead.Pool[key, *sentry] // of machines that run
	// booted has sentries that have not begun anything, for snapshots, and copies
	// those with the memory of one, which have not begun to run.
	booted, copies *ahead.Pool[key, *sentry]
	// origins has the snapshots of copies, by directory.
	origins sync.Map
	version runtimeVersion
	work    *workers

	sweepOnce sync.Once

	mu sync.Mutex
	// live has the sentries that this run knows, from before they start to
	// after their end, and the sandbox that each serves: "" when it is in the
	// pool or on its way.
	live map[string]sandbox.ID
	// held has the sentries of machines, by name.
	held map[string]*sentry

	// shares says who shares memory with whom, tending holds one when there may
	// be something to do for that.
	shares                *shares
	tending               chan struct{}
	tendStart, guardStart sync.Once
}

var (
	_ backend.Backend  = (*Backend)(nil)
	_ backend.Auditor  = (*Backend)(nil)
	_ backend.Slotter  = (*Backend)(nil)
	_ backend.Restorer = (*Backend)(nil)

	_ backend.Pauser      = (*instance)(nil)
	_ backend.Snapshotter = (*instance)(nil)
	_ backend.Differ      = (*instance)(nil)
	_ backend.Sharer      = (*instance)(nil)
)

// New returns a backend. It starts nothing. With its first use it ends what a
// killed run held ready; what else that run left is found by Audit.
func New(o Options) (*Backend, error) {
	if o.Prefix == "" || !filepath.IsAbs(o.StateDir) || !filepath.IsAbs(o.SentryPath) {
		return nil, fmt.Errorf("gvisor backend: want a prefix and absolute paths, got prefix %q, state directory %q, sentry %q", o.Prefix, o.StateDir, o.SentryPath)
	}
	if o.Slots == nil {
		return nil, errors.New("gvisor backend: want a pool of network slots")
	}
	// gVisor's packages log to stderr by themselves. What matters comes back
	// as errors.
	log.SetTarget(log.GoogleEmitter{Writer: &log.Writer{Next: io.Discard}})
	conf, err := configure(o)
	if err != nil {
		return nil, fmt.Errorf("gvisor backend: configure the sentry: %w", err)
	}
	b := &Backend{log: o.Log, opts: o, conf: conf, work: newWorkers(), live: map[string]sandbox.ID{},
		held: map[string]*sentry{}, shares: newShares(o.StateDir), tending: make(chan struct{}, 1)}
	b.pool = b.newPool(o.Pool, b.prepare)
	b.booted = b.newPool(o.Pool, b.bootAhead)
	b.copies = b.newPool(0, b.copy)
	return b, nil
}

// newPool returns a pool of sentries, of which the keys share even.
func (b *Backend) newPool(even int, launch func(context.Context, key) (*sentry, error)) *ahead.Pool[key, *sentry] {
	return ahead.New(ahead.Options[key, *sentry]{
		Log: b.log, Size: ahead.SizeOf(b.opts.Pool, even), Make: launch, End: b.dismiss, Ended: (*sentry).exited, Load: b.opts.Load,
	})
}

// configure returns the sentry's configuration. What is not named has gVisor's
// default; filters.Options in cmd/opendsec-sentry must agree with it.
func configure(o Options) (*config.Config, error) {
	fs := flag.NewFlagSet("sentry", flag.ContinueOnError)
	config.RegisterFlags(fs)
	args := []string{
		"--platform=systrap",
		"--network=sandbox",
		"--host-settings=ignore",
		"--ignore-cgroups",
		"--in-sandbox-cgroup=v2",
		"--root=" + o.StateDir,
	}
	if o.DebugDir != "" {
		args = append(args, "--debug", "--debug-log="+o.DebugDir+"/")
	}
	if err := fs.Parse(args); err != nil {
		return nil, err
	}
	return config.NewFromFlags(fs)
}

// Name returns sandbox.GVisor.
func (b *Backend) Name() sandbox.Backend { return sandbox.GVisor }

// Create makes a machine: of one that is held ready when there is a fitting
// one. A slot in cfg, which a Slotter's caller need not give, is taken for a new
// machine.
func (b *Backend) Create(ctx context.Context, cfg backend.Config) (_ backend.Instance, err error) {
	if err := errors.Join(check(cfg), b.checkFrom(cfg)); err != nil {
		return nil, err
	}
	b.sweepOnce.Do(b.sweep)
	s, err := b.running(ctx, cfg)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.dismiss(s))
		}
	}()
	if err := b.adopt(s, cfg); err != nil {
		return nil, err
	}
	if err := b.settle(s); err != nil {
		return nil, err
	}
	if s.lent {
		b.opts.Slots.Hand(s.Slot)
		s.lent = false
	}
	return b.newInstance(cfg.ID, s), nil
}

// running returns a sentry that runs its process 1.
func (b *Backend) running(ctx context.Context, cfg backend.Config) (*sentry, error) {
	k := keyOf(cfg)
	switch {
	case cfg.From != nil && cfg.From.Memory:
		return b.restored(ctx, k, cfg)
	case cfg.From != nil:
		return b.refilled(ctx, k, cfg)
	case cfg.Slot.Name != "":
		return b.launch(ctx, k, cfg.Slot, nil)
	}
	if s, ok := b.pool.Take(k, time.Now()); ok {
		return s, nil
	}
	return b.prepare(ctx, k)
}

// prepare makes a machine with a slot of its own.
func (b *Backend) prepare(ctx context.Context, k key) (*sentry, error) {
	return b.lend(ctx, k, func(ctx context.Context, k key, slot backend.Slot) (*sentry, error) {
		return b.launch(ctx, k, slot, nil)
	})
}

// lend makes a sentry with a slot of its own.
func (b *Backend) lend(ctx context.Context, k key, launch func(context.Context, key, backend.Slot) (*sentry, error)) (*sentry, error) {
	slot, err := b.opts.Slots.Lend(ctx)
	if err != nil {
		return nil, err
	}
	s, err := launch(ctx, k, slot)
	if err != nil {
		b.opts.Slots.Release(slot)
		return nil, err
	}
	s.lent = true
	return s, nil
}

// dismiss ends a machine that serves no sandbox, and gives back its slot.
func (b *Backend) dismiss(s *sentry) error {
	err := b.discard(s)
	if s.lent {
		b.opts.Slots.Release(s.Slot)
	}
	return err
}

// check refuses what would fail later with a worse message.
func check(cfg backend.Config) error {
	switch {
	case !(cfg.Limits.CPU > 0) || math.IsInf(cfg.Limits.CPU, 0):
		return fmt.Errorf("create machine %s: a CPU limit of %v cores", cfg.ID, cfg.Limits.CPU)
	case cfg.Limits.MemoryMB <= 0 || cfg.Limits.DiskMB <= 0 || cfg.Limits.PIDs <= 0:
		return fmt.Errorf("create machine %s: limits of memory, disk and processes must be more than 0, got %+v", cfg.ID, cfg.Limits)
	}
	return nil
}

// adopt makes a sentry the machine of cfg.
func (b *Backend) adopt(s *sentry, cfg backend.Config) error {
	s.Limits, s.Agent = cfg.Limits, cfg.Agent.ID
	b.know(s.Name, cfg.ID)
	// For a later run: which sandbox a process or control group is of.
	if err := os.Symlink(string(cfg.ID), b.record(s.Name)); err != nil {
		return fmt.Errorf("record the sentry's sandbox: %w", err)
	}
	dir := filepath.Join(cfg.StateDir, "sentry")
	if err := os.Rename(s.Dir, dir); err != nil {
		return fmt.Errorf("move the sentry's directory into the sandbox's: %w", err)
	}
	s.Dir = dir
	return nil
}

// record returns the path of the symbolic link whose target is the ID of the
// sandbox that a sentry serves.
func (b *Backend) record(name string) string {
	return filepath.Join(b.opts.StateDir, name+recordSuffix)
}

const recordSuffix = ".id"

// know notes that a sentry is of this run, and which sandbox it serves.
func (b *Backend) know(name string, id sandbox.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.live[name] = id
}

// discard ends a sentry and forgets it. It may be repeated.
func (b *Backend) discard(s *sentry) error {
	err := s.destroy()
	if err == nil {
		err = b.shares.forget(s.Name)
	}
	if err == nil {
		err = os.RemoveAll(b.record(s.Name)) // last: until then Audit needs it
	}
	if err != nil {
		return fmt.Errorf("end sentry %s: %w", s.Name, err)
	}
	s.release()
	if s.memory.Load() != nil && !b.work.start(func(<-chan struct{}) { s.letMemoryGo() }) {
		s.letMemoryGo()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.live, s.Name)
	delete(b.held, s.Name)
	b.poke()
	return nil
}

// startTending has layers looked after from now on.
func (b *Backend) startTending() {
	b.tendStart.Do(func() { b.work.start(b.tend) })
}

// Forget ends what is held ready of an image, by its directory, so that its
// files can go from the disk. Machines go on.
func (b *Backend) Forget(dir string) {
	b.origins.Range(func(state, _ any) bool {
		if within(state.(string), dir) {
			b.origins.Delete(state)
		}
		return true
	})
	for _, p := range []*ahead.Pool[key, *sentry]{b.pool, b.booted, b.copies} {
		p.Forget(func(k key) bool { return k.of(dir) })
	}
}

// Close ends the machines that are held ready.
func (b *Backend) Close() error {
	b.work.stop()
	b.shares.close()
	return errors.Join(b.pool.Close(), b.booted.Close(), b.copies.Close(), cgroup.RemoveParent(b.opts.Prefix))
}
