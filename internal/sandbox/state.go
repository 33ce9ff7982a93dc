package sandbox

import (
	"fmt"
	"slices"
)

// State is where a sandbox is in its life.
type State string

// The states. Only MoveTo changes one into another.
const (
	Pending  State = "pending"  // recorded and placed, nothing made yet
	Starting State = "starting" // the node makes the machine, or wakes it
	Running  State = "running"  // the agent answers
	Paused   State = "paused"   // its state is kept, nothing runs
	Stopping State = "stopping" // the node removes it
	Stopped  State = "stopped"  // ended as asked or by its own deadlines
	Failed   State = "failed"   // ended by a fault
)

// States lists all states in the order of a life.
var States = []State{Pending, Starting, Running, Paused, Stopping, Stopped, Failed}

// transitions is the one table of what may follow what.
var transitions = map[State][]State{
	Pending:  {Starting, Running, Stopping, Stopped, Failed},
	Starting: {Running, Paused, Stopping, Stopped, Failed},
	Running:  {Paused, Stopping, Stopped, Failed},
	Paused:   {Starting, Running, Stopping, Stopped, Failed},
	Stopping: {Stopped, Failed},
	Stopped:  nil,
	Failed:   nil,
}

// Alive reports whether the sandbox still holds resources.
func (s State) Alive() bool { return s != Stopped && s != Failed }

// Valid reports whether s is one of the states.
func (s State) Valid() bool { return slices.Contains(States, s) }

// CanBecome reports whether next may follow s.
func (s State) CanBecome(next State) bool { return slices.Contains(transitions[s], next) }

// WrongStateError says that a sandbox is not in a state that an operation needs.
type WrongStateError struct {
	ID    ID
	State State
	Want  State
}

func (e *WrongStateError) Error() string {
	return fmt.Sprintf("sandbox %s is %s and cannot become %s", e.ID, e.State, e.Want)
}
