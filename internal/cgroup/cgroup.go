// Package cgroup puts a machine's host processes in a control group with the
// machine's limits, on cgroup v1, v2 and the hybrid of both: each controller is
// used where this host has it mounted. Groups are directories
// <mount>/<parent>/<name>; the parent is the edge's own prefix.
//
// It knows nothing of sandboxes beyond their limits, and keeps no record: what
// exists on the host is the record.
package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// Group is one control group: a directory per hierarchy of the host.
type Group struct {
	parent, name string
	dirs         []dir
}

// dir is a group's directory in one hierarchy.
type dir struct {
	hierarchy
	path string
}

// New makes a group with limits. A limit that is 0 or less is not set. A group
// of that name must not exist.
func New(parent, name string, limits sandbox.Limits) (*Group, error) {
	h, err := mounted()
	if err != nil {
		return nil, err
	}
	return create(h, parent, name, limits)
}

func create(h []hierarchy, parent, name string, limits sandbox.Limits) (*Group, error) {
	if err := checkNames(parent, name); err != nil {
		return nil, err
	}
	g := open(h, parent, name)
	for _, d := range g.dirs {
		if err := d.make(parent); err != nil {
			err = fmt.Errorf("make control group %s/%s: %w", parent, name, err)
			if errors.Is(err, fs.ErrExist) {
				return nil, err // somebody else's
			}
			return nil, errors.Join(err, g.Remove())
		}
		if err := d.limit(limits); err != nil {
			return nil, errors.Join(fmt.Errorf("limit control group %s/%s: %w", parent, name, err), g.Remove())
		}
	}
	return g, nil
}

// make makes the group's directory and what it lies in. RemoveParent, of
// another backend of the edge perhaps, may come in between.
func (d dir) make(parent string) error {
	for tries := 0; ; tries++ {
		if err := d.prepare(parent); err != nil {
			return err
		}
		err := os.Mkdir(d.path, 0o755)
		if !errors.Is(err, fs.ErrNotExist) || tries == 10 {
			return err
		}
	}
}

// Open returns a group that was made before. An error that is fs.ErrNotExist
// says that there is none.
func Open(parent, name string) (*Group, error) {
	h, err := mounted()
	if err != nil {
		return nil, err
	}
	if err := checkNames(parent, name); err != nil {
		return nil, err
	}
	g := open(h, parent, name)
	if !g.exists() {
		return nil, fmt.Errorf("control group %s/%s: %w", parent, name, fs.ErrNotExist)
	}
	return g, nil
}

func open(h []hierarchy, parent, name string) *Group {
	g := &Group{parent: parent, name: name}
	for _, x := range h {
		g.dirs = append(g.dirs, dir{hierarchy: x, path: filepath.Join(x.mount, parent, name)})
	}
	return g
}

// SetLimits changes the limits that are more than 0 and leaves the others.
func (g *Group) SetLimits(limits sandbox.Limits) error {
	for _, d := range g.dirs {
		if err := d.limit(limits); err != nil {
			return fmt.Errorf("limit control group %s/%s: %w", g.parent, g.name, err)
		}
	}
	return nil
}

func (g *Group) exists() bool {
	return slices.ContainsFunc(g.dirs, func(d dir) bool {
		_, err := os.Stat(d.path)
		return err == nil
	})
}

func checkNames(names ...string) error {
	for _, n := range names {
		if n == "" || n == "." || n == ".." || strings.ContainsAny(n, "/\n") {
			return fmt.Errorf("control group %q: not a name of a group", n)
		}
	}
	return nil
}

// Name returns the group's name below its parent.
func (g *Group) Name() string { return g.name }

// Paths returns the group's directories.
func (g *Group) Paths() []string {
	var all []string
	for _, d := range g.dirs {
		all = append(all, d.path)
	}
	return all
}

// Add moves a process with all its threads into the group.
func (g *Group) Add(pid int) error {
	for _, d := range g.dirs {
		if err := write(d.path, "cgroup.procs", strconv.Itoa(pid)); err != nil {
			return fmt.Errorf("add process %d to control group: %w", pid, err)
		}
	}
	return nil
}

