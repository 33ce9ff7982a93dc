package container

import (
	"context"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// BenchmarkState measures what state costs with different amounts of it, on
// this machine's file system and on XFS. Each is reported as the median in
// milliseconds.
func BenchmarkState(b *testing.B) {
	const files = "mkdir /d; for d in $(seq %); do mkdir /d/$d; for f in $(seq 1000); do echo $f >/d/$d/$f; done; done"
	for _, on := range []string{"plain", "xfs"} {
		for _, c := range []struct{ name, fill string }{
			{"empty", "true"},
			{"1000 files", strings.ReplaceAll(files, "%", "1")},
			{"20000 files", strings.ReplaceAll(files, "%", "20")},
			{"500 MB", "dd if=/dev/urandom of=/data bs=1M count=500 2>/dev/null"},
		} {
			b.Run(on+"/"+c.name, func(b *testing.B) {
				dir := b.TempDir()
				if on == "xfs" {
					dir = mountXFS(b, 6000)
				}
				benchmarkState(b, newHost(b, dir), c.fill)
			})
		}
	}
}

func benchmarkState(b *testing.B, h *host, fill string) {
	ctx := context.Background()
	i := h.create(sandbox.Limits{CPU: 2, MemoryMB: 512, DiskMB: 1024, PIDs: 100}, nil)
	sh(b, h.client(i), fill+"; sync")
	took := map[string][]time.Duration{}
	measure := func(unit string, f func() error) {
		begin := time.Now()
		if err := f(); err != nil {
			b.Fatal(err)
		}
		took[unit] = append(took[unit], time.Since(begin))
	}
	for b.Loop() {
		measure("ms/pause", func() error { return i.Pause(ctx) })
		measure("ms/resume", func() error { return i.Resume(ctx) })
		begin := time.Now()
		s := h.snapshot(i)
		took["ms/snapshot"] = append(took["ms/snapshot"], time.Since(begin))
		var r *instance
		measure("ms/start", func() error {
			r = h.create(s.Limits, s)
			return r.answers(ctx)
		})
		if err := r.Destroy(ctx); err != nil {
			b.Fatal(err)
		}
		h.made = h.made[:1]
		if err := os.RemoveAll(s.Dir); err != nil {
			b.Fatal(err)
		}
		layer, err := os.CreateTemp(h.dir, "layer-")
		if err != nil {
			b.Fatal(err)
		}
		measure("ms/layer", func() error { return i.Diff(ctx, layer) })
		if err := os.Remove(layer.Name()); err != nil {
			b.Fatal(err)
		}
		layer.Close()
	}
	for unit, all := range took {
		slices.Sort(all)
		b.ReportMetric(float64(all[len(all)/2].Microseconds())/1000, unit)
	}
}
