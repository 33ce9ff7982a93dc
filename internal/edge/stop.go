package edge

import (
	"context"
	"errors"
	"time"

	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// stepTimeout bounds one attempt to give back what a box has taken.
const stepTimeout = 30 * time.Second

// live is the life of a box: begin, be there, be removed. It returns when
// nothing is left of the box, or when the edge stops; then the machine goes on.
func (e *Edge) live(b *box, begin func(*box) error) {
	defer context.AfterFunc(e.run, func() { b.endLife(errEdgeStops) })()
	err := begin(b)
	if err == nil {
		b.answer()
		e.publish(b.status())
		e.keep(b)
		if b.end() == nil {
			e.letGo(b) // the edge stops
			return
		}
	}
	e.remove(b, err)
}

// begin runs a create within its time.
func (e *Edge) begin(b *box) error {
	ctx, cancel := context.WithTimeout(b.life, time.Duration(e.cfg.CreateTimeout))
	defer cancel()
	err := e.start(ctx, b)
	if err == nil {
		return nil
	}
	f := b.startFault(ctx, err)
	told := fault.Of(f)
	b.finish(sandbox.End{Reason: sandbox.ReasonStart, Domain: told.DomainOf(), Detail: told.Error(), Time: e.now()})
	return f
}

// keep watches over a running box until its end is decided or the edge stops.
func (e *Edge) keep(b *box) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for b.life.Err() == nil {
		select {
		case <-b.life.Done():
			return
		case <-b.changed:
			if err := e.record(b, journal.Lazy, nil); err != nil {
				e.log.Error("cannot record deadlines", "sandbox", b.id, "error", err)
			}
		case <-timer.C:
		}
		if wait := e.look(b); wait > 0 {
			timer.Reset(wait)
		} else {
			timer.Stop()
		}
	}
}

// longestWait makes a jump of the clock felt in time.
const longestWait = time.Minute

// look ends the box if a deadline says so, or returns when to look again; 0
// for not before the deadlines change.
func (e *Edge) look(b *box) time.Duration {
	now := e.now()
	d, created, u := b.deadlines()
	v := judge(d, created, u, now)
	if v.end == sandbox.ReasonIdle {
		a, err := e.activity(b)
		if err != nil {
			// Not known to be idle. The agent may be starved by what runs in
			// its sandbox; a stop or the lifetime ends it in any case.
			e.log.Warn("cannot ask a sandbox whether it is idle", "sandbox", b.id, "error", err)
			a.running = 1
		}
		now = e.now()
		v = judgeIdle(d, created, u, a, now)
	}
	if v.end == sandbox.ReasonIdle && b.spec().OnIdle == sandbox.PauseOnIdle {
		return e.pauseIdle(b, u)
	}
	if v.end != "" {
		if b.expire(v.end, u, now) {
			e.log.Info("a deadline passed", "sandbox", b.id, "reason", v.end)
			return 0
		}
		return time.Millisecond // it was used just now: look again
	}
	if v.next.IsZero() {
		return 0
	}
	return min(max(v.next.Sub(now), time.Millisecond), longestWait)
}

// pauseIdle pauses a box whose idle time passed, and returns when to look again.
func (e *Edge) pauseIdle(b *box, u usage) time.Duration {
	switch err := e.pause(b.life, b, &u); {
	case err == nil:
		return 0
	case errors.Is(err, errUsed):
		return time.Millisecond
	default:
		e.log.Error("cannot pause an idle sandbox; it is tried again", "sandbox", b.id, "error", err, "again_in", longestWait)
		return longestWait
	}
}

// expire ends the box, unless it is idle time that passed and the box was used
// since u was taken.
func (b *box) expire(reason string, u usage, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if reason == sandbox.ReasonIdle && b.use != u {
		return false
	}
	b.finishLocked(deadlineEnd(reason, b.entry.Spec.Deadlines, now))
	return true
}

