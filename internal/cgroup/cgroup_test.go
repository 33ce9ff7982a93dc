package cgroup

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// parentFor returns a parent of the test's own, and checks at its end that no
// group is left in it.
func parentFor(t testing.TB) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("control groups need root")
	}
	parent := backend.Prefix(t.TempDir())
	t.Cleanup(func() {
		if left := List(parent); len(left) > 0 {
			t.Errorf("left on the host: %v", left)
		}
		for range 2 {
			if err := RemoveParent(parent); err != nil {
				t.Error(err)
			}
		}
	})
	return parent
}

var limits = sandbox.Limits{CPU: 0.5, MemoryMB: 64, PIDs: 30}

func newGroup(t testing.TB, parent, name string) *Group {
	t.Helper()
	g, err := New(parent, name, limits)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for range 2 {
			if err := g.Remove(); err != nil {
				t.Error(err)
			}
		}
	})
	return g
}

// started runs a shell command in the group and returns it before its end.
func started(t testing.TB, g *Group, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", script)
	err := g.Start(func(v2 *os.File) error {
		cmd.SysProcAttr = &unix.SysProcAttr{}
		if v2 != nil {
			cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(v2.Fd())
		}
		return cmd.Start()
	})
	if err != nil {
		t.Fatal(err)
	}
	return cmd
}

func TestGroupLife(t *testing.T) {
	parent := parentFor(t)
	g := newGroup(t, parent, "a")
	if _, err := New(parent, "a", limits); !errors.Is(err, fs.ErrExist) {
		t.Errorf("a second group of the same name: %v", err)
	}
	if err := RemoveParent(parent); err != nil {
		t.Errorf("remove the parent of a group: %v", err)
	}
	if got := List(parent); !slices.Equal(got, []string{"a"}) {
		t.Errorf("list: %v", got)
	}
	cmd := exec.Command("/bin/sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := g.Add(cmd.Process.Pid); err != nil {
		t.Fatal(err)
	}
	again, err := Open(parent, "a")
	if err != nil {
		t.Fatal(err)
	}
	pids, err := again.Processes()
	if err != nil || !slices.Equal(pids, []int{cmd.Process.Pid}) {
		t.Errorf("processes: %v, %v", pids, err)
	}
	_, memory, n, err := again.Usage()
	if err != nil || memory < 0 || n != 1 {
		t.Errorf("usage: %d bytes, %d threads, %v", memory, n, err)
	}
	waited := make(chan error, 1)
	go func() { waited <- cmd.Wait() }()
	if err := again.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := <-waited; err == nil {
		t.Error("the member was not killed")
	}
	if _, err := Open(parent, "a"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a removed group opens: %v", err)
	}
}

func TestNamesAreChecked(t *testing.T) {
	for _, n := range []string{"", ".", "..", "a/b"} {
		if _, err := New("od000000", n, limits); err == nil {
			t.Errorf("the name %q was accepted", n)
		}
		if _, err := Open(n, "a"); err == nil || errors.Is(err, fs.ErrNotExist) {
			t.Errorf("the parent %q was accepted", n)
		}
	}
}

// A process is born in the group, and the thread that started it is back.
func TestStart(t *testing.T) {
	g := newGroup(t, parentFor(t), "s")
	own, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			var out strings.Builder
			cmd := exec.Command("/bin/cat", "/proc/self/cgroup")
			cmd.Stdout = &out
			err := g.Start(func(v2 *os.File) error {
				cmd.SysProcAttr = &unix.SysProcAttr{}
				if v2 != nil {
					cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(v2.Fd())
				}
				return cmd.Start()
			})
			if err == nil {
				err = cmd.Wait()
			}
			if err != nil {
				t.Error(err)
			}
			if n := strings.Count(out.String(), "/"+g.parent+"/s\n"); n < len(g.dirs) {
				t.Errorf("born in:\n%s", out.String())
			}
		})
	}
	wg.Wait()
	for range 20 {
		wg.Go(func() {
			if now, err := os.ReadFile("/proc/thread-self/cgroup"); string(now) != string(own) {
				t.Errorf("a thread stayed in %s, %v", now, err)
			}
		})
	}
	wg.Wait()
}

func TestMemoryLimit(t *testing.T) {
	g := newGroup(t, parentFor(t), "m")
	if killed, err := g.OOMKilled(); killed || err != nil {
		t.Errorf("before: %v, %v", killed, err)
	}
	err := started(t, g, `x=$(head -c 200000000 /dev/zero | tr "\0" x); echo ${#x}`).Wait()
	if err == nil {
		t.Error("200 MB fit in a group of 64 MiB")
	}
	if killed, err := g.OOMKilled(); !killed || err != nil {
		t.Errorf("after: %v, %v", killed, err)
	}
}

