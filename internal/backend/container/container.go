// Package container makes sandboxes that share the host's kernel: containers
// of an OCI runtime, crun where it runs and runc elsewhere, with limits by
// control groups and a disk of limited size. It isolates as Docker does, and no
// better.
//
// A container is prepared on a stage, a thread with namespaces of its own, and
// takes them over. So the host never sees its mounts, and when its last process
// ends, or ours while it makes one, the kernel removes mounts, links and loop
// device by itself. What remains to be removed is files and control groups.
//
// Containers are made ahead, in a pool, up to the agent that waits to be told who
// it is. A runtime is used to start a container and for nothing else.
package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/ahead"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/ocispec"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Options configure the backend.
type Options struct {
	Log *slog.Logger
	// StateDir is the edge's state directory, absolute. The backend's own files
	// are in "container" below it, the sandboxes' directories anywhere else in it.
	StateDir string
	// Prefix begins the names of what is on the host; see backend.Prefix.
	Prefix string
	// Agent is what Probe runs.
	Agent backend.Agent
	// Load is what nothing is made ahead beside; the caller counts creates in it. nil
	// is none.
	Load *ahead.Load
	// Slots gives network to containers whose Config has none. Without it they
	// have none, and none is made ahead.
	Slots *netslot.Pool
	// Ready is for how many kinds of container some are kept ready, and how many
	// those share evenly; of what is wanted several at a time there are more. 0 is
	// none. One takes some 10 MiB of memory.
	Ready int
	// ReadyDisks is how many empty disks are kept ready, 4 when zero.
	ReadyDisks int
	// Runtime is "crun" or "runc"; "" takes the first that works, in that order.
	Runtime string
}

// Backend makes containers.
type Backend struct {
	log    *slog.Logger
	state  string // the edge's state directory
	dir    string // our own
	prefix string
	agent  backend.Agent
	wanted string    // the runtime, "" for any
	fsck   string    // e2fsck
	warned sync.Once // of snapshots that are whole copies
	slots  *netslot.Pool
	disks  *diskPool
	pool   *ahead.Pool[key, *ready]

	choice  sync.Mutex // held while a runtime is chosen
	runtime *ociRuntime

	mu   sync.Mutex // guards what is below
	live map[sandbox.ID]*instance
	// serves has the containers of this run whose name is not their sandbox's ID,
	// from before they are made until they are removed, and the sandbox that each
	// serves: "" for those that are ready, on their way or a trial.
	serves map[sandbox.ID]sandbox.ID
	watch  sync.WaitGroup

	sweepOnce sync.Once
}

var (
	_ backend.Backend = (*Backend)(nil)
	_ backend.Auditor = (*Backend)(nil)
	_ backend.Slotter = (*Backend)(nil)
)

// Open returns the backend. It fails where containers cannot work for want of
// a program or of rights; Probe says whether they do work.
func Open(o Options) (*Backend, error) {
	if !filepath.IsAbs(o.StateDir) {
		return nil, fmt.Errorf("container backend: state directory %q is not absolute", o.StateDir)
	}
	mkfs, err := lookProgram("mkfs.ext4")
	if err != nil {
		return nil, fmt.Errorf("container backend: %w; apt-get install e2fsprogs", err)
	}
	dir := filepath.Join(o.StateDir, "container")
	fsck, err := lookProgram("e2fsck")
	if err != nil {
		return nil, fmt.Errorf("container backend: %w; apt-get install e2fsprogs", err)
	}
	t := &templates{dir: filepath.Join(dir, "disks"), mkfs: mkfs, made: map[int64]string{}}
	for _, d := range []string{t.dir, filepath.Join(dir, "ready")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("container backend: %w", err)
		}
	}
	if err := sweepDisks(t.dir); err != nil {
		return nil, fmt.Errorf("container backend: remove disks of before: %w", err)
	}
	if o.ReadyDisks == 0 {
		o.ReadyDisks = 4
	}
	if o.Slots == nil {
		o.Ready = 0
	}
	b := &Backend{
		log: o.Log, state: o.StateDir, dir: dir, prefix: o.Prefix, agent: o.Agent, wanted: o.Runtime, fsck: fsck,
		slots: o.Slots, disks: newDiskPool(o.Log, t, o.ReadyDisks, o.Load),
		live: map[sandbox.ID]*instance{}, serves: map[sandbox.ID]sandbox.ID{},
	}
	b.pool = ahead.New(ahead.Options[key, *ready]{
		Log: o.Log, Size: ahead.SizeOf(o.Ready, o.Ready), Make: b.prepare, End: b.dismiss, Ended: (*ready).ended, Load: o.Load,
	})
	return b, nil
}

