package gvisor

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// settle is how long after its last use the pool is filled, so that a
	// burst of creations has the machine for itself.
	settle = 20 * time.Millisecond
	// yield is how long the pool waits for creations under way, which it would
	// take the CPU from. Under a steady stream of them it must work all the same.
	yield = time.Second
	// retention is how long a key that is not used has machines ready, and how
	// long as many as were wanted at once.
	retention = 10 * time.Minute
	// burst is the time within which machines are wanted at once: about that of
	// making the pool's machines anew.
	burst = time.Second
	// review is how often the pool looks whether it has to change by itself.
	review = time.Minute
)

// pool holds machines of the keys that were used lately ready: an equal share
// for each, and as many as were wanted at once where that is more.
type pool struct {
	log    *slog.Logger
	size   poolSize
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
	used    map[key]*demand // its keys are those the pool works for
}

// poolSize bounds a pool. With none it holds nothing.
type poolSize struct {
	keys  int // that it works for
	even  int // machines that the keys share evenly, one for each at least
	extra int // more machines, for keys of which many are wanted at once
}

// maxExtra is the most of poolSize.extra.
const maxExtra = 16

// sizeOfPool returns the size of a pool of some keys, of which even share that
// many machines. A node has one extra machine for each GiB of memory.
func sizeOfPool(keys, even int) poolSize {
	extra := maxExtra
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		extra = int(min(maxExtra, info.Totalram*uint64(info.Unit)>>30))
	}
	return poolSize{keys: keys, even: even, extra: extra}
}

// demand says how often a key is used.
type demand struct {
	last  time.Time
	begin time.Time // of the burst
	count int       // machines wanted in the burst
	peak  int       // the most of a burst
	at    time.Time // when that was
}

// note counts a machine that is wanted.
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

// newPool returns a pool. It begins to work with its first use.
func newPool(log *slog.Logger, size poolSize, launch func(context.Context, key) (*sentry, error), end func(*sentry) error, busy func() bool) *pool {
	ctx, stop := context.WithCancel(context.Background())
	return &pool{
		log: log, size: size, launch: launch, end: end, busy: busy,
		ctx: ctx, stop: stop, poke: make(chan struct{}, 1),
		ready: map[key][]*sentry{}, used: map[key]*demand{},
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
	p.note(k, now).note(now)
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
	p.note(k, now).last = now
}

// note has sentries of a key made. It returns the key's demand. p.mu is held.
func (p *pool) note(k key, now time.Time) *demand {
	d := p.used[k]
	if d == nil {
		d = &demand{last: now, at: now}
	}
	if p.size.keys <= 0 || p.closed {
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
	for k, d := range p.used {
		d.age(now)
		if now.Sub(d.last) > retention {
			delete(p.used, k)
		}
	}
	for len(p.used) > p.size.keys {
		oldest, at := key{}, now
		for k, d := range p.used {
			if !d.last.After(at) {
				oldest, at = k, d.last
			}
		}
		delete(p.used, oldest)
	}
	shares := p.shares()
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
	var latest time.Time
	for k, d := range p.used {
		if len(p.ready[k]) < shares[k] && (!any || d.last.After(latest)) {
			missing, any, latest = k, true, d.last
		}
	}
	return missing, any, surplus
}

// shares returns how many sentries of each key the pool should hold. It does not
// depend on which key was used last, so that keys used in turn do not take each
// other's machines away. p.mu is held.
func (p *pool) shares() map[key]int {
	even := max(1, p.size.even/max(1, len(p.used)))
	more := 0
	for _, d := range p.used {
		more += max(0, d.peak-even)
	}
	shares := make(map[key]int, len(p.used))
	for k, d := range p.used {
		wants := max(0, d.peak-even)
		if more > p.size.extra {
			wants = wants * p.size.extra / more
		}
		shares[k] = even + wants
	}
	return shares
}

func (p *pool) discard(s *sentry) {
	if err := p.end(s); err != nil {
		p.log.Error("cannot end a gVisor machine that was made ahead", "error", err)
	}
}

// forget ends the machines that are ready for an image, by its directory.
func (p *pool) forget(dir string) {
	p.mu.Lock()
	var out []*sentry
	for k, list := range p.ready {
		if k.of(dir) {
			out = append(out, list...)
			delete(p.ready, k)
		}
	}
	for k := range p.used {
		if k.of(dir) {
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
