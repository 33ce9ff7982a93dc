package gvisor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"github.com/kernflux/opendsec/internal/backend"
)

// Prepare says that snapshots of machines like cfg's will be restored soon:
// sentries for that are booted.
func (b *Backend) Prepare(cfg backend.Config) {
	b.sweepOnce.Do(b.sweep)
	b.booted.want(keyOf(cfg), time.Now())
}

// restored returns a sentry with the memory and the processes of a snapshot.
func (b *Backend) restored(ctx context.Context, k key, cfg backend.Config) (*sentry, error) {
	s, err := b.waiting(ctx, k, cfg.Slot)
	if err != nil {
		return nil, err
	}
	if err := b.restore(ctx, s, *cfg.From); err != nil {
		return nil, errors.Join(fmt.Errorf("create gVisor machine of a snapshot: %w", err), s.crash(), b.dismiss(s))
	}
	s.Features = cfg.From.Stamp.CPUFeatures
	return s, nil
}

// waiting returns a sentry that waits to be told what it becomes.
func (b *Backend) waiting(ctx context.Context, k key, slot backend.Slot) (*sentry, error) {
	if slot.Name != "" {
		return b.hold(ctx, k, slot)
	}
	if s := b.booted.take(k, time.Now()); s != nil {
		return s, nil
	}
	return b.lend(ctx, k, b.hold)
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

// restore makes the sentry what a snapshot with memory was. Its limit on
// processes inside comes with it.
func (b *Backend) restore(ctx context.Context, s *sentry, from backend.Snapshot) error {
	files, err := openSnapshot(from)
	if err != nil {
		return err
	}
	s.making.Store(true)
	defer s.making.Store(false)
	layers, files, err := b.layersOf(s, from, files)
	defer closeAll(files)
	if err != nil {
		return err
	}
	err = s.talk(ctx, func(c *urpc.Client) error {
		args := layerRestoreArgs{HavePagesFile: true, Layers: layers, FilePayload: urpc.FilePayload{Files: files}}
		return c.Call(boot.ContMgrRestore, &args, nil)
	})
	if err == nil {
		// It runs; what it does after that must go well too. A restored sentry
		// ends its connections.
		err = s.talk(ctx, func(c *urpc.Client) error { return c.Call(boot.ContMgrWaitRestore, nil, nil) })
	}
	if err != nil {
		return fmt.Errorf("restore: %w", told(err))
	}
	return nil
}

// loaded returns when a sentry has read all of the layer that it began with.
func (s *sentry) loaded(ctx context.Context) error {
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
