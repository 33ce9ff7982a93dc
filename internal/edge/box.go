package edge

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// box is one sandbox. One goroutine, started with it, takes it through its
// life (Edge.live); all others only ask it, or decide its end with finish.
type box struct {
	// Never changed.
	id      sandbox.ID
	cost    sandbox.Resources
	arrived time.Time // when this run of the edge came to know it
	old     bool      // an earlier run made it

	undo undo // what it has taken

	// life ends when the sandbox's end is decided or the edge stops; its cause
	// is a *fault.Error that says which. All that is done for the sandbox, its
	// creation and its open requests, hangs on it.
	life    context.Context
	endLife context.CancelCauseFunc

	created chan struct{} // closed when the create came to its end, good or bad
	ended   chan struct{} // closed when nothing is left of it, or the edge stops
	changed chan struct{} // holds one when the deadlines are to be looked at again

	writing sync.Mutex // held over each write of the journal, so that they keep their order

	mu      sync.Mutex // guards what follows
	entry   journal.Entry
	inst    backend.Instance    // nil before it is made, and after it is gone
	agent   *agentclient.Client // the same
	letGo   func()              // ends the watch over inst and the connections of agent; nil before there is one
	use     usage
	waiters int   // callers that wait for the create
	failure error // how the create failed; set before created is closed
}

func (e *Edge) newBox(entry journal.Entry) *box {
	b := &box{
		id: entry.ID, cost: entry.Spec.Limits.Resources(), arrived: e.now(), entry: entry,
		created: make(chan struct{}), ended: make(chan struct{}), changed: make(chan struct{}, 1),
		use: usage{last: e.now()},
	}
	b.life, b.endLife = context.WithCancelCause(context.Background())
	if entry.End != nil {
		b.endLife(endedFault(b.id, *entry.End))
	}
	return b
}

// status is what others are told of a sandbox.
type status struct {
	ID        sandbox.ID
	Project   sandbox.Project
	Backend   sandbox.Backend
	State     sandbox.State
	StartedAt time.Time
	End       *sandbox.End // nil until nothing is left of it
}

func (b *box) status() status {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.statusLocked()
}

func (b *box) statusLocked() status {
	s := status{ID: b.id, Project: b.entry.Project, Backend: b.entry.Spec.Backend, StartedAt: b.entry.StartedAt}
	switch b.entry.Phase {
	case journal.Creating:
		s.State = sandbox.Starting
	case journal.Running:
		s.State = sandbox.Running
	case journal.Ended:
		s.State, s.End = b.entry.End.State(), b.entry.End
		return s
	}
	if b.entry.End != nil {
		s.State = sandbox.Stopping
	}
	return s
}

// end returns how the sandbox ended or is ending, nil while it lives.
func (b *box) end() *sandbox.End {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.entry.End
}

// finish decides the sandbox's end. The first one stands; it reports whether
// this was it. What follows from it is done by the box's own goroutine.
func (b *box) finish(end sandbox.End) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.finishLocked(end)
}

func (b *box) finishLocked(end sandbox.End) bool {
	if b.entry.End != nil {
		return false
	}
	b.entry.End = &end
	b.endLife(endedFault(b.id, end))
	return true
}

// endedFault is the error of a call to a sandbox that has ended.
func endedFault(id sandbox.ID, end sandbox.End) *fault.Error {
	f := fault.New(fault.SandboxEnded, "sandbox %s has ended (%s): %s", id, end.Reason, end.Detail)
	f.Domain, f.End, f.State = end.Domain, &end, end.State()
	return f
}

// errEdgeStops is why a request breaks when only the edge goes away.
var errEdgeStops = fault.New(fault.Unavailable, "the node's edge is being restarted; the sandbox goes on, so try again in a moment")

// why returns the reason for the end of the box's life.
func (b *box) why() error { return context.Cause(b.life) }

// enter counts a request as open and as a use; leave must follow. It refuses
// when the sandbox cannot be used.
func (b *box) enter() (*agentclient.Client, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.life.Err() != nil:
		return nil, b.why()
	case b.entry.End != nil:
		return nil, endedFault(b.id, *b.entry.End)
	case b.entry.Phase == journal.Creating || b.agent == nil:
		return nil, b.noMachine()
	}
	b.use.open++
	return b.agent, nil
}

func (b *box) leave(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.use.open--
	b.use.last = now
}

// touch counts as a use.
func (b *box) touch(now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.use.last = now
}

// setDeadlines replaces the deadlines and counts as a use.
func (b *box) setDeadlines(d sandbox.Deadlines, now time.Time) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.entry.End != nil {
		return endedFault(b.id, *b.entry.End)
	}
	b.entry.Spec.Deadlines = d
	b.use.last = now
	select {
	case b.changed <- struct{}{}:
	default:
	}
	return nil
}

func (b *box) spec() sandbox.Spec {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.entry.Spec
}

// measurable returns the machine of a sandbox that can be measured.
func (b *box) measurable() (backend.Instance, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.entry.End != nil {
		return nil, endedFault(b.id, *b.entry.End)
	}
	if b.inst == nil {
		return nil, b.noMachine()
	}
	return b.inst, nil
}

// noMachine is the error of a call for which it is too early; b.mu is held.
func (b *box) noMachine() error {
	if b.entry.Phase == journal.Creating {
		f := fault.New(fault.WrongState, "sandbox %s is still being made; wait for its create to answer", b.id)
		f.State = sandbox.Starting
		return f
	}
	return fault.New(fault.Unavailable, "the node has not found the machine of sandbox %s again yet; try again in a moment", b.id)
}

// deadlines returns what judge wants.
func (b *box) deadlines() (d sandbox.Deadlines, created time.Time, u usage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.entry.Spec.Deadlines, b.entry.CreatedAt, b.use
}

// machine returns the instance and the agent, nil for what is not there.
func (b *box) machine() (backend.Instance, *agentclient.Client) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.inst, b.agent
}

// record writes the journal as the box is now, after change, which may be nil.
func (e *Edge) record(b *box, sync journal.Sync, change func(*journal.Entry)) error {
	b.writing.Lock()
	defer b.writing.Unlock()
	b.mu.Lock()
	if change != nil {
		change(&b.entry)
	}
	entry := b.entry
	b.mu.Unlock()
	return e.journal.Write(&entry, sync)
}

// forget drops an ended box with its journal.
func (e *Edge) forget(b *box) {
	select {
	case <-b.ended:
	default:
		return
	}
	b.writing.Lock()
	err := e.journal.Remove(b.id)
	b.writing.Unlock()
	if err != nil {
		e.log.Error("cannot forget an ended sandbox", "sandbox", b.id, "error", err)
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.boxes[b.id] == b {
		delete(e.boxes, b.id)
	}
}

// notFound is the error of a call that names no sandbox of this node.
func (e *Edge) notFound(id sandbox.ID) error {
	return fault.New(fault.NotFound, "node %s has no sandbox %s: it was never here, or ended and is forgotten", e.cfg.Name, id)
}

// get returns the box of an id.
func (e *Edge) get(id string) (*box, error) {
	sid, err := sandbox.ParseID(id)
	if err != nil {
		return nil, fault.Invalid("id", "%w", err)
	}
	b := e.find(sid)
	if b == nil {
		return nil, e.notFound(sid)
	}
	return b, nil
}

func (s status) String() string { return fmt.Sprintf("%s %s", s.ID, s.State) }
