package edge

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image"
	"github.com/kernflux/opendsec/internal/netgate"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// box is one sandbox. One goroutine, started with it, takes it through its
// life (Edge.live); all others only ask it, or decide its end with finish.
type box struct {
	// Never changed.
	id      sandbox.ID
	arrived time.Time // when this run of the edge came to know it
	old     bool      // an earlier run made it
	origin  origin    // what a new one begins with
	denials *netgate.Denials

	undo undo          // what it has taken for its whole life; see spell for the rest
	op   chan struct{} // holds one while a state operation is under way

	held sandbox.Resources // what it counts for; guarded by Edge.mu

	// life ends when the sandbox's end is decided or the edge stops; its cause
	// is a *fault.Error that says which. All that is done for the sandbox, its
	// creation and its open requests, hangs on it.
	life    context.Context
	endLife context.CancelCauseFunc

	created chan struct{} // closed when the create came to its end, good or bad
	ended   chan struct{} // closed when nothing is left of it, or the edge stops
	changed chan struct{} // holds one when the deadlines are to be looked at again

	netting sync.Mutex  // held over each change of its network; before writing and mu
	pinned  atomic.Bool // its network's pins changed since they were recorded

	writing sync.Mutex // held over each write of the journal, so that they keep their order

	mu      sync.Mutex // guards what follows
	entry   journal.Entry
	art     image.Artifact // its image, and where that is
	rootfs  backend.Rootfs
	spell   *spell        // nil while it has no machine
	pausing chan struct{} // closed when the pause that is under way is done; nil for none
	waking  bool          // a resume is under way
	use     usage
	waiters int                               // callers that wait for the create
	failure error                             // how the create failed; set before created is closed
	tunnels map[*context.CancelCauseFunc]bool // how to cut each that is open
}

// origin is the state that a new machine begins with; zero for a fresh one.
type origin struct {
	from  *backend.Snapshot
	token string // of the agent in it, with memory
	again bool   // others are likely to begin with it too
}

func (e *Edge) newBox(entry journal.Entry) *box {
	b := &box{
		id: entry.ID, arrived: e.now(), entry: entry, op: make(chan struct{}, 1),
		created: make(chan struct{}), ended: make(chan struct{}), changed: make(chan struct{}, 1),
		use: usage{last: e.now()}, denials: netgate.NewDenials(netgate.Denied{}),
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
	PausedAt  time.Time // zero while it is not paused
	PausedFor time.Duration
	End       *sandbox.End // nil until nothing is left of it

	NetworkRules    map[string]bool
	NetworkRevision int64 // how often the rules were changed
}

func (b *box) status() status {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.statusLocked()
}

func (b *box) statusLocked() status {
	s := status{
		ID: b.id, Project: b.entry.Project, Backend: b.entry.Spec.Backend, StartedAt: b.entry.StartedAt,
		PausedAt: b.entry.PausedAt, PausedFor: b.entry.PausedFor,
		NetworkRules: b.entry.Spec.NetworkRules, NetworkRevision: b.entry.NetworkRevision,
	}
	switch b.entry.Phase {
	case journal.Creating:
		s.State = sandbox.Starting
	case journal.Running:
		s.State = sandbox.Running
	case journal.Paused:
		s.State = sandbox.Paused
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

// enter counts a request as open and as a use, and returns the machine; leave
// must follow. It wakes a paused sandbox that is to be woken by calls, and
// refuses when the sandbox cannot be used.
func (e *Edge) enter(ctx context.Context, b *box) (*spell, error) {
	for {
		sp, wait, err := b.tryEnter()
		if err != nil || sp != nil {
			return sp, err
		}
		if wait == nil {
			if err := e.resume(ctx, b); err != nil {
				return nil, err
			}
			continue
		}
		select {
		case <-wait:
		case <-b.life.Done():
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// tryEnter returns one of three: the machine, what to wait for, or why the
// sandbox cannot be used; none of them when it is to be woken.
func (b *box) tryEnter() (sp *spell, wait <-chan struct{}, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.life.Err() != nil:
		return nil, nil, b.why()
	case b.entry.End != nil:
		return nil, nil, endedFault(b.id, *b.entry.End)
	case b.pausing != nil:
		return nil, b.pausing, nil
	case b.entry.Phase == journal.Paused && b.entry.Spec.AutoResume:
		return nil, nil, nil
	case b.entry.Phase != journal.Running || b.spell == nil || b.spell.agent == nil:
		return nil, nil, b.noMachine()
	}
	b.use.open++
	return b.spell, nil, nil
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
	b.poke()
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
	if b.spell == nil || b.spell.inst == nil {
		return nil, b.noMachine()
	}
	return b.spell.inst, nil
}

// usage measures the sandbox. One that is paused without a machine uses disk only.
func (b *box) usage(ctx context.Context) (backend.Usage, error) {
	b.mu.Lock()
	saved, end := b.entry.Saved, b.entry.End
	b.mu.Unlock()
	if saved != nil && end == nil {
		return backend.Usage{DiskBytes: saved.Size}, nil
	}
	inst, err := b.measurable()
	if err != nil {
		return backend.Usage{}, err
	}
	return inst.Usage(ctx)
}

// pausedFault is the error of a call to a paused sandbox.
func pausedFault(id sandbox.ID) *fault.Error {
	f := fault.New(fault.WrongState, "sandbox %s is paused: resume it first, or make it with auto_resume so that calls wake it", id)
	f.State = sandbox.Paused
	return f
}

// noMachine is the error of a call that wants a machine, for a sandbox that has
// none now; b.mu is held.
func (b *box) noMachine() error {
	switch b.entry.Phase {
	case journal.Paused:
		return pausedFault(b.id)
	case journal.Creating:
		f := fault.New(fault.WrongState, "sandbox %s is still being made; wait for its create to answer", b.id)
		f.State = sandbox.Starting
		return f
	}
	return fault.New(fault.Unavailable, "the node has not found the machine of sandbox %s again yet; try again in a moment", b.id)
}

// deadlines returns what judge wants; none hold while the box is paused. Time
// in which it was paused is as if it had been made so much later.
func (b *box) deadlines() (d sandbox.Deadlines, created time.Time, u usage) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.entry.Phase == journal.Paused {
		return sandbox.Deadlines{}, b.entry.CreatedAt, b.use
	}
	return b.entry.Spec.Deadlines, b.entry.CreatedAt.Add(b.entry.PausedFor), b.use
}

// poke has the deadlines looked at again.
func (b *box) poke() {
	select {
	case b.changed <- struct{}{}:
	default:
	}
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
