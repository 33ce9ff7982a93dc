package edge

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// forked is one copy or why it was not made.
type forked struct {
	status status
	err    error
}

// fork makes copies of a running or paused box, which stands still only while
// its state is taken. The error is nil when each result says how it went.
func (e *Edge) fork(ctx context.Context, b *box, children []journal.Entry, memory bool) ([]forked, error) {
	if err := e.canFork(b, children, memory); err != nil {
		return nil, err
	}
	begin := time.Now()
	var snap backend.Snapshot
	// To the end, whatever becomes of the caller: what was written must go.
	err := e.alone(context.WithoutCancel(ctx), b, func(ctx context.Context) (func(), error) {
		dir, err := e.journal.MakeTemp(b.id)
		if err != nil {
			return nil, outOfDisk(err)
		}
		snap, err = e.take(ctx, b, backend.SnapshotOptions{Dir: dir, Memory: memory, Live: memory})
		return nil, err
	})
	if err != nil {
		return nil, fmt.Errorf("fork sandbox %s: %w", b.id, err)
	}
	defer func() {
		if maker, ok := e.backends[snap.Backend].(backend.Restorer); ok && memory {
			maker.Withdraw(snap)
		}
		if err := os.RemoveAll(snap.Dir); err != nil {
			e.log.Error("cannot remove the state of a fork yet; it goes with its sandbox", "sandbox", b.id, "error", err)
		}
	}()
	taken := time.Now()
	from := origin{from: &snap}
	if memory {
		from.token = b.token()
	}
	results := make([]forked, len(children))
	var making sync.WaitGroup
	pins := b.pinsOf()
	for i, child := range children {
		child.Pins = pins // what its programs know is true for them too
		making.Go(func() { results[i].status, results[i].err = e.create(ctx, child, from) })
	}
	making.Wait()
	e.log.Info("forked", "sandbox", b.id, "copies", len(children), "memory", memory, "stopped", taken.Sub(begin), "took", time.Since(begin))
	return results, nil
}

// canFork refuses copies that could not be.
func (e *Edge) canFork(b *box, children []journal.Entry, memory bool) error {
	spec := b.spec()
	what, can := "fork a sandbox without its memory", canSnapshotFiles
	if memory {
		what, can = "fork a sandbox with its memory", canSnapshotMemory
	}
	if err := e.need(spec.Backend, what, can); err != nil {
		return err
	}
	if len(children) == 0 {
		return fault.Invalid("children", "no copies are asked for")
	}
	for _, c := range children {
		if c.Spec.Backend != spec.Backend || c.Spec.Limits != spec.Limits || c.ImageDigest != b.entry.ImageDigest || c.Project != b.entry.Project {
			return fault.Invalid("children", "copy %s must have the project, backend, limits and image of sandbox %s", c.ID, b.id)
		}
	}
	if slices.ContainsFunc(children, func(c journal.Entry) bool { return e.find(c.ID) == nil }) {
		return e.full() // here, so that the sandbox does not stand still for nothing
	}
	return nil
}

func (b *box) token() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.entry.AgentToken
}

// take writes the state of a box into a directory, which it removes when it
// fails.
func (e *Edge) take(ctx context.Context, b *box, o backend.SnapshotOptions) (snap backend.Snapshot, err error) {
	defer func() {
		if err != nil {
			err = outOfDisk(errors.Join(err, os.RemoveAll(o.Dir)))
		}
	}()
	b.mu.Lock()
	saved := b.entry.Saved
	b.mu.Unlock()
	if saved != nil {
		if !o.Memory {
			return snap, noFiles(b.id)
		}
		snap = *saved
		snap.Dir = o.Dir
		return snap, linkTree(saved.Dir, o.Dir)
	}
	inst, err := b.measurable()
	if err != nil {
		return snap, err
	}
	if err := e.roomFor(ctx, inst, o); err != nil {
		return snap, err
	}
	snap, err = inst.(backend.Snapshotter).Snapshot(ctx, o)
	snap.Dir = o.Dir
	if err == nil && o.Live {
		// How much of its memory a machine cannot share shows only now.
		if err = e.roomOnDisk(0); err != nil {
			e.backends[snap.Backend].(backend.Restorer).Withdraw(snap)
		}
	}
	return snap, err
}

// noFiles is the error of an operation on the files of a paused sandbox that has
// no machine, in whose memory they are.
func noFiles(id sandbox.ID) *fault.Error {
	f := fault.New(fault.WrongState, "the files of sandbox %s are in its saved memory while it is paused: resume it first, or copy it with its memory", id)
	f.State = sandbox.Paused
	return f
}

