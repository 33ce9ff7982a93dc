package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/takeover"
)

// Audit lists what containers left. Mounts are not looked for: they exist in
// containers only, and so only with their processes.
func (b *Backend) Audit(ctx context.Context, known []sandbox.ID) ([]backend.Leftover, error) {
	expected := func(name sandbox.ID) (sandbox.ID, bool) {
		id, ours := b.servedBy(name)
		return id, ours && id == "" || slices.Contains(known, id)
	}
	var all []backend.Leftover
	for _, look := range []func(owner) ([]backend.Leftover, error){
		b.auditGroups, b.auditRecords, b.auditLoops, b.auditFiles,
	} {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		found, err := look(expected)
		if err != nil {
			return nil, fmt.Errorf("look for what containers left: %w", err)
		}
		all = append(all, found...)
	}
	return all, nil
}

// owner returns the sandbox that a container serves, by the container's name,
// and whether the container is to be there.
type owner func(name sandbox.ID) (sandbox.ID, bool)

// auditGroups lists processes and then the groups that they are in.
func (b *Backend) auditGroups(expected owner) ([]backend.Leftover, error) {
	names, err := b.groups()
	if err != nil {
		return nil, err
	}
	mounts, err := hierarchies()
	if err != nil {
		return nil, err
	}
	var processes, groups []backend.Leftover
	for _, name := range names {
		id, ok := expected(sandbox.ID(strings.TrimPrefix(name, groupOf(""))))
		if ok {
			continue
		}
		groups = append(groups, backend.Leftover{Kind: backend.LeftoverCgroup, Name: b.prefix + "/" + name, ID: id})
		pids := map[string]bool{}
		for _, m := range mounts {
			text, err := os.ReadFile(filepath.Join(m, b.prefix, name, "cgroup.procs"))
			if err != nil {
				continue // not there, or gone since
			}
			for _, pid := range strings.Fields(string(text)) {
				if !pids[pid] {
					pids[pid] = true
					comm, _ := os.ReadFile("/proc/" + pid + "/comm")
					processes = append(processes, backend.Leftover{
						Kind: backend.LeftoverProcess, Name: pid, ID: id, Detail: strings.TrimSpace(string(comm)),
					})
				}
			}
		}
	}
	return append(processes, groups...), nil
}

func (b *Backend) auditRecords(expected owner) ([]backend.Leftover, error) {
	var all []backend.Leftover
	for _, name := range runtimes {
		r := ociRuntime{name: name, root: filepath.Join(b.dir, name)}
		ids, err := r.records()
		if err != nil {
			return nil, err
		}
		for _, id := range ids {
			if serves, ok := expected(sandbox.ID(id)); !ok {
				all = append(all, backend.Leftover{
					Kind: backend.LeftoverContainer, Name: filepath.Join(r.root, id), ID: serves, Detail: "a record of " + name,
				})
			}
		}
	}
	return all, nil
}

// auditLoops lists loop devices whose file is in the state directory: a
// sandbox's disk.ext4, or one of the pool's.
func (b *Backend) auditLoops(expected owner) ([]backend.Leftover, error) {
	devices, err := loopDevices()
	if err != nil {
		return nil, err
	}
	var all []backend.Leftover
	for dev, file := range devices {
		path := strings.TrimSuffix(file, " (deleted)")
		if !strings.HasPrefix(path, b.state+"/") || filepath.Ext(path) != ".ext4" {
			continue
		}
		l := backend.Leftover{Kind: backend.LeftoverLoop, Name: dev, Detail: file}
		wanted := false
		for part := range strings.SplitSeq(path, "/") {
			if id, err := sandbox.ParseID(part); err == nil {
				l.ID, wanted = expected(id)
			}
		}
		if path == file && (wanted || b.disks.holds(path)) {
			continue
		}
		all = append(all, l)
	}
	slices.SortFunc(all, func(x, y backend.Leftover) int { return strings.Compare(x.Name, y.Name) })
	return all, nil
}

