package edge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// recover finds the sandboxes of an earlier run again. It works in this order:
// first those that run, so that what they use is known; then what belongs to
// nobody is removed; then the removal of the half-made and half-removed ones
// goes on. It returns when each running one was tried once.
func (e *Edge) recover(ctx context.Context) error {
	entries, _, err := e.journal.Load()
	if err != nil {
		return err
	}
	var tried sync.WaitGroup
	var unfinished []*box
	for _, entry := range entries {
		b := e.newBox(*entry)
		b.old = true
		e.boxes[b.id] = b
		switch entry.Phase {
		case journal.Running, journal.Paused:
			e.hold(b)
			e.recallDenials(b)
			tried.Add(1)
			begin := e.readopt(tried.Done)
			if entry.Saved != nil {
				begin = e.rest(tried.Done)
			}
			e.spawn(func() { e.live(b, begin) })
		case journal.Ended:
			close(b.created)
			close(b.ended)
		default:
			e.hold(b)
			unfinished = append(unfinished, b)
		}
	}
	tried.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	left, err := e.scan(ctx)
	if err != nil {
		// What could not be looked at may hold leaks, and hinders nothing else.
		e.log.Error("cannot look for everything that an earlier run left", "error", err)
	}
	for _, l := range left {
		removed := e.repair(ctx, l)
		e.log.Warn("found something that an earlier run left", "kind", l.kind, "name", l.name, "detail", l.detail, "removed", removed)
	}
	if err := e.deps.Images.Sweep(); err != nil {
		e.log.Error("cannot remove images that were deleted", "error", err)
	}
	for _, b := range unfinished {
		e.spawn(func() { e.live(b, e.unmade) })
	}
	return nil
}

// hold counts a box of an earlier run.
func (e *Edge) hold(b *box) { e.holding(b, b.status().State == sandbox.Paused) }

// readopt returns how a box with a machine begins after a restart: find the machine
// again. It does not give up while the machine may exist, and calls tried
// after the first attempt.
func (e *Edge) readopt(tried func()) func(*box) error {
	return func(b *box) error {
		once := sync.OnceFunc(tried)
		defer once()
		b.answer() // its creator was answered in an earlier life
		e.recallUndo(b)
		for wait := 100 * time.Millisecond; b.life.Err() == nil; wait = min(2*wait, 10*time.Second) {
			err := e.reach(b)
			if err == nil {
				break
			}
			if errors.Is(err, backend.ErrGone) {
				b.finish(goneEnd(err, e.now()))
				break
			}
			e.log.Error("cannot find a machine again yet", "sandbox", b.id, "error", err, "again_in", wait)
			once()
			select {
			case <-time.After(wait):
			case <-b.life.Done():
			}
		}
		return nil
	}
}

// rest returns how a paused box without a machine begins after a restart. The
// machine that it was paused of may be there still.
func (e *Edge) rest(tried func()) func(*box) error {
	return func(b *box) error {
		defer tried()
		b.answer()
		e.recallUndo(b)
		if _, err := os.Stat(b.entry.Saved.Dir); err != nil {
			b.finish(sandbox.End{
				Reason: sandbox.ReasonLost, Domain: sandbox.Infra, Time: e.now(), Detail: "its saved state is gone: " + err.Error(),
			})
			return nil
		}
		e.shed(b.life, b, b.current())
		return nil
	}
}

// goneEnd is the end of a sandbox whose machine ended while no edge ran.
func goneEnd(err error, now time.Time) sandbox.End {
	return sandbox.End{
		Reason: sandbox.ReasonLost, Domain: sandbox.Infra, Time: now,
		Detail: "its machine ended while the node's edge did not run: " + err.Error(),
	}
}

