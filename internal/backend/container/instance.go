package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/netslot"
)

// instance is one container.
type instance struct {
	backend *Backend
	record  record
	handle  backend.Handle
	process *process

	destroying atomic.Bool // the end is our own doing
	done       chan struct{}
	exit       backend.Exit // how it ended; set before done is closed
	lost       error        // why that is not known; set before done is closed

	// turn holds one while a method changes how the container is: Pause, Resume,
	// Snapshot, Diff and Destroy come one after another.
	turn    chan struct{}
	life    context.Context    // done when it was destroyed or has ended
	end     context.CancelFunc // ends life
	removed bool               // changed in turn only
}

var _ backend.Instance = (*instance)(nil)

// enter waits for the caller's turn, which leave ends.
func (i *instance) enter(ctx context.Context) error {
	select {
	case i.turn <- struct{}{}:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (i *instance) leave() { <-i.turn }

// Handle returns what Recover needs.
func (i *instance) Handle() backend.Handle { return i.handle }

// Dial connects to a TCP port of the container.
func (i *instance) Dial(ctx context.Context, port int) (net.Conn, error) {
	return netslot.Dial(ctx, i.record.Slot, port)
}

// Wait returns when the container has ended.
func (i *instance) Wait(ctx context.Context) (backend.Exit, error) {
	select {
	case <-i.done:
		return i.exit, i.lost
	case <-ctx.Done():
		return backend.Exit{}, ctx.Err()
	}
}

// watch waits for the container's end and finds out its cause.
func (i *instance) watch() {
	defer i.backend.watch.Done()
	// A disk that the pool had not ready does it now, when nobody waits.
	if err := bypassCache(i.record.Loop); err != nil {
		i.backend.log.Warn("a sandbox's disk is in the host's memory twice", "sandbox", i.record.ID, "error", err)
	}
	if err := i.process.wait(); err != nil {
		i.lost = fmt.Errorf("container %s is not watched any more: %w", i.record.ID, err)
	} else {
		i.exit = i.cause()
		i.end()
	}
	i.process.fd.Close()
	i.backend.mu.Lock()
	if i.backend.live[i.record.ID] == i {
		delete(i.backend.live, i.record.ID)
	}
	i.backend.mu.Unlock()
	close(i.done)
}

// cause says why the container ended. The kernel kills the agent for memory
// only when nothing larger is in the container; a command that it killed
// before is that command's end, not the container's.
func (i *instance) cause() backend.Exit {
	if i.destroying.Load() {
		return backend.Exit{Detail: "it was destroyed"}
	}
	signal, known := i.process.signal()
	switch {
	case (!known || signal == unix.SIGKILL) && i.outOfMemory():
		return backend.Exit{OutOfMemory: true, Detail: "the kernel killed its agent for the memory limit"}
	case known && signal > 0:
		return backend.Exit{Detail: fmt.Sprintf("its agent was ended by signal %d (%s)", signal, signal)}
	case known:
		return backend.Exit{Detail: "its agent exited"}
	}
	return backend.Exit{Detail: "its agent ended"}
}

func (i *instance) outOfMemory() bool {
	group, err := cgroup.Open(i.backend.prefix, i.record.group())
	if err != nil {
		return false
	}
	killed, err := group.OOMKilled()
	return err == nil && killed
}

// Usage measures the container.
func (i *instance) Usage(context.Context) (backend.Usage, error) {
	group, err := cgroup.Open(i.backend.prefix, i.record.group())
	if err != nil {
		return backend.Usage{}, fmt.Errorf("usage of container %s: %w", i.record.ID, err)
	}
	var u backend.Usage
	if u.CPU, u.MemoryBytes, u.PIDs, err = group.Usage(); err != nil {
		return u, err
	}
	u.DiskBytes, err = i.diskUsage()
	return u, err
}

// diskUsage asks the container's own root: it shows the disk below it.
func (i *instance) diskUsage() (int64, error) {
	var st unix.Statfs_t
	err := unix.Statfs(fmt.Sprintf("/proc/%d/root", i.process.PID), &st)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, fmt.Errorf("disk usage of container %s: %w", i.record.ID, backend.ErrGone)
	}
	if err != nil {
		return 0, fmt.Errorf("disk usage of container %s: %w", i.record.ID, err)
	}
	return int64(st.Blocks-st.Bfree) * st.Bsize, nil
}

// Destroy ends the container and removes all it had.
func (i *instance) Destroy(ctx context.Context) error {
	i.end() // a snapshot that is being taken has no use any more
	if err := i.enter(ctx); err != nil {
		return fmt.Errorf("end container %s: %w", i.record.ID, err)
	}
	defer i.leave()
	if i.removed {
		return nil
	}
	i.destroying.Store(true)
	i.discardWrites()
	err := i.process.kill()
	if err == nil {
		err = i.backend.killGroups(i.record.group()) // it may stand still
	}
	if err != nil {
		return fmt.Errorf("end container %s: %w", i.record.ID, err)
	}
	select {
	case <-i.done: // or it is not watched any more; then remove waits for its end
	case <-ctx.Done():
		return fmt.Errorf("end container %s: %w", i.record.ID, ctx.Err())
	}
	if err := i.backend.remove(i.record); err != nil {
		return fmt.Errorf("remove container %s: %w", i.record.ID, err)
	}
	i.removed = true
	return nil
}

// discardWrites makes the container's end quick. One that fails makes it slow.
func (i *instance) discardWrites() {
	used, err := i.diskUsage()
	if err != nil {
		return // it has ended
	}
	if err := discardWrites(i.record.Loop, filepath.Join(i.record.StateDir, diskFile), used); err != nil {
		i.backend.log.Warn("the removal of a sandbox's disk waits for its writes", "sandbox", i.record.ID, "error", err)
	}
}

// remove removes what a container has on the host, in whatever condition it
// is, ending what still runs. It may be repeated.
func (b *Backend) remove(r record) error {
	errs := []error{b.removeGroups(r.group())}
	for _, rt := range findRuntimes(b.dir) {
		errs = append(errs, rt.forget(string(r.name())))
	}
	entries, err := os.ReadDir(r.StateDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	for _, e := range entries {
		errs = append(errs, os.RemoveAll(filepath.Join(r.StateDir, e.Name())))
	}
	if err := errors.Join(errs...); err != nil || r.Name == "" {
		return err
	}
	// Last: until then Audit needs it.
	if err := os.RemoveAll(b.link(r.Name)); err != nil {
		return err
	}
	b.unknow(r.Name)
	return nil
}

// pause waits for the time between two looks at something that has no event.
func pause(ctx context.Context) error {
	select {
	case <-time.After(time.Millisecond):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
