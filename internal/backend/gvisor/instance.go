package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// instance is one machine.
type instance struct {
	b    *Backend
	id   sandbox.ID
	s    *sentry
	open *conns

	// still is held while the machine is paused, resumed or written down.
	still  sync.Mutex
	paused bool // under still: by Pause

	// ending is held while the machine is removed.
	ending    sync.Mutex
	destroyed bool // under ending: nothing is left

	exitOnce sync.Once
	exit     backend.Exit
}

// handleData is what a Handle holds.
type handleData struct {
	ID     sandbox.ID `json:"id"`
	Sentry *sentry    `json:"sentry"`
}

func (b *Backend) newInstance(id sandbox.ID, s *sentry) *instance {
	i := &instance{b: b, id: id, s: s, open: newConns()}
	b.mu.Lock()
	b.held[s.Name] = s
	b.mu.Unlock()
	b.guardStart.Do(func() { b.work.start(b.guard) })
	go func() { // ends with the machine, or with this process
		<-s.gone
		i.open.end()
	}()
	return i
}

// Handle returns what finds the machine again.
func (i *instance) Handle() backend.Handle {
	data, err := json.Marshal(handleData{ID: i.id, Sentry: i.s})
	if err != nil {
		panic("encode a gvisor handle: " + err.Error()) // its fields are plain
	}
	return backend.Handle{Backend: sandbox.GVisor, Data: data}
}

// SlotOf returns the network slot of a machine.
func (b *Backend) SlotOf(i backend.Instance) backend.Slot { return i.(*instance).s.Slot }

// Recover finds a machine again. What is left of one that ended is removed.
func (b *Backend) Recover(ctx context.Context, h backend.Handle) (backend.Instance, error) {
	var d handleData
	if err := json.Unmarshal(h.Data, &d); err != nil {
		return nil, fmt.Errorf("recover gVisor machine: read its handle: %w", err)
	}
	if h.Backend != sandbox.GVisor || d.Sentry == nil || d.Sentry.Name == "" || d.Sentry.Dir == "" {
		return nil, fmt.Errorf("recover gVisor machine %s: not a handle of the gvisor backend", d.ID)
	}
	if d.Sentry.Prefix != b.opts.Prefix {
		return nil, fmt.Errorf("recover gVisor machine %s: it belongs to the edge %s, this one is %s", d.ID, d.Sentry.Prefix, b.opts.Prefix)
	}
	b.sweepOnce.Do(b.sweep)
	err := d.Sentry.find()
	if errors.Is(err, backend.ErrGone) {
		return nil, errors.Join(err, b.discard(d.Sentry))
	}
	if err != nil {
		return nil, fmt.Errorf("recover gVisor machine %s: %w", d.ID, err)
	}
	b.know(d.Sentry.Name, d.ID)
	if err := b.rediscover(d.Sentry); err != nil {
		b.log.Warn("cannot tell what memory a machine shares", "sandbox", d.ID, "error", err)
	}
	paused, err := d.Sentry.wasPaused(ctx)
	if err != nil {
		return nil, fmt.Errorf("recover gVisor machine %s: %w", d.ID, err)
	}
	i := b.newInstance(d.ID, d.Sentry)
	i.paused = paused
	if err := b.resettle(d.Sentry); err != nil {
		return nil, fmt.Errorf("recover gVisor machine %s: %w", d.ID, err)
	}
	return i, nil
}

// Dial connects to a TCP port of the machine. The connection breaks when the
// machine ends.
func (i *instance) Dial(ctx context.Context, port int) (net.Conn, error) {
	return i.open.dial(ctx, func(ctx context.Context) (net.Conn, error) {
		return netslot.Dial(ctx, i.s.Slot, port)
	})
}

// Wait returns when the machine has ended.
func (i *instance) Wait(ctx context.Context) (backend.Exit, error) {
	if err := i.s.wait(ctx); err != nil {
		return backend.Exit{}, err
	}
	i.exitOnce.Do(func() { i.exit = i.s.exit() })
	return i.exit, nil
}

// exit says how the ended sentry ended. It reads what destroy removes.
func (s *sentry) exit() backend.Exit {
	over := s.overused.Load()
	if s.group != nil && !over {
		killed, err := s.group.OOMKilled()
		over = err == nil && killed
	}
	if over {
		return backend.Exit{OutOfMemory: true, Detail: "the sandbox went over its memory limit"}
	}
	if said := s.crash(); said != nil {
		return backend.Exit{Detail: said.Error()}
	}
	switch {
	case s.status == nil:
		return backend.Exit{Detail: "the sandbox's machine ended"}
	case s.status.Signaled():
		return backend.Exit{Detail: fmt.Sprintf("the sandbox's machine was killed by signal %d (%s)", s.status.Signal(), unix.SignalName(s.status.Signal()))}
	case s.status.ExitStatus() > 128: // by a signal, and nothing outside can send one in there
		n := unix.Signal(s.status.ExitStatus() - 128)
		return backend.Exit{Inside: true, Detail: fmt.Sprintf("a process inside sent signal %d (%s) to process 1", n, unix.SignalName(n))}
	default:
		return backend.Exit{Detail: fmt.Sprintf("process 1 of the sandbox, the agent, ended with status %d", s.status.ExitStatus())}
	}
}

// Usage measures the machine.
func (i *instance) Usage(ctx context.Context) (backend.Usage, error) {
	if err := ctx.Err(); err != nil {
		return backend.Usage{}, err
	}
	if i.s.group == nil {
		return backend.Usage{}, fmt.Errorf("usage of machine %s: its control group is gone", i.id)
	}
	cpu, memory, pids, err := i.s.group.Usage()
	if err != nil {
		return backend.Usage{}, err
	}
	disk, err := i.s.usage()
	if err != nil {
		return backend.Usage{}, err
	}
	return backend.Usage{CPU: cpu, MemoryBytes: memory, SharedMemoryBytes: i.shared(), DiskBytes: disk, PIDs: pids}, nil
}

// shared returns how much memory the machine maps that it has in common with
// others.
func (i *instance) shared() (bytes int64) {
	if !i.s.layered() || len(i.b.shares.of(i.s.Name)) == 0 {
		return 0
	}
	st, err := i.s.layerStat()
	if err != nil {
		i.b.log.Debug("cannot tell how much memory a machine shares", "sandbox", i.id, "error", err)
	}
	for _, l := range st.Layers {
		bytes += l.Bytes
	}
	return bytes
}

// Destroy ends the machine. It does its work to the end whatever becomes of
// ctx: half a removal helps nobody.
func (i *instance) Destroy(context.Context) error {
	i.ending.Lock()
	defer i.ending.Unlock()
	if i.destroyed {
		return nil
	}
	if err := i.s.stop(); err != nil {
		return fmt.Errorf("destroy machine %s: %w", i.id, err)
	}
	// Before its files go.
	i.exitOnce.Do(func() { i.exit = i.s.exit() })
	if err := i.b.discard(i.s); err != nil {
		return fmt.Errorf("destroy machine %s: %w", i.id, err)
	}
	i.destroyed = true
	return nil
}
