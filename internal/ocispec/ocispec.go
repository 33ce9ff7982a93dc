// Package ocispec describes a sandbox as an OCI runtime specification, the same
// for the backends that are OCI runtimes: the agent as process 1, with the
// capabilities, mounts and hidden paths that a container of Docker's has, so
// that images behave as their makers expect. It makes nothing on the host;
// what differs between runtimes (seccomp, sysctls, annotations) is added by the
// backend that wants it.
package ocispec

import (
	"path"
	"runtime"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Version is the version of the runtime specification that a Spec follows. It
// is not the newest one, because runtimes of distributions refuse a newer.
const Version = "1.0.2"

// AgentPath is the agent's binary inside each sandbox.
const AgentPath = backend.AgentDir + "/agent"

// DefaultPath is the PATH of the agent itself. Processes get theirs from the
// image.
const DefaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Options say what sandbox to describe. The zero value of a field leaves its
// part out.
type Options struct {
	Hostname string
	// Root is the path of the root file system on the host.
	Root string
	// RootReadonly makes it read-only.
	RootReadonly bool
	// AgentDir is a host directory that is bound read-only at
	// backend.AgentDir. Empty when the backend mounts the agent another way.
	AgentDir string
	// NetNS is the path of a network namespace to join. Empty makes a new one.
	NetNS string
	// CgroupNS gives the sandbox a cgroup namespace of its own and, with it, a
	// read-only view of its limits at /sys/fs/cgroup.
	CgroupNS bool
	// CgroupsPath is the sandbox's cgroup, from the root of the hierarchies.
	CgroupsPath string
	// Limits go into the resources. An amount of zero is no limit.
	Limits sandbox.Limits
	// LimitSwap counts swap in the memory limit. The host must account for swap.
	LimitSwap bool
}

// Build returns the specification.
func Build(o Options) *specs.Spec {
	return &specs.Spec{
		Version:  Version,
		Hostname: o.Hostname,
		Root:     &specs.Root{Path: o.Root, Readonly: o.RootReadonly},
		Process: &specs.Process{
			Args:         []string{AgentPath},
			Env:          []string{"PATH=" + DefaultPath, "HOME=/root"},
			Cwd:          "/",
			User:         specs.User{UID: 0, GID: 0},
			Capabilities: capabilities(),
			Rlimits:      rlimits(),
		},
		Mounts: mounts(o),
		Linux: &specs.Linux{
			Namespaces:    namespaces(o),
			CgroupsPath:   o.CgroupsPath,
			Resources:     resources(o),
			MaskedPaths:   maskedPaths(),
			ReadonlyPaths: readonlyPaths(),
		},
	}
}

// capabilities returns those that Docker gives a container. Users inside may
// gain them (sudo works), so no_new_privileges stays off as in Docker.
func capabilities() *specs.LinuxCapabilities {
	all := []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER",
		"CAP_FSETID", "CAP_KILL", "CAP_MKNOD", "CAP_NET_BIND_SERVICE",
		"CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP",
		"CAP_SETUID", "CAP_SYS_CHROOT",
	}
	return &specs.LinuxCapabilities{Bounding: all, Effective: all, Permitted: all}
}

// Numbers of open files: what programs start with, and how far they may raise
// it themselves.
const (
	softFiles = 64 << 10
	hardFiles = 1 << 20
)

// rlimits gives what the host has at most, because a host that may not raise
// its own hard limit (a container without CAP_SYS_RESOURCE) could not start
// a sandbox with a higher one.
func rlimits() []specs.POSIXRlimit {
	hard := uint64(hardFiles)
	var host unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &host); err == nil {
		hard = min(hard, host.Max)
	}
	return []specs.POSIXRlimit{{Type: "RLIMIT_NOFILE", Hard: hard, Soft: min(hard, softFiles)}}
}

func mounts(o Options) []specs.Mount {
	shm := int64(64 << 20)
	if o.Limits.MemoryMB > 0 {
		// Pages of /dev/shm count as the sandbox's memory. Half of it leaves
		// room for the processes that share the other.
		shm = o.Limits.MemoryMB << 20 / 2
	}
	ms := []specs.Mount{
		{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
		{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}},
		{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: []string{"nosuid", "noexec", "nodev", "mode=1777", "size=" + strconv.FormatInt(shm, 10)}},
		{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: []string{"nosuid", "noexec", "nodev"}},
		{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: []string{"nosuid", "noexec", "nodev", "ro"}},
	}
	if o.CgroupNS {
		ms = append(ms, specs.Mount{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"nosuid", "noexec", "nodev", "relatime", "ro"}})
	}
	if o.AgentDir != "" {
		ms = append(ms, specs.Mount{Destination: backend.AgentDir, Type: "bind", Source: o.AgentDir, Options: []string{"bind", "ro", "nosuid", "nodev"}})
	}
	return ms
}

func namespaces(o Options) []specs.LinuxNamespace {
	ns := []specs.LinuxNamespace{
		{Type: specs.PIDNamespace},
		{Type: specs.MountNamespace},
		{Type: specs.IPCNamespace},
		{Type: specs.UTSNamespace},
		{Type: specs.NetworkNamespace, Path: o.NetNS},
	}
	if o.CgroupNS {
		ns = append(ns, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return ns
}

// cpuPeriod is the time in microseconds over which the kernel counts CPU time.
const cpuPeriod = 100_000

func resources(o Options) *specs.LinuxResources {
	r := &specs.LinuxResources{
		// Everything is refused; runtimes add the harmless ones (null, zero,
		// full, random, urandom, tty, ptmx).
		Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}},
	}
	if o.Limits.CPU > 0 {
		period, quota, shares := uint64(cpuPeriod), int64(o.Limits.CPU*cpuPeriod), uint64(o.Limits.CPU*1024)
		quota, shares = max(quota, 1000), max(shares, 2) // the kernel takes no less
		r.CPU = &specs.LinuxCPU{Period: &period, Quota: &quota, Shares: &shares}
	}
	if o.Limits.MemoryMB > 0 {
		limit := o.Limits.MemoryMB << 20
		r.Memory = &specs.LinuxMemory{Limit: &limit}
		if o.LimitSwap {
			r.Memory.Swap = &limit
		}
	}
	if o.Limits.PIDs > 0 {
		r.Pids = &specs.LinuxPids{Limit: o.Limits.PIDs}
	}
	return r
}

// maskedPaths tell of the host or reach into it.
func maskedPaths() []string {
	masked := []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore",
		"/proc/keys", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
		"/proc/timer_list", "/proc/timer_stats",
		"/sys/devices/virtual/powercap", "/sys/firmware",
	}
	for cpu := range runtime.NumCPU() {
		p := path.Join("/sys/devices/system/cpu", "cpu"+strconv.Itoa(cpu), "thermal_throttle")
		if unix.Access(p, unix.F_OK) == nil {
			masked = append(masked, p)
		}
	}
	return masked
}

func readonlyPaths() []string {
	return []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
}
