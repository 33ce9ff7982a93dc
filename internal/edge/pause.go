package edge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/durable"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// opTimeout bounds one state operation. A machine with much memory takes as
// long as the disk needs for it.
const opTimeout = 10 * time.Minute

// What an operation wants of a backend.
func canPause(f backend.Features) bool          { return f.Pause }
func canSnapshotMemory(f backend.Features) bool { return f.SnapshotMemory }
func canSnapshotFiles(f backend.Features) bool  { return f.SnapshotFiles }

// need refuses what a backend cannot do here, and names those that can; nil
// when it can.
func (e *Edge) need(name sandbox.Backend, what string, can func(backend.Features) bool) *fault.Error {
	able := e.probes.able(can)
	if slices.Contains(able, name) {
		return nil
	}
	able = slices.DeleteFunc(able, func(b sandbox.Backend) bool { return b == sandbox.Sim })
	f := fault.New(fault.Unsupported, "the backend %s cannot %s on node %s; these can: %v", name, what, e.cfg.Name, able)
	f.Backends = able
	return f
}

// errUsed is why a pause on idle time is not done: the sandbox was used since.
var errUsed = errors.New("it was used just now")

// pause stops all that runs in a sandbox and keeps it. One that fails leaves
// the sandbox running. With idle it is done only if the box was not used since.
func (e *Edge) pause(ctx context.Context, b *box, idle *usage) error {
	return e.alone(ctx, b, func(ctx context.Context) (func(), error) { return e.pauseNow(ctx, b, idle) })
}

func (e *Edge) pauseNow(ctx context.Context, b *box, idle *usage) (after func(), err error) {
	if err := e.need(b.spec().Backend, "pause a sandbox", canPause); err != nil {
		return nil, err
	}
	sp, err := b.beginPause(idle)
	if err != nil || sp == nil {
		return nil, err
	}
	defer b.endPause()
	begin := time.Now()
	if b.spec().Backend.PausesToDisk() {
		after, err = e.putAway(ctx, b, sp)
	} else {
		err = e.freeze(ctx, b, sp)
	}
	if err != nil {
		return nil, fmt.Errorf("pause sandbox %s: %w", b.id, err)
	}
	b.cutTunnels(pausedFault(b.id))
	e.holding(b, true)
	b.poke()
	e.publish(b.status())
	e.log.Info("paused", "sandbox", b.id, "idle", idle != nil, "took", time.Since(begin))
	return after, nil
}

// beginPause returns the machine to pause, nil when the box is paused. Calls
// that come from now on wait for endPause.
func (b *box) beginPause(idle *usage) (*spell, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.entry.End != nil:
		return nil, endedFault(b.id, *b.entry.End)
	case b.entry.Phase == journal.Paused:
		return nil, nil
	case b.entry.Phase != journal.Running || b.spell == nil || b.spell.inst == nil:
		return nil, b.noMachine()
	case idle != nil && b.use != *idle:
		return nil, errUsed
	}
	b.pausing = make(chan struct{})
	return b.spell, nil
}

func (b *box) endPause() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.pausing)
	b.pausing = nil
}

// freeze pauses a machine that stays.
func (e *Edge) freeze(ctx context.Context, b *box, sp *spell) error {
	if err := sp.inst.(backend.Pauser).Pause(ctx); err != nil {
		e.goOn(ctx, b, sp)
		return err
	}
	if err := e.recordPaused(b, journal.Lazy, nil); err != nil {
		e.goOn(ctx, b, sp)
		return err
	}
	return nil
}