// reach finds the machine of a running box.
func (e *Edge) reach(b *box) error {
	ctx, cancel := context.WithTimeout(b.life, time.Duration(e.cfg.CreateTimeout))
	defer cancel()
	inst, err := e.recall(ctx, b)
	if err != nil {
		return err
	}
	e.adopt(b, b.current(), inst, b.token())
	if p, ok := inst.(backend.Pauser); ok && b.status().State == sandbox.Running {
		// A pause that was cut off did not happen.
		if err := p.Resume(ctx); err != nil {
			e.log.Error("cannot let a sandbox go on; resuming it tries again", "sandbox", b.id, "error", err)
		}
	}
	e.log.Info("found a sandbox again", "sandbox", b.id)
	return nil
}

// recall asks the backend of a journal's handle for its machine.
func (e *Edge) recall(ctx context.Context, b *box) (backend.Instance, error) {
	b.mu.Lock()
	handle := b.entry.Handle
	b.mu.Unlock()
	if handle == nil {
		return nil, fmt.Errorf("sandbox %s has no handle: %w", b.id, backend.ErrGone)
	}
	be := e.backends[handle.Backend]
	if be == nil {
		return nil, fmt.Errorf("find the machine of sandbox %s: this edge has no backend %s any more", b.id, handle.Backend)
	}
	inst, err := be.Recover(ctx, *handle)
	if err != nil {
		return nil, fmt.Errorf("find the machine of sandbox %s: %w", b.id, err)
	}
	return inst, nil
}

// recallUndo puts on the undo stacks of the box and its spell what its journal
// says it has taken, and removes states that are not whole.
func (e *Edge) recallUndo(b *box) {
	if err := e.journal.RemoveTemps(b.id); err != nil {
		e.log.Error("cannot remove what an earlier run left", "sandbox", b.id, "error", err)
	}
	b.undo.add("remove its files", func(context.Context) error { return e.journal.RemoveFiles(b.id) })
	sp := b.begin()
	b.mu.Lock()
	slot, phase, saved := b.entry.Slot, b.entry.Phase, b.entry.Saved
	b.mu.Unlock()
	if slot != nil {
		e.holdSlot(b, sp, *slot)
		if err := e.renetwork(b, sp, *slot, phase); err != nil {
			e.log.Error("the network of a sandbox stays closed; a change of its rules tries again", "sandbox", b.id, "error", err)
		}
	}
	if phase == journal.Running || phase == journal.Paused {
		if _, err := e.acquireImage(b.life, b); err != nil {
			// The machine has what it needs of it already.
			e.log.Error("the image of a sandbox is not in the store any more", "sandbox", b.id, "error", err)
		}
	}
	if saved == nil {
		// A resume that an earlier run did not bring to its end.
		remove, err := e.unkeep(b)
		if err != nil {
			e.log.Error("cannot remove what an earlier run left", "sandbox", b.id, "error", err)
		}
		remove()
	}
	sp.undo.add("end its machine", func(ctx context.Context) error { return e.endMachine(ctx, b) })
}

// endMachine ends the machine of a box that an earlier run made, found again
// or not.
func (e *Edge) endMachine(ctx context.Context, b *box) error {
	b.mu.Lock()
	handle := b.entry.Handle
	b.mu.Unlock()
	if handle == nil {
		return nil // what there was of it has been removed as a leak
	}
	inst, _ := b.machine()
	if inst == nil {
		var err error
		inst, err = e.recall(ctx, b)
		if errors.Is(err, backend.ErrGone) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	return inst.Destroy(ctx)
}

// errUnmade is why a half-made sandbox of an earlier run never came to be.
var errUnmade = errors.New("the node's edge ended while the sandbox was being made")

// unmade begins the removal of a box that an earlier run had begun to make or
// to remove. One without a handle had no machine that could be found by it;
// what there was of it has been removed as a leak.
func (e *Edge) unmade(b *box) error {
	e.recallUndo(b)
	b.finish(sandbox.End{Reason: sandbox.ReasonStart, Domain: sandbox.Infra, Time: e.now(), Detail: errUnmade.Error()})
	return errUnmade
}