func TestSharedMemory(t *testing.T) {
	g := newGroup(t, parentFor(t), "s")
	file := filepath.Join("/dev/shm", g.parent)
	defer os.Remove(file)
	if err := started(t, g, "head -c 8000000 /dev/zero >"+file).Wait(); err != nil {
		t.Fatal(err)
	}
	if n, err := g.SharedMemory(); err != nil || n < 8000000 || n > 9000000 {
		t.Errorf("%d bytes, %v; 8000000 were written", n, err)
	}
}

func TestPIDLimit(t *testing.T) {
	g := newGroup(t, parentFor(t), "p")
	// The shell gives up when it cannot fork; what it started stays.
	if err := started(t, g, `exec 2>/dev/null; for i in $(seq 60); do sleep 100 & done`).Wait(); err == nil {
		t.Error("60 processes could be started")
	}
	_, _, n, err := g.Usage()
	if err != nil || n < limits.PIDs/2 || n > limits.PIDs {
		t.Errorf("%d processes, %v; the limit is %d", n, err, limits.PIDs)
	}
}

func TestCPULimit(t *testing.T) {
	g := newGroup(t, parentFor(t), "c")
	cmd := started(t, g, "while :; do :; done")
	t.Cleanup(func() { cmd.Wait() }) // after the group's removal, which kills it
	t.Cleanup(func() { g.Remove() })
	begin := time.Now()
	var cpu time.Duration
	for cpu < 500*time.Millisecond {
		var err error
		if cpu, _, _, err = g.Usage(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Millisecond)
	}
	if share := cpu.Seconds() / time.Since(begin).Seconds(); share > 0.65 {
		t.Errorf("a busy loop had %.2f of a core; the limit is 0.5", share)
	}
}

func TestChoose(t *testing.T) {
	const (
		v1 = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n" +
			"35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:9 - cgroup cgroup rw,memory\n" +
			"40 31 0:37 / /sys/fs/cgroup/pids rw - cgroup cgroup rw,pids\n" +
			"40 31 0:37 / /sys/fs/cgroup/systemd rw - cgroup cgroup rw,name=systemd\n"
		v2 = "41 31 0:38 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw,nsdelegate\n"
	)
	for _, c := range []struct {
		name, info, has string
		want            []hierarchy
	}{
		{"v1", v1, "", []hierarchy{
			{"/sys/fs/cgroup/cpu,cpuacct", "/", false, []string{"cpu", "cpuacct"}},
			{"/sys/fs/cgroup/memory", "/", false, []string{"memory"}},
			{"/sys/fs/cgroup/pids", "/", false, []string{"pids"}},
		}},
		{"v2", v2, "cpuset cpu io memory hugetlb pids\n", []hierarchy{
			{"/sys/fs/cgroup", "/", true, []string{"cpu", "memory", "pids"}},
		}},
		{"hybrid", "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n" + v1, "hugetlb\n", []hierarchy{
			{"/sys/fs/cgroup/cpu,cpuacct", "/", false, []string{"cpu", "cpuacct"}},
			{"/sys/fs/cgroup/memory", "/", false, []string{"memory"}},
			{"/sys/fs/cgroup/pids", "/", false, []string{"pids"}},
		}},
		{"split", "40 31 0:37 /docker/x /sys/fs/cgroup/pid\\040s rw - cgroup cgroup rw,pids\n" + v2, "cpu memory", []hierarchy{
			{"/sys/fs/cgroup/pid s", "/docker/x", false, []string{"pids"}},
			{"/sys/fs/cgroup", "/", true, []string{"cpu", "memory"}},
		}},
		{"nothing", "1 2 0:1 / / rw - ext4 /dev/vda rw\n", "", nil},
		{"v2 without memory", v2, "cpu pids", nil},
	} {
		got, err := choose(c.info, func(string) string { return c.has })
		if (err != nil) != (c.want == nil) {
			t.Errorf("%s: error %v", c.name, err)
		}
		if diff := cmp.Diff(c.want, got, cmp.AllowUnexported(hierarchy{})); err == nil && diff != "" {
			t.Errorf("%s: %s", c.name, diff)
		}
	}
}

func TestPlace(t *testing.T) {
	in := hierarchy{mount: "/sys/fs/cgroup/pids", root: "/docker/x"}
	if got := in.place("/docker/x/y"); got != "/sys/fs/cgroup/pids/y" {
		t.Error(got)
	}
	whole := hierarchy{mount: "/sys/fs/cgroup/pids", root: "/"}
	if got := whole.place("/a/b"); got != "/sys/fs/cgroup/pids/a/b" {
		t.Error(got)
	}
}

