package container

import (
	"context"
	"crypto/sha1"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/sandbox"
)

var stateLimits = sandbox.Limits{CPU: 1, MemoryMB: 256, DiskMB: 200, PIDs: 60}

// loads are programs that make it hard to stop a container.
var loads = map[string]string{
	"idle":      "sleep 100000",
	"fork bomb": "b() { while :; do (sleep 0.01; true) & done; }; b & b & b & wait",
	"writers":   "for f in 1 2 3; do (while :; do dd if=/dev/zero of=/w$f bs=1M count=20; sync; rm /w$f; done) & done; wait",
	"dying":     "while :; do sleep 1000 & kill -9 $!; wait; done",
}

func TestPauseResumePairs(t *testing.T) {
	h := newHost(t, t.TempDir())
	for name, load := range loads {
		t.Run(name, func(t *testing.T) {
			i := h.create(stateLimits, nil)
			c := h.client(i)
			stop := inBackground(t, c, "exec >/dev/null 2>&1; "+load)
			var longest time.Duration
			for n := range 200 {
				begin := time.Now()
				if err := i.Pause(t.Context()); err != nil {
					t.Fatalf("pause %d: %v", n, err)
				}
				longest = max(longest, time.Since(begin))
				if err := i.Resume(t.Context()); err != nil {
					t.Fatalf("resume %d: %v", n, err)
				}
			}
			t.Logf("the longest of 200 pauses took %v", longest)
			if name != "fork bomb" { // which leaves no process for a command
				sh(t, c, "true")
			}
			if err := i.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
			if _, err := i.Usage(t.Context()); err != nil {
				t.Errorf("usage: %v", err)
			}
			if err := i.Destroy(t.Context()); err != nil {
				t.Errorf("destroy: %v", err)
			}
			stop()
		})
	}
}

// fsck checks that a snapshot's disk has no error and was unmounted cleanly.
func fsck(t testing.TB, s *backend.Snapshot) {
	t.Helper()
	path := filepath.Join(s.Dir, diskFile)
	if out, err := exec.Command("e2fsck", "-fn", path).CombinedOutput(); err != nil {
		t.Errorf("the snapshot's file system has errors: %v: %s", err, out)
	}
	if out, err := exec.Command("dumpe2fs", "-h", path).CombinedOutput(); err != nil || !strings.Contains(string(out), "Filesystem state:         clean") {
		t.Errorf("the snapshot's file system is not clean: %v: %s", err, out)
	}
}

// logging writes numbers and their digests to a file, one in each line, with
// much else beside it: files that are renamed, removed, and removed while open.
const logging = `exec 3>/removed; echo x >&3; rm /removed
n=0; while :; do
  n=$((n+1)); echo $n $(echo $n | sha1sum | cut -c 1-40) >>/log
  echo $n >/new; mv /new /latest; mkdir -p /d/$((n%50)); rm -rf /d/$((n%7)); dd if=/dev/zero of=/noise bs=64k count=$((n%9)) 2>/dev/null
done`