// linkTree gives the files of a directory further names in another of the same
// file system. Files of a state never change.
func linkTree(from, to string) error {
	return filepath.WalkDir(from, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(from, path)
		if err != nil {
			return err
		}
		at := filepath.Join(to, rel)
		if d.IsDir() {
			return os.MkdirAll(at, 0o700)
		}
		return os.Link(path, at)
	})
}

// snapshot makes an image of a running or paused box: of its memory and
// processes and files, or of its files.
func (e *Edge) snapshot(ctx context.Context, b *box, memory bool) (image.Artifact, error) {
	what, can, make := "make a snapshot of files", canSnapshotFiles, e.packFiles
	if memory {
		what, can, make = "make a snapshot with memory", canSnapshotMemory, e.keepMemory
	}
	if err := e.need(b.spec().Backend, what, can); err != nil {
		return image.Artifact{}, err
	}
	begin := time.Now()
	art, err := make(ctx, b)
	if err != nil {
		return image.Artifact{}, fmt.Errorf("make a snapshot of sandbox %s: %w", b.id, err)
	}
	e.log.Info("made a snapshot", "sandbox", b.id, "digest", art.Digest, "memory", memory, "size", art.Size, "took", time.Since(begin))
	return art, nil
}

// keepMemory makes an image of the box's whole state.
func (e *Edge) keepMemory(ctx context.Context, b *box) (art image.Artifact, err error) {
	draft, err := e.deps.Images.Begin()
	if err != nil {
		return art, outOfDisk(err)
	}
	defer func() { err = errors.Join(err, draft.Abort()) }()
	var snap backend.Snapshot
	err = e.alone(context.WithoutCancel(ctx), b, func(ctx context.Context) (func(), error) {
		snap, err = e.take(ctx, b, backend.SnapshotOptions{Dir: draft.Dir(), Memory: true})
		return nil, err
	})
	if err != nil {
		return art, err
	}
	if err := context.Cause(ctx); err != nil {
		return art, err
	}
	return draft.CommitMemory(image.Memory{
		Base: b.base(), Snapshot: snap, AgentToken: b.token(), SandboxID: b.id,
	}, b.config(), sourceOf(b))
}

// packFiles makes an image of the box's image and what was changed since.
func (e *Edge) packFiles(ctx context.Context, b *box) (art image.Artifact, err error) {
	var layer *os.File
	err = e.alone(context.WithoutCancel(ctx), b, func(ctx context.Context) (func(), error) {
		layer, err = e.diff(ctx, b)
		return nil, err
	})
	if err != nil {
		return art, err
	}
	defer func() { err = errors.Join(err, layer.Close()) }()
	if _, err := layer.Seek(0, io.SeekStart); err != nil {
		return art, err
	}
	return e.deps.Images.Pack(ctx, image.PackOptions{Base: b.base(), Layer: layer, Config: b.config(), Source: sourceOf(b)})
}

// diff writes what was changed in the box's files into a file without a name.
func (e *Edge) diff(ctx context.Context, b *box) (*os.File, error) {
	inst, err := b.measurable()
	if fault.Is(err, fault.WrongState) && b.status().State == sandbox.Paused {
		err = noFiles(b.id)
	}
	if err != nil {
		return nil, err
	}
	if err := e.roomFor(ctx, inst, backend.SnapshotOptions{}); err != nil {
		return nil, err
	}
	f, err := unnamed(e.journal.Dir(b.id))
	if err != nil {
		return nil, outOfDisk(err)
	}
	if err := inst.(backend.Differ).Diff(ctx, f); err != nil {
		return nil, outOfDisk(errors.Join(err, f.Close()))
	}
	return f, nil
}

// unnamed makes a file in dir that is gone once it is closed.
func unnamed(dir string) (*os.File, error) {
	fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a file in %s: %w", dir, err)
	}
	return os.NewFile(uintptr(fd), filepath.Join(dir, "(no name)")), nil
}

func sourceOf(b *box) string { return "sandbox " + string(b.id) }

// base returns the digest of the plain image that the box's machine stands on.
func (b *box) base() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.art.Memory != nil {
		return b.art.Memory.Base
	}
	return b.entry.ImageDigest
}

// config returns what processes in the box get by default, as an image's
// configuration.
func (b *box) config() image.Config {
	b.mu.Lock()
	defer b.mu.Unlock()
	c, spec := b.art.Config, b.entry.Spec
	c.Env = nil
	for name, value := range environment(b.art.Config.Env, spec.Env) {
		c.Env = append(c.Env, name+"="+value)
	}
	slices.Sort(c.Env)
	if spec.User != "" {
		c.User = spec.User
	}
	if spec.Workdir != "" {
		c.Workdir = spec.Workdir
	}
	return c
}
