package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// wanted are the controllers that a group needs. On v2 "cpu" counts CPU time
// too, so "cpuacct" is wanted from v1 only.
var wanted = []string{"cpu", "cpuacct", "memory", "pids"}

// hierarchy is one mounted tree of control groups.
type hierarchy struct {
	mount       string
	root        string // the group that is mounted there, "/" but in some containers
	v2          bool
	controllers []string // those of wanted that are used here
}

// mounted returns the hierarchies that together have the wanted controllers.
// They do not change while a machine runs, and the table of mounts can be long.
var mounted = sync.OnceValues(func() ([]hierarchy, error) {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find control groups: %w", err)
	}
	return choose(string(info), func(mount string) string {
		b, err := os.ReadFile(filepath.Join(mount, "cgroup.controllers"))
		if err != nil {
			return ""
		}
		return string(b)
	})
})

// choose picks hierarchies from the text of mountinfo. A controller is in one
// hierarchy only, so where v1 has it v2 does not.
func choose(mountinfo string, v2Controllers func(mount string) string) ([]hierarchy, error) {
	var all []hierarchy
	missing := slices.Clone(wanted)
	take := func(h hierarchy, has []string) {
		for _, c := range has {
			if i := slices.Index(missing, c); i >= 0 {
				missing = slices.Delete(missing, i, i+1)
				h.controllers = append(h.controllers, c)
			}
		}
		if len(h.controllers) > 0 {
			all = append(all, h)
		}
	}
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		place, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(place) < 5 || len(kind) < 3 {
			continue
		}
		h := hierarchy{root: unescape(place[3]), mount: unescape(place[4])}
		switch kind[0] {
		case "cgroup":
			take(h, strings.Split(kind[2], ","))
		case "cgroup2":
			h.v2 = true
			take(h, strings.Fields(v2Controllers(h.mount)))
		}
	}
	if i := slices.Index(missing, "cpuacct"); i >= 0 && slices.ContainsFunc(all, func(h hierarchy) bool {
		return h.v2 && slices.Contains(h.controllers, "cpu")
	}) {
		missing = slices.Delete(missing, i, i+1)
	}
	if len(missing) > 0 {
		return nil, fmt.Errorf("this machine has no control group for %s: mount cgroup v1 or v2 at /sys/fs/cgroup with it", strings.Join(missing, ", "))
	}
	return all, nil
}

// unescape undoes mountinfo's octal form of blanks.
func unescape(s string) string {
	return strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace(s)
}

// ownGroups reads a file of the form of /proc/self/cgroup: controller to path,
// with "" for v2.
func ownGroups(file string) (map[string]string, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("find own control group: %w", err)
	}
	own := map[string]string{}
	for line := range strings.Lines(string(b)) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) != 3 {
			continue
		}
		for _, c := range strings.Split(parts[1], ",") {
			own[c] = parts[2]
		}
	}
	return own, nil
}

// place returns the directory of a group that /proc names by its whole path.
func (h hierarchy) place(group string) string {
	if below, ok := strings.CutPrefix(group, h.root); ok {
		group = below
	}
	return filepath.Join(h.mount, group)
}

// prepare makes the parent of groups and lets it hand on its controllers.
func (h hierarchy) prepare(parent string) error {
	path := filepath.Join(h.mount, parent)
	_, err := os.Stat(path)
	if err == nil && !h.v2 {
		return nil
	}
	if h.v2 {
		if err := h.delegate(h.mount); err != nil {
			return err
		}
	}
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("make control group %s: %w", parent, err)
	}
	if h.v2 {
		return h.delegate(path)
	}
	return nil
}

// delegate enables the controllers for the groups below path.
func (h hierarchy) delegate(path string) error {
	b, err := os.ReadFile(filepath.Join(path, "cgroup.subtree_control"))
	if err != nil {
		return fmt.Errorf("delegate control group %s: %w", path, err)
	}
	var add []string
	for _, c := range h.controllers {
		if !slices.Contains(strings.Fields(string(b)), c) {
			add = append(add, "+"+c)
		}
	}
	if len(add) == 0 {
		return nil
	}
	err = write(path, "cgroup.subtree_control", strings.Join(add, " "))
	if errors.Is(err, unix.EBUSY) {
		// A container's root group holds processes, which forbids it: they move
		// to a leaf of their own.
		if err = vacate(path); err == nil {
			err = write(path, "cgroup.subtree_control", strings.Join(add, " "))
		}
	}
	if err != nil {
		return fmt.Errorf("delegate controllers %s: %w", strings.Join(add, " "), err)
	}
	return nil
}

// vacate moves the processes of a v2 group to the group "init" in it.
func vacate(path string) error {
	leaf := filepath.Join(path, "init")
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	b, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
	if err != nil {
		return err
	}
	for _, pid := range strings.Fields(string(b)) {
		if err := write(leaf, "cgroup.procs", pid); err != nil && !errors.Is(err, unix.ESRCH) {
			return err
		}
	}
	return nil
}

// period is the time over which a CPU quota is counted, in microseconds.
const period = 100_000

// limit writes the limits that this hierarchy enforces.
func (d dir) limit(l sandbox.Limits) error {
	quota := max(int64(l.CPU*period), 1000) // the kernel takes no less
	bytes := strconv.FormatInt(l.MemoryMB<<20, 10)
	pids := strconv.FormatInt(l.PIDs, 10)
	for _, c := range d.controllers {
		var err error
		switch {
		case c == "cpu" && l.CPU > 0 && d.v2:
			err = write(d.path, "cpu.max", fmt.Sprintf("%d %d", quota, period))
		case c == "cpu" && l.CPU > 0:
			err = errors.Join(
				write(d.path, "cpu.cfs_period_us", strconv.Itoa(period)),
				write(d.path, "cpu.cfs_quota_us", strconv.FormatInt(quota, 10)))
		case c == "memory" && l.MemoryMB > 0 && d.v2:
			err = errors.Join(
				write(d.path, "memory.max", bytes),
				optional(write(d.path, "memory.swap.max", "0")))
		case c == "memory" && l.MemoryMB > 0:
			err = errors.Join(
				write(d.path, "memory.limit_in_bytes", bytes),
				// With the same limit for both, there is no swap.
				optional(write(d.path, "memory.memsw.limit_in_bytes", bytes)))
		case c == "pids" && l.PIDs > 0:
			err = write(d.path, "pids.max", pids)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// optional makes nothing of a file that this kernel does not have.
func optional(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// write writes one value to a control file, which must exist.
func write(dir, file, value string) error {
	f, err := os.OpenFile(filepath.Join(dir, file), os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := f.WriteString(value); err != nil {
		return fmt.Errorf("write %q: %w", value, err)
	}
	return nil
}

// readInt reads a control file that holds one number.
func readInt(dir, file string) (int64, error) {
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return 0, err
	}
	n, err := strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read %s: %w", file, err)
	}
	return n, nil
}

// readField reads a number from a control file of "name number" lines.
func readField(dir, file, field string) (int64, error) {
	b, err := os.ReadFile(filepath.Join(dir, file))
	if err != nil {
		return 0, err
	}
	return fieldOf(string(b), file, field)
}

// fieldOf finds a number in the text of a control file.
func fieldOf(text, file, field string) (int64, error) {
	for line := range strings.Lines(text) {
		name, value, ok := strings.Cut(strings.TrimSpace(line), " ")
		if ok && name == field {
			n, err := strconv.ParseInt(value, 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read %s of %s: %w", field, file, err)
			}
			return n, nil
		}
	}
	return 0, fmt.Errorf("read %s: it has no %s", file, field)
}
