package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/container/upper"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/ocispec"
	"github.com/kernflux/opendsec/internal/reflink"
	"github.com/kernflux/opendsec/internal/sandbox"
)

var (
	_ backend.Pauser      = (*instance)(nil)
	_ backend.Snapshotter = (*instance)(nil)
	_ backend.Differ      = (*instance)(nil)
)

// A container that stands still is one of two: paused, which a file in its state
// directory says, or stopped for a moment, by a snapshot. The file is made when
// all stands still and removed before anything goes on. So whoever finds a
// container that stands still and no file knows that a process was killed.

// Pause stops the container.
func (i *instance) Pause(ctx context.Context) error {
	err := i.inTurn(ctx, func(ctx context.Context, freezer *cgroup.Freezer) error {
		if err := freezer.Freeze(ctx); err != nil {
			return err
		}
		if err := os.WriteFile(i.pausedPath(), nil, 0o600); err != nil {
			return errors.Join(fmt.Errorf("note that it is paused: %w", err), os.RemoveAll(i.pausedPath()), freezer.Thaw())
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("pause container %s: %w", i.record.ID, err)
	}
	return nil
}

// Resume lets the container go on.
func (i *instance) Resume(ctx context.Context) error {
	err := i.inTurn(ctx, func(_ context.Context, freezer *cgroup.Freezer) error {
		if err := os.RemoveAll(i.pausedPath()); err != nil {
			return err
		}
		return freezer.Thaw()
	})
	if err != nil {
		return fmt.Errorf("resume container %s: %w", i.record.ID, err)
	}
	return nil
}

func (i *instance) pausedPath() string { return filepath.Join(i.record.StateDir, pausedFile) }

// paused reports whether the container is paused by Pause.
func (i *instance) paused() (bool, error) {
	_, err := os.Lstat(i.pausedPath())
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// inTurn calls f when nothing else changes how the container is. The context
// that f gets ends with the container, too. An error that is backend.ErrGone
// says that the container has ended.
func (i *instance) inTurn(ctx context.Context, f func(context.Context, *cgroup.Freezer) error) error {
	if err := i.enter(ctx); err != nil {
		return err
	}
	defer i.leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(i.life, cancel)()
	if i.life.Err() != nil {
		return backend.ErrGone
	}
	freezer, err := cgroup.OpenFreezer(i.backend.prefix, i.record.group())
	if err == nil {
		err = f(ctx, freezer)
	}
	if err != nil && i.life.Err() != nil {
		err = fmt.Errorf("%w: %w", backend.ErrGone, err)
	}
	return err
}

// still calls f while the container stands still. One that ran before goes on
// afterwards, whatever f did. It is called in turn.
func (i *instance) still(ctx context.Context, freezer *cgroup.Freezer, f func() error) error {
	paused, err := i.paused()
	if err != nil {
		return err
	}
	if paused {
		return f()
	}
	if err := freezer.Freeze(ctx); err != nil {
		return err
	}
	return errors.Join(f(), freezer.Thaw())
}

// restoreMotion brings a container that was found again to what it was meant to
// be, as a process may have been killed while it was about to change that.
func (i *instance) restoreMotion(ctx context.Context) error {
	if err := thawDisk(i.record.Loop, i.diskPath()); err != nil {
		i.backend.log.Warn("cannot look whether a sandbox's disk stands still", "sandbox", i.record.ID, "error", err)
	}
	err := i.inTurn(ctx, func(ctx context.Context, freezer *cgroup.Freezer) error {
		paused, err := i.paused()
		switch {
		case err != nil:
			return err
		case paused:
			return freezer.Freeze(ctx)
		}
		return freezer.Thaw()
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing can be stopped here, so nothing was
	}
	return err
}

func (i *instance) diskPath() string { return filepath.Join(i.record.StateDir, diskFile) }

// snapshotData is what is in Snapshot.Data.
type snapshotData struct {
	DiskSize int64 `json:"disk_size"` // of the disk's file, in bytes with its holes
}

// Snapshot copies the container's disk. The copy is a whole file system that
// was unmounted cleanly.
func (i *instance) Snapshot(ctx context.Context, o backend.SnapshotOptions) (backend.Snapshot, error) {
	s, err := i.snapshot(ctx, o)
	if err != nil {
		return s, fmt.Errorf("snapshot of container %s: %w", i.record.ID, err)
	}
	return s, nil
}

func (i *instance) snapshot(ctx context.Context, o backend.SnapshotOptions) (s backend.Snapshot, err error) {
	if o.Memory {
		return s, errors.New("containers have no snapshots with memory")
	}
	top, err := openMounted(i.record.Loop, i.diskPath())
	if err != nil {
		return s, i.goneFor(err)
	}
	to := filepath.Join(o.Dir, diskFile)
	err = i.inTurn(ctx, func(ctx context.Context, freezer *cgroup.Freezer) error {
		// Most of what is to be written is written while the container works,
		// and what the kernel waits for the first time, some 40 ms, it does not
		// wait for again a moment later.
		if err := errors.Join(unix.Syncfs(int(top.Fd())), quiesce(top)); err != nil {
			return fmt.Errorf("write out the disk: %w", err)
		}
		return i.still(ctx, freezer, func() error { return i.copyDisk(ctx, top, to) })
	})
	if err := errors.Join(err, top.Close()); err != nil {
		return s, err
	}
	var st unix.Stat_t
	err = i.backend.repair(ctx, to)
	if err == nil {
		err = unix.Stat(to, &st)
	}
	if err != nil {
		return s, errors.Join(err, os.Remove(to))
	}
	s = backend.Snapshot{Backend: sandbox.Container, Dir: o.Dir, Limits: i.record.Limits, Size: st.Blocks * 512}
	s.Data, err = json.Marshal(snapshotData{DiskSize: st.Size})
	return s, err
}

// copyDisk copies the disk, top being the top directory of its file system, when
// the container stands still.
func (i *instance) copyDisk(ctx context.Context, top *os.File, to string) error {
	if err := quiesce(top); err != nil {
		return err
	}
	how, err := reflink.Copy(ctx, to, i.diskPath())
	if err == nil && how == reflink.Copied {
		i.backend.warned.Do(func() {
			i.backend.log.Warn("snapshots of containers are whole copies of their disks; state on XFS or btrfs makes them cheap",
				"directory", filepath.Dir(to))
		})
	}
	return err
}

// checkSnapshot returns the disk's file of a snapshot that a container with
// limits can begin with.
func checkSnapshot(s backend.Snapshot, limits sandbox.Limits) (string, error) {
	if s.Backend != sandbox.Container || s.Memory {
		return "", fmt.Errorf("begin with a snapshot of backend %q, with memory: %t; containers take their own of files only", s.Backend, s.Memory)
	}
	if s.Limits.DiskMB != limits.DiskMB {
		return "", fmt.Errorf("begin with a snapshot of a disk of %d MiB; the limit is %d", s.Limits.DiskMB, limits.DiskMB)
	}
	var data snapshotData
	if err := json.Unmarshal(s.Data, &data); err != nil {
		return "", fmt.Errorf("begin with a snapshot: read its data: %w", err)
	}
	path := filepath.Join(s.Dir, diskFile)
	info, err := os.Stat(path)
	if err != nil {
		return "", fmt.Errorf("begin with a snapshot: %w", err)
	}
	if info.Size() != data.DiskSize {
		return "", fmt.Errorf("the snapshot's disk %s has %d bytes and had %d: it is damaged", path, info.Size(), data.DiskSize)
	}
	return path, nil
}

// Diff writes the container's changed files.
func (i *instance) Diff(ctx context.Context, w *os.File) error {
	top, err := openMounted(i.record.Loop, i.diskPath())
	if err != nil {
		return fmt.Errorf("changed files of container %s: %w", i.record.ID, i.goneFor(err))
	}
	defer top.Close()
	err = i.inTurn(ctx, func(ctx context.Context, freezer *cgroup.Freezer) error {
		// What reads slowly, or not at all, must not hold up a Destroy.
		defer context.AfterFunc(ctx, func() {
			_ = w.SetWriteDeadline(time.Unix(1, 0)) // a plain file has none, and needs none
		})()
		dir := fmt.Sprintf("/proc/self/fd/%d/%s", top.Fd(), upperDir)
		return i.still(ctx, freezer, func() error { return upper.Pack(ctx, w, dir, ownMounts()) })
	})
	if err != nil {
		return fmt.Errorf("changed files of container %s: %w", i.record.ID, err)
	}
	return nil
}

// ownMounts returns the places where a container has mounts of the backend's
// own, without the first slash.
func ownMounts() []string {
	own := []string{strings.TrimPrefix(backend.AgentDir, "/")}
	for _, m := range ocispec.Build(ocispec.Options{CgroupNS: true}).Mounts {
		own = append(own, strings.TrimPrefix(m.Destination, "/"))
	}
	return own
}

// goneFor makes backend.ErrGone of an error when the container has ended.
func (i *instance) goneFor(err error) error {
	if i.life.Err() != nil {
		return fmt.Errorf("%w: %w", backend.ErrGone, err)
	}
	return err
}
