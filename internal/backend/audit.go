package backend

import (
	"context"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// An Auditor is a Backend that can say what of its making is on the host
// without belonging to a machine. Every backend that makes anything outside
// Config.StateDir is one.
type Auditor interface {
	// Audit lists what lies on the host under the backend's names and belongs
	// neither to a machine in known nor to what the backend holds ready. A
	// machine that is being made while Audit runs must be in known.
	Audit(ctx context.Context, known []sandbox.ID) ([]Leftover, error)
	// Remove removes a thing that Audit listed. A thing that is gone by then
	// is no error.
	Remove(ctx context.Context, l Leftover) error
}

// A Leftover is a thing on the host that should not be there.
type Leftover struct {
	Kind LeftoverKind
	// Name finds it: a pid, a path, a device.
	Name string
	// ID is the sandbox that it was made for, "" when it does not say.
	ID sandbox.ID
	// Detail is a few words for a person, such as a process's command.
	Detail string
}

// LeftoverKind says what a Leftover is.
type LeftoverKind string

// The kinds of leftover.
const (
	LeftoverProcess   LeftoverKind = "process"
	LeftoverNetNS     LeftoverKind = "netns"
	LeftoverLink      LeftoverKind = "link"
	LeftoverMount     LeftoverKind = "mount"
	LeftoverCgroup    LeftoverKind = "cgroup"
	LeftoverLoop      LeftoverKind = "loop device"
	LeftoverFile      LeftoverKind = "file"
	LeftoverContainer LeftoverKind = "container" // a runtime's record of one
)