// Start runs start so that a process it starts from the calling goroutine is
// born in the group, which costs less than a move of a process that has
// threads. On cgroup v2 that takes more: start gets the group's directory,
// for CLONE_INTO_CGROUP; on v1 it gets nil and nothing is left to do.
func (g *Group) Start(start func(v2 *os.File) error) error {
	var v2 *os.File
	for _, d := range g.dirs {
		if !d.v2 {
			continue
		}
		f, err := os.Open(d.path)
		if err != nil {
			return err
		}
		defer f.Close()
		v2 = f
	}
	// A child is born where the thread is that starts it.
	runtime.LockOSThread()
	back, err := g.enter()
	if err == nil {
		err = start(v2)
	}
	if berr := back(); berr != nil {
		// The thread stays locked: nothing else may run in the group.
		return errors.Join(err, berr)
	}
	runtime.UnlockOSThread()
	return err
}

// enter puts the calling thread in the group's v1 directories. The function
// that it returns, always, brings the thread back.
func (g *Group) enter() (back func() error, err error) {
	var left []string // "tasks" files that the thread came from
	back = func() error {
		var errs []error
		for _, path := range left {
			errs = append(errs, os.WriteFile(path, []byte("0"), 0))
		}
		return errors.Join(errs...)
	}
	own, err := ownGroups("/proc/thread-self/cgroup")
	if err != nil {
		return back, err
	}
	for _, d := range g.dirs {
		if d.v2 {
			continue
		}
		if err := write(d.path, "tasks", "0"); err != nil {
			return back, fmt.Errorf("enter control group: %w", err)
		}
		left = append(left, filepath.Join(d.place(own[d.controllers[0]]), "tasks"))
	}
	return back, nil
}

// Usage returns the CPU time used since the group was made, the memory in use
// in bytes without file cache that is not in active use, and the number of
// threads.
func (g *Group) Usage() (cpu time.Duration, memory, pids int64, err error) {
	for _, d := range g.dirs {
		for _, c := range d.controllers {
			var e error
			switch c {
			case "cpuacct":
				var ns int64
				ns, e = readInt(d.path, "cpuacct.usage")
				cpu = time.Duration(ns)
			case "cpu":
				if d.v2 {
					var us int64
					us, e = readField(d.path, "cpu.stat", "usage_usec")
					cpu = time.Duration(us) * time.Microsecond
				}
			case "memory":
				memory, e = d.memory()
			case "pids":
				pids, e = readInt(d.path, "pids.current")
			}
			if e != nil {
				return 0, 0, 0, fmt.Errorf("usage of control group %s/%s: %w", g.parent, g.name, e)
			}
		}
	}
	return cpu, memory, pids, nil
}

func (d dir) memory() (int64, error) {
	file, field := "memory.usage_in_bytes", "total_inactive_file"
	if d.v2 {
		file, field = "memory.current", "inactive_file"
	}
	all, err := readInt(d.path, file)
	if err != nil {
		return 0, err
	}
	idle, err := readField(d.path, "memory.stat", field)
	if err != nil {
		return 0, err
	}
	return max(all-idle, 0), nil
}

// SharedMemory returns how much of the memory in use is shared memory: that of
// tmpfs and of files that are in memory only, in bytes.
func (g *Group) SharedMemory() (int64, error) {
	for _, d := range g.dirs {
		if !slices.Contains(d.controllers, "memory") {
			continue
		}
		n, err := readField(d.path, "memory.stat", "shmem")
		if err != nil {
			return 0, fmt.Errorf("shared memory of control group %s/%s: %w", g.parent, g.name, err)
		}
		return n, nil
	}
	return 0, nil
}

// OOMKilled reports whether the kernel has killed a process of the group for
// the group's memory limit.
func (g *Group) OOMKilled() (bool, error) {
	for _, d := range g.dirs {
		if !slices.Contains(d.controllers, "memory") {
			continue
		}
		file := "memory.oom_control"
		if d.v2 {
			file = "memory.events"
		}
		n, err := readField(d.path, file, "oom_kill")
		if err != nil {
			return false, fmt.Errorf("out-of-memory count of control group %s/%s: %w", g.parent, g.name, err)
		}
		return n > 0, nil
	}
	return false, nil
}