// The v2 files are written as the kernel wants them. A directory of plain
// files stands for the kernel's tree where v2 has no controllers.
func TestV2Files(t *testing.T) {
	root := t.TempDir()
	group := filepath.Join(root, "od0", "a")
	if err := os.MkdirAll(group, 0o755); err != nil {
		t.Fatal(err)
	}
	for path, content := range map[string]string{
		"cgroup.subtree_control":     "cpu",
		"od0/cgroup.subtree_control": "",
		"od0/a/cpu.max":              "",
		"od0/a/memory.max":           "",
		"od0/a/memory.swap.max":      "",
		"od0/a/memory.oom.group":     "",
		"od0/a/pids.max":             "",
		"od0/a/cpu.stat":             "usage_usec 2500000\nuser_usec 1\n",
		"od0/a/memory.current":       "1000",
		"od0/a/memory.stat":          "anon 5\nshmem 40\ninactive_file 300\n",
		"od0/a/memory.events":        "low 0\noom 4\noom_kill 1\n",
		"od0/a/pids.current":         "7\n",
	} {
		if err := os.WriteFile(filepath.Join(root, path), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	h := hierarchy{mount: root, root: "/", v2: true, controllers: []string{"cpu", "memory", "pids"}}
	if err := h.prepare("od0"); err != nil {
		t.Fatal(err)
	}
	g := open([]hierarchy{h}, "od0", "a")
	if err := g.dirs[0].limit(sandbox.Limits{CPU: 1.5, MemoryMB: 512, PIDs: 100}); err != nil {
		t.Fatal(err)
	}
	if err := g.KillTogether(); err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{
		"cgroup.subtree_control":     "+memory +pids",
		"od0/cgroup.subtree_control": "+cpu +memory +pids",
		"od0/a/cpu.max":              "150000 100000",
		"od0/a/memory.max":           "536870912",
		"od0/a/memory.swap.max":      "0",
		"od0/a/memory.oom.group":     "1",
		"od0/a/pids.max":             "100",
	} {
		b, err := os.ReadFile(filepath.Join(root, path))
		if err != nil || string(b) != want {
			t.Errorf("%s: %q, %v; want %q", path, b, err, want)
		}
	}
	cpu, memory, pids, err := g.Usage()
	if err != nil || cpu != 2500*time.Millisecond || memory != 700 || pids != 7 {
		t.Errorf("usage: %v, %d, %d, %v", cpu, memory, pids, err)
	}
	if n, err := g.SharedMemory(); n != 40 || err != nil {
		t.Errorf("shared memory: %d, %v", n, err)
	}
	if killed, err := g.OOMKilled(); !killed || err != nil {
		t.Errorf("killed for memory: %v, %v", killed, err)
	}
}

// Whatever this host's v2 tree has for controllers, its groups can be made,
// hold a process from its birth on, and be killed at once.
func TestV2Life(t *testing.T) {
	mount := unifiedMount(t)
	if mount == "" {
		t.Log("this host has no cgroup v2 mounted; TestV2Files covers the rest")
		return
	}
	parent := parentFor(t)
	h := hierarchy{mount: mount, root: "/", v2: true}
	g, err := create([]hierarchy{h}, parent, "v2", sandbox.Limits{})
	if err != nil {
		t.Fatal(err)
	}
	cmd := started(t, g, "sleep 1000 & sleep 1000")
	pids, err := g.Processes()
	if err != nil || len(pids) == 0 || pids[0] != cmd.Process.Pid {
		t.Errorf("processes: %v, %v; want %d", pids, err, cmd.Process.Pid)
	}
	waited := make(chan error, 1)
	go func() { waited <- cmd.Wait() }()
	if err := g.Remove(); err != nil {
		t.Fatal(err)
	}
	<-waited
	if err := unix.Rmdir(filepath.Join(mount, parent)); err != nil {
		t.Error(err)
	}
}

func unifiedMount(t *testing.T) string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(b)) {
		if strings.Contains(line, " - cgroup2 ") {
			return unescape(strings.Fields(line)[4])
		}
	}
	return ""
}

func BenchmarkNewStartRemove(b *testing.B) {
	parent := parentFor(b)
	b.Run("new", func(b *testing.B) {
		for b.Loop() {
			g, err := New(parent, "x", limits)
			if err != nil {
				b.Fatal(err)
			}
			b.StopTimer()
			g.Remove()
			b.StartTimer()
		}
	})
	b.Run("enter", func(b *testing.B) {
		g, err := New(parent, "x", limits)
		if err != nil {
			b.Fatal(err)
		}
		for b.Loop() {
			if err := g.Start(func(*os.File) error { return nil }); err != nil {
				b.Fatal(err)
			}
		}
		g.Remove()
	})
}