// Name returns sandbox.Container.
func (b *Backend) Name() sandbox.Backend { return sandbox.Container }

// Probe chooses a runtime by running a container with it, if none is chosen
// yet.
func (b *Backend) Probe(ctx context.Context) (backend.Features, error) {
	r, err := b.chosen(ctx, b.agent)
	if err != nil {
		return backend.Features{}, err
	}
	return backend.Features{Pause: r.stops, SnapshotFiles: r.stops}, nil
}

// Close ends what is held ready and stops to watch the containers of sandboxes,
// which go on.
func (b *Backend) Close() error {
	err := errors.Join(b.pool.Close(), b.disks.Close()) // in this order, as one takes from the other
	b.mu.Lock()
	for _, i := range b.live {
		i.process.fd.Close()
	}
	b.mu.Unlock()
	b.watch.Wait()
	b.removeParents()
	return err
}

// Create makes a container and starts it, or takes one that is ready. A slot in
// cfg, which a Slotter's caller need not give, is taken for a new container.
func (b *Backend) Create(ctx context.Context, cfg backend.Config) (backend.Instance, error) {
	r, err := b.chosen(ctx, cfg.Agent)
	if err != nil {
		return nil, err
	}
	b.sweepOnce.Do(b.sweep)
	i, err := b.start(ctx, r, cfg)
	if err != nil {
		return nil, fmt.Errorf("create container %s: %w", cfg.ID, err)
	}
	return i, nil
}

