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
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/cgroup"
)

// hierarchies returns where this host has control groups mounted. A runtime
// makes a group in each of them, whether or not it limits anything.
var hierarchies = sync.OnceValues(func() ([]string, error) {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find control groups: %w", err)
	}
	var all []string
	for line := range strings.Lines(string(b)) {
		before, after, _ := strings.Cut(line, " - ")
		place := strings.Fields(before)
		if len(place) > 4 && (strings.HasPrefix(after, "cgroup ") || strings.HasPrefix(after, "cgroup2 ")) {
			all = append(all, place[4])
		}
	}
	return all, nil
})

// removeWait bounds how long removeGroups waits for killed processes to be
// gone. One that the kernel cannot end, such as one that waits for a disk, takes
// longer.
const removeWait = 10 * time.Second

// removeGroups ends a group's processes and removes it in all hierarchies. A
// group that does not exist is no error.
func (b *Backend) removeGroups(name string) error {
	mounts, err := hierarchies()
	if err != nil {
		return err
	}
	if err := b.killGroups(name); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), removeWait)
	defer cancel()
	for _, m := range mounts {
		path := filepath.Join(m, b.prefix, name)
		for {
			err := unix.Rmdir(path)
			if err == nil || err == unix.ENOENT {
				break
			}
			if err != unix.EBUSY {
				return fmt.Errorf("remove control group %s: %w", path, err)
			}
			// Again and again: a member may have forked while it was killed.
			if err := killGroup(path); err != nil {
				return err
			}
			if perr := pause(ctx); perr != nil {
				return fmt.Errorf("remove control group %s: its processes do not end: %w", path, err)
			}
		}
	}
	return nil
}

// killGroups kills the processes of a group where it can be stopped: one that
// stands still does not die by a signal alone. A group that does not exist, or
// cannot be stopped on this host, is no error.
func (b *Backend) killGroups(name string) error {
	freezer, err := cgroup.OpenFreezer(b.prefix, name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return freezer.Kill()
}

// killGroup kills the processes that are in a group's directory.
func killGroup(path string) error {
	text, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
	if err != nil {
		return nil // the group is gone
	}
	for _, f := range strings.Fields(string(text)) {
		pid, err := strconv.Atoi(f)
		if err != nil || pid < 2 {
			continue // of another PID namespace
		}
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
			return fmt.Errorf("kill process %d of control group %s: %w", pid, path, err)
		}
	}
	return nil
}

// removeParents removes the groups' parent where nothing is below it.
func (b *Backend) removeParents() {
	mounts, err := hierarchies()
	if err != nil {
		return
	}
	for _, m := range mounts {
		// It is not empty while another backend, or a container, uses it.
		_ = unix.Rmdir(filepath.Join(m, b.prefix))
	}
}

// groups returns the names of all groups of ours.
func (b *Backend) groups() ([]string, error) {
	mounts, err := hierarchies()
	if err != nil {
		return nil, err
	}
	var names []string
	for _, m := range mounts {
		entries, err := os.ReadDir(filepath.Join(m, b.prefix))
		if err != nil {
			continue // none there
		}
		for _, e := range entries {
			if e.IsDir() && strings.HasPrefix(e.Name(), groupOf("")) {
				names = append(names, e.Name())
			}
		}
	}
	slices.Sort(names)
	return slices.Compact(names), nil
}

// inGroups checks that the runtime put a process where its limits are.
func (b *Backend) inGroups(pid int, group string) error {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return fmt.Errorf("look at a container's control groups: %w", err)
	}
	where := map[string]string{}
	for line := range strings.Lines(string(text)) {
		if parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3); len(parts) == 3 {
			for _, c := range strings.Split(parts[1], ",") {
				where[c] = parts[2]
			}
		}
	}
	end := filepath.Join("/", b.prefix, group)
	for _, c := range []string{"cpu", "memory", "pids"} {
		path, v1 := where[c]
		if !v1 {
			path = where[""]
		}
		if !strings.HasSuffix(path, end) {
			return fmt.Errorf("a container has no %s limit: it is in control group %q and not in %q", c, path, end)
		}
	}
	return nil
}

// countsSwap reports whether this host's kernel can limit swap, which some v1
// kernels must be booted for.
var countsSwap = sync.OnceValue(func() bool {
	mounts, err := hierarchies()
	if err != nil {
		return false
	}
	return slices.ContainsFunc(mounts, func(m string) bool {
		if filepath.Base(m) == "memory" {
			_, err := os.Stat(filepath.Join(m, "memory.memsw.limit_in_bytes"))
			return err == nil
		}
		// On v2 every group but the root has the file.
		found, err := filepath.Glob(filepath.Join(m, "*", "memory.swap.max"))
		return err == nil && len(found) > 0
	})
})
