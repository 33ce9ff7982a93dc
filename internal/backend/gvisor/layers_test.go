package gvisor

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/urpc"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// same checks that a machine's memory has these sums.
func (m *being) same(what string, want map[string]string) {
	m.Helper()
	if d := cmp.Diff(want, m.sums()); d != "" {
		m.Errorf("%s (-want +got):\n%s", what, d)
	}
}

// family makes a machine, a fork of it, and a fork of that. All have the same
// memory, of which they share what they can.
func family(t *testing.T, mb int) (all []*being, sums map[string]string) {
	t.Helper()
	w := newWorld(t, 2)
	w.limits.MemoryMB = 256
	m := w.guest()
	m.ask("make %d", mb)
	m.ask("kid")
	sums = m.sums()
	child := m.fork()
	grandchild := child.fork()
	for i, m := range []*being{m, child, grandchild} {
		m.same(fmt.Sprintf("generation %d has other memory", i), sums)
	}
	return []*being{m, child, grandchild}, sums
}

// TestGuestCannotTell does in each of three generations what programs do with
// memory, and looks that all goes as usual there and nothing changes elsewhere.
func TestGuestCannotTell(t *testing.T) {
	all, start := family(t, 16)
	sums := []map[string]string{maps.Clone(start), maps.Clone(start), maps.Clone(start)}
	steps := []struct {
		name, ask, want string
		changes         []string
	}{
		{name: "write to private memory in places", ask: "change anon 11 10 1", changes: []string{"anon"}},
		{name: "write to the begin of it", ask: "change anon 12 50 0", changes: []string{"anon"}},
		{name: "huge pages", ask: "change huge 13 30 1", changes: []string{"huge"}},
		{name: "shared memory", ask: "change shared 14 30 1", changes: []string{"shared"}},
		{name: "a memfd", ask: "change memfd 15 100 0", changes: []string{"memfd", "memfdprivate"}},
		{name: "private pages of a memfd", ask: "change memfdprivate 16 80 0", changes: []string{"memfdprivate"}},
		{name: "private pages of a file", ask: "change file 17 60 1", changes: []string{"file"}},
		{name: "fork", ask: "fork 18 40", want: "ok"},
		{name: "a process forked before writes", ask: "kidchange", changes: []string{"kid"}},
		{name: "protect", ask: "protect", want: "ok"},
		{name: "write after that", ask: "change anon 19 20 1", changes: []string{"anon"}},
		{name: "move", ask: "move", want: "ok"},
		{name: "drop private memory", ask: "drop anon 30", want: "ok", changes: []string{"anon"}},
		{name: "drop huge pages", ask: "drop huge 70", want: "ok", changes: []string{"huge"}},
		{name: "fork again", ask: "fork 20 10", want: "ok"},
	}
	for _, step := range steps {
		for n, m := range all {
			said := m.ask("%s", step.ask)
			if step.want != "" && said != step.want {
				t.Errorf("%s in generation %d: said %q; want %q", step.name, n, said, step.want)
			}
			got := m.sums()
			for name := range got {
				may := false
				for _, c := range step.changes {
					may = may || c == name
				}
				if !may && got[name] != sums[n][name] {
					t.Errorf("%s in generation %d changed %s", step.name, n, name)
				}
			}
			if len(step.changes) > 0 && got[step.changes[0]] == sums[n][step.changes[0]] {
				t.Errorf("%s in generation %d changed nothing", step.name, n)
			}
			sums[n] = got
			for other, m := range all {
				if other != n {
					m.same(fmt.Sprintf("%s in generation %d changed generation %d", step.name, n, other), sums[other])
				}
			}
		}
	}
}

