package gvisor

import (
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/specutils"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/ocispec"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// key is what is fixed when a sentry is made. Sentries of the same key can
// become the same machines.
type key struct {
	rootfs   string // path of the image's EROFS file
	agent    string // path of the agent's EROFS file
	cpus     int    // that the sandbox sees
	memoryMB int64
	diskMB   int64
	pids     int64
	state    string // directory of the snapshot that it has the memory of; "" for none
}

func keyOf(cfg backend.Config) key {
	return key{
		rootfs:   cfg.Rootfs.EROFS,
		agent:    cfg.Agent.EROFS,
		cpus:     int(math.Ceil(cfg.Limits.CPU)),
		memoryMB: cfg.Limits.MemoryMB,
		diskMB:   cfg.Limits.DiskMB,
		pids:     cfg.Limits.PIDs,
	}
}

// of reports whether the machine is made of an image, by its directory.
func (k key) of(dir string) bool {
	return within(k.rootfs, dir) || within(k.state, dir)
}

// within reports whether a path is a directory's or below it.
func within(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, dir+string(filepath.Separator))
}

// What the host's control group gets beyond the sandbox's own memory: the
// sentry's heap, its stub processes and the kernel's tables for them. An idle
// sandbox needs 10 MiB of it; the rest is for file trees and connections.
const (
	overheadMB    = 32
	overheadShare = 32 // and one part in so many of the limit
)

// A process or thread inside takes two of the host. The host's limit on them is
// a guard only, for going over it kills the sandbox; inside, Limits.PIDs holds.
const (
	threadsOwn = 1024
	threadsPer = 4
)

// hostLimits are those of the control group while a sentry is made. The CPU has
// none yet, so that a sandbox with little of it does not start slowly.
func (k key) hostLimits() sandbox.Limits {
	return sandbox.Limits{
		MemoryMB: hostMemoryMB(k.memoryMB),
		PIDs:     threadsOwn + threadsPer*k.pids,
	}
}

// hostMemoryMB is the memory limit of the control group of a sandbox.
func hostMemoryMB(memoryMB int64) int64 {
	return memoryMB + overheadMB + memoryMB/overheadShare
}

// mountConfs says how the sentry mounts its two EROFS files: the image under a
// writable layer of limited size, and the agent as it is.
func (k key) mountConfs() string {
	confs := specutils.GoferMountConfFlags{
		{Lower: specutils.Erofs, Upper: specutils.AnonOverlay, Size: strconv.FormatInt(k.diskMB, 10) + "m"},
		{Lower: specutils.Erofs, Upper: specutils.NoOverlay},
	}
	return confs.String()
}

// unmounted is the type of a mount that is none.
const unmounted = "image"

// spec describes the sandbox to the sentry. The hostname is set later, by the
// agent, so that a machine can be made before anybody knows it.
func (k key) spec() *specs.Spec {
	s := ocispec.Build(ocispec.Options{
		Root:   "/", // the sentry has the image by its descriptor
		Limits: sandbox.Limits{MemoryMB: k.memoryMB},
	})
	s.Mounts = append(s.Mounts,
		// For the limit on processes, and programs that look for limits. Without
		// a control group namespace: in one, this sentry dies of a write that
		// comes from outside.
		specs.Mount{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: []string{"ro", "nosuid", "noexec", "nodev"}},
		// The sentry passes over a type that it does not know, and leaves /tmp as
		// it is. Without this it would put a tmpfs on one that is empty, and what
		// is written there would count as memory.
		specs.Mount{Destination: "/tmp", Type: unmounted, Source: unmounted},
		specs.Mount{Destination: backend.AgentDir, Type: "erofs", Source: k.agent, Options: []string{"ro", "nodev"}},
	)
	// Names inside are names outside: the sentry needs a user namespace for its
	// own capabilities only.
	s.Linux.Namespaces = append(s.Linux.Namespaces, specs.LinuxNamespace{Type: specs.UserNamespace})
	s.Linux.UIDMappings = identity()
	s.Linux.GIDMappings = identity()
	s.Linux.Resources = nil
	// For sethostname. The agent takes it from the processes it starts.
	c := s.Process.Capabilities
	for _, set := range []*[]string{&c.Bounding, &c.Effective, &c.Permitted} {
		*set = append(slices.Clone(*set), "CAP_SYS_ADMIN")
	}
	return s
}

func identity() []specs.LinuxIDMapping {
	return []specs.LinuxIDMapping{{ContainerID: 0, HostID: 0, Size: math.MaxUint32}}
}

// specFile returns the specification as a file in memory.
func (k key) specFile() (*os.File, error) {
	data, err := json.Marshal(k.spec())
	if err != nil {
		return nil, fmt.Errorf("encode the sandbox's specification: %w", err)
	}
	f, err := memoryFile("spec")
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(data); err != nil {
		f.Close()
		return nil, fmt.Errorf("write the sandbox's specification: %w", err)
	}
	return f, nil
}

// memoryFile makes a file in memory.
func memoryFile(name string) (*os.File, error) {
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make a file in memory: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}