// KillTogether makes the kernel kill all processes of the group when it kills
// one for memory, where it can do that (v2).
func (g *Group) KillTogether() error {
	for _, d := range g.dirs {
		if d.v2 && slices.Contains(d.controllers, "memory") {
			return write(d.path, "memory.oom.group", "1")
		}
	}
	return nil
}

// Processes returns the ids of the group's processes, sorted.
func (g *Group) Processes() ([]int, error) {
	var pids []int
	for _, d := range g.dirs {
		b, err := os.ReadFile(filepath.Join(d.path, "cgroup.procs"))
		if err != nil && !gone(err) {
			return nil, err
		}
		for _, f := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(f); err == nil && pid > 0 {
				pids = append(pids, pid)
			}
		}
	}
	slices.Sort(pids)
	return slices.Compact(pids), nil
}

// Kill kills the group's processes with SIGKILL. It does not wait for their end.
func (g *Group) Kill() error {
	for _, d := range g.dirs {
		if d.v2 && write(d.path, "cgroup.kill", "1") == nil && len(g.dirs) == 1 {
			return nil
		}
	}
	pids, err := g.Processes()
	if err != nil {
		return fmt.Errorf("kill control group %s/%s: %w", g.parent, g.name, err)
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return fmt.Errorf("kill process %d: %w", pid, err)
		}
	}
	return nil
}

// removeWait bounds how long Remove waits for killed processes to be gone. One
// that the kernel cannot end, such as one stuck in a disk driver, takes longer.
const removeWait = 10 * time.Second

// Remove kills the group's members and deletes the group. A group that does
// not exist is no error.
func (g *Group) Remove() error {
	ctx, cancel := context.WithTimeout(context.Background(), removeWait)
	defer cancel()
	for pause := 200 * time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		err := g.rmdir()
		if err == nil {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) {
			return fmt.Errorf("remove control group %s/%s: %w", g.parent, g.name, err)
		}
		// Again and again: a member may have forked while it was killed.
		if kerr := g.Kill(); kerr != nil {
			return kerr
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("remove control group %s/%s: its processes do not end: %w", g.parent, g.name, err)
		case <-time.After(pause):
		}
	}
}

func (g *Group) rmdir() error {
	var errs []error
	for _, d := range g.dirs {
		errs = append(errs, rmtree(d.path))
	}
	return errors.Join(errs...)
}

// rmtree removes a group's directory and those below it.
func rmtree(path string) error {
	err := unix.Rmdir(path)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	entries, rerr := os.ReadDir(path)
	if rerr != nil {
		if gone(rerr) {
			return nil
		}
		return rerr
	}
	below := false
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		below = true
		if err := rmtree(filepath.Join(path, e.Name())); err != nil {
			return err
		}
	}
	if below {
		err = unix.Rmdir(path)
	}
	if err == nil || err == unix.ENOENT {
		return nil
	}
	return &fs.PathError{Op: "rmdir", Path: path, Err: err}
}

// List returns the names of the groups below parent, sorted.
func List(parent string) []string {
	h, err := mounted()
	if err != nil {
		return nil
	}
	var names []string
	for _, x := range h {
		entries, err := os.ReadDir(filepath.Join(x.mount, parent))
		if err != nil {
			continue
		}
		for _, e := range entries {
			if e.IsDir() {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// RemoveParent deletes the parent of groups, unless a group is left below it.
func RemoveParent(parent string) error {
	h, err := mounted()
	if err != nil {
		return err
	}
	if err := checkNames(parent); err != nil {
		return err
	}
	var errs []error
	for _, x := range h {
		err := unix.Rmdir(filepath.Join(x.mount, parent))
		if err != nil && err != unix.ENOENT && err != unix.EBUSY && err != unix.ENOTEMPTY {
			errs = append(errs, fmt.Errorf("remove control group %s: %w", parent, err))
		}
	}
	return errors.Join(errs...)
}

// gone reports whether a group vanished while it was looked at.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}
