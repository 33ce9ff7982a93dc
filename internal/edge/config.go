package edge

import (
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"time"

	"github.com/kernflux/opendsec/internal/daemon"
)

// Config says how an edge behaves. The zero value of a field takes its
// default; Name, StateDir and AgentPath have none.
type Config struct {
	// Name is the node's name in the cluster, up to 63 of [a-z0-9.-].
	Name string `json:"name"`
	// StateDir holds all that the edge keeps; an absolute path. A file system
	// with reflink (XFS, btrfs) makes copies of large files cheap.
	StateDir string `json:"state_dir"`
	// AgentPath is the agent's static binary, which runs in each sandbox.
	AgentPath string `json:"agent_path"`
	// CPUOvercommit is how many cores are given out for each that the machine
	// has: sandboxes rarely compute all at once. Default 8.
	CPUOvercommit float64 `json:"cpu_overcommit,omitempty"`
	// MemoryOvercommit is the same of memory. Default 1: who goes over dies.
	// Forks have most of their memory in common, and use less than their limits.
	MemoryOvercommit float64 `json:"memory_overcommit,omitempty"`
	// DiskOvercommit is the same of the state directory's file system; what a
	// sandbox may write is rarely what it writes. Default 8. When space really
	// runs out, DiskReserveMB stops further creates first.
	DiskOvercommit float64 `json:"disk_overcommit,omitempty"`
	// MemoryReserveMB is kept for the machine itself, in MiB. Default a tenth
	// of the memory, at least 512 and at most 8192.
	MemoryReserveMB int64 `json:"memory_reserve_mb,omitempty"`
	// MemoryFloorMB is the free memory, in MiB, below which no sandbox is
	// created, forked or woken, whatever the limits add up to. Default half of
	// MemoryReserveMB.
	MemoryFloorMB int64 `json:"memory_floor_mb,omitempty"`
	// DiskReserveMB is the free space, in MiB, below which no sandbox is
	// created. Default a twentieth of the file system, at most 5120.
	DiskReserveMB int64 `json:"disk_reserve_mb,omitempty"`
	// MaxSandboxes bounds how many live at once. Default 1000.
	MaxSandboxes int64 `json:"max_sandboxes,omitempty"`
	// Mirrors says which hosts to ask before a registry, in their order, such
	// as {"docker.io": ["mirror.example.com"]}.
	Mirrors map[string][]string `json:"mirrors,omitempty"`
	// CreateTimeout bounds one create. Default 60 s.
	CreateTimeout daemon.Duration `json:"create_timeout,omitempty"`
	// StopTimeout is how long a stop waits for the machine's removal before it
	// answers "stopping" and goes on in the background. Default 15 s.
	StopTimeout daemon.Duration `json:"stop_timeout,omitempty"`
	// ProbeTimeout bounds the trial run of each backend at the start. Default 30 s.
	ProbeTimeout daemon.Duration `json:"probe_timeout,omitempty"`
	// KeepEnded is how long an ended sandbox is remembered when nobody says
	// that it is recorded elsewhere. Default 24 h.
	KeepEnded daemon.Duration `json:"keep_ended,omitempty"`
}

// withDefaults fills in what does not depend on the machine; see node.go for
// the rest.
func (c Config) withDefaults() Config {
	orFloat := func(v *float64, def float64) {
		if *v == 0 {
			*v = def
		}
	}
	orDuration := func(v *daemon.Duration, def time.Duration) {
		if *v == 0 {
			*v = daemon.Duration(def)
		}
	}
	orFloat(&c.CPUOvercommit, 8)
	orFloat(&c.MemoryOvercommit, 1)
	orFloat(&c.DiskOvercommit, 8)
	if c.MaxSandboxes == 0 {
		c.MaxSandboxes = 1000
	}
	orDuration(&c.CreateTimeout, time.Minute)
	orDuration(&c.StopTimeout, 15*time.Second)
	orDuration(&c.ProbeTimeout, 30*time.Second)
	orDuration(&c.KeepEnded, 24*time.Hour)
	return c
}

var nodeName = regexp.MustCompile(`^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$`)

// Validate reports all that is wrong with c at once.
func (c Config) Validate() error {
	var errs []error
	wrong := func(field, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: "+format, append([]any{field}, args...)...))
	}
	if !nodeName.MatchString(c.Name) {
		wrong("name", "%q must be 1 to 63 of [a-z0-9.-], such as node-1", c.Name)
	}
	if !filepath.IsAbs(c.StateDir) || filepath.Clean(c.StateDir) == "/" {
		wrong("state_dir", "%q must be an absolute path of a directory of its own", c.StateDir)
	}
	if !filepath.IsAbs(c.AgentPath) {
		wrong("agent_path", "%q must be the absolute path of the agent's binary", c.AgentPath)
	}
	for field, v := range map[string]float64{
		"cpu_overcommit": c.CPUOvercommit, "memory_overcommit": c.MemoryOvercommit, "disk_overcommit": c.DiskOvercommit,
	} {
		if v != 0 && (v < 0.01 || v > 1000) {
			wrong(field, "%v must be 0.01 to 1000, or 0 for the default", v)
		}
	}
	for field, v := range map[string]int64{
		"memory_reserve_mb": c.MemoryReserveMB, "memory_floor_mb": c.MemoryFloorMB, "disk_reserve_mb": c.DiskReserveMB, "max_sandboxes": c.MaxSandboxes,
	} {
		if v < 0 {
			wrong(field, "%d must not be negative; 0 takes the default", v)
		}
	}
	for field, v := range map[string]daemon.Duration{
		"create_timeout": c.CreateTimeout, "stop_timeout": c.StopTimeout, "probe_timeout": c.ProbeTimeout, "keep_ended": c.KeepEnded,
	} {
		if v < 0 {
			wrong(field, "%v must not be negative; 0 takes the default", time.Duration(v))
		}
	}
	return errors.Join(errs...)
}
