package edge

import (
	"context"
	"net"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/netgate"
)

// spell is a time in which a box has a machine: from its create or a resume to
// its end or a pause that ends the machine. A box without one has none.
type spell struct {
	// ctx ends when nothing more can be asked of the machine, with the box's
	// life at the latest; its cause is a *fault.Error that says why.
	ctx context.Context
	end context.CancelCauseFunc

	undo undo // what the machine has taken: its network, itself, connections

	// Set by adopt, under the box's mu; nil before.
	inst  backend.Instance
	agent *agentclient.Client
	guard *netgate.Guard // of its network; nil for none
	letGo func()         // ends the watch over inst and the connections of agent; may be repeated
}

// begin gives the box a spell, with nothing in it yet.
func (b *box) begin() *spell {
	sp := &spell{}
	sp.ctx, sp.end = context.WithCancelCause(b.life)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.spell = sp
	return sp
}

// drop takes the spell from the box, for it has no machine any more.
func (b *box) drop(sp *spell) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.spell == sp {
		b.spell = nil
	}
}

// current returns the box's spell, nil for none.
func (b *box) current() *spell {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.spell
}

// machine returns the instance and the agent, nil for what is not there.
func (b *box) machine() (backend.Instance, *agentclient.Client) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.spell == nil {
		return nil, nil
	}
	return b.spell.inst, b.spell.agent
}

// giveBack removes all that the box has taken: its machine first.
func (b *box) giveBack(ctx context.Context) error {
	if sp := b.current(); sp != nil {
		if err := sp.undo.run(ctx); err != nil {
			return err
		}
	}
	return b.undo.run(ctx)
}

// letGo lets go of the box's machine, which goes on, and closes its network.
func (e *Edge) letGo(b *box) {
	sp := b.current()
	if sp == nil {
		return
	}
	e.closeNetwork(b, sp)
	e.keepDenials(b)
	if err := e.record(b, journal.Lazy, nil); err != nil {
		e.log.Error("cannot record what names of a sandbox led to", "sandbox", b.id, "error", err)
	}
	if sp.letGo != nil {
		sp.letGo()
	}
}

func (e *Edge) holdSlot(b *box, sp *spell, slot backend.Slot) {
	b.mu.Lock()
	b.entry.Slot = &slot
	b.mu.Unlock()
	sp.undo.add("release its network", func(context.Context) error { e.deps.Slots.Release(slot); return nil })
}

// adopt takes a machine into the spell: how to reach it, with the token that
// its agent knows, and a watch over it.
func (e *Edge) adopt(b *box, sp *spell, inst backend.Instance, token string) {
	handle := inst.Handle()
	dialled := &connections{inst: inst, open: map[net.Conn]bool{}}
	agent := agentclient.New(dialled.dial, token)

	// The watch ends with the machine, or with the last step back.
	ctx, cancel := context.WithCancel(e.run)
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		e.watchMachine(ctx, b, inst)
	}()
	letGo := func() {
		agent.Close()
		dialled.close()
		cancel()
		<-watched
	}
	b.mu.Lock()
	b.entry.Handle = &handle
	sp.inst, sp.agent, sp.letGo = inst, agent, letGo
	b.mu.Unlock()
	sp.undo.add("let go of its machine", func(context.Context) error { letGo(); return nil })
}

// watchMachine ends the box when its machine ends.
func (e *Edge) watchMachine(ctx context.Context, b *box, inst backend.Instance) {
	exit, err := inst.Wait(ctx)
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		e.log.Error("cannot watch a machine any more", "sandbox", b.id, "error", err)
		exit.Detail = err.Error()
	}
	if b.finish(exitEnd(exit, e.now())) {
		e.log.Warn("a machine ended by itself", "sandbox", b.id, "out_of_memory", exit.OutOfMemory, "detail", exit.Detail)
	}
}

// operation is something that is done to a box's state. What it returns to be
// done after it, nil for nothing, is done when its callers have their answer and
// before the next operation.
type operation func(ctx context.Context) (after func(), err error)

// alone does an operation of the box, such as a pause: one at a time, and to its
// end even when the caller goes away. It ends early with the box's life.
func (e *Edge) alone(ctx context.Context, b *box, do operation) error {
	done := make(chan error, 1)
	if !e.spawn(func() { b.exclusively(ctx, do, done) }) {
		return errEdgeStops
	}
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (b *box) exclusively(ctx context.Context, do operation, done chan<- error) {
	select {
	case b.op <- struct{}{}:
	case <-b.life.Done():
		done <- b.why()
		return
	case <-ctx.Done():
		done <- context.Cause(ctx)
		return
	}
	defer func() { <-b.op }()
	within, cancel := context.WithTimeout(b.life, opTimeout)
	defer cancel()
	after, err := do(within)
	if err != nil && b.life.Err() != nil {
		err = b.why()
	}
	done <- err
	if after != nil {
		after()
	}
}

// settle waits until no state operation of the box is under way, for one that
// hangs no longer than patience. The box's life must have ended, so that no
// other begins.
func (b *box) settle(ctx context.Context) {
	select {
	case b.op <- struct{}{}:
		return
	case <-ctx.Done():
	}
	// What it waits for ends with the machine.
	if inst, _ := b.machine(); inst != nil {
		_ = inst.Destroy(context.WithoutCancel(ctx)) // its removal is tried again, and then it counts
	}
	b.op <- struct{}{}
}

// holding notes what the box counts for on the node, paused or not.
func (e *Edge) holding(b *box, paused bool) {
	held := b.spec().Holds(paused)
	e.mu.Lock()
	defer e.mu.Unlock()
	e.used = e.used.Sub(b.held).Add(held)
	b.held = held
}

// claim is holding for a box that is to run again, if there is room for it.
func (e *Edge) claim(b *box) error {
	want := b.spec().Holds(false)
	e.mu.Lock()
	defer e.mu.Unlock()
	if room := e.capacity.Sub(e.used.Sub(b.held)); !want.Fits(room) {
		return e.noRoom(want, room)
	}
	e.used = e.used.Sub(b.held).Add(want)
	b.held = want
	return nil
}