// TestGuestSeesTheSame compares what a machine and its forks say of their
// memory.
func TestGuestSeesTheSame(t *testing.T) {
	all, _ := family(t, 48)
	seen := all[0].ask("seen")
	meminfo := func(m *being) (free int) {
		for line := range strings.Lines(m.run("cat /proc/meminfo")) {
			fmt.Sscanf(line, "MemFree: %d", &free)
		}
		return free
	}
	free := meminfo(all[0])
	for n, m := range all[1:] {
		if got := m.ask("seen"); got != seen {
			t.Errorf("generation %d sees %s; the first sees %s", n+1, got, seen)
		}
		if got := meminfo(m); got < free-4<<10 || got > free+4<<10 {
			t.Errorf("generation %d has %d KiB free; the first has %d", n+1, got, free)
		}
	}
	// What is kept for others is free here.
	m := all[0].guest()
	m.ask("make 48")
	free = meminfo(m)
	m.fork()
	m.ask("change anon 3 100 0")
	if got := meminfo(m); got < free-4<<10 || got > free+4<<10 {
		t.Errorf("after it wrote to all of its memory it has %d KiB free, before %d", got, free)
	}
}

// TestWaitsGoOn has threads wait in all kinds of system calls while the machine is
// written down, forked and restored: in each copy each wait ends as it should, and
// not before its time.
func TestWaitsGoOn(t *testing.T) {
	w := newWorld(t, 2)
	m := w.guest()
	if said := m.ask("wait"); said != "ok" {
		t.Fatal(said)
	}
	child := m.fork()
	all := map[string]*being{"source": m, "child": child, "grandchild": child.fork(), "restored": w.create(child.snapshot(true))}
	var waking sync.WaitGroup
	for name, m := range all {
		waking.Go(func() {
			if said, err := m.request("wake"); err != nil || said != "ok" {
				t.Errorf("%s: %s %v", name, said, err)
			}
		})
	}
	waking.Wait()
}

// TestClocksFromTheStart asks copies for the time as soon as they answer, in a
// process that is refused the system call: a program that asks often, as Go's
// runtime does, would be stopped for each call otherwise, for a second or longer. On
// a busy machine two looks at the clock may be too inexact, so one of five copies
// is enough.
func TestClocksFromTheStart(t *testing.T) {
	w := newWorld(t, 2)
	m := w.guest()
	snap := m.snapshot(true)
	for name, make := range map[string]func() *being{"fork": m.fork, "start": func() *being { return w.create(snap) }} {
		missed := ""
		for range 5 {
			copied := make()
			if missed = copied.ask("clocks"); missed == "0" {
				break
			}
			copied.destroy()
		}
		if missed != "0" {
			t.Errorf("after a %s the time is not there without a system call, or wrong, %s of 100 times", name, missed)
		}
	}
}

// TestForkOfBusyMachine forks while 64 threads write and asynchronous reads are
// under way.
func TestForkOfBusyMachine(t *testing.T) {
	w := newWorld(t, 2)
	w.limits = limitsOf(2, 512)
	m := w.guest()
	m.ask("make 4")
	m.ask("busy 64 32")
	m.ask("aio")
	all := []*being{m}
	for range 4 {
		all = append(all, all[len(all)-1].fork())
	}
	for n, m := range all {
		if said := m.ask("errors"); said != "0" {
			t.Errorf("generation %d found %s errors", n, said)
		}
	}
}

// TestGenerationsEndInAnyOrder ends generations before those made of them, and
// makes snapshots of what is left.
func TestGenerationsEndInAnyOrder(t *testing.T) {
	all, sums := family(t, 32)
	w := all[0].world
	frozen := all[0].snapshot(true) // of one whose memory is frozen
	shared := all[1].snapshot(true) // of one that maps others'
	all[1].destroy()
	w.tend()
	all[2].same("after its parent's end", sums)
	all[0].ask("change anon 5 100 0")
	all[2].same("after a write to the source", sums)
	all[0].destroy()
	w.tend()
	all[2].same("after the source's end", sums)
	for _, s := range []*backend.Snapshot{frozen, shared} {
		m := w.create(s)
		if err := os.RemoveAll(s.Dir); err != nil {
			t.Fatal(err)
		}
		m.same("a machine of a snapshot whose files are gone", sums)
		m.ask("change anon 6 100 0")
		m.destroy()
	}
	last := all[2].fork()
	all[2].destroy()
	w.tend()
	last.same("the last generation", sums)
	if said := last.ask("fork 7 50"); said != "ok" {
		t.Errorf("fork in the last generation: %s", said)
	}
}

