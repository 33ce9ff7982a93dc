package edge

import (
	"context"
	"fmt"

	"github.com/kernflux/opendsec/internal/ahead"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/host"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/reflink"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// measure settles what this node gives out.
func (e *Edge) measure() error {
	memory, err := host.MemoryMB()
	if err != nil {
		return err
	}
	disk, err := host.Disk(e.cfg.StateDir)
	if err != nil {
		return err
	}
	reserve := e.cfg.MemoryReserveMB
	if reserve == 0 {
		reserve = min(max(memory/10, 512), 8192)
	}
	e.floor = e.cfg.MemoryFloorMB
	if e.floor == 0 {
		e.floor = reserve / 2
	}
	e.reserve = e.cfg.DiskReserveMB
	if e.reserve == 0 {
		e.reserve = min(disk.TotalMB/20, 5120)
	}
	e.capacity = sandbox.Resources{
		CPU:       float64(e.cores()) * e.cfg.CPUOvercommit,
		MemoryMB:  int64(float64(max(memory-reserve, 0)) * e.cfg.MemoryOvercommit),
		DiskMB:    int64(float64(max(disk.TotalMB-e.reserve, 0)) * e.cfg.DiskOvercommit),
		Sandboxes: e.cfg.MaxSandboxes,
	}
	clones, err := reflink.Supported(e.cfg.StateDir)
	if err != nil {
		return err
	}
	if !clones {
		e.notes = append(e.notes, fmt.Sprintf("the file system of %s has no reflink, so copies of container disks are real copies; XFS or btrfs under it makes their forks fast", e.cfg.StateDir))
	}
	return nil
}

func (e *Edge) cores() int { return host.Cores() }

// full returns why no machine is made any more, nil while there is space and
// memory.
func (e *Edge) full() error {
	if err := e.roomOnDisk(0); err != nil {
		return err
	}
	free, err := host.FreeMemoryMB()
	if err != nil || free >= e.floor {
		return err
	}
	return fault.New(fault.Capacity, "node %s is low on memory: %d MiB are free and %d must stay so (memory_floor_mb); stop or pause sandboxes, or end what else takes memory there",
		e.cfg.Name, free, e.floor)
}

// roomAhead says how much memory there is for machines that nobody asked for
// yet. Where sandboxes are refused for want of it, they go within a minute.
func (e *Edge) roomAhead() ahead.Room {
	free, err := host.FreeMemoryMB()
	switch {
	case err != nil || free >= 2*e.floor:
		return ahead.Enough
	case free >= e.floor:
		return ahead.Short
	}
	return ahead.None
}

// roomFor refuses to write a machine's state, its files and maybe its memory,
// when the disk could run full of it. Memory that the machine shares is not
// written.
func (e *Edge) roomFor(ctx context.Context, inst backend.Instance, o backend.SnapshotOptions) error {
	used, err := inst.Usage(ctx)
	if err != nil {
		return err
	}
	want := used.DiskBytes
	sharer, ok := inst.(backend.Sharer)
	if shared := ok && o.Live && sharer.Shares(); o.Memory && !shared {
		want += used.MemoryBytes + used.SharedMemoryBytes
	}
	return e.roomOnDisk(want)
}

func (e *Edge) roomOnDisk(bytes int64) error {
	space, err := host.Disk(e.cfg.StateDir)
	if err != nil {
		return err
	}
	want, wanted := bytes>>20, ""
	if space.FreeMB-want >= e.reserve {
		return nil
	}
	if want > 0 {
		wanted = fmt.Sprintf("the state may take %d MiB, ", want)
	}
	return fault.New(fault.Capacity, "node %s is low on disk: %s%d MiB are free on the file system of %s and %d must stay so; delete images or stop sandboxes",
		e.cfg.Name, wanted, space.FreeMB, e.cfg.StateDir, e.reserve)
}

// health returns what an admin should know, and why the node takes no
// sandboxes, "" when it does.
func (e *Edge) health() (warnings []string, unhealthy string) {
	warnings = append(warnings, e.notes...)
	if e.deps.Gate != nil {
		if err := e.deps.Gate.Lack(); err != nil {
			warnings = append(warnings, fmt.Sprintf("sandboxes cannot have network rules here: %v", err))
		}
	}
	if err := e.full(); err != nil {
		return warnings, err.Error()
	}
	if len(e.available()) == 0 {
		return warnings, "no backend works here"
	}
	if space, err := host.Disk(e.cfg.StateDir); err == nil && space.FreeMB < 2*e.reserve {
		warnings = append(warnings, fmt.Sprintf("the file system of %s is filling up: %d MiB are free, below %d no sandbox is created", e.cfg.StateDir, space.FreeMB, e.reserve))
	}
	if free, err := host.FreeMemoryMB(); err == nil && free < 2*e.floor {
		warnings = append(warnings, fmt.Sprintf("memory is running short: %d MiB are free, below %d no sandbox is created, forked or woken", free, e.floor))
	}
	return warnings, ""
}