// auditFiles lists disks that a pool of before, or of another process that
// does not live, made ahead, and trials of such a process.
func (b *Backend) auditFiles(expected owner) ([]backend.Leftover, error) {
	var all []backend.Leftover
	stale, err := staleDisks(b.disks.templates.dir, b.disks.holds, 0)
	if err != nil {
		return nil, err
	}
	trials, err := filepath.Glob(filepath.Join(b.dir, "trial-*"))
	if err != nil {
		return nil, err
	}
	for _, p := range trials {
		if _, ok := expected(sandbox.ID(strings.TrimPrefix(filepath.Base(p), "trial-"))); !ok {
			stale = append(stale, p)
		}
	}
	for _, p := range stale {
		all = append(all, backend.Leftover{Kind: backend.LeftoverFile, Name: p, Detail: "a disk or trial of an earlier process"})
	}
	ready, err := b.leftReady()
	if err != nil {
		return nil, err
	}
	for _, file := range ready {
		if id, ok := expected(sandbox.ID(strings.TrimSuffix(file, linkSuffix))); !ok {
			all = append(all, backend.Leftover{
				Kind: backend.LeftoverFile, Name: filepath.Join(b.readyDir(), file), ID: id, Detail: "of a container that was made ahead",
			})
		}
	}
	return all, nil
}

// Remove removes a thing that Audit listed.
func (b *Backend) Remove(_ context.Context, l backend.Leftover) error {
	switch l.Kind {
	case backend.LeftoverProcess:
		pid, err := strconv.Atoi(l.Name)
		if err != nil || pid < 2 {
			return fmt.Errorf("remove process %q: not a number of one", l.Name)
		}
		if in, err := b.serving(pid, l.ID); err != nil || !in {
			return err // it ended, and its number may be another's now
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return fmt.Errorf("kill process %d: %w", pid, err)
		}
		return nil
	case backend.LeftoverCgroup:
		name, ok := strings.CutPrefix(l.Name, b.prefix+"/"+groupOf(""))
		if !ok || strings.Contains(name, "/") {
			return fmt.Errorf("remove control group %q: not one of a container here", l.Name)
		}
		return b.removeGroups(groupOf(sandbox.ID(name)))
	case backend.LeftoverLoop:
		// A file system that a killed process had stopped keeps its device.
		if file, err := backingFile(l.Name); err == nil {
			_ = thawDisk(l.Name, file) // it is mounted no more, as a rule
		}
		return detachLoop(l.Name)
	case backend.LeftoverContainer, backend.LeftoverFile:
		if !strings.HasPrefix(filepath.Clean(l.Name), b.dir+"/") {
			return fmt.Errorf("remove %s %q: not in %s", l.Kind, l.Name, b.dir)
		}
		return os.RemoveAll(l.Name)
	}
	return fmt.Errorf("remove %s %q: containers leave none", l.Kind, l.Name)
}

// serving reports whether a process is in a container that serves a sandbox.
func (b *Backend) serving(pid int, id sandbox.ID) (bool, error) {
	names, err := b.groups()
	return err == nil && slices.ContainsFunc(names, func(name string) bool {
		served, _ := b.servedBy(sandbox.ID(strings.TrimPrefix(name, groupOf(""))))
		return served == id && b.inGroups(pid, name) == nil
	}), err
}

// staleDisks returns the ready disks in dir of processes that do not live any
// more. Those in use here are not touched: to try their lock would disturb. For
// what a killed process left locked, by a child or a loop device that the kernel
// has not let go of yet, it waits up to the patience.
func staleDisks(dir string, inUse func(path string) bool, patience time.Duration) ([]string, error) {
	found, err := filepath.Glob(filepath.Join(dir, "ready-*.ext4"))
	if err != nil {
		return nil, err
	}
	var stale []string
	for _, p := range found {
		if inUse(p) {
			continue
		}
		f, err := os.Open(p)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, err
		}
		wait := patience
		if makerLives(p) {
			wait = 0
		}
		lock := func() error { return unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB) }
		if takeover.Wait(wait, lock, unix.EWOULDBLOCK, unix.EINTR) == nil {
			stale = append(stale, p)
		}
		f.Close()
	}
	return stale, nil
}

// makerLives reports whether the process that made a ready disk lives, or another
// that has its number now. See diskPool.create.
func makerLives(path string) bool {
	var pid int
	_, err := fmt.Sscanf(filepath.Base(path), "ready-%d-", &pid)
	return err != nil || unix.Kill(pid, 0) != unix.ESRCH
}

// sweepDisks removes the ready disks of processes that do not live any more.
func sweepDisks(dir string) error {
	stale, err := staleDisks(dir, func(string) bool { return false }, takeover.Patience)
	for _, p := range stale {
		err = errors.Join(err, os.Remove(p))
	}
	return err
}
