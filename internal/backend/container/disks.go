package container

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/ahead"
)

// diskPool keeps disks of the sizes that were wanted lately ready.
type diskPool struct {
	*ahead.Pool[int64, *disk] // by MiB
	templates                 *templates

	serial atomic.Uint64

	mu  sync.Mutex      // guards own
	own map[string]bool // files of disks from before they are made until they are given away or removed
}

// diskSizes is for how many sizes there are disks ready.
const diskSizes = 2

func newDiskPool(log *slog.Logger, t *templates, ready int, load *ahead.Load) *diskPool {
	p := &diskPool{templates: t, own: map[string]bool{}}
	p.Pool = ahead.New(ahead.Options[int64, *disk]{
		Log: log, Size: ahead.Size{Keys: min(diskSizes, ready), Even: ready}, Load: load,
		Make: p.create, End: p.drop, Ended: func(*disk) bool { return false },
	})
	return p
}

// take moves a ready disk of mb MiB, or a new one, to path.
func (p *diskPool) take(ctx context.Context, mb int64, path string) (*disk, error) {
	if d, ok := p.Take(mb, time.Now()); ok {
		ready := d.path
		err := d.place(path)
		if err == nil {
			p.setOwn(ready, false)
			return d, nil
		}
		err = errors.Join(err, p.drop(d))
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

// create makes a disk of mb MiB ahead.
func (p *diskPool) create(ctx context.Context, mb int64) (*disk, error) {
	path := filepath.Join(p.templates.dir, fmt.Sprintf("ready-%d-%d.ext4", os.Getpid(), p.serial.Add(1)))
	p.setOwn(path, true)
	d, err := p.templates.newDisk(ctx, mb, path)
	if err != nil {
		p.setOwn(path, false)
		return nil, fmt.Errorf("make a disk ahead: %w", err)
	}
	if err := bypassCache(d.loop); err != nil {
		return nil, errors.Join(err, p.drop(d))
	}
	return d, nil
}

func (p *diskPool) drop(d *disk) error {
	defer p.setOwn(d.path, false)
	if err := d.close(); err != nil {
		return fmt.Errorf("remove the ready disk %s: %w", d.path, err)
	}
	return nil
}