// putAway writes a machine's state to the disk and ends it. All stands still
// from the first step, so that nothing happens that is not in the state. The
// pause is done when the journal says so; the machine's removal comes after.
func (e *Edge) putAway(ctx context.Context, b *box, sp *spell) (after func(), err error) {
	if err := e.roomFor(ctx, sp.inst, backend.SnapshotOptions{Memory: true}); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			e.goOn(ctx, b, sp)
		}
	}()
	if err := sp.inst.(backend.Pauser).Pause(ctx); err != nil {
		return nil, err
	}
	snap, err := e.save(ctx, b, sp.inst)
	if err != nil {
		return nil, err
	}
	if err := e.recordPaused(b, journal.Durable, &snap); err != nil {
		remove, uerr := e.unkeep(b)
		remove()
		return nil, errors.Join(err, uerr)
	}
	sp.end(pausedFault(b.id))
	b.drop(sp)
	return func() {
		e.shed(ctx, b, sp)
		if maker, ok := e.backends[snap.Backend].(backend.Restorer); ok {
			maker.Prepare(e.config(b, &snap))
		}
	}, nil
}

// save writes a machine's state into the sandbox's directory for saved ones,
// and sees that it is on the disk.
func (e *Edge) save(ctx context.Context, b *box, inst backend.Instance) (snap backend.Snapshot, err error) {
	dir, err := e.journal.MakeTemp(b.id)
	if err != nil {
		return snap, outOfDisk(err)
	}
	defer func() {
		if err != nil {
			err = outOfDisk(errors.Join(err, os.RemoveAll(dir)))
		}
	}()
	snap, err = inst.(backend.Snapshotter).Snapshot(ctx, backend.SnapshotOptions{Dir: dir, Memory: true})
	if err != nil {
		return snap, err
	}
	if err := durable.Tree(dir); err != nil {
		return snap, err
	}
	if err := e.journal.Keep(b.id, dir); err != nil {
		return snap, err
	}
	snap.Dir = e.journal.SavedDir(b.id)
	return snap, nil
}

// recordPaused makes the box a paused one, unless the journal cannot be written.
func (e *Edge) recordPaused(b *box, sync journal.Sync, saved *backend.Snapshot) error {
	err := e.record(b, sync, func(entry *journal.Entry) {
		entry.Phase, entry.PausedAt, entry.Saved = journal.Paused, e.now(), saved
	})
	if err == nil {
		return nil
	}
	// What is on the disk may be either by now.
	again := e.record(b, journal.Lazy, func(entry *journal.Entry) {
		entry.Phase, entry.PausedAt, entry.Saved = journal.Running, time.Time{}, nil
	})
	return outOfDisk(errors.Join(err, again))
}

// goOn lets a machine go on whose pause failed. A pause that was cut off by the
// end of the edge is taken back all the same.
func (e *Edge) goOn(ctx context.Context, b *box, sp *spell) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	if err := sp.inst.(backend.Pauser).Resume(ctx); err != nil && b.end() == nil {
		e.log.Error("a sandbox stands still after a pause that failed; resuming it tries again", "sandbox", b.id, "error", err)
	}
}

// shed gives back what the machine of a box that has none any more had. What
// cannot be removed now goes with the box at the latest.
func (e *Edge) shed(ctx context.Context, b *box, sp *spell) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stepTimeout)
	defer cancel()
	err := sp.undo.run(ctx)
	b.drop(sp)
	if err != nil {
		e.log.Error("cannot remove a machine yet; it goes with its sandbox", "sandbox", b.id, "error", err)
		b.undo.add("end its former machine", sp.undo.run)
		return
	}
	err = e.record(b, journal.Lazy, func(entry *journal.Entry) { entry.Handle, entry.Slot = nil, nil })
	if err != nil {
		e.log.Error("cannot record that a machine has ended", "sandbox", b.id, "error", err)
	}
}

// resume lets a paused sandbox go on. One that fails leaves it paused.
func (e *Edge) resume(ctx context.Context, b *box) error {
	return e.alone(ctx, b, func(ctx context.Context) (func(), error) { return e.resumeNow(ctx, b) })
}

