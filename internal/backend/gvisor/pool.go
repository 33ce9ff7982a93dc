package gvisor

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"
)

const (
	// settle is how long after its last use the pool is filled, so that a
	// burst of creations has the machine for itself.
	settle = 20 * time.Millisecond
	// yield is how long the pool waits for creations under way, which it would
	// take the CPU from. Under a steady stream of them it must work all the same.
	yield = time.Second
	// retention is how long a key that is not used has machines ready.
	retention = 10 * time.Minute
	// review is how often the pool looks whether it has to change by itself.
	review = time.Minute
)

// pool holds machines of the keys that were used lately ready, an equal share
// for each.
type pool struct {
	log    *slog.Logger
	size   int
	launch func(context.Context, key) (*sentry, error)
	end    func(*sentry) error
	busy   func() bool // a creation is under way

	ctx  context.Context // of run
	stop context.CancelFunc
	poke chan struct{}  // holds one when the pool was used since run looked
	work sync.WaitGroup // goroutines; Add only with mu held and closed false

	mu      sync.Mutex
	running bool
	closed  bool
	ready   map[key][]*sentry
	used    map[key]time.Time // last use; its keys are those the pool works for
}

// newPool returns a pool for up to size sentries. It begins to work with its
// first use.
func newPool(log *slog.Logger, size int, launch func(context.Context, key) (*sentry, error), end func(*sentry) error, busy func() bool) *pool {
	ctx, stop := context.WithCancel(context.Background())
	return &pool{
		log: log, size: size, launch: launch, end: end, busy: busy,
		ctx: ctx, stop: stop, poke: make(chan struct{}, 1),
		ready: map[key][]*sentry{}, used: map[key]time.Time{},
	}
}

// take returns a ready machine of the key, nil when there is none. Some are
// made for the next time.
func (p *pool) take(k key, now time.Time) *sentry {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		return nil
	}
	p.note(k, now)
	for len(p.ready[k]) > 0 {
		s := p.ready[k][0]
		p.ready[k] = p.ready[k][1:]
		if !s.exited() {
			return s
		}
		p.work.Go(func() { p.discard(s) }) // somebody killed it
	}
	return nil
}

// want says that the key is likely to be used soon.
func (p *pool) want(k key, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.note(k, now)
}

// note has sentries of a key made. p.mu is held.
func (p *pool) note(k key, now time.Time) {
	if p.size <= 0 || p.closed {
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
func (p *pool) run() {
	tick := time.NewTicker(review)
	defer tick.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-tick.C:
		case <-p.poke:
			p.quiet()
		}
		p.fill()
	}
}

// quiet returns when the pool was not used for a while and nothing is created,
// or has been for long.
func (p *pool) quiet() {
	begin := time.Now()
	timer := time.NewTimer(settle)
	defer timer.Stop()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.poke:
			timer.Reset(settle)
		case <-timer.C:
			if !p.busy() || time.Since(begin) > yield {
				return
			}
			timer.Reset(settle)
		}
	}
}

// fill ends what is too much and creates what is missing, one after the other,
// until somebody uses the pool.
func (p *pool) fill() {
	for p.ctx.Err() == nil && len(p.poke) == 0 {
		k, missing, surplus := p.plan(time.Now())
		for _, s := range surplus {
			p.discard(s)
		}
		if !missing {
			return
		}
		if p.busy() {
			p.quiet()
		}
		s, err := p.launch(p.ctx, k)
		if err != nil {
			if p.ctx.Err() == nil {
				p.log.Warn("cannot make a gVisor machine ahead; the next use or minute tries again", "error", err)
			}
			return
		}
		p.mu.Lock()
		p.ready[k] = append(p.ready[k], s)
		p.mu.Unlock()
	}
}

// plan takes out of the pool what is too much, and names the most recently
// used key that has too few.
func (p *pool) plan(now time.Time) (missing key, any bool, surplus []*sentry) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for k, at := range p.used {
		if now.Sub(at) > retention {
			delete(p.used, k)
		}
	}
	for len(p.used) > p.size {
		oldest, at := key{}, now
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

// share returns how many sentries of a key the pool should hold.
func (p *pool) share(k key) int {
	if _, ok := p.used[k]; !ok {
		return 0
	}
	return max(1, p.size/len(p.used))
}

func (p *pool) discard(s *sentry) {
	if err := p.end(s); err != nil {
		p.log.Error("cannot end a gVisor machine that was made ahead", "error", err)
	}
}

// forget ends the machines that are ready for an image.
func (p *pool) forget(rootfs string) {
	p.mu.Lock()
	var out []*sentry
	for k, list := range p.ready {
		if k.rootfs == rootfs {
			out = append(out, list...)
			delete(p.ready, k)
		}
	}
	for k := range p.used {
		if k.rootfs == rootfs {
			delete(p.used, k)
		}
	}
	p.mu.Unlock()
	for _, s := range out {
		p.discard(s)
	}
}

// close ends the pool's work and all its sentries.
func (p *pool) close() error {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.stop()
	p.work.Wait()
	var errs []error
	for k, list := range p.ready { // nobody else has it any more
		for _, s := range list {
			errs = append(errs, p.end(s))
		}
		delete(p.ready, k)
	}
	return errors.Join(errs...)
}
