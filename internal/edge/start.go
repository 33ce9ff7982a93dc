package edge

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// create makes a sandbox, or returns the one that its id has already. It
// answers when the sandbox's agent did. When every caller that waits for a
// create has gone, the create is undone.
func (e *Edge) create(ctx context.Context, entry journal.Entry, from origin) (status, error) {
	b, err := e.admit(entry, from)
	if err != nil {
		return status{}, err
	}
	defer b.waits(e.now())
	select {
	case <-b.created:
	case <-ctx.Done():
		return status{}, ctx.Err()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.failure != nil {
		return status{}, b.failure
	}
	if b.entry.End != nil {
		return status{}, endedFault(b.id, *b.entry.End)
	}
	return b.statusLocked(), nil
}

// admit returns the box of the entry's id, and makes it if there is room for
// it. The caller counts as waiting for it until it calls waits.
func (e *Edge) admit(entry journal.Entry, from origin) (*box, error) {
	if err := e.choose(&entry); err != nil {
		return nil, err
	}
	if err := e.full(); err != nil && e.find(entry.ID) == nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.boxes[entry.ID]; b != nil {
		return b, b.join(entry)
	}
	cost := entry.Spec.Holds(false)
	if room := e.capacity.Sub(e.used); !cost.Fits(room) {
		return nil, e.noRoom(cost, room)
	}
	b := e.newBox(entry)
	b.waiters, b.held, b.origin = 1, cost, from
	if !e.spawnLocked(func() { e.live(b, e.begin) }) {
		return nil, errEdgeStops
	}
	e.boxes[b.id] = b
	e.used = e.used.Add(cost)
	return b, nil
}

// choose settles the backend and refuses what this node cannot do at all.
func (e *Edge) choose(entry *journal.Entry) error {
	spec := &entry.Spec
	if most := float64(e.cores()); spec.Limits.CPU > most {
		return fault.Invalid("spec.cpu_cores_limit", "%g cores are more than the %g of node %s", spec.Limits.CPU, most, e.cfg.Name)
	}
	if err := e.fitImage(entry); err != nil {
		return err
	}
	chosen, err := e.probes.choose(spec.Backend)
	if err != nil {
		return err
	}
	spec.Backend = chosen
	if spec.OnIdle == sandbox.PauseOnIdle {
		if err := e.need(chosen, "pause a sandbox", canPause); err != nil {
			err.Field = "spec.on_idle"
			return err
		}
	}
	return nil
}

// fitImage sees that a snapshot with memory can be started as it is asked for.
// An image that is not there is refused later, when it is opened.
func (e *Edge) fitImage(entry *journal.Entry) error {
	art, err := e.deps.Images.Get(entry.ImageDigest)
	if err != nil || art.Memory == nil {
		return nil
	}
	spec, snap := &entry.Spec, art.Memory.Snapshot
	if spec.Backend == sandbox.Auto || spec.Backend == "" {
		spec.Backend = snap.Backend
	}
	if spec.Backend != snap.Backend {
		f := fault.New(fault.Unsupported, "image %s is a snapshot with memory of a %s sandbox: it starts on that backend only, not on %s", spec.Image, snap.Backend, spec.Backend)
		f.Field, f.Backends = "spec.backend", []sandbox.Backend{snap.Backend}
		return f
	}
	if spec.Limits != snap.Limits {
		return fault.Invalid("spec", "image %s is a snapshot with memory and has the limits of its machine, %s; leave the limits out", spec.Image, describeLimits(snap.Limits))
	}
	return e.canRestore(snap)
}

// canRestore returns why this node cannot start a snapshot with memory.
func (e *Edge) canRestore(snap backend.Snapshot) error {
	maker, ok := e.backends[snap.Backend].(backend.Restorer)
	if !ok {
		return fault.New(fault.Unsupported, "node %s cannot start snapshots with memory of the backend %s", e.cfg.Name, snap.Backend)
	}
	if err := maker.CanRestore(snap); err != nil {
		return fault.New(fault.Unsupported, "node %s cannot start this snapshot: %w", e.cfg.Name, err)
	}
	return nil
}

func (e *Edge) noRoom(want, room sandbox.Resources) error {
	return fault.New(fault.Capacity, "node %s has no room: the sandbox wants %s, free are %s; stop sandboxes or ask for less",
		e.cfg.Name, describe(want), describe(room))
}

func describeLimits(l sandbox.Limits) string {
	return fmt.Sprintf("%g cores, %d MiB memory, %d MiB disk, %d processes", l.CPU, l.MemoryMB, l.DiskMB, l.PIDs)
}

func describe(r sandbox.Resources) string {
	return fmt.Sprintf("%.4g cores, %d MiB memory, %d MiB disk, %d sandboxes", r.CPU, r.MemoryMB, r.DiskMB, r.Sandboxes)
}

// join makes a repeated create wait for the first.
func (b *box) join(entry journal.Entry) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.entry.Project != entry.Project {
		return fault.New(fault.AlreadyExists, "the id %s belongs to another project's sandbox", b.id)
	}
	b.waiters++
	return nil
}