// TestMemoryIsGivenBack looks that memory is frozen as long as somebody maps
// it, and that a machine which ended leaves what is needed only.
func TestMemoryIsGivenBack(t *testing.T) {
	w := newWorld(t, 2)
	w.limits.MemoryMB = 256
	m := w.guest()
	m.ask("make 64")
	sums := m.sums()
	usual := m.memoryLimit()
	a, b := m.fork(), m.fork()
	if n := len(m.frozen()); n != 2 {
		t.Errorf("after two forks %d are frozen", n)
	}
	if limit := m.memoryLimit(); limit < usual+64 || limit > usual+2*64 {
		t.Errorf("with two forks of the same 64 MiB the group's limit is %d MiB; before it was %d", limit, usual)
	}
	a.destroy()
	w.tend()
	if n := len(m.frozen()); n != 1 {
		t.Errorf("after the end of one fork %d are frozen; want 1", n)
	}
	use, err := b.i.Usage(t.Context())
	if err != nil || use.SharedMemoryBytes < 64<<20 || use.MemoryBytes > 48<<20 {
		t.Errorf("a fork uses %+v, %v; want more than 64 MiB shared, and little of its own", use, err)
	}
	m.ask("change anon 8 100 0") // 64 MiB that no fork can map
	memory := m.memory()
	m.destroy()
	w.tend()
	var st unix.Stat_t
	if err := unix.Fstat(int(memory.Fd()), &st); err != nil || st.Blocks*512 > 90<<20 {
		t.Errorf("the ended machine's memory has %d MiB, %v; want the frozen 70", st.Blocks*512>>20, err)
	}
	b.same("after that", sums)
	b.destroy()
	b2 := w.guest()
	b2.ask("make 1")
	c := b2.fork()
	c.destroy()
	w.tend()
	if n := len(b2.frozen()); n != 0 {
		t.Errorf("after the end of all forks %d are frozen", n)
	}
}

// frozen returns what of the machine's memory is frozen.
func (m *being) frozen() []string {
	m.Helper()
	st, err := m.i.s.layerStat()
	if err != nil {
		m.Fatal(err)
	}
	return st.Frozen
}

// memory opens the machine's own memory file.
func (m *being) memory() *os.File {
	m.Helper()
	files := m.memoryFiles(unix.O_RDWR)
	if len(files) == 0 {
		m.Fatal("the sentry has no memory file")
	}
	// The last is that of the kernel that runs; the first went with the one
	// that was there to begin with.
	return files[len(files)-1]
}

// memoryFiles takes the sentry's descriptors of application memory with an
// access mode.
func (m *being) memoryFiles(mode int) (files []*os.File) {
	m.Helper()
	dir := fmt.Sprintf("/proc/%d/fd", m.i.s.PID)
	entries, err := os.ReadDir(dir)
	if err != nil {
		m.Fatal(err)
	}
	pidfd, err := unix.PidfdOpen(m.i.s.PID, 0)
	if err != nil {
		m.Fatal(err)
	}
	defer unix.Close(pidfd)
	for _, e := range entries {
		target, err := os.Readlink(filepath.Join(dir, e.Name()))
		if err != nil || !strings.HasPrefix(target, "/memfd:runsc-memory") {
			continue
		}
		var n int
		fmt.Sscan(e.Name(), &n)
		fd, err := unix.PidfdGetfd(pidfd, n, 0)
		if err != nil {
			m.Fatal(err)
		}
		flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFL, 0)
		if err != nil {
			m.Fatal(err)
		}
		f := os.NewFile(uintptr(fd), target)
		if flags&unix.O_ACCMODE != mode {
			f.Close()
			continue
		}
		m.Cleanup(func() { f.Close() })
		files = append(files, f)
	}
	return files
}

