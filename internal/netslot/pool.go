package netslot

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/ahead"
	"github.com/kernflux/opendsec/internal/backend"
)

// retry is how long the pool waits after it failed to make a slot.
const retry = time.Second

// Pool keeps some slots ready.
type Pool struct {
	log    *slog.Logger
	prefix string
	// further is done to each new slot, on a thread in its namespace.
	further func(backend.Slot) error
	load    *ahead.Load

	ready chan backend.Slot
	taken chan struct{} // holds one when a slot was taken since the last fill

	mu       sync.Mutex
	next     uint64          // number of the next name to try
	held     map[string]bool // slots that are the pool's own: ready, being made or being removed
	closed   bool            // Run has ended: nobody waits for removals any more
	removals sync.WaitGroup  // Add only with mu held and closed false
}

// NewPool returns a pool of up to size ready slots, named prefix and a number.
// It makes none before Run. further, unless it is nil, is done to each new slot,
// on a thread in its namespace; a slot for which it fails is not made.
func NewPool(log *slog.Logger, prefix string, size int, further func(backend.Slot) error) *Pool {
	return &Pool{
		log:     log,
		prefix:  prefix,
		further: further,
		ready:   make(chan backend.Slot, max(size, 0)),
		taken:   make(chan struct{}, 1),
		held:    map[string]bool{},
		// By chance, so that a name of an earlier run, which somebody may still
		// want to remove, does not come again.
		next: uint64(rand.Uint32()),
	}
}

// YieldTo has the pool make its slots when there is no load. It is to be called
// before Run.
func (p *Pool) YieldTo(load *ahead.Load) { p.load = load }

// Run keeps the pool full until ctx is done. Then it removes the slots that
// nobody took and waits for the removals that Release began.
func (p *Pool) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		if err := p.fill(ctx); err != nil {
			p.log.Error("cannot make a network slot ahead", "error", err)
			wait(ctx, retry)
			continue
		}
		select {
		case <-ctx.Done():
		case <-p.taken:
			ahead.Calm(ctx, p.taken, p.load)
		}
	}
	p.drain()
	return nil
}

// fill makes slots until the pool is full or somebody takes one.
func (p *Pool) fill(ctx context.Context) error {
	for len(p.ready) < cap(p.ready) && ctx.Err() == nil && len(p.taken) == 0 {
		if p.load.Busy() {
			ahead.Calm(ctx, p.taken, p.load)
		}
		slot, err := p.create(ctx)
		if err != nil {
			return err
		}
		p.ready <- slot // only this goroutine sends, so there is room
	}
	return nil
}

// drain removes what is left. Later calls of Release remove at once.
func (p *Pool) drain() {
	for more := true; more; {
		select {
		case slot := <-p.ready:
			p.remove(slot.Name)
		default:
			more = false
		}
	}
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.removals.Wait()
}

// Acquire returns a ready slot, or makes one.
func (p *Pool) Acquire(ctx context.Context) (backend.Slot, error) {
	slot, err := p.Lend(ctx)
	if err == nil {
		p.Hand(slot)
	}
	return slot, err
}

// Hand says that a lent slot is a sandbox's from now on.
func (p *Pool) Hand(slot backend.Slot) { p.hold(slot.Name, false) }

// Lend returns a slot as Acquire does, for a machine that is made ahead and has
// no sandbox yet: the slot counts as the pool's own until Hand.
func (p *Pool) Lend(ctx context.Context) (backend.Slot, error) {
	if err := ctx.Err(); err != nil {
		return backend.Slot{}, err
	}
	select {
	case slot := <-p.ready:
		select {
		case p.taken <- struct{}{}:
		default:
		}
		return slot, nil
	default:
		return p.create(ctx)
	}
}

// Holds reports whether the pool itself has the slot of a name: ready, lent,
// being made or being removed. What is on the host and neither held nor a sandbox's
// has been left behind.
func (p *Pool) Holds(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.held[name]
}

func (p *Pool) hold(name string, held bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if held {
		p.held[name] = true
	} else {
		delete(p.held, name)
	}
}

// Release removes a slot in the background, which takes 10 to 30 ms. Run waits
// for that before it returns; after Run has ended Release itself waits.
func (p *Pool) Release(slot backend.Slot) {
	p.mu.Lock()
	closed := p.closed
	p.held[slot.Name] = true
	if !closed {
		p.removals.Add(1)
	}
	p.mu.Unlock()
	if closed {
		p.remove(slot.Name)
		return
	}
	go func() {
		defer p.removals.Done()
		p.remove(slot.Name)
	}()
}

func (p *Pool) remove(name string) {
	defer p.hold(name, false)
	if err := Remove(name); err != nil {
		p.log.Error("cannot remove a network slot", "slot", name, "error", err)
	}
}

// create makes a slot under the next free name.
func (p *Pool) create(ctx context.Context) (backend.Slot, error) {
	for {
		if err := ctx.Err(); err != nil {
			return backend.Slot{}, err
		}
		p.mu.Lock()
		name := p.prefix + "-" + strconv.FormatUint(p.next, 36)
		p.next++
		p.held[name] = true
		p.mu.Unlock()
		slot, err := create(name, p.further)
		if err != nil {
			p.hold(name, false)
		}
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err != nil {
			return backend.Slot{}, fmt.Errorf("acquire a network slot: %w", err)
		}
		return slot, nil
	}
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
