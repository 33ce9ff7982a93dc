package container

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
	"github.com/kernflux/opendsec/internal/ocispec"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func BenchmarkContainer(b *testing.B) {
	for _, name := range runtimes {
		b.Run(name, func(b *testing.B) { backendtest.Benchmark(b, kindOf(name, 4)) })
	}
}

// BenchmarkStockRunc is what BenchmarkContainer is to be compared with: runc
// from the command line, on a plain directory, with the same limits and, in
// "filtered", the same system call filter.
func BenchmarkStockRunc(b *testing.B) {
	rootfs, _ := backendtest.Rootfs(b)
	for name, filtered := range map[string]bool{"plain": false, "filtered": true} {
		b.Run(name, func(b *testing.B) {
			dir := b.TempDir()
			root := filepath.Join(dir, "root")
			if out, err := exec.Command("cp", "-a", rootfs.Tree, root).CombinedOutput(); err != nil {
				b.Fatalf("copy the image: %v %s", err, out)
			}
			spec := ocispec.Build(ocispec.Options{
				Hostname: "stock", Root: root, CgroupNS: true, LimitSwap: countsSwap(),
				CgroupsPath: filepath.Join("/", backend.Prefix(dir), "stock"),
				Limits:      sandbox.Limits{CPU: 1, MemoryMB: 256, PIDs: 200},
			})
			spec.Process.Args = []string{"/bin/sleep", "1000"}
			if filtered {
				if err := ocispec.AddSeccomp(spec); err != nil {
					b.Fatal(err)
				}
			}
			text, err := json.Marshal(spec)
			if err != nil {
				b.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, "config.json"), text, 0o600); err != nil {
				b.Fatal(err)
			}
			runc := func(args ...string) {
				cmd := exec.Command("runc", append([]string{"--root", filepath.Join(dir, "state")}, args...)...)
				if err := cmd.Run(); err != nil {
					b.Fatalf("%s: %v", cmd, err)
				}
			}
			var started, ran []time.Duration
			for b.Loop() {
				<-time.After(150 * time.Millisecond)
				begin := time.Now()
				runc("run", "--detach", "--bundle", dir, "stock")
				started = append(started, time.Since(begin))
				runc("exec", "stock", "true")
				ran = append(ran, time.Since(begin))
				runc("delete", "--force", "stock")
			}
			for unit, took := range map[string][]time.Duration{"ms/create": started, "ms/first-command": ran} {
				slices.Sort(took)
				b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, unit)
			}
		})
	}
}