// activity asks the agent what runs.
func (e *Edge) activity(b *box) (activity, error) {
	_, agent := b.machine()
	if agent == nil {
		return activity{}, errors.New("its machine is not found")
	}
	ctx, cancel := context.WithTimeout(b.life, 5*time.Second)
	defer cancel()
	got, err := agent.Activity(ctx)
	if err != nil {
		return activity{}, err
	}
	a := activity{running: got.RunningCommands}
	if got.AnyEnded {
		a.ended = e.now().Add(-got.SinceLastEnd)
	}
	return a, nil
}

// destroy ends a sandbox and waits for its removal, as long as StopTimeout.
// What is not removed by then is removed in the background.
func (e *Edge) destroy(ctx context.Context, id sandbox.ID, end sandbox.End) (st status, known bool, err error) {
	b := e.find(id)
	if b == nil {
		return status{}, false, nil
	}
	if b.finish(end) {
		e.log.Info("stopping", "sandbox", id, "reason", end.Reason)
	}
	patience := time.NewTimer(time.Duration(e.cfg.StopTimeout))
	defer patience.Stop()
	select {
	case <-b.ended:
	case <-patience.C:
	case <-ctx.Done():
		return status{}, true, ctx.Err()
	case <-e.run.Done():
		return status{}, true, errEdgeStops
	}
	return b.status(), true, nil
}

// settlePatience is how long the removal of a box waits for a state operation
// that its end has cut off.
const settlePatience = 2 * time.Second

// remove gives back all that the box has taken, and tries again until that is
// done. failure is why its create failed, nil when it ran; then the callers of
// the create are answered after the first attempt, and the box is forgotten at
// the end, since nobody was told that there is a sandbox.
func (e *Edge) remove(b *box, failure error) {
	never := b.setFailure(failure)
	e.recordStopping(b)
	patience, cancel := context.WithTimeout(context.WithoutCancel(e.run), settlePatience)
	b.settle(patience)
	cancel()
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, 10*time.Second) {
		// Not bound to the box's life, which has ended, nor to the edge's: what
		// was begun is finished.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(e.run), stepTimeout)
		err := b.giveBack(ctx)
		cancel()
		if err == nil {
			break
		}
		e.log.Error("cannot remove a sandbox yet", "sandbox", b.id, "error", err, "again_in", wait)
		b.answer()
		select {
		case <-time.After(wait):
		case <-e.run.Done():
			return // the journal says that it is to be removed
		}
	}
	e.finished(b, never)
}

// setFailure notes why the create failed and reports whether the box never ran.
func (b *box) setFailure(failure error) (never bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	never = b.entry.StartedAt.IsZero()
	if never {
		b.failure = failure
	}
	return never
}

// answer lets the callers of the create go.
func (b *box) answer() {
	select {
	case <-b.created:
	default:
		close(b.created)
	}
}

// recordStopping writes the intent to remove the box, before it is begun. An
// end that the edge decided by itself is known nowhere else yet.
func (e *Edge) recordStopping(b *box) {
	sync := journal.Durable
	if end := b.end(); end.Reason == sandbox.ReasonStopped || end.Reason == sandbox.ReasonStart {
		sync = journal.Lazy
	}
	err := e.record(b, sync, func(entry *journal.Entry) { entry.Phase = journal.Stopping })
	if err != nil {
		// A full disk must not keep a sandbox from being removed.
		e.log.Error("cannot record that a sandbox is being removed", "sandbox", b.id, "error", err)
	}
	e.publish(b.status())
}

// finished makes the box an ended one, of which only the entry is left.
func (e *Edge) finished(b *box, never bool) {
	err := e.record(b, journal.Lazy, func(entry *journal.Entry) {
		entry.Phase = journal.Ended
		entry.Handle, entry.Slot, entry.AgentToken, entry.Saved, entry.Pins = nil, nil, "", nil, nil
		b.spell = nil
	})
	if err != nil {
		e.log.Error("cannot record the end of a sandbox", "sandbox", b.id, "error", err)
	}
	e.mu.Lock()
	e.used = e.used.Sub(b.held)
	e.mu.Unlock()
	st := b.status()
	e.log.Info("removed", "sandbox", b.id, "reason", st.End.Reason, "domain", st.End.Domain)
	close(b.ended)
	if never {
		e.forget(b)
	}
	b.answer()
	e.publish(st)
}
