package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// A container that was made ahead has a name of its own, which its control group
// and the runtime's record keep when it becomes a sandbox's. Its files are in
// "ready" until then, in a directory of its name, and become the sandbox's state
// directory. Beside them a link of its name leads to the sandbox's ID, so that a
// later run knows whose it is.

// key is what is fixed when a container is made. Containers of the same key can
// become the same sandboxes.
type key struct {
	rootfs backend.Rootfs
	agent  backend.Agent
	limits sandbox.Limits
}

func keyOf(cfg backend.Config) key { return key{cfg.Rootfs, cfg.Agent, cfg.Limits} }

// ready is a container that runs its agent and is no sandbox's.
type ready struct {
	made    record
	process *process
}

func (b *Backend) readyDir() string { return filepath.Join(b.dir, "ready") }

// filesOf returns the directory of a container that serves no sandbox yet.
func (b *Backend) filesOf(name sandbox.ID) string { return filepath.Join(b.readyDir(), string(name)) }

// link returns the path of the symbolic link whose target is the ID of the
// sandbox that a container serves.
func (b *Backend) link(name sandbox.ID) string {
	return filepath.Join(b.readyDir(), string(name)+linkSuffix)
}

const linkSuffix = ".id"

// know notes which sandbox a container of this run serves, "" for none.
func (b *Backend) know(name, id sandbox.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.serves[name] = id
}

func (b *Backend) unknow(name sandbox.ID) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.serves, name)
}

// servedBy returns the sandbox that a container serves. A container of this
// run, which ours is about, may serve none.
func (b *Backend) servedBy(name sandbox.ID) (id sandbox.ID, ours bool) {
	b.mu.Lock()
	id, ours = b.serves[name]
	b.mu.Unlock()
	if ours {
		return id, true
	}
	if target, err := os.Readlink(b.link(name)); err == nil {
		return sandbox.ID(target), false
	}
	return name, false
}

// prepare makes a container ahead.
func (b *Backend) prepare(ctx context.Context, k key) (_ *ready, err error) {
	r, err := b.chosen(ctx, k.agent)
	if err != nil {
		return nil, err
	}
	name := sandbox.NewID()
	b.know(name, "")
	c := &ready{made: record{ID: name, StateDir: b.filesOf(name)}}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make a container ahead: %w", err), b.dismiss(c))
		}
	}()
	slot, err := b.slots.Lend(ctx)
	if err != nil {
		return nil, err
	}
	c.made.Slot = slot
	if err := os.MkdirAll(c.made.StateDir, 0o700); err != nil {
		return nil, err
	}
	if c.made, err = b.build(ctx, r, backend.Config{
		ID: name, Hostname: string(name), Limits: k.limits, Rootfs: k.rootfs, Agent: k.agent, Slot: slot, StateDir: c.made.StateDir,
	}); err != nil {
		return nil, err
	}
	c.process, err = openProcess(c.made.Process)
	return c, err
}

// dismiss ends a container that is no sandbox's and gives back its slot.
func (b *Backend) dismiss(c *ready) error {
	if c.process != nil {
		c.process.fd.Close()
	}
	name := c.made.name()
	err := b.remove(c.made)
	if err == nil {
		err = errors.Join(os.RemoveAll(b.filesOf(name)), os.RemoveAll(b.link(name)))
	}
	b.unknow(name)
	if c.made.Slot.Name != "" {
		b.slots.Release(c.made.Slot)
	}
	return err
}

// ended reports whether a container has come to its end.
func (c *ready) ended() bool {
	done, err := c.process.ended()
	return err != nil || done
}

// take makes a container that is ready the one of cfg, nil when none is.
func (b *Backend) take(cfg backend.Config) (*instance, error) {
	c, ok := b.pool.Take(keyOf(cfg), time.Now())
	if !ok {
		return nil, nil
	}
	i, err := b.turn(c, cfg)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("take a container that was made ahead: %w", err), b.dismiss(c))
	}
	c.process.fd.Close()
	b.slots.Hand(c.made.Slot)
	return i, nil
}

// turn makes a container that is ready the one of cfg.
func (b *Backend) turn(c *ready, cfg backend.Config) (*instance, error) {
	name := c.made.ID
	b.know(name, cfg.ID)
	if err := os.Symlink(string(cfg.ID), b.link(name)); err != nil {
		return nil, fmt.Errorf("note whose it is: %w", err)
	}
	if err := unix.Rename(c.made.StateDir, cfg.StateDir); err != nil { // os.Rename refuses a directory that is there
		return nil, fmt.Errorf("make its files the state directory: %w", err)
	}
	c.made.ID, c.made.Name, c.made.StateDir = cfg.ID, name, cfg.StateDir
	if err := c.process.setHostname(cfg.Hostname); err != nil {
		return nil, err
	}
	return b.adopt(c.made)
}

// setHostname sets the name that a container's host has inside. The agent cannot.
func (p *process) setHostname(name string) error {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	result := make(chan error)
	go func() {
		runtime.LockOSThread()
		own, err := unix.Open("/proc/thread-self/ns/uts", unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			runtime.UnlockOSThread()
			result <- err
			return
		}
		defer unix.Close(own)
		var serr error
		err = conn.Control(func(fd uintptr) {
			if serr = unix.Setns(int(fd), unix.CLONE_NEWUTS); serr == nil {
				serr = unix.Sethostname([]byte(name))
			}
		})
		if back := unix.Setns(own, unix.CLONE_NEWUTS); back == nil {
			runtime.UnlockOSThread() // or the thread ends with this goroutine
		} else {
			serr = errors.Join(serr, back)
		}
		result <- errors.Join(err, serr)
	}()
	if err := <-result; err != nil {
		return fmt.Errorf("set the host name %q: %w", name, err)
	}
	return nil
}

// Forget ends what is held ready of an image, by its directory. Containers of
// sandboxes go on.
func (b *Backend) Forget(dir string) {
	b.pool.Forget(func(k key) bool {
		below, err := filepath.Rel(dir, k.rootfs.Tree)
		return err == nil && filepath.IsLocal(below)
	})
}

// SlotOf returns the network slot of a container.
func (b *Backend) SlotOf(i backend.Instance) backend.Slot { return i.(*instance).record.Slot }

// leftReady lists the names of containers that have files or a link in "ready".
func (b *Backend) leftReady() ([]string, error) {
	entries, err := os.ReadDir(b.readyDir())
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		files = append(files, e.Name())
	}
	return files, nil
}

// sweep ends the containers that a killed run held ready or had on their way.
// They have files here and no link; nobody can want them any more.
func (b *Backend) sweep() {
	files, err := b.leftReady()
	if err != nil {
		b.log.Error("cannot look for what an earlier run held ready", "error", err)
		return
	}
	for _, file := range files {
		name := sandbox.ID(file)
		if strings.HasSuffix(file, linkSuffix) {
			continue
		}
		if id, ours := b.servedBy(name); ours || id != name {
			continue
		}
		if err := b.dismiss(&ready{made: record{ID: name, StateDir: b.filesOf(name)}}); err != nil {
			b.log.Error("cannot end what an earlier run held ready", "container", name, "error", err)
		}
	}
}
