package cgroup

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// eachFreezer runs a test with a new group in each hierarchy of this host that
// can stop processes.
func eachFreezer(t *testing.T, f func(*testing.T, *Freezer)) {
	places, err := freezers()
	if err != nil || len(places) == 0 {
		t.Fatalf("this host cannot stop processes: %v", err)
	}
	for _, h := range places {
		name := "v1"
		if h.v2 {
			name = "v2"
		}
		t.Run(name, func(t *testing.T) {
			parent := filepath.Join(h.mount, strings.ReplaceAll(t.Name(), "/", "-"))
			path := filepath.Join(parent, "x")
			if err := errors.Join(os.Mkdir(parent, 0o755), os.Mkdir(path, 0o755)); err != nil {
				t.Fatal(err)
			}
			fr := &Freezer{path: path, v2: h.v2}
			t.Cleanup(func() {
				g := Group{parent: filepath.Base(parent), name: "x", dirs: []dir{{hierarchy: h, path: path}}}
				if err := errors.Join(fr.Kill(), g.Remove(), unix.Rmdir(parent)); err != nil {
					t.Error(err)
				}
			})
			f(t, fr)
		})
	}
}

// run starts a shell in the freezer's group, which is killed in the end.
func (f *Freezer) run(t *testing.T, script string) *exec.Cmd {
	t.Helper()
	return f.start(t, exec.Command("/bin/sh", "-c", "read go; "+script))
}

// start starts a command that waits for a line of its input, and moves it to
// the group before that comes.
func (f *Freezer) start(t *testing.T, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Wait() // it was killed, or a test has waited for it
	})
	t.Cleanup(func() {
		if err := f.Kill(); err != nil {
			t.Error(err)
		}
	})
	err = write(f.path, "cgroup.procs", strconv.Itoa(cmd.Process.Pid))
	if err == nil {
		_, err = in.Write([]byte("go\n"))
	}
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

// grows waits until a file grows.
func grows(t *testing.T, path string) {
	t.Helper()
	growsFrom(t, path, sizeOf(path))
}

func growsFrom(t *testing.T, path string, before int64) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	for sizeOf(path) <= before {
		if time.Now().After(deadline) {
			t.Fatalf("%s does not grow from %d bytes", path, before)
		}
		time.Sleep(time.Millisecond)
	}
}

// sizeOf returns a file's size, 0 when it is not there yet.
func sizeOf(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

func TestFreezer(t *testing.T) {
	eachFreezer(t, func(t *testing.T, f *Freezer) {
		file := filepath.Join(t.TempDir(), "out")
		f.run(t, "while :; do echo x; done >"+file)
		for range 3 {
			grows(t, file)
			for range 2 {
				if err := f.Freeze(t.Context()); err != nil {
					t.Fatal(err)
				}
			}
			before, err := os.Stat(file)
			if err != nil {
				t.Fatal(err)
			}
			<-time.After(50 * time.Millisecond)
			if after, err := os.Stat(file); err != nil || after.Size() != before.Size() {
				t.Errorf("a stopped process wrote, %v", err)
			}
			if frozen, err := f.frozen(); !frozen || err != nil {
				t.Errorf("frozen: %v, %v", frozen, err)
			}
			for range 2 {
				if err := f.Thaw(); err != nil {
					t.Fatal(err)
				}
			}
			if frozen, err := f.frozen(); frozen || err != nil {
				t.Errorf("after it went on, frozen: %v, %v", frozen, err)
			}
		}
	})
}

// Pairs of freeze and thaw without a pause converge each time, whatever the
// processes do.
func TestFreezeThawPairs(t *testing.T) {
	dir := t.TempDir()
	for name, script := range map[string]string{
		"idle":    "while :; do sleep 1000; done",
		"busy":    "while :; do :; done",
		"forks":   "while :; do /bin/true; done",
		"threads": "yes | xargs -P 20 -n 1 true",
		"bomb":    "b() { while :; do (/bin/true; /bin/true) & [ $((i=i+1)) -gt 50 ] && wait && i=0; done; }; b & b & b",
		"writes":  "while :; do head -c 8000000 /dev/zero >" + dir + "/w; sync -d " + dir + "/w; done",
		"vforks":  "exec python3 -c 'import subprocess\nwhile True: subprocess.run([\"/bin/true\"])'",
		"dies":    "while :; do sleep 1000 & kill -9 $!; wait; done",
	} {
		t.Run(name, func(t *testing.T) {
			eachFreezer(t, func(t *testing.T, f *Freezer) {
				f.run(t, script)
				var longest time.Duration
				for n := range 200 {
					begin := time.Now()
					if err := f.Freeze(t.Context()); err != nil {
						t.Fatalf("freeze %d: %v", n, err)
					}
					longest = max(longest, time.Since(begin))
					standsStill(t, f)
					if err := f.Thaw(); err != nil {
						t.Fatalf("thaw %d: %v", n, err)
					}
				}
				t.Logf("the longest of 200 freezes took %v", longest)
			})
		})
	}
}

// frozen reports whether all processes of the group stand still.
func (f *Freezer) frozen() (bool, error) {
	if f.v2 {
		n, err := readField(f.path, "cgroup.events", "frozen")
		return n == 1, err
	}
	state, err := f.state()
	return state == "FROZEN", err
}

// standsStill waits until the group stands still, which it did a moment ago. On
// v2 it does not while a process that was killed before dies.
func standsStill(t *testing.T, f *Freezer) {
	t.Helper()
	deadline := time.Now().Add(20 * time.Second)
	frozen, err := f.frozen()
	for f.v2 && !frozen && err == nil && time.Now().Before(deadline) {
		frozen, err = f.frozen()
	}
	if !frozen || err != nil {
		t.Fatalf("frozen: %v, %v", frozen, err)
	}
}

// A process that was stopped can be killed, and does nothing before it dies.
func TestKillFrozen(t *testing.T) {
	eachFreezer(t, func(t *testing.T, f *Freezer) {
		file := filepath.Join(t.TempDir(), "out")
		cmd := f.run(t, "while :; do echo x; done >"+file)
		grows(t, file)
		if err := f.Freeze(t.Context()); err != nil {
			t.Fatal(err)
		}
		before, err := os.Stat(file)
		if err != nil {
			t.Fatal(err)
		}
		if err := f.Kill(); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); err == nil {
			t.Error("it ended by itself")
		}
		if after, err := os.Stat(file); err != nil || after.Size() != before.Size() {
			t.Errorf("it wrote before it died, %v", err)
		}
	})
}

