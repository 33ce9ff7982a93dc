package apiserver

import (
	"context"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/apiserver/placement"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// stateTimeout bounds a pause, a resume and a snapshot: the memory of a large
// sandbox takes a while to the disk and back.
const stateTimeout = 10 * time.Minute

// turns let the calls that pause one sandbox, resume it or change its network rules go one after the other
// within this process, so that the record is what the last of them did. Those
// of other processes meet at the node, and the watcher mends the record; changes
// of rules bear the node's number.
type turns struct {
	mu   sync.Mutex // guards byID and the counts in it
	byID map[sandbox.ID]*turn
}

type turn struct {
	free  chan struct{} // holds one token
	users int           // that have it or wait for it
}

// take waits for the turn of a sandbox, which lasts until give.
func (t *turns) take(ctx context.Context, id sandbox.ID) (give func(), err error) {
	t.mu.Lock()
	this := t.byID[id]
	if this == nil {
		this = &turn{free: make(chan struct{}, 1)}
		this.free <- struct{}{}
		if t.byID == nil {
			t.byID = map[sandbox.ID]*turn{}
		}
		t.byID[id] = this
	}
	this.users++
	t.mu.Unlock()
	leave := func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if this.users--; this.users == 0 {
			delete(t.byID, id)
		}
	}
	select {
	case <-this.free:
		return func() { this.free <- struct{}{}; leave() }, nil
	case <-ctx.Done():
		leave()
		return nil, ctx.Err()
	}
}

// hasState reports whether there is something to pause, to wake, or to copy:
// the sandbox has run. What it is just now its node knows best.
func hasState(sb *sandbox.Sandbox) bool {
	switch sb.State {
	case sandbox.Running, sandbox.Paused:
		return true
	case sandbox.Starting:
		return !sb.StartedAt.IsZero() // it is being woken
	}
	return false
}

// inTurn finds a sandbox that has run, for a caller who may change it, and does
// something with it when it is its turn. Once begun, that does not end with its
// caller, so that record and node say the same.
func (s *Server) inTurn(ctx context.Context, id string, want sandbox.State, do func(context.Context, *sandbox.Sandbox) (*sandbox.Sandbox, error)) (*sandbox.Sandbox, error) {
	sb, err := s.find(ctx, id, role.Developer)
	if err != nil {
		return nil, err
	}
	give, err := s.turns.take(ctx, sb.ID)
	if err != nil {
		return nil, err
	}
	defer give()
	if sb, err = s.load(ctx, sb.ID); err != nil {
		return nil, err
	}
	if sb.End != nil {
		return nil, ended(sb.ID, *sb.End)
	}
	if !hasState(sb) {
		return nil, &sandbox.WrongStateError{ID: sb.ID, State: sb.State, Want: want}
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stateTimeout)
	defer cancel()
	return do(ctx, sb)
}

// lookTime bounds what is asked of a node for a record that may be old.
const lookTime = time.Second

// awake returns a record that knows of the calls that woke the sandbox: they go
// to its node, and one that has an answer shall not find the sandbox paused.
// What cannot be learned in a second is as recorded; the watcher hears of it.
func (s *Server) awake(ctx context.Context, sb *sandbox.Sandbox) *sandbox.Sandbox {
	if sb.State != sandbox.Paused || !sb.Spec.AutoResume {
		return sb
	}
	ctx, cancel := context.WithTimeout(ctx, lookTime)
	defer cancel()
	address, err := s.nodes.of(ctx, sb.Node)
	if err != nil {
		return sb
	}
	m, err := s.edges.look(ctx, address, sb.ID)
	if err != nil || m.state != sandbox.Running {
		return sb
	}
	now, err := s.recordState(ctx, sb.ID, m)
	if err != nil {
		s.log.Warn("record that a call has woken a sandbox; the watcher goes on with it", "sandbox", sb.ID, "error", err)
		return sb
	}
	return now
}