// TestLayersAreReadOnly tries to write through the descriptors that a fork has
// of others' memory, and to give a sentry one that can be written to.
func TestLayersAreReadOnly(t *testing.T) {
	all, _ := family(t, 64)
	all[1].ask("change anon 3 30 1")
	files := all[1].fork().memoryFiles(unix.O_RDONLY)
	if len(files) < 2 {
		t.Fatalf("the grandchild has %d layers; want 2", len(files))
	}
	for _, f := range files {
		fd := int(f.Fd())
		if _, err := unix.Pwrite(fd, []byte("x"), 0); err == nil {
			t.Error("a layer can be written to")
		}
		if m, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
			t.Errorf("a layer can be mapped for writing: %v", unsafe.SliceData(m))
		}
		m, err := unix.Mmap(fd, 0, 4096, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Mprotect(m, unix.PROT_READ|unix.PROT_WRITE); err == nil {
			t.Error("a layer's mapping can be made writable")
		}
		if err := unix.Ftruncate(fd, 0); err == nil {
			t.Error("a layer can be cut off")
		}
		if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, 4096); err == nil {
			t.Error("holes can be made in a layer")
		}
	}
	w := all[0].world
	all[0].live(func(s *backend.Snapshot) {
		snapshot, err := openSnapshot(*s)
		if err != nil {
			t.Fatal(err)
		}
		defer closeAll(snapshot)
		l, err := layoutOf(*s)
		if err != nil {
			t.Fatal(err)
		}
		sentry, err := w.b.waiting(t.Context(), keyOf(all[0].cfg), backend.Slot{})
		if err != nil {
			t.Fatal(err)
		}
		defer func() {
			if err := w.b.dismiss(sentry); err != nil {
				t.Error(err)
			}
		}()
		args := layerRestoreArgs{HavePagesFile: true, Layers: []string{l.Layer}, FilePayload: urpc.FilePayload{Files: append(snapshot, all[0].memory())}}
		err = sentry.call("containerManager.Restore", &args, nil)
		if err == nil || !strings.Contains(err.Error(), "not read-only") {
			t.Errorf("restore with a layer that can be written to: %v", err)
		}
	})
}

// TestDeepChainsAreFlattened forks a fork of a fork and so on.
func TestDeepChainsAreFlattened(t *testing.T) {
	w := newWorld(t, 2)
	w.limits.MemoryMB = 256
	m := w.guest()
	m.ask("make 64")
	for n := range maxDepth + 2 {
		m.ask("random %d 1", n)
		next := m.fork()
		m.destroy()
		m = next
	}
	sums := m.sums()
	w.tend()
	if left := w.b.shares.of(m.i.s.Name); len(left) != 0 {
		t.Errorf("it still has layers: %v", left)
	}
	m.same("with memory of its own", sums)
}

// TestSharesOutliveTheEdge makes a new backend as after a kill of the edge, and
// looks that nothing is given back early.
func TestSharesOutliveTheEdge(t *testing.T) {
	all, sums := family(t, 8)
	w := all[0].world
	again := open(t, w.p, 0)
	recovered := func(m *being) {
		t.Helper()
		i, err := again.Recover(t.Context(), m.i.Handle())
		if err != nil {
			t.Fatal(err)
		}
		m.i = i.(*instance)
	}
	recovered(all[0]) // before those who map its memory
	again.tendOnce(make(chan struct{}), true)
	if n := len(all[0].frozen()); n != 1 {
		t.Fatalf("%d are frozen before the others are found; want 1", n)
	}
	all[0].ask("change anon 10 100 0")
	recovered(all[2])
	recovered(all[1])
	again.tendOnce(make(chan struct{}), true)
	all[1].same("the child", sums)
	all[2].same("the grandchild", sums)
	for _, m := range []*being{all[1], all[2]} {
		if err := m.i.Destroy(context.Background()); err != nil {
			t.Fatal(err)
		}
	}
	again.tendOnce(make(chan struct{}), true)
	if n := len(all[0].frozen()); n != 0 {
		t.Errorf("%d are frozen after the end of all who mapped it", n)
	}
	if err := all[0].i.Destroy(context.Background()); err != nil {
		t.Fatal(err)
	}
	if err := again.Close(); err != nil {
		t.Error(err)
	}
}

// soakVariable has how long TestRandomForks goes on, such as "1h".
const soakVariable = "OPENDSEC_TEST_SOAK"