// The first process of a PID namespace does not end before the others have, and
// those do not while they are stopped.
func TestFreezeWhileNamespaceDies(t *testing.T) {
	eachFreezer(t, func(t *testing.T, f *Freezer) {
		for range 20 {
			file := filepath.Join(t.TempDir(), "out")
			cmd := exec.Command("/bin/sh", "-c", "read go; for i in 1 2 3 4 5 6 7 8 9 10; do sleep 1000 & done; echo >"+file+"; wait")
			cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWPID}
			f.start(t, cmd)
			growsFrom(t, file, 0)
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			begin := time.Now()
			if err := f.Freeze(t.Context()); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(begin); took > 5*time.Second {
				t.Errorf("it took %v", took)
			}
			if err := f.Thaw(); err != nil {
				t.Fatal(err)
			}
			if err := cmd.Wait(); err == nil {
				t.Error("it was not killed")
			}
		}
	})
}

// A freeze that is given up leaves the processes running.
func TestFreezeCancelled(t *testing.T) {
	eachFreezer(t, func(t *testing.T, f *Freezer) {
		file := filepath.Join(t.TempDir(), "out")
		f.run(t, "while :; do echo x; done >"+file)
		grows(t, file)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := f.Freeze(ctx); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
		grows(t, file)
	})
}

func TestOpenFreezer(t *testing.T) {
	if _, err := OpenFreezer("od000000", "missing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a group that is missing: %v", err)
	}
	if _, err := OpenFreezer("od000000", "../x"); err == nil || errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a name of none: %v", err)
	}
	eachFreezer(t, func(t *testing.T, f *Freezer) {
		parent := filepath.Base(filepath.Dir(f.path))
		found, err := OpenFreezer(parent, "x")
		if err != nil || *found != *f {
			t.Errorf("found %+v, %v; want %+v", found, err, f)
		}
	})
}

func TestChooseFreezers(t *testing.T) {
	const (
		v1 = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n" +
			"36 31 0:33 / /sys/fs/cgroup/freezer rw - cgroup cgroup rw,freezer\n"
		v2 = "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw,nsdelegate\n"
	)
	one, two := hierarchy{mount: "/sys/fs/cgroup/freezer", root: "/"}, hierarchy{mount: "/sys/fs/cgroup/unified", root: "/", v2: true}
	for info, want := range map[string][]hierarchy{v1: {one}, v2: {two}, v2 + v1: {one, two}, "": nil} {
		if got := chooseFreezers(info); !slices.EqualFunc(got, want, func(a, b hierarchy) bool {
			return a.mount == b.mount && a.v2 == b.v2 && a.root == b.root
		}) {
			t.Errorf("%q: got %+v, want %+v", info, got, want)
		}
	}
}
