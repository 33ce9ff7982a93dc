package ahead

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// retention is how long a key that is not used has things ready, and how
	// long as many as were wanted at once.
	retention = 10 * time.Minute
	// burst is the time within which things are wanted at once: about that of
	// making the pool's anew.
	burst = time.Second
	// review is how often the pool looks whether it has to change by itself.
	review = time.Minute
)

// Options say what a pool makes and how.
type Options[K comparable, T any] struct {
	Log  *slog.Logger
	Size Size
	// Make makes a thing of a key, for which nobody waits.
	Make func(context.Context, K) (T, error)
	// End ends a thing that nobody took.
	End func(T) error
	// Ended reports whether a thing has come to its end by itself.
	Ended func(T) bool
	// Load is what nothing is made beside, and whose memory bounds what is held;
	// nil is none.
	Load *Load
}

// Pool holds things of the keys that were used lately ready: an equal share
// for each, and as many as were wanted at once where that is more.
type Pool[K comparable, T any] struct {
	o Options[K, T]

	ctx  context.Context // of run
	stop context.CancelFunc
	poke chan struct{}  // holds one when the pool was used since run looked
	work sync.WaitGroup // goroutines; Add only with mu held and closed false

	mu      sync.Mutex
	running bool
	closed  bool
	ready   map[K][]T
	used    map[K]*demand // its keys are those the pool works for
}

// Size bounds a pool. With none it holds nothing.
type Size struct {
	Keys  int // that it works for
	Even  int // things that the keys share evenly, one for each at least
	Extra int // more things, for keys of which many are wanted at once
}

// maxExtra is the most of Size.Extra.
const maxExtra = 16

// SizeOf returns the size of a pool of machines of some keys, which share even
// of them. A node has one extra machine for each GiB of memory.
func SizeOf(keys, even int) Size {
	extra := maxExtra
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		extra = int(min(maxExtra, info.Totalram*uint64(info.Unit)>>30))
	}
	return Size{Keys: keys, Even: even, Extra: extra}
}

// demand says how often a key is used.
type demand struct {
	last  time.Time
	begin time.Time // of the burst
	count int       // wanted in the burst
	peak  int       // the most of a burst
	at    time.Time // when that was
}

// note counts a thing that is wanted.
func (d *demand) note(now time.Time) {
	if now.Sub(d.begin) > burst {
		d.begin, d.count = now, 0
	}
	d.count++
	d.last = now
	d.age(now)
	if d.count >= d.peak {
		d.peak, d.at = d.count, now
	}
}

// age forgets a peak that was long ago.
func (d *demand) age(now time.Time) {
	if now.Sub(d.at) > retention {
		d.peak, d.at = 0, now
	}
}

// New returns a pool. It begins to work with its first use.
func New[K comparable, T any](o Options[K, T]) *Pool[K, T] {
	ctx, stop := context.WithCancel(context.Background())
	return &Pool[K, T]{
		o: o, ctx: ctx, stop: stop, poke: make(chan struct{}, 1),
		ready: map[K][]T{}, used: map[K]*demand{},
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
	p.note(k, now).note(now)
	for len(p.ready[k]) > 0 {
		t := p.ready[k][0]
		p.ready[k] = p.ready[k][1:]
		if !p.o.Ended(t) {
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
	p.note(k, now).last = now
}

// Ready returns the things that are ready for a key.
func (p *Pool[K, T]) Ready(k K) []T {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.ready[k])
}

// Keys returns the keys that the pool works for, in no order.
func (p *Pool[K, T]) Keys() []K {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Collect(maps.Keys(p.used))
}

// note has things of a key made. It returns the key's demand. p.mu is held.
func (p *Pool[K, T]) note(k K, now time.Time) *demand {
	d := p.used[k]
	if d == nil {
		d = &demand{last: now, at: now}
	}
	if p.o.Size.Keys <= 0 || p.closed {
		return d
	}
	if !p.running {
		p.running = true
		p.work.Go(p.run)
	}
	p.used[k] = d
	select {
	case p.poke <- struct{}{}:
	default:
	}
	return d
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
			Calm(p.ctx, p.poke, p.o.Load)
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
		if p.o.Load.Busy() {
			Calm(p.ctx, p.poke, p.o.Load)
		}
		t, err := p.o.Make(p.ctx, k)
		if err != nil {
			if p.ctx.Err() == nil {
				p.o.Log.Warn("what is to be ready cannot be made; the next use or minute tries again", "error", err)
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
	for k, d := range p.used {
		d.age(now)
		if now.Sub(d.last) > retention {
			delete(p.used, k)
		}
	}
	for len(p.used) > p.o.Size.Keys {
		var oldest K
		at := now
		for k, d := range p.used {
			if !d.last.After(at) {
				oldest, at = k, d.last
			}
		}
		delete(p.used, oldest)
	}
	room := p.o.Load.Room()
	shares := p.shares()
	if room == None {
		clear(shares)
	}
	for k, list := range p.ready {
		n := shares[k]
		if len(list) > n {
			surplus = append(surplus, list[n:]...)
			p.ready[k] = list[:n:n]
		}
		if n == 0 {
			delete(p.ready, k)
		}
	}
	if room != Enough {
		return missing, false, surplus
	}
	var latest time.Time
	for k, d := range p.used {
		if len(p.ready[k]) < shares[k] && (!any || d.last.After(latest)) {
			missing, any, latest = k, true, d.last
		}
	}
	return missing, any, surplus
}

// shares returns how many things of each key the pool should hold. It does not
// depend on which key was used last, so that keys used in turn do not take each
// other's things away. p.mu is held.
func (p *Pool[K, T]) shares() map[K]int {
	even := max(1, p.o.Size.Even/max(1, len(p.used)))
	more := 0
	for _, d := range p.used {
		more += max(0, d.peak-even)
	}
	shares := make(map[K]int, len(p.used))
	for k, d := range p.used {
		wants := max(0, d.peak-even)
		if more > p.o.Size.Extra {
			wants = wants * p.o.Size.Extra / more
		}
		shares[k] = even + wants
	}
	return shares
}

func (p *Pool[K, T]) discard(t T) {
	if err := p.o.End(t); err != nil {
		p.o.Log.Error("cannot end what was made ahead", "error", err)
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
			errs = append(errs, p.o.End(t))
		}
		delete(p.ready, k)
	}
	return errors.Join(errs...)
}