// TestRandomForks does random things with up to eight machines that are forks
// of each other, and compares sums all the time.
func TestRandomForks(t *testing.T) {
	lasts := 15 * time.Second
	if v := os.Getenv(soakVariable); v != "" {
		var err error
		if lasts, err = time.ParseDuration(v); err != nil {
			t.Fatal(err)
		}
	}
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	dice := rand.New(rand.NewPCG(seed, 1))
	w := newWorld(t, 2)
	w.limits = limitsOf(2, 256)
	type one struct {
		*being
		sums map[string]string
	}
	first := w.guest()
	first.ask("make 24")
	first.ask("kid")
	for _, dir := range trees[:2] {
		first.ask("files %s 200 3000", dir)
	}
	all := []*one{{first, first.sums()}}
	counts := map[string]int{}
	changed := func(x *one, ask string) {
		if said := x.ask("%s", ask); said == "bad" {
			t.Fatalf("%s: %s", ask, said)
		}
		x.sums = x.being.sums()
	}
	areas := []string{"anon", "anon", "anon", "huge", "shared", "memfd", "memfdprivate", "file"}
	var saved []*backend.Snapshot
	var savedSums []map[string]string
	for end := time.Now().Add(lasts); time.Now().Before(end) && !t.Failed(); {
		x := all[dice.IntN(len(all))]
		op := "write"
		switch n := dice.IntN(100); {
		case n < 12 && len(all) < 8:
			op = "fork"
			all = append(all, &one{x.fork(), maps.Clone(x.sums)})
		case n < 18 && len(all) < 7:
			op = "fork twice"
			x.live(func(s *backend.Snapshot) {
				for range 2 {
					all = append(all, &one{w.create(s), maps.Clone(x.sums)})
				}
			})
		case n < 30 && len(all) > 1:
			op = "destroy"
			x.destroy()
			for i := range all {
				if all[i] == x {
					all = append(all[:i], all[i+1:]...)
					break
				}
			}
			continue
		case n < 34 && len(saved) < 4:
			op = "snapshot"
			saved, savedSums = append(saved, x.snapshot(true)), append(savedSums, maps.Clone(x.sums))
		case n < 40 && len(saved) > 0 && len(all) < 8:
			op = "start"
			i := dice.IntN(len(saved))
			all = append(all, &one{w.create(saved[i]), maps.Clone(savedSums[i])})
			if dice.IntN(2) == 0 {
				os.RemoveAll(saved[i].Dir)
				saved, savedSums = append(saved[:i], saved[i+1:]...), append(savedSums[:i], savedSums[i+1:]...)
			}
		case n < 46:
			op = "tend"
			w.b.tendOnce(make(chan struct{}), true)
		case n < 50:
			op = "detach"
			if _, err := x.i.s.detach(1 + dice.Int64N(8<<20)); err != nil {
				t.Fatal(err)
			}
		case n < 54:
			op = "fork inside"
			changed(x, fmt.Sprintf("fork %d %d", dice.Uint32(), 1+dice.IntN(60)))
		case n < 58:
			op = "drop"
			changed(x, fmt.Sprintf("drop %s %d", []string{"anon", "huge"}[dice.IntN(2)], dice.IntN(50)))
		case n < 62:
			op = "kid"
			changed(x, "kidchange")
		case n < 65:
			op = "protect"
			changed(x, []string{"protect", "move"}[dice.IntN(2)])
		case n < 70:
			op = "random"
			changed(x, fmt.Sprintf("random %d %d", dice.Uint32(), 1+dice.IntN(2000)))
		case n < 82:
			op = "files"
			changed(x, fmt.Sprintf("mess %s %d %d", trees[dice.IntN(2)], dice.Uint32(), 1+dice.IntN(500)))
		default:
			changed(x, fmt.Sprintf("change %s %d %d %d", areas[dice.IntN(len(areas))], dice.Uint32(), 1+dice.IntN(100), dice.IntN(2)))
		}
		counts[op]++
		y := all[dice.IntN(len(all))]
		y.same("after "+op, y.sums)
	}
	for _, x := range all {
		x.same("at the end", x.sums)
	}
	t.Logf("%v", counts)
}

func limitsOf(cpu float64, memoryMB int64) sandbox.Limits {
	return sandbox.Limits{CPU: cpu, MemoryMB: memoryMB, DiskMB: 256, PIDs: 200}
}
