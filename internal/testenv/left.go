package testenv

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// NothingLeft looks over the host by hand, not through our own leak check, and
// fails the test with what still bears an installation's state directory or the
// prefix of its edge's names: mounts in any namespace, processes, loop devices,
// network namespaces, control groups. Another program that copied the mounts
// while they were there (any test that makes a mount namespace does) keeps
// them until it ends, so a while is allowed for that.
func NothingLeft(t testing.TB, state, prefix string) {
	t.Helper()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	late := time.After(time.Minute)
	for {
		left := onHost(t, state, prefix)
		if len(left) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			t.Errorf("left on the host:\n%s", strings.Join(left, "\n"))
			return
		}
	}
}

func onHost(t testing.TB, state, prefix string) (left []string) {
	t.Helper()
	for _, pattern := range []string{"/run/netns/" + prefix + "*", "/sys/fs/cgroup/*/" + prefix + "*", "/sys/fs/cgroup/" + prefix + "*"} {
		left = append(left, glob(t, pattern)...)
	}
	for _, pattern := range []string{"/proc/[0-9]*/mountinfo", "/proc/[0-9]*/cmdline", "/sys/block/loop*/loop/backing_file"} {
		for _, path := range glob(t, pattern) {
			b, err := os.ReadFile(path)
			if err != nil {
				continue // it has ended
			}
			for line := range strings.Lines(string(b)) {
				if strings.Contains(line, state) || strings.Contains(line, prefix) {
					left = append(left, fmt.Sprintf("%s: %q", path, line))
				}
			}
		}
	}
	return left
}

func glob(t testing.TB, pattern string) []string {
	t.Helper()
	paths, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return paths
}
