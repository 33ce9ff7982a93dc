package backendtest

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/netslot"
)

// checkHost fails the test when anything of its place is left on the host. The
// kernel frees some things a moment after the last use, so it looks again for
// a while.
func (e *env) checkHost() {
	e.Helper()
	if left := e.settled(e.leftOnHost); len(left) > 0 {
		e.Errorf("left on the host:\n\t%s", strings.Join(left, "\n\t"))
	}
}

// settled looks until nothing is found, at most for some seconds.
func (e *env) settled(look func() []string) []string {
	deadline := time.Now().Add(5 * time.Second)
	for {
		left := look()
		if len(left) == 0 || time.Now().After(deadline) {
			return left
		}
		<-time.After(20 * time.Millisecond)
	}
}

// leftOnHost lists all that bears the place's names.
func (e *env) leftOnHost() []string {
	var left []string
	left = append(left, e.processesLeft()...)
	left = append(left, e.groupsLeft()...)
	left = append(left, e.loopsLeft()...)
	names, err := netslot.List(e.place.Prefix)
	if err != nil {
		e.Error(err)
	}
	for _, n := range names {
		left = append(left, "network slot "+n)
	}
	return left
}

// processesLeft lists processes that are in a control group of the place or
// name it, and mounts of it in any process's mount namespace.
func (e *env) processesLeft() []string {
	var left []string
	dirs, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		e.Fatal(err)
	}
	seen := map[string]bool{} // mount namespaces
	for _, dir := range dirs {
		if dir == fmt.Sprintf("/proc/%d", os.Getpid()) {
			left = append(left, e.mountsLeft(dir)...)
			continue
		}
		group, _ := os.ReadFile(dir + "/cgroup") // "" when it ended meanwhile
		line, _ := os.ReadFile(dir + "/cmdline")
		if strings.Contains(string(group), "/"+e.place.Prefix+"/") ||
			strings.Contains(string(line), e.place.StateDir) || strings.Contains(string(line), e.place.Prefix) {
			left = append(left, fmt.Sprintf("process %s: %q", filepath.Base(dir), strings.ReplaceAll(string(line), "\x00", " ")))
		}
		if ns, err := os.Readlink(dir + "/ns/mnt"); err == nil && !seen[ns] {
			seen[ns] = true
			left = append(left, e.mountsLeft(dir)...)
		}
	}
	return left
}

func (e *env) mountsLeft(proc string) []string {
	var left []string
	text, _ := os.ReadFile(proc + "/mountinfo") // "" when it ended meanwhile
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, e.place.StateDir) {
			left = append(left, fmt.Sprintf("mount in process %s: %s", filepath.Base(proc), strings.TrimSpace(line)))
		}
	}
	return left
}

func (e *env) groupsLeft() []string {
	var left []string
	text, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		e.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		place, kind, _ := strings.Cut(line, " - ")
		fields := strings.Fields(place)
		if !strings.HasPrefix(kind, "cgroup") || len(fields) < 5 {
			continue
		}
		entries, err := os.ReadDir(filepath.Join(fields[4], e.place.Prefix))
		if err != nil {
			continue // not there
		}
		for _, g := range entries {
			if g.IsDir() {
				left = append(left, "control group "+filepath.Join(fields[4], e.place.Prefix, g.Name()))
			}
		}
	}
	return left
}

func (e *env) loopsLeft() []string {
	var left []string
	found, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		e.Fatal(err)
	}
	for _, p := range found {
		if file, err := os.ReadFile(p); err == nil && strings.Contains(string(file), e.place.StateDir) {
			left = append(left, "loop device on "+strings.TrimSpace(string(file)))
		}
	}
	return left
}

// openFiles returns what this process has open, without what comes and goes.
func openFiles() []string {
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return nil
	}
	var open []string
	for _, f := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + f.Name()); err == nil {
			open = append(open, to)
		}
	}
	slices.Sort(open)
	return open
}
