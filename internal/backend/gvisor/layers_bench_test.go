package gvisor

import (
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
)

// times are what was measured, in milliseconds.
type times []float64

func (t *times) add(d time.Duration) { *t = append(*t, float64(d.Microseconds())/1000) }

func (t times) median() float64 {
	if len(t) == 0 {
		return 0
	}
	slices.Sort(t)
	return t[len(t)/2]
}

// inside is what a machine has that is measured.
type inside struct {
	mb    int // of memory
	files int // of some 4 KiB
}

func (i inside) String() string { return fmt.Sprintf("%dMiB-%dfiles", i.mb, i.files) }

// machine makes one.
func (i inside) machine(w *world) *being {
	w.Helper()
	w.limits = limitsOf(2, int64(i.mb)*13/10+160)
	w.limits.DiskMB = 512
	m := w.guest()
	m.ask("make %d", i.mb)
	if i.files > 0 {
		m.ask("files /tree %d 4000", i.files)
	}
	return m
}

// BenchmarkForks measures forks of a machine that has written to all of its
// memory since the last one: until all copies have answered, and how long it
// takes to write the machine's state, for which it stands still. "plain" is
// without shared memory, as gVisor does it.
func BenchmarkForks(b *testing.B) {
	for _, how := range []string{"live", "plain"} {
		for _, has := range []inside{{0, 0}, {100, 0}, {500, 0}, {1000, 0}, {0, 1000}, {0, 20000}} {
			for _, n := range []int{1, 3, 8} {
				b.Run(fmt.Sprintf("%s/%s/x%d", how, has, n), func(b *testing.B) { benchmarkForks(b, how, has, n) })
			}
		}
	}
}

func benchmarkForks(b *testing.B, how string, has inside, n int) {
	w := newWorld(b, 8)
	m := has.machine(w)
	if how == "plain" {
		m.i.s.Version = ""
	}
	var all, stopped times
	var own int64
	for round := 0; b.Loop(); round++ {
		m.ask("change anon %d 100 0", round)
		w.ready(m.cfg, n)
		children := make([]*being, n)
		begin := time.Now()
		m.live(func(s *backend.Snapshot) {
			stopped.add(time.Since(begin))
			var making sync.WaitGroup
			for i := range children {
				making.Go(func() { children[i] = w.start(s) })
			}
			making.Wait()
		})
		all.add(time.Since(begin))
		use, err := children[0].i.Usage(b.Context())
		if err != nil {
			b.Fatal(err)
		}
		own = use.MemoryBytes
		for _, c := range children {
			c.destroy()
			w.b.opts.Slots.Release(c.i.s.Slot)
		}
		w.tend()
	}
	b.ReportMetric(all.median(), "ms/all-answered")
	b.ReportMetric(stopped.median(), "ms/stopped")
	b.ReportMetric(float64(own)/megabyte, "MiB/child")
	b.ReportMetric(0, "ns/op")
}

// BenchmarkStarts measures starts of a snapshot, whose files are in the page
// cache, and what pause and resume of a machine come to: its snapshot, its end,
// and a start.
func BenchmarkStarts(b *testing.B) {
	for _, how := range []string{"live", "plain"} {
		for _, mb := range []int{0, 100, 500, 1000} {
			for _, n := range []int{1, 3, 8} {
				b.Run(fmt.Sprintf("%s/%dMiB/x%d", how, mb, n), func(b *testing.B) { benchmarkStarts(b, how, mb, n) })
			}
		}
	}
}

func benchmarkStarts(b *testing.B, how string, mb, n int) {
	w := newWorld(b, 8)
	m := inside{mb: mb}.machine(w)
	if how == "plain" {
		m.i.s.Version = ""
	}
	var all, written times
	for b.Loop() {
		dir := b.TempDir()
		begin := time.Now()
		s, err := m.i.Snapshot(b.Context(), backend.SnapshotOptions{Dir: dir, Memory: true})
		if err != nil {
			b.Fatal(err)
		}
		written.add(time.Since(begin))
		w.ready(m.cfg, n)
		children := make([]*being, n)
		begin = time.Now()
		var making sync.WaitGroup
		for i := range children {
			making.Go(func() { children[i] = w.start(&s) })
		}
		making.Wait()
		all.add(time.Since(begin))
		for _, c := range children {
			c.destroy()
			w.b.opts.Slots.Release(c.i.s.Slot)
		}
		os.RemoveAll(dir)
	}
	b.ReportMetric(all.median(), "ms/all-answered")
	b.ReportMetric(written.median(), "ms/snapshot")
	b.ReportMetric(0, "ns/op")
}

// ready waits until sentries are booted.
func (w *world) ready(cfg backend.Config, n int) {
	w.Helper()
	for {
		w.b.Prepare(cfg)
		if len(w.b.booted.Ready(keyOf(cfg))) >= n {
			<-time.After(100 * time.Millisecond) // the pool is done with the rest
			return
		}
		<-time.After(100 * time.Millisecond)
	}
}

// start makes a machine and waits until its program answers.
func (w *world) start(from *backend.Snapshot) *being {
	w.Helper()
	cfg := w.config(from)
	i, err := w.b.Create(w.Context(), cfg)
	if err != nil {
		w.Error(err)
		return nil
	}
	m := &being{world: w, cfg: cfg, i: i.(*instance)}
	if _, err := m.request("sum shared"); err != nil {
		w.Error(err)
	}
	return m
}