func (e *Edge) resumeNow(ctx context.Context, b *box) (after func(), err error) {
	b.mu.Lock()
	end, phase, sp, missing := b.entry.End, b.entry.Phase, b.spell, b.noMachine()
	b.mu.Unlock()
	begin := time.Now()
	switch {
	case end != nil:
		return nil, endedFault(b.id, *end)
	case phase == journal.Running && sp != nil && sp.inst != nil:
		// Also one that a failed pause left standing.
		if p, ok := sp.inst.(backend.Pauser); ok {
			err = p.Resume(ctx)
		}
		return nil, err
	case phase != journal.Paused:
		return nil, missing
	case sp != nil && sp.inst != nil:
		err = e.thaw(ctx, b, sp)
	default:
		after, err = e.wake(ctx, b)
	}
	if err != nil {
		return nil, fmt.Errorf("resume sandbox %s: %w", b.id, err)
	}
	b.poke()
	e.publish(b.status())
	e.log.Info("resumed", "sandbox", b.id, "took", time.Since(begin))
	return after, nil
}

// thaw resumes a machine that stayed.
func (e *Edge) thaw(ctx context.Context, b *box, sp *spell) error {
	if err := e.claim(b); err != nil {
		return err
	}
	err := sp.inst.(backend.Pauser).Resume(ctx)
	if err == nil {
		err = e.recordResumed(b)
	}
	if err != nil {
		e.holding(b, true)
	}
	return err
}

// wake makes a machine of the box's saved state, which goes when the machine
// answers.
func (e *Edge) wake(ctx context.Context, b *box) (after func(), err error) {
	if err := e.full(); err != nil {
		return nil, err
	}
	if err := e.claim(b); err != nil {
		return nil, err
	}
	b.setWaking(true)
	defer b.setWaking(false)
	if err := e.restore(ctx, b); err != nil {
		if sp := b.current(); sp != nil {
			e.shed(ctx, b, sp)
		}
		e.holding(b, true)
		return nil, err
	}
	after, err = e.unkeep(b)
	if err != nil {
		e.log.Error("cannot remove a saved state yet; the next pause or start does", "sandbox", b.id, "error", err)
	}
	return after, nil
}

// restore makes the machine and says that it runs.
func (e *Edge) restore(ctx context.Context, b *box) error {
	defer e.deps.Load.Begin()()
	b.mu.Lock()
	saved, token := *b.entry.Saved, b.entry.AgentToken
	b.mu.Unlock()
	if err := e.canRestore(saved); err != nil {
		return err
	}
	if err := e.journal.RemoveMachineDir(b.id); err != nil {
		return err
	}
	if err := e.boot(ctx, b, origin{from: &saved, token: token}); err != nil {
		return err
	}
	if err := e.introduce(ctx, b); err != nil {
		return err
	}
	return e.recordResumed(b)
}

func (b *box) setWaking(waking bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.waking = waking
}

// recordResumed makes a paused box a running one, unless the journal cannot be
// written.
func (e *Edge) recordResumed(b *box) error {
	now := e.now()
	var before journal.Entry
	err := e.record(b, journal.Lazy, func(entry *journal.Entry) {
		before = *entry
		entry.PausedFor += max(now.Sub(entry.PausedAt), time.Microsecond) // by more than nothing: it orders a node's words
		entry.Phase, entry.PausedAt, entry.Saved = journal.Running, time.Time{}, nil
		b.use.last = now
	})
	if err == nil {
		return nil
	}
	again := e.record(b, journal.Lazy, func(entry *journal.Entry) {
		entry.Phase, entry.PausedAt, entry.PausedFor, entry.Saved = before.Phase, before.PausedAt, before.PausedFor, before.Saved
	})
	return outOfDisk(errors.Join(err, again))
}

// unkeep takes the saved state away at once; the function that it returns, never
// nil, removes it.
func (e *Edge) unkeep(b *box) (remove func(), err error) {
	temp, err := e.journal.Unkeep(b.id)
	if err != nil {
		return func() {}, err
	}
	return func() {
		if err := os.RemoveAll(temp); err != nil {
			e.log.Error("cannot remove a saved state yet; it goes with its sandbox", "sandbox", b.id, "error", err)
		}
	}, nil
}

// outOfDisk gives a full disk its kind.
func outOfDisk(err error) error {
	if !fault.DiskFull(err) || errors.As(err, new(*fault.Error)) {
		return err
	}
	return fault.New(fault.Capacity, "the node's disk is full; delete images or stop sandboxes: %w", err)
}
