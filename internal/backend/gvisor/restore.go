package gvisor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/gvisor/patch"
)

// Prepare says that snapshots of machines like cfg's will be restored soon:
// sentries for that are booted.
func (b *Backend) Prepare(cfg backend.Config) {
	b.sweepOnce.Do(b.sweep)
	b.booted.Want(keyOf(cfg), time.Now())
}

// restored returns a sentry with the memory and the processes of a snapshot.
func (b *Backend) restored(ctx context.Context, k key, cfg backend.Config) (*sentry, error) {
	s := b.loadedAhead(k, cfg)
	var err error
	if s == nil {
		s, err = b.loadedNow(ctx, k, cfg)
	}
	if err != nil {
		return nil, err
	}
	if err := s.begin(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("create gVisor machine of a snapshot: %w", err), s.crash(), b.dismiss(s))
	}
	s.Features = cfg.From.Stamp.CPUFeatures
	return s, nil
}

// loadedAhead returns a sentry that has a snapshot's memory, nil when none is
// ready.
func (b *Backend) loadedAhead(k key, cfg backend.Config) *sentry {
	if !cfg.Again || cfg.Slot.Name != "" || !patch.Has(b.sentryVersion()) {
		return nil
	}
	k.state = cfg.From.Dir
	b.origins.Store(k.state, *cfg.From)
	s, _ := b.copies.Take(k, time.Now())
	return s
}

// loadedNow gives a sentry a snapshot's memory.
func (b *Backend) loadedNow(ctx context.Context, k key, cfg backend.Config) (*sentry, error) {
	s, err := b.waiting(ctx, k, cfg.Slot)
	if err != nil {
		return nil, err
	}
	return b.loaded(ctx, s, *cfg.From, false)
}

// copy makes a copy of a snapshot ahead.
func (b *Backend) copy(ctx context.Context, k key) (*sentry, error) {
	from, ok := b.origins.Load(k.state)
	if !ok {
		return nil, fmt.Errorf("the snapshot in %s was removed", k.state)
	}
	s, err := b.lend(ctx, k, b.hold)
	if err != nil {
		return nil, err
	}
	return b.loaded(ctx, s, from.(backend.Snapshot), true)
}

// waiting returns a sentry that waits to be told what it becomes.
func (b *Backend) waiting(ctx context.Context, k key, slot backend.Slot) (*sentry, error) {
	if slot.Name != "" {
		return b.hold(ctx, k, slot)
	}
	if s, ok := b.booted.Take(k, time.Now()); ok {
		return s, nil
	}
	return b.lend(ctx, k, b.hold)
}

// bootAhead makes a sentry that waits to be told what it becomes, and has done
// all of a restore that needs no snapshot.
func (b *Backend) bootAhead(ctx context.Context, k key) (*sentry, error) {
	s, err := b.lend(ctx, k, b.hold)
	if err != nil || !s.layered() {
		return s, err
	}
	if err := s.talk(ctx, func(c *urpc.Client) error { return c.Call(callRestoreAhead, nil, nil) }); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare a restore ahead: %w", told(err)), s.crash(), b.dismiss(s))
	}
	return s, nil
}

// hold boots a sentry with its network and leaves it there.
func (b *Backend) hold(ctx context.Context, k key, slot backend.Slot) (*sentry, error) {
	s, err := b.boot(ctx, k, beginning{saved: true})
	if err != nil {
		return nil, err
	}
	s.Slot = slot
	if err := s.network(ctx); err != nil {
		return nil, errors.Join(err, s.crash(), b.discard(s))
	}
	return s, nil
}

// network gives a sentry its network.
func (s *sentry) network(ctx context.Context) error {
	return s.talk(ctx, func(c *urpc.Client) error { return s.connect(c, s.Slot) })
}

// loaded gives a sentry the memory and the processes of a snapshot. They run, or
// if held do not until begin. Its limit on processes inside comes with it. On an
// error the sentry is ended.
func (b *Backend) loaded(ctx context.Context, s *sentry, from backend.Snapshot, held bool) (_ *sentry, err error) {
	s.making.Store(true)
	defer s.making.Store(false)
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("restore a gVisor machine: %w", told(err)), s.crash(), b.dismiss(s))
		}
	}()
	files, err := openSnapshot(from)
	if err != nil {
		return nil, err
	}
	layers, files, err := b.layersOf(s, from, files)
	defer closeAll(files)
	if err != nil {
		return nil, err
	}
	err = s.talk(ctx, func(c *urpc.Client) error {
		args := layerRestoreArgs{HavePagesFile: true, Layers: layers, Held: held, FilePayload: urpc.FilePayload{Files: files}}
		return c.Call(boot.ContMgrRestore, &args, nil)
	})
	s.unstarted = held
	return s, err
}

// begin returns when a restored sentry runs; what it does at first must go well
// too. A sentry that runs has ended the connections from before. A patched
// sentry waits for that before it answers.
func (s *sentry) begin(ctx context.Context) error {
	call, what := boot.ContMgrWaitRestore, "wait for the restored machine"
	switch {
	case s.unstarted:
		call, what = callRestoreStart, "start what was restored"
	case s.layered():
		return nil
	}
	if err := s.talk(ctx, func(c *urpc.Client) error { return c.Call(call, nil, nil) }); err != nil {
		return fmt.Errorf("%s: %w", what, told(err))
	}
	s.unstarted = false
	return nil
}

// filled returns when a sentry has read all of the layer that it began with.
func (s *sentry) filled(ctx context.Context) error {
	return s.talk(ctx, func(c *urpc.Client) error {
		if err := c.Call(boot.ContMgrWaitFSRestore, &boot.WaitFSRestoreArgs{CID: s.Name}, nil); err != nil {
			return fmt.Errorf("read the snapshot's files: %w", told(err))
		}
		return nil
	})
}

// refilled returns a fresh sentry whose files are those of a snapshot.
func (b *Backend) refilled(ctx context.Context, k key, cfg backend.Config) (*sentry, error) {
	launch := func(ctx context.Context, k key, slot backend.Slot) (*sentry, error) {
		return b.launch(ctx, k, slot, cfg.From)
	}
	if cfg.Slot.Name != "" {
		return launch(ctx, k, cfg.Slot)
	}
	return b.lend(ctx, k, launch)
}
