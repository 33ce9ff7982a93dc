package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/ahead"
)

// diskPool keeps disks of the size that was wanted last ready.
type diskPool struct {
	log       *slog.Logger
	templates *templates
	size      int // how many are kept ready
	load      *ahead.Load

	serial atomic.Uint64
	taken  chan struct{} // holds one when a disk was wanted since the last fill
	done   chan struct{} // closed when the filler has ended

	mu    sync.Mutex // guards what is below
	mb    int64      // the size that was wanted last
	ready []*disk
	own   map[string]bool // files of disks from before they are made until they are given away or removed
}

func newDiskPool(ctx context.Context, log *slog.Logger, t *templates, size int, load *ahead.Load) *diskPool {
	p := &diskPool{log: log, templates: t, size: size, load: load, taken: make(chan struct{}, 1), done: make(chan struct{}), own: map[string]bool{}}
	go p.run(ctx)
	return p
}

// take moves a ready disk of mb MiB, or a new one, to path.
func (p *diskPool) take(ctx context.Context, mb int64, path string) (*disk, error) {
	if d := p.pick(mb); d != nil {
		ready := d.path
		err := d.place(path)
		if err == nil {
			p.setOwn(ready, false)
			return d, nil
		}
		p.drop(d)
		if !errors.Is(err, unix.EXDEV) {
			return nil, fmt.Errorf("take a ready disk: %w", err)
		}
	}
	return p.templates.newDisk(ctx, mb, path)
}

// holds reports whether the file at path is a disk of the pool's, ready, being
// made or being given away.
func (p *diskPool) holds(path string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.own[path]
}

func (p *diskPool) setOwn(path string, own bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if own {
		p.own[path] = true
	} else {
		delete(p.own, path)
	}
}

// pick returns a ready disk of mb MiB, if there is one, and wakes the filler.
func (p *diskPool) pick(mb int64) *disk {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mb = mb
	select {
	case p.taken <- struct{}{}:
	default:
	}
	for i, d := range p.ready {
		if d.room == mb {
			p.ready = slices.Delete(p.ready, i, i+1)
			return d
		}
	}
	return nil
}

// run fills the pool after each use, until ctx is done.
func (p *diskPool) run(ctx context.Context) {
	defer close(p.done)
	for {
		select {
		case <-ctx.Done():
			p.drain()
			return
		case <-p.taken:
		}
		ahead.Calm(ctx, p.taken, p.load)
		if err := p.fill(ctx); err != nil && ctx.Err() == nil {
			p.log.Warn("cannot make a disk ahead", "error", err)
		}
	}
}

func (p *diskPool) fill(ctx context.Context) error {
	for {
		mb, missing := p.missing()
		if !missing || len(p.taken) > 0 || ctx.Err() != nil {
			return nil
		}
		if p.load.Busy() {
			ahead.Calm(ctx, p.taken, p.load)
		}
		path := filepath.Join(p.templates.dir, fmt.Sprintf("ready-%d-%d.ext4", os.Getpid(), p.serial.Add(1)))
		p.setOwn(path, true)
		d, err := p.templates.newDisk(ctx, mb, path)
		if err != nil {
			p.setOwn(path, false)
			return err
		}
		if err := bypassCache(d.loop); err != nil {
			p.drop(d)
			return err
		}
		p.mu.Lock()
		p.ready = append(p.ready, d)
		surplus := p.surplus()
		p.mu.Unlock()
		if surplus != nil {
			p.drop(surplus)
		}
	}
}

// missing says whether a disk is missing, and of which size.
func (p *diskPool) missing() (mb int64, yes bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	have := 0
	for _, d := range p.ready {
		if d.room == p.mb {
			have++
		}
	}
	return p.mb, have < p.size
}

// surplus takes out the oldest disk of a size that is not wanted any more,
// when there are many. The caller holds p.mu.
func (p *diskPool) surplus() *disk {
	if len(p.ready) <= 2*p.size {
		return nil
	}
	for i, d := range p.ready {
		if d.room != p.mb {
			p.ready = slices.Delete(p.ready, i, i+1)
			return d
		}
	}
	return nil
}

func (p *diskPool) drain() {
	p.mu.Lock()
	ready := p.ready
	p.ready = nil
	p.mu.Unlock()
	for _, d := range ready {
		p.drop(d)
	}
}

func (p *diskPool) drop(d *disk) {
	defer p.setOwn(d.path, false)
	if err := d.close(); err != nil {
		p.log.Warn("cannot remove a ready disk", "disk", d.path, "error", err)
	}
}