// start makes a container, of one that is ready when there is a fitting one.
func (b *Backend) start(ctx context.Context, r *ociRuntime, cfg backend.Config) (*instance, error) {
	if cfg.Slot.Name != "" || b.slots == nil {
		return b.create(ctx, r, cfg)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if cfg.From == nil {
		if i, err := b.take(cfg); i != nil || err != nil {
			return i, err
		}
	}
	slot, err := b.slots.Lend(ctx)
	if err != nil {
		return nil, err
	}
	cfg.Slot = slot
	i, err := b.create(ctx, r, cfg)
	if err != nil {
		b.slots.Release(slot)
		return nil, err
	}
	b.slots.Hand(slot)
	return i, nil
}

// record is what is in a Handle.
type record struct {
	ID       sandbox.ID     `json:"id"`
	Name     sandbox.ID     `json:"name,omitempty"` // its own, when that is not ID
	Process  identity       `json:"process"`
	StateDir string         `json:"state_dir"`
	Loop     string         `json:"loop"` // the disk's device
	Slot     backend.Slot   `json:"slot"`
	Limits   sandbox.Limits `json:"limits"`
}

// name returns the container's own name.
func (r record) name() sandbox.ID {
	if r.Name != "" {
		return r.Name
	}
	return r.ID
}

// group returns the name of the container's control group.
func (r record) group() string { return groupOf(r.name()) }

// Names in a sandbox's state directory, of which diskFile is a name in a
// snapshot's as well.
const (
	rootDir    = "root" // where the root file system is mounted, on the stage
	diskFile   = "disk.ext4"
	configFile = "config.json"
	pausedFile = "paused" // there while the container is paused by Pause
)

// create makes a container whose name is the sandbox's ID.
func (b *Backend) create(ctx context.Context, r *ociRuntime, cfg backend.Config) (*instance, error) {
	made, err := b.build(ctx, r, cfg)
	if err != nil {
		return nil, err
	}
	i, err := b.adopt(made)
	if err != nil {
		return nil, errors.Join(err, b.remove(made))
	}
	return i, nil
}

// build makes a container. On an error nothing is left.
func (b *Backend) build(ctx context.Context, r *ociRuntime, cfg backend.Config) (made record, err error) {
	made = record{ID: cfg.ID, StateDir: cfg.StateDir, Slot: cfg.Slot, Limits: cfg.Limits}
	// Making this directory claims the sandbox's: until then there is nothing
	// of ours to undo.
	if err := os.Mkdir(filepath.Join(cfg.StateDir, rootDir), 0o700); err != nil {
		return made, fmt.Errorf("use the state directory: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, b.remove(made))
		}
	}()
	d, err := b.diskFor(ctx, cfg)
	if err != nil {
		return made, err
	}
	made.Loop = d.loop
	// The container has the disk by the end of this; without one the kernel
	// frees it.
	defer func() { err = errors.Join(err, d.release(), d.file.Close()) }()
	pid := 0
	err = onStage(func(s stage) error {
		if err := s.mountRoot(cfg.Rootfs.Tree, d, cfg.StateDir); err != nil {
			return err
		}
		if err := s.openNetwork(); err != nil {
			return err
		}
		if err := b.writeSpec(s, r, cfg); err != nil {
			return err
		}
		connected := make(chan error, 1)
		if cfg.Slot.NetNS == "" {
			connected <- nil
		} else {
			go func() { connected <- s.connect(cfg.Slot) }()
		}
		pid, err = r.run(ctx, s, string(cfg.ID), cfg.StateDir)
		return errors.Join(err, <-connected)
	})
	if err != nil {
		return made, err
	}
	if made.Process, err = identify(pid); err != nil {
		return made, fmt.Errorf("the agent ended at once: %w", err)
	}
	return made, nil
}

// diskFor returns a new container's disk: an empty one, or a copy of the one in
// the snapshot that it begins with.
func (b *Backend) diskFor(ctx context.Context, cfg backend.Config) (*disk, error) {
	path := filepath.Join(cfg.StateDir, diskFile)
	if cfg.From == nil {
		return b.disks.take(ctx, cfg.Limits.DiskMB, path)
	}
	from, err := checkSnapshot(*cfg.From, cfg.Limits)
	if err != nil {
		return nil, err
	}
	return diskOf(ctx, from, cfg.Limits.DiskMB, path)
}

// groupOf returns the name of a container's control group below the prefix. The
// prefix is shared with other backends, so the name says whose it is.
func groupOf(name sandbox.ID) string { return "container-" + string(name) }

// writeSpec writes the bundle's configuration.
func (b *Backend) writeSpec(s stage, r *ociRuntime, cfg backend.Config) error {
	spec := ocispec.Build(ocispec.Options{
		Hostname:    cfg.Hostname,
		Root:        filepath.Join(cfg.StateDir, rootDir),
		AgentDir:    cfg.Agent.Dir,
		NetNS:       s.netns,
		CgroupNS:    true,
		CgroupsPath: filepath.Join("/", b.prefix, groupOf(cfg.ID)),
		Limits:      cfg.Limits,
		LimitSwap:   countsSwap(),
	})
	if err := ocispec.AddSeccomp(spec); err != nil {
		return err
	}
	if r.filter != "" {
		spec.Annotations = map[string]string{filterAnnotation: r.filter}
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("describe the container: %w", err)
	}
	if err := os.WriteFile(filepath.Join(cfg.StateDir, configFile), text, 0o600); err != nil {
		return fmt.Errorf("describe the container: %w", err)
	}
	return nil
}

// adopt makes an instance of a container that runs, and watches it.
func (b *Backend) adopt(made record) (*instance, error) {
	data, err := json.Marshal(made)
	if err != nil {
		return nil, fmt.Errorf("describe the container for its recovery: %w", err)
	}
	p, err := openProcess(made.Process)
	if err != nil {
		return nil, err
	}
	i := &instance{
		backend: b, record: made, process: p, done: make(chan struct{}), turn: make(chan struct{}, 1),
		handle: backend.Handle{Backend: sandbox.Container, Data: data},
	}
	i.life, i.end = context.WithCancel(context.Background())
	b.mu.Lock()
	b.live[made.ID] = i
	b.watch.Add(1)
	b.mu.Unlock()
	go i.watch()
	return i, nil
}

// Recover finds a container again. One that was paused by Pause still is; one
// that stands still for another reason, because the process that took a
// snapshot of it was killed, goes on.
func (b *Backend) Recover(ctx context.Context, h backend.Handle) (backend.Instance, error) {
	var made record
	if err := json.Unmarshal(h.Data, &made); err != nil {
		return nil, fmt.Errorf("recover a container: read its handle: %w", err)
	}
	_, err := sandbox.ParseID(string(made.ID))
	if _, nerr := sandbox.ParseID(string(made.name())); err != nil || nerr != nil || h.Backend != sandbox.Container || !filepath.IsAbs(made.StateDir) {
		return nil, fmt.Errorf("recover a container: %s is not a handle of a container", h.Data)
	}
	b.sweepOnce.Do(b.sweep)
	if made.Name != "" {
		b.know(made.Name, made.ID)
	}
	i, err := b.adopt(made)
	if errors.Is(err, backend.ErrGone) {
		if rerr := b.remove(made); rerr != nil {
			return nil, fmt.Errorf("recover container %s: %w", made.ID, errors.Join(err, rerr))
		}
	}
	if err == nil {
		err = i.restoreMotion(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("recover container %s: %w", made.ID, err)
	}
	return i, nil
}

// chosen returns the runtime that works here.
func (b *Backend) chosen(ctx context.Context, agent backend.Agent) (*ociRuntime, error) {
	b.choice.Lock()
	defer b.choice.Unlock()
	if b.runtime != nil {
		return b.runtime, nil
	}
	found := slices.DeleteFunc(findRuntimes(b.dir), func(r ociRuntime) bool {
		return b.wanted != "" && r.name != b.wanted
	})
	if len(found) == 0 {
		return nil, errors.New("no OCI runtime is installed: apt-get install runc")
	}
	var failed []error
	for _, r := range found {
		err := b.try(ctx, &r, agent)
		if err == nil {
			b.log.Info("chose a runtime for containers", "runtime", r.path)
			b.runtime = &r
			return b.runtime, nil
		}
		failed = append(failed, fmt.Errorf("%s does not work here: %w", r.name, err))
	}
	return nil, errors.Join(failed...)
}

// trialLimits bound the container that shows whether a runtime works.
var trialLimits = sandbox.Limits{CPU: 1, MemoryMB: 128, DiskMB: 16, PIDs: 64}

// try runs a container with nothing but the agent in it and sees that the agent
// answers and is limited.
func (b *Backend) try(ctx context.Context, r *ociRuntime, agent backend.Agent) (err error) {
	id := sandbox.NewID()
	b.know(id, "")
	defer b.unknow(id)
	dir := filepath.Join(b.dir, "trial-"+string(id))
	tree := filepath.Join(dir, "tree")
	state := filepath.Join(dir, string(id))
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	for _, p := range []string{dir, tree, state} {
		if err := os.Mkdir(p, 0o755); err != nil {
			return fmt.Errorf("prepare a trial: %w", err)
		}
	}
	i, err := b.create(ctx, r, backend.Config{
		ID: id, Hostname: "trial", Limits: trialLimits, StateDir: state,
		Rootfs: backend.Rootfs{Tree: tree}, Agent: agent,
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, i.Destroy(context.WithoutCancel(ctx))) }()
	if err := b.inGroups(i.process.PID, groupOf(id)); err != nil {
		return err
	}
	if err := i.answers(ctx); err != nil {
		return err
	}
	r.keepFilter(string(id))
	if err := errors.Join(i.Pause(ctx), i.Resume(ctx)); err != nil {
		b.log.Warn("containers cannot be paused here", "runtime", r.path, "error", err)
	} else {
		r.stops = true
	}
	return nil
}

// answers returns when the agent accepts connections on the loopback of a
// container that has no slot, and an error when the container ends first.
func (i *instance) answers(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	go func() {
		select {
		case <-i.done:
			cancel(errors.New("the agent ended at once"))
		case <-ctx.Done():
		}
	}()
	inside := backend.Slot{
		Name:      "of the container itself",
		NetNS:     fmt.Sprintf("/proc/%d/ns/net", i.process.PID),
		GuestAddr: "127.0.0.1/8",
	}
	for {
		conn, err := netslot.Dial(ctx, inside, backend.AgentPort)
		if err == nil {
			return conn.Close()
		}
		if !errors.Is(err, unix.ECONNREFUSED) {
			return errors.Join(err, context.Cause(ctx))
		}
		if err := pause(ctx); err != nil {
			return fmt.Errorf("the agent does not answer: %w", err)
		}
	}
}
