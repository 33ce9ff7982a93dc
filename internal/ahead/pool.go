package ahead

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

const (
	// retention is how long a key that is not used has things ready.
	retention = 10 * time.Minute
	// review is how often the pool looks whether it has to change by itself.
	review = time.Minute
)

// Options say what a pool makes and how.
type Options[K comparable, T any] struct {
	Log *slog.Logger
	// Size is how many things are held ready in all; 0 is none.
	Size int
	// Make makes a thing of a key, for which nobody waits.
	Make func(context.Context, K) (T, error)
	// End ends a thing that nobody took.
	End func(T) error
	// Ended reports whether a thing has come to its end by itself.
	Ended func(T) bool
	// Load is what nothing is made beside; nil is none.
	Load *Load
}

// Pool holds things of the keys that were used lately ready, an equal share
// for each.
type Pool[K comparable, T any] struct {
	Options[K, T]

	ctx  context.Context // of run
	stop context.CancelFunc
	poke chan struct{}  // holds one when the pool was used since run looked
	work sync.WaitGroup // goroutines; Add only with mu held and closed false

	mu      sync.Mutex
	running bool
	closed  bool
	ready   map[K][]T
	used    map[K]time.Time // last use; its keys are those the pool works for
}

// New returns a pool. It begins to work with its first use.
func New[K comparable, T any](o Options[K, T]) *Pool[K, T] {
	ctx, stop := context.WithCancel(context.Background())
	return &Pool[K, T]{
		Options: o, ctx: ctx, stop: stop, poke: make(chan struct{}, 1),
		ready: map[K][]T{}, used: map[K]time.Time{},
	}
}

// Take returns a ready thing of the key, if there is one. Some are made for
// the next time.
func (p *Pool[K, T]) Take(k K, now time.Time) (thing T, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return thing, false
	}
	p.note(k, now)
	for len(p.ready[k]) > 0 {
		t := p.ready[k][0]
		p.ready[k] = p.ready[k][1:]
		if !p.Ended(t) {
			return t, true
		}
		p.work.Go(func() { p.discard(t) }) // somebody killed it
	}
	return thing, false
}

// Want says that the key is likely to be used soon.
func (p *Pool[K, T]) Want(k K, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.note(k, now)
}

// Ready returns the things that are ready for a key.
func (p *Pool[K, T]) Ready(k K) []T {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]T(nil), p.ready[k]...)
}

// note has things of a key made. p.mu is held.
func (p *Pool[K, T]) note(k K, now time.Time) {
	if p.Size <= 0 || p.closed {
		return
	}
	if !p.running {
		p.running = true
		p.work.Go(p.run)
	}
	p.used[k] = now
	select {
	case p.poke <- struct{}{}:
	default:
	}
}

// run fills the pool after each use until the pool is closed.
func (p *Pool[K, T]) run() {
	tick := time.NewTicker(review)
	defer tick.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-tick.C:
		case <-p.poke:
			Calm(p.ctx, p.poke, p.Load)
		}
		p.fill()
	}
}

// fill ends what is too much and makes what is missing, one after the other,
// until somebody uses the pool.
func (p *Pool[K, T]) fill() {
	for p.ctx.Err() == nil && len(p.poke) == 0 {
		k, missing, surplus := p.plan(time.Now())
		for _, t := range surplus {
			p.discard(t)
		}
		if !missing {
			return
		}
		if p.Load.Busy() {
			Calm(p.ctx, p.poke, p.Load)
		}
		t, err := p.Make(p.ctx, k)
		if err != nil {
			if p.ctx.Err() == nil {
				p.Log.Warn("cannot make a machine ahead; the next use or minute tries again", "error", err)
			}
			return
		}
		p.mu.Lock()
		p.ready[k] = append(p.ready[k], t)
		p.mu.Unlock()
	}
}

// plan takes out of the pool what is too much, and names the most recently
// used key that has too few.
func (p *Pool[K, T]) plan(now time.Time) (missing K, any bool, surplus []T) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, at := range p.used {
		if now.Sub(at) > retention {
			delete(p.used, k)
		}
	}
	for len(p.used) > p.Size {
		var oldest K
		at := now
		for k, t := range p.used {
			if !t.After(at) {
				oldest, at = k, t
			}
		}
		delete(p.used, oldest)
	}
	for k, list := range p.ready {
		n := p.share(k)
		if len(list) > n {
			surplus = append(surplus, list[n:]...)
			p.ready[k] = list[:n:n]
		}
		if n == 0 {
			delete(p.ready, k)
		}
	}
	var latest time.Time
	for k, at := range p.used {
		if len(p.ready[k]) < p.share(k) && (!any || at.After(latest)) {
			missing, any, latest = k, true, at
		}
	}
	return missing, any, surplus
}

// share returns how many things of a key the pool should hold.
func (p *Pool[K, T]) share(k K) int {
	if _, ok := p.used[k]; !ok {
		return 0
	}
	return max(1, p.Size/len(p.used))
}

func (p *Pool[K, T]) discard(t T) {
	if err := p.End(t); err != nil {
		p.Log.Error("cannot end a machine that was made ahead", "error", err)
	}
}

// Forget ends what is ready for the keys that match.
func (p *Pool[K, T]) Forget(match func(K) bool) {
	p.mu.Lock()
	var out []T
	for k, list := range p.ready {
		if match(k) {
			out = append(out, list...)
			delete(p.ready, k)
		}
	}
	for k := range p.used {
		if match(k) {
			delete(p.used, k)
		}
	}
	p.mu.Unlock()
	for _, t := range out {
		p.discard(t)
	}
}

// Close ends the pool's work and all that is ready.
func (p *Pool[K, T]) Close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.stop()
	p.work.Wait()
	var errs []error
	for k, list := range p.ready { // nobody else has it any more
		for _, t := range list {
			errs = append(errs, p.End(t))
		}
		delete(p.ready, k)
	}
	return errors.Join(errs...)
}
