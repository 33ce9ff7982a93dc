package agent

import (
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// metrics is what /metrics answers, in E2B's form. It is the machine's own
// view; what is charged is measured outside.
type metrics struct {
	Time     int64   `json:"ts"` // seconds since 1970
	CPUCount int     `json:"cpu_count"`
	CPUUsed  float64 `json:"cpu_used_pct"` // of all CPUs together, since the last call
	MemTotal uint64  `json:"mem_total"`    // bytes
	MemUsed  uint64  `json:"mem_used"`
	MemCache uint64  `json:"mem_cache"`
	MemMiB   uint64  `json:"mem_total_mib"`
	UsedMiB  uint64  `json:"mem_used_mib"`
	DiskUsed uint64  `json:"disk_used"` // bytes of the root file system
	Disk     uint64  `json:"disk_total"`
}

func (s *Server) metrics(now time.Time) metrics {
	m := metrics{Time: now.Unix(), CPUCount: runtime.NumCPU(), CPUUsed: s.load.since(readFile("/proc/stat"))}
	mem := memory(readFile("/proc/meminfo"))
	m.MemTotal, m.MemCache = mem["MemTotal"], mem["Cached"]+mem["SReclaimable"]
	m.MemUsed = m.MemTotal - min(m.MemTotal, mem["MemAvailable"])
	m.MemMiB, m.UsedMiB = m.MemTotal>>20, m.MemUsed>>20
	var disk syscall.Statfs_t
	if syscall.Statfs("/", &disk) == nil {
		m.Disk = disk.Blocks * uint64(disk.Bsize)
		m.DiskUsed = (disk.Blocks - min(disk.Blocks, disk.Bfree)) * uint64(disk.Bsize)
	}
	return m
}

func readFile(path string) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return "" // the figures that it would give are then 0
	}
	return string(data)
}

// memory reads /proc/meminfo, in bytes.
func memory(text string) map[string]uint64 {
	out := map[string]uint64{}
	for line := range strings.Lines(text) {
		name, rest, _ := strings.Cut(line, ":")
		if f := strings.Fields(rest); len(f) > 0 {
			if kb, err := strconv.ParseUint(f[0], 10, 54); err == nil {
				out[name] = kb << 10
			}
		}
	}
	return out
}

// cpuMeter turns the kernel's counters into a share.
type cpuMeter struct {
	mu         sync.Mutex // guards what follows
	busy, idle uint64     // at the last call
}

// since returns the share in percent since the last call, from the content of
// /proc/stat; the first call's goes back to the start of the counters.
func (c *cpuMeter) since(stat string) float64 {
	line, _, _ := strings.Cut(stat, "\n")
	var busy, idle uint64
	for i, f := range strings.Fields(line) {
		n, err := strconv.ParseUint(f, 10, 64)
		switch {
		case err != nil, i > 8: // the name, and guests, which are counted as user already
		case i == 4 || i == 5: // idle and waiting for a disk
			idle += n
		default:
			busy += n
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	dBusy, dIdle := busy-c.busy, idle-c.idle
	c.busy, c.idle = busy, idle
	if total := dBusy + dIdle; total > 0 && dBusy <= total {
		return 100 * float64(dBusy) / float64(total)
	}
	return 0
}