// waits ends a caller's wait for the create. The last one that goes before the
// create is done ends it.
func (b *box) waits(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waiters--
	if b.waiters == 0 && b.entry.Phase == journal.Creating {
		b.finishLocked(sandbox.End{
			Reason: sandbox.ReasonStart, Domain: sandbox.User, Time: now,
			Detail: "its create was cancelled before it was done",
		})
	}
}

// start takes a box from nothing to running. What it has taken is on the box's
// undo stack when it fails.
func (e *Edge) start(ctx context.Context, b *box) error {
	defer e.deps.Load.Begin()()
	begin := time.Now()
	if err := e.record(b, journal.Lazy, nil); err != nil {
		return err
	}
	b.undo.add("remove its files", func(context.Context) error { return e.journal.RemoveFiles(b.id) })
	art, err := e.acquireImage(ctx, b)
	if err != nil {
		return err
	}
	from := b.origin
	if art.Memory != nil && from.from == nil {
		from = origin{from: &art.Memory.Snapshot, token: art.Memory.AgentToken, again: true}
	}
	gathered := time.Now()
	if err := e.boot(ctx, b, from); err != nil {
		return err
	}
	booted := time.Now()
	if err := e.greet(ctx, b); err != nil {
		return err
	}
	greeted := time.Now()
	if err := e.running(ctx, b); err != nil {
		return err
	}
	e.log.Info("created", "sandbox", b.id, "backend", b.spec().Backend, "took", time.Since(begin),
		"gather", gathered.Sub(begin), "boot", booted.Sub(gathered), "greet", greeted.Sub(booted))
	return nil
}

// acquireImage opens the box's image for the whole of its life.
func (e *Edge) acquireImage(ctx context.Context, b *box) (image.Artifact, error) {
	digest := b.entry.ImageDigest
	rootfs, art, err := e.deps.Images.Acquire(ctx, digest)
	if err != nil {
		return art, fmt.Errorf("open the image %s: %w", digest, err)
	}
	b.mu.Lock()
	b.art, b.rootfs = art, rootfs
	b.mu.Unlock()
	b.undo.add("release its image", func(context.Context) error { e.deps.Images.Release(digest); return nil })
	return art, nil
}

