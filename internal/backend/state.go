package backend

import (
	"context"
	"encoding/json"
	"os"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// A Pauser is an Instance that can be stopped and go on. Both methods may be
// repeated and return when it is so.
type Pauser interface {
	// Pause stops all that runs in the machine, as one, and keeps it in memory.
	// Connections into the machine stay open and say nothing.
	Pause(ctx context.Context) error
	// Resume lets it go on.
	Resume(ctx context.Context) error
}

// A Snapshotter is an Instance whose state can be written down. The machine,
// paused or running, is as it was when Snapshot returns; a running one stands
// still meanwhile. When the caller dies in the middle, a running one goes on by
// itself, or is found paused by Recover, which lets it go on.
type Snapshotter interface {
	// Snapshot writes the state into o.Dir. On an error it may leave parts of it
	// there, and the machine is unharmed. What it wrote is not on the disk for
	// sure before the caller has synced it. An error that wraps unix.ENOSPC says
	// that the disk is full.
	Snapshot(ctx context.Context, o SnapshotOptions) (Snapshot, error)
}

// A Sharer is a Snapshotter whose live snapshots may leave memory where it is.
type Sharer interface {
	// Shares reports whether they do.
	Shares() bool
}

// A Differ is an Instance whose changed files can be read.
type Differ interface {
	// Diff writes what was changed against the machine's image to w, as an
	// uncompressed OCI layer: a tar with whiteouts. A running machine stands
	// still meanwhile. Mounts of the backend's own and what lies below them are
	// left out.
	Diff(ctx context.Context, w *os.File) error
}

// SnapshotOptions say what to write and where.
type SnapshotOptions struct {
	// Dir is an existing, empty directory on the state file system.
	Dir string
	// Memory says whether memory and processes are in it; else files only. A
	// backend whose Features have no such snapshots is not asked for them.
	Memory bool
	// Live says that machines will be made of it soon, by this run, on this node
	// and for the same project, and of no copy of it: they may share memory with
	// the machine. Restorer.Withdraw ends that. It is of no meaning without Memory.
	Live bool
}

// Snapshot is what a machine was at one moment. Its files are in a directory
// that whoever has the Snapshot keeps, and may move as a whole. Machines are
// made of it by Config.From. The files never change, so they may be linked.
type Snapshot struct {
	Backend sandbox.Backend `json:"backend"`
	// Dir is where its files are. It is not part of what is written down.
	Dir    string         `json:"-"`
	Memory bool           `json:"memory"` // with memory and processes; else files only
	Size   int64          `json:"size"`   // of its files on the disk, in bytes
	Limits sandbox.Limits `json:"limits"` // of the machine that it was taken of
	Stamp  Stamp          `json:"stamp"`
	// Data is the backend's own.
	Data json.RawMessage `json:"data,omitempty"`
}

// Stamp says what a snapshot with memory was taken with.
type Stamp struct {
	Virtualization string   `json:"virtualization"` // "systrap"
	Runtime        string   `json:"runtime"`        // version of kernel or monitor, with its patches
	Kernel         string   `json:"kernel"`         // of the host; for information
	CPUFeatures    []string `json:"cpu_features"`   // that a node must have, sorted
	Agent          string   `json:"agent"`          // Agent.ID
}

// A Restorer is a Backend that makes machines of snapshots with memory.
type Restorer interface {
	// CanRestore returns why a snapshot cannot be started on this node, in words
	// for a caller, nil when it can. It is quick.
	CanRestore(s Snapshot) error
	// Prepare says that machines of a snapshot with memory of a machine of this
	// Config are likely to be wanted soon. It returns at once.
	Prepare(cfg Config)
	// Withdraw says that no more machines will be made of a live snapshot. Those
	// that were made of it go on. It is done for every one before its files go.
	Withdraw(s Snapshot)
}
