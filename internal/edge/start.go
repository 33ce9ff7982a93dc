package edge

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
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
func (e *Edge) create(ctx context.Context, entry journal.Entry) (status, error) {
	b, err := e.admit(entry)
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
func (e *Edge) admit(entry journal.Entry) (*box, error) {
	if err := e.choose(&entry); err != nil {
		return nil, err
	}
	if err := e.lowDisk(); err != nil && e.find(entry.ID) == nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.boxes[entry.ID]; b != nil {
		return b, b.join(entry)
	}
	cost := entry.Spec.Limits.Resources()
	if room := e.capacity.Sub(e.used); !cost.Fits(room) {
		return nil, fault.New(fault.Capacity, "node %s has no room: the sandbox wants %s, free are %s; stop sandboxes or ask for less",
			e.cfg.Name, describe(cost), describe(room))
	}
	b := e.newBox(entry)
	b.waiters = 1
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
	if spec.OnIdle == sandbox.PauseOnIdle {
		f := fault.New(fault.Unsupported, "no backend can pause a sandbox in this version; use on_idle \"stop\"")
		f.Field = "spec.on_idle"
		return f
	}
	if most := float64(e.cores()); spec.Limits.CPU > most {
		return fault.Invalid("spec.cpu_cores_limit", "%g cores are more than the %g of node %s", spec.Limits.CPU, most, e.cfg.Name)
	}
	chosen, err := e.probes.choose(spec.Backend)
	if err != nil {
		return err
	}
	spec.Backend = chosen
	return nil
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
	begin := time.Now()
	if err := e.record(b, journal.Lazy, nil); err != nil {
		return err
	}
	b.undo.add("remove its files", func(context.Context) error { return e.journal.RemoveMachineDir(b.id) })
	cfg, art, err := e.gather(ctx, b)
	if err != nil {
		return err
	}
	gathered := time.Now()
	if err := e.boot(ctx, b, cfg); err != nil {
		return err
	}
	booted := time.Now()
	if err := e.greet(ctx, b, art); err != nil {
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

// gather gets the image and the network slot side by side; a backend may take
// the slot itself.
func (e *Edge) gather(ctx context.Context, b *box) (backend.Config, image.Artifact, error) {
	spec := b.spec()
	cfg := backend.Config{ID: b.id, Hostname: hostname(b.id, spec), Limits: spec.Limits, Agent: e.deps.Agent}
	var art image.Artifact
	var err error
	if cfg.StateDir, err = e.journal.MakeMachineDir(b.id); err != nil {
		return cfg, art, err
	}
	var g errgroup.Group // without a context: what one has got, the other's failure must not lose
	g.Go(func() error {
		var err error
		cfg.Rootfs, art, err = e.acquireImage(ctx, b)
		return err
	})
	g.Go(func() error {
		if _, itself := e.backends[spec.Backend].(backend.Slotter); itself {
			return nil
		}
		var err error
		cfg.Slot, err = e.deps.Slots.Acquire(ctx)
		if err != nil {
			return fmt.Errorf("get a network slot: %w", err)
		}
		e.holdSlot(b, cfg.Slot)
		return nil
	})
	return cfg, art, g.Wait()
}

func (e *Edge) acquireImage(ctx context.Context, b *box) (backend.Rootfs, image.Artifact, error) {
	digest := b.entry.ImageDigest
	rootfs, art, err := e.deps.Images.Acquire(ctx, digest)
	if err != nil {
		return rootfs, art, fmt.Errorf("open the image %s: %w", digest, err)
	}
	b.undo.add("release its image", func(context.Context) error { e.deps.Images.Release(digest); return nil })
	return rootfs, art, nil
}

func (e *Edge) holdSlot(b *box, slot backend.Slot) {
	b.mu.Lock()
	b.entry.Slot = &slot
	b.mu.Unlock()
	b.undo.add("release its network", func(context.Context) error { e.deps.Slots.Release(slot); return nil })
}

func hostname(id sandbox.ID, spec sandbox.Spec) string {
	if spec.Hostname != "" {
		return spec.Hostname
	}
	return string(id)
}

// boot makes the machine and begins to watch it.
func (e *Edge) boot(ctx context.Context, b *box, cfg backend.Config) error {
	maker := e.backends[b.spec().Backend]
	inst, err := maker.Create(ctx, cfg)
	if err != nil {
		return fmt.Errorf("make a %s machine: %w", b.spec().Backend, err)
	}
	if s, ok := maker.(backend.Slotter); ok {
		e.holdSlot(b, s.SlotOf(inst))
	}
	b.undo.add("end its machine", inst.Destroy)
	e.adopt(b, inst, rand.Text())
	return nil
}

// adopt takes a machine into the box: how to reach it, and a watch over it.
func (e *Edge) adopt(b *box, inst backend.Instance, token string) {
	handle := inst.Handle()
	dialled := &connections{inst: inst, open: map[net.Conn]bool{}}
	agent := agentclient.New(dialled.dial, token)
	b.mu.Lock()
	b.inst, b.agent = inst, agent
	b.entry.Handle, b.entry.AgentToken = &handle, token
	b.mu.Unlock()

	// The watch ends with the machine, or with the last step back.
	ctx, cancel := context.WithCancel(e.run)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		e.watchMachine(ctx, b, inst)
	}()
	letGo := func() {
		agent.Close()
		dialled.close()
		cancel()
		<-watched
	}
	b.mu.Lock()
	b.letGo = letGo
	b.mu.Unlock()
	b.undo.add("let go of its machine", func(context.Context) error { letGo(); return nil })
}

// watchMachine ends the box when its machine ends.
func (e *Edge) watchMachine(ctx context.Context, b *box, inst backend.Instance) {
	exit, err := inst.Wait(ctx)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		e.log.Error("cannot watch a machine any more", "sandbox", b.id, "error", err)
		exit.Detail = err.Error()
	}
	if b.finish(exitEnd(exit, e.now())) {
		e.log.Warn("a machine ended by itself", "sandbox", b.id, "out_of_memory", exit.OutOfMemory, "detail", exit.Detail)
	}
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
func (e *Edge) greet(ctx context.Context, b *box, art image.Artifact) error {
	_, agent := b.machine()
	var g errgroup.Group
	g.Go(func() error { return e.record(b, journal.Lazy, nil) })
	g.Go(func() error {
		if err := agent.WaitReady(ctx); err != nil {
			return fmt.Errorf("wait for the agent: %w", err)
		}
		if _, err := agent.Hello(ctx, e.identity(b, art)); err != nil {
			return fmt.Errorf("greet the agent: %w", err)
		}
		return nil
	})
	return g.Wait()
}

func (e *Edge) identity(b *box, art image.Artifact) agentclient.Identity {
	spec := b.spec()
	id := agentclient.Identity{
		SandboxID: b.id, Hostname: hostname(b.id, spec), Env: environment(art.Config.Env, spec.Env),
		User: art.Config.User, Workdir: art.Config.Workdir, Now: e.now(), Entropy: make([]byte, 64),
	}
	b.mu.Lock()
	id.Token = b.entry.AgentToken
	b.mu.Unlock()
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