// config says what machine a box has. With memory it has the agent that was in it.
func (e *Edge) config(b *box, from *backend.Snapshot) backend.Config {
	agent := e.deps.Agent
	if from != nil && from.Memory {
		agent = e.agentOf(from.Stamp.Agent)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	spec := b.entry.Spec
	return backend.Config{
		ID: b.id, Hostname: hostname(b.id, spec), Limits: spec.Limits, Rootfs: b.rootfs, Agent: agent,
		StateDir: e.journal.MachineDir(b.id), From: from,
	}
}

// agentOf returns the agent of an ID, which lies beside the present one.
func (e *Edge) agentOf(id string) backend.Agent {
	if id == e.deps.Agent.ID {
		return e.deps.Agent
	}
	return image.AgentAt(filepath.Dir(filepath.Dir(e.deps.Agent.EROFS)), id)
}

func hostname(id sandbox.ID, spec sandbox.Spec) string {
	if spec.Hostname != "" {
		return spec.Hostname
	}
	return string(id)
}

// boot makes the machine and begins to watch it. What it has taken is in the
// box's new spell.
func (e *Edge) boot(ctx context.Context, b *box, from origin) error {
	cfg := e.config(b, from.from)
	cfg.Again = from.again
	if _, err := e.journal.MakeMachineDir(b.id); err != nil {
		return outOfDisk(err)
	}
	sp := b.begin()
	maker := e.backends[b.spec().Backend]
	own, itself := maker.(backend.Slotter)
	if !itself {
		slot, err := e.deps.Slots.Acquire(ctx)
		if err != nil {
			return fmt.Errorf("get a network slot: %w", err)
		}
		cfg.Slot = slot
		e.holdSlot(b, sp, cfg.Slot)
		if err := e.network(b, sp, slot); err != nil {
			return err
		}
	}
	inst, err := maker.Create(ctx, cfg)
	if err != nil {
		return fmt.Errorf("make a %s machine: %w", b.spec().Backend, err)
	}
	if itself {
		e.holdSlot(b, sp, own.SlotOf(inst))
	}
	sp.undo.add("end its machine", inst.Destroy)
	if itself {
		if err := e.network(b, sp, own.SlotOf(inst)); err != nil {
			return err
		}
	}
	known := from.token
	b.mu.Lock()
	b.entry.Agent = cfg.Agent.ID
	if b.entry.AgentToken == "" {
		b.entry.AgentToken = rand.Text()
	}
	if known == "" {
		known = b.entry.AgentToken
	}
	b.mu.Unlock()
	e.adopt(b, sp, inst, known)
	return nil
}

// exitEnd says what the end of a machine that nobody asked for means. Unless
// the backend knows that it came from inside it is ours to answer for.
func exitEnd(exit backend.Exit, now time.Time) sandbox.End {
	end := sandbox.End{Reason: sandbox.ReasonExited, Domain: sandbox.Infra, Time: now, Detail: "its machine ended by itself"}
	if exit.OutOfMemory {
		end.Reason, end.Domain, end.Detail = sandbox.ReasonMemory, sandbox.Quota, "it went over its memory limit"
	}
	if exit.Inside {
		end.Domain = sandbox.User
	}
	if exit.Detail != "" {
		end.Detail += ": " + exit.Detail
	}
	return end
}

// greet waits for the agent and gives the machine its identity. The handle is
// written meanwhile.
func (e *Edge) greet(ctx context.Context, b *box) error {
	var g errgroup.Group
	g.Go(func() error { return e.record(b, journal.Lazy, nil) })
	g.Go(func() error { return e.introduce(ctx, b) })
	return g.Wait()
}

// introduce waits for the agent and gives the machine its identity.
func (e *Edge) introduce(ctx context.Context, b *box) error {
	_, agent := b.machine()
	if _, err := agent.Greet(ctx, e.identity(b)); err != nil {
		return fmt.Errorf("greet the agent: %w", b.refused(err))
	}
	return nil
}

// refused says of what an agent does not take on which field of the create it
// is, or that it is the image's.
func (b *box) refused(err error) error {
	var f *fault.Error
	if !errors.As(err, &f) || f.Kind != fault.InvalidArgument {
		return err
	}
	spec := b.spec()
	for field, is := range map[string]struct{ name, asked string }{
		"default_user": {"user", spec.User}, "default_workdir": {"workdir", spec.Workdir},
	} {
		if f.Field != field {
			continue
		}
		if is.asked == "" {
			return fault.Invalid("spec."+is.name, "the %s that image %s names: %w; give another", is.name, spec.Image, err)
		}
		return fault.Invalid("spec."+is.name, "%s: %w", is.name, err)
	}
	return err
}

func (e *Edge) identity(b *box) agentclient.Identity {
	b.mu.Lock()
	spec, config, token := b.entry.Spec, b.art.Config, b.entry.AgentToken
	resolver := ""
	if b.entry.Slot != nil {
		resolver = b.entry.Slot.GatewayIP
	}
	b.mu.Unlock()
	id := agentclient.Identity{
		Token: token, SandboxID: b.id, Hostname: hostname(b.id, spec), Env: environment(config.Env, spec.Env),
		User: config.User, Workdir: config.Workdir, Resolver: resolver, Now: e.now(), Entropy: make([]byte, 64), Generation: rand.Text(),
	}
	if spec.User != "" {
		id.User = spec.User
	}
	if spec.Workdir != "" {
		id.Workdir = spec.Workdir
	}
	rand.Read(id.Entropy)
	return id
}

// environment puts a sandbox's variables over its image's.
func environment(image []string, own map[string]string) map[string]string {
	env := map[string]string{}
	for _, kv := range image {
		if k, v, ok := strings.Cut(kv, "="); ok && k != "" {
			env[k] = v
		}
	}
	maps.Copy(env, own)
	return env
}

// running makes the sandbox a living one, if nothing ended it meanwhile.
func (e *Edge) running(ctx context.Context, b *box) error {
	err := e.record(b, journal.Lazy, func(entry *journal.Entry) {
		// Under the box's lock: from here on a stop finds it running.
		if entry.End == nil {
			entry.Phase, entry.StartedAt = journal.Running, e.now()
			b.use.last = entry.StartedAt
		}
	})
	if err == nil {
		err = ctx.Err()
	}
	return err
}

// startFault is what the callers of a create that failed get.
func (b *box) startFault(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && errors.As(cause, new(*fault.Error)) {
		return cause // its end was decided, or the edge stops
	}
	var kinded *fault.Error
	switch {
	case errors.As(err, &kinded):
		return err
	case ctx.Err() != nil:
		f := fault.New(fault.Timeout, "sandbox %s did not answer in time: %w", b.id, err)
		f.Domain = sandbox.Infra
		return f
	default:
		f := fault.New(fault.Internal, "sandbox %s could not be made: %w", b.id, err)
		return f
	}
}