// TestSnapshotOfWriter looks at the files of snapshots of a container that
// writes all the time: they are all of one moment.
func TestSnapshotOfWriter(t *testing.T) {
	eachDisk(t, func(t *testing.T, h *host) {
		i := h.create(stateLimits, nil)
		c := h.client(i)
		inBackground(t, c, logging)
		last := 0
		for range 5 {
			sh(t, c, fmt.Sprintf("until [ $(cat /latest 2>/dev/null || echo 0) -gt %d ]; do sleep 0.01; done", last+5))
			s := h.snapshot(i)
			fsck(t, s)
			r := h.create(stateLimits, s)
			rc := h.client(r)
			last = checkLog(t, sh(t, rc, "cat /log"), last)
			if latest, err := strconv.Atoi(strings.TrimSpace(sh(t, rc, "cat /latest"))); err != nil || latest != last && latest != last-1 {
				t.Errorf("the last line has %d and the file of the latest %d, %v", last, latest, err)
			}
			sh(t, rc, "echo more >>/log")
			if err := errors.Join(r.Destroy(t.Context()), os.RemoveAll(s.Dir)); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// checkLog checks each line of what logging has written, and that there are
// more than before. It returns how many.
func checkLog(t *testing.T, text string, before int) int {
	t.Helper()
	lines := strings.Split(strings.TrimSuffix(text, "\n"), "\n")
	for n, line := range lines {
		if want := fmt.Sprintf("%d %x", n+1, sha1.Sum([]byte(strconv.Itoa(n+1)+"\n"))); line != want {
			t.Fatalf("line %d of %d is %q, want %q", n+1, len(lines), line, want)
		}
	}
	if len(lines) <= before {
		t.Errorf("%d lines after %d", len(lines), before)
	}
	return len(lines)
}

// Snapshots and what is made of them share blocks on XFS, and elsewhere take
// no more than the data.
func TestSnapshotSpace(t *testing.T) {
	eachDisk(t, func(t *testing.T, h *host) {
		const mb = 100
		i := h.create(stateLimits, nil)
		sh(t, h.client(i), fmt.Sprintf("dd if=/dev/urandom of=/data bs=1M count=%d 2>/dev/null; sync", mb))
		free := func() int64 {
			var st unix.Statfs_t
			unix.Sync()
			if err := unix.Statfs(h.dir, &st); err != nil {
				t.Fatal(err)
			}
			return int64(st.Bfree) * st.Bsize >> 20
		}
		before := free()
		s := h.snapshot(i)
		h.create(stateLimits, s)
		var st unix.Stat_t
		if err := unix.Stat(filepath.Join(s.Dir, diskFile), &st); err != nil {
			t.Fatal(err)
		}
		if used := st.Blocks * 512 >> 20; used < mb || used > mb+10 || s.Size != st.Blocks*512 {
			t.Errorf("a snapshot of %d MiB takes %d and says %d", mb, used, s.Size>>20)
		}
		if strings.HasSuffix(t.Name(), "xfs") {
			if used := before - free(); used > 10 {
				t.Errorf("a snapshot and a container of it take %d MiB of XFS", used)
			}
		}
	})
}

// stopHalfway leaves a container as a process does that is killed in the middle
// of a snapshot, at the worst moment.
func stopHalfway(t *testing.T, i *instance) {
	t.Helper()
	freezer, err := cgroup.OpenFreezer(i.backend.prefix, i.record.group())
	if err != nil {
		t.Fatal(err)
	}
	if err := freezer.Freeze(t.Context()); err != nil {
		t.Fatal(err)
	}
	top, err := openMounted(i.record.Loop, i.diskPath())
	if err != nil {
		t.Fatal(err)
	}
	defer top.Close()
	if err := unix.IoctlSetInt(int(top.Fd()), fiFreeze, 0); err != nil {
		t.Fatal(err)
	}
}

func TestRecoverStoppedHalfway(t *testing.T) {
	h := newHost(t, t.TempDir())
	i := h.create(stateLimits, nil)
	for _, pause := range []bool{false, true} {
		if pause {
			if err := i.Pause(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		stopHalfway(t, i)
		i = h.recover(i)
		if pause {
			if err := i.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
		}
		if got := sh(t, h.client(i), "echo written >/file; sync; cat /file"); got != "written\n" {
			t.Errorf("got %q", got)
		}
	}
}

// What is stopped halfway and known to nobody can be removed.
func TestRemoveStoppedHalfway(t *testing.T) {
	h := newHost(t, t.TempDir())
	i := h.create(stateLimits, nil)
	sh(t, h.client(i), "dd if=/dev/zero of=/data bs=1M count=20 2>/dev/null")
	stopHalfway(t, i)
	h.made = nil
	deadline := time.Now().Add(30 * time.Second)
	for {
		left, err := h.backend.Audit(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		if len(left) == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("left: %v", left)
		}
		for _, l := range left {
			if err := h.backend.Remove(t.Context(), l); err != nil {
				t.Logf("remove %v: %v", l, err)
			}
		}
		<-time.After(10 * time.Millisecond)
	}
}

// Destroy does not wait until a snapshot is taken, or a layer read.
func TestDestroyDuringStill(t *testing.T) {
	h := newHost(t, t.TempDir())
	i := h.create(stateLimits, nil)
	sh(t, h.client(i), "dd if=/dev/urandom of=/data bs=1M count=20 2>/dev/null")
	r, w, err := os.Pipe() // nobody reads
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	diffed := make(chan error, 1)
	go func() { diffed <- i.Diff(context.Background(), w) }()
	if _, err := r.Read(make([]byte, 1)); err != nil { // it has begun
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	if err := i.Destroy(ctx); err != nil {
		t.Errorf("destroy: %v", err)
	}
	if err := <-diffed; !errors.Is(err, backend.ErrGone) {
		t.Errorf("the layer of a container that was destroyed: %v", err)
	}
	if err := i.Pause(t.Context()); !errors.Is(err, backend.ErrGone) {
		t.Errorf("pause: %v", err)
	}
	if _, err := i.Snapshot(t.Context(), backend.SnapshotOptions{Dir: t.TempDir()}); !errors.Is(err, backend.ErrGone) {
		t.Errorf("snapshot: %v", err)
	}
}

func TestSnapshotRefused(t *testing.T) {
	h := newHost(t, t.TempDir())
	i := h.create(stateLimits, nil)
	if _, err := i.Snapshot(t.Context(), backend.SnapshotOptions{Dir: t.TempDir(), Memory: true}); err == nil {
		t.Error("a snapshot with memory")
	}
	s := h.snapshot(i)
	for what, change := range map[string]func(*backend.Snapshot, *sandbox.Limits){
		"with memory":        func(s *backend.Snapshot, _ *sandbox.Limits) { s.Memory = true },
		"of another backend": func(s *backend.Snapshot, _ *sandbox.Limits) { s.Backend = sandbox.GVisor },
		"of another size":    func(_ *backend.Snapshot, l *sandbox.Limits) { l.DiskMB *= 2 },
		"without data":       func(s *backend.Snapshot, _ *sandbox.Limits) { s.Data = nil },
	} {
		changed, limits := *s, stateLimits
		change(&changed, &limits)
		if _, err := checkSnapshot(changed, limits); err == nil {
			t.Errorf("a snapshot %s was taken", what)
		}
	}
}