// pause has a sandbox's node pause it, and records that it did. One that fails
// there runs on, and its record too.
func (s *Server) pause(ctx context.Context, id string) (*sandbox.Sandbox, error) {
	return s.inTurn(ctx, id, sandbox.Paused, func(ctx context.Context, sb *sandbox.Sandbox) (*sandbox.Sandbox, error) {
		if sb.State == sandbox.Paused && !sb.Spec.AutoResume {
			return sb, nil // no other call can have woken it
		}
		address, err := s.nodes.of(ctx, sb.Node)
		if err != nil {
			return nil, err
		}
		m, err := s.edges.pause(ctx, address, sb.ID)
		if err != nil {
			return nil, err
		}
		return s.recordState(ctx, sb.ID, m)
	})
}

// resume has a sandbox's node wake it, once it is admitted anew: paused it may
// hold less than awake. One that fails stays paused. A sandbox that is recorded
// as running may have been paused by its node a moment ago, so that is asked
// all the same.
func (s *Server) resume(ctx context.Context, id string) (*sandbox.Sandbox, error) {
	return s.inTurn(ctx, id, sandbox.Running, func(ctx context.Context, sb *sandbox.Sandbox) (*sandbox.Sandbox, error) {
		sb, err := s.deps.DB.WakeSandbox(ctx, sb.ID, s.admitWake)
		if err != nil {
			return nil, err
		}
		m, err := s.wake(ctx, sb)
		if err != nil {
			s.backToPaused(ctx, sb.ID)
			return nil, err
		}
		return s.recordState(ctx, sb.ID, m)
	})
}

func (s *Server) wake(ctx context.Context, sb *sandbox.Sandbox) (machine, error) {
	address, err := s.nodes.of(ctx, sb.Node)
	if err != nil {
		return machine{}, err
	}
	return s.edges.resume(ctx, address, sb.ID)
}

// admitWake is the store's Place of a sandbox that is to wake. One that holds
// paused what it holds awake is not counted again.
func (s *Server) admitWake(sb *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
	if sb.Spec.Holds(true) == sb.Spec.Holds(false) {
		return sb.Node, nil
	}
	for _, n := range s.nodes.placement(nodes) {
		if n.Name == sb.Node {
			return sb.Node, placement.Wake(sb.Spec.Limits, n, quotas(projects))
		}
	}
	return "", fault.New(fault.Unavailable, "node %s, which has the state of sandbox %s, is not known any more", sb.Node, sb.ID)
}

// backToPaused records that a sandbox did not wake. If it did all the same, and
// only the word of it was lost, the watcher records that.
func (s *Server) backToPaused(ctx context.Context, id sandbox.ID) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	_, err := s.deps.DB.UpdateSandbox(ctx, id, func(r *sandbox.Sandbox) error {
		if r.State != sandbox.Starting {
			return nil // its node or a stop was quicker
		}
		return r.Pause(s.deps.Now().UTC())
	})
	if err != nil {
		s.log.Warn("record that a sandbox is still paused; the watcher goes on with it", "sandbox", id, "error", err)
	}
}

// recordState records what a node said after a pause or a resume, unless it has
// said something newer meanwhile. The times are its own, so that they are the
// same for all who hear of them.
func (s *Server) recordState(ctx context.Context, id sandbox.ID, m machine) (*sandbox.Sandbox, error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	return s.deps.DB.UpdateSandbox(ctx, id, func(r *sandbox.Sandbox) error {
		if r.End != nil {
			return ended(id, *r.End)
		}
		if m.end != nil {
			return r.Finish(*m.end)
		}
		if err := r.Follow(m.state, m.pausedAt, m.pausedFor); err != nil {
			return err
		}
		if r.State != sandbox.Starting {
			return nil
		}
		// It was to be woken, and this is how that went, whatever the node's clock
		// makes of the pause.
		if err := r.MoveTo(m.state); err != nil {
			return err
		}
		r.PausedAt, r.PausedFor = m.pausedAt, m.pausedFor
		return nil
	})
}
