package ahead

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// thing is what the pools of the tests make.
type thing struct{ dead bool }

// plant makes things and counts those that are not ended.
type plant struct {
	t     *testing.T
	alive atomic.Int64
	made  atomic.Int64
	fail  atomic.Bool
	load  Load
}

func (f *plant) pool(size int) *Pool[string, *thing] { return f.poolOf(Size{Keys: size, Even: size}) }

func (f *plant) poolOf(size Size) *Pool[string, *thing] {
	return New(Options[string, *thing]{
		Log: slog.New(slog.NewTextHandler(f.t.Output(), nil)), Size: size, Make: f.launch, End: f.end,
		Ended: func(t *thing) bool { return t.dead }, Load: &f.load,
	})
}

// launch takes the 30 ms of a real one.
func (f *plant) launch(ctx context.Context, _ string) (*thing, error) {
	if f.fail.Load() {
		return nil, errors.New("no")
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(30 * time.Millisecond):
	}
	f.alive.Add(1)
	f.made.Add(1)
	return &thing{}, nil
}

func (f *plant) end(*thing) error {
	f.alive.Add(-1)
	return nil
}

// give takes a thing of a key and ends it.
func (f *plant) give(p *Pool[string, *thing], k string) {
	f.t.Helper()
	s, ok := p.Take(k, time.Now())
	if !ok {
		f.t.Fatal("the pool had none")
	}
	f.end(s)
}

// has reports whether a pool gives a thing of a key, which it asks for.
func has(p *Pool[string, *thing], k string) bool {
	_, ok := p.Take(k, time.Now())
	return ok
}

func (p *Pool[K, T]) count(k K) int { return len(p.Ready(k)) }

func TestPoolFillsAfterUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(4)
		const a, b = "a", "b"
		if has(p, a) {
			t.Error("a new pool has something")
		}
		<-time.After(time.Second)
		if p.count(a) != 4 {
			t.Errorf("%d ready; want the whole pool for the only key", p.count(a))
		}
		f.give(p, a)
		if has(p, b) {
			t.Error("b was never made")
		}
		<-time.After(time.Second)
		if p.count(a) != 2 || p.count(b) != 2 {
			t.Errorf("%d and %d ready; want a half each", p.count(a), p.count(b))
		}
		// b is not used any more: its share goes to a.
		for range 12 {
			<-time.After(time.Minute)
			f.give(p, a)
		}
		<-time.After(time.Second)
		if p.count(a) != 4 || p.count(b) != 0 {
			t.Errorf("%d and %d ready; want all for a", p.count(a), p.count(b))
		}
		// Nothing is used any more.
		<-time.After(retention + 2*review)
		if f.alive.Load() != 0 {
			t.Errorf("%d live long after the last use", f.alive.Load())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolHoldsNoMoreThanItsSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(2)
		for n := range 5 {
			p.Take(fmt.Sprint(n), time.Now())
			<-time.After(time.Second)
		}
		if f.alive.Load() != 2 || p.count("4") != 1 || p.count("3") != 1 {
			t.Errorf("%d ready: %v; want one of each of the last two", f.alive.Load(), p.ready)
		}
		p.Forget(func(k string) bool { return k == "4" })
		if p.count("4") != 0 {
			t.Error("what was forgotten is ready")
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
		if f.alive.Load() != 0 {
			t.Errorf("%d live after the end", f.alive.Load())
		}
		if has(p, "3") {
			t.Error("a closed pool gives something")
		}
	})
}

// takes takes n things at once, and ends them.
func (f *plant) takes(p *Pool[string, *thing], k string, n int) (had int) {
	for range n {
		if s, ok := p.Take(k, time.Now()); ok {
			f.end(s)
			had++
		}
	}
	return had
}

func TestPoolHoldsWhatWasWantedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.poolOf(Size{Keys: 4, Even: 4, Extra: 8})
		const a, b = "a", "b"
		f.takes(p, a, 8)
		<-time.After(2 * time.Second)
		if had := f.takes(p, a, 8); had != 8 {
			t.Errorf("%d of 8 were ready for the second time", had)
		}
		<-time.After(2 * time.Second)
		// Both together want twice what there is.
		f.takes(p, b, 12)
		<-time.After(2 * time.Second)
		if p.count(a)+p.count(b) > 12 || p.count(a) < 4 || p.count(b) < 6 {
			t.Errorf("%d and %d ready; want shares by demand, 12 in all", p.count(a), p.count(b))
		}
		// Used in turn, neither takes from the other.
		made := f.made.Load()
		for range 10 {
			f.give(p, a)
			<-time.After(2 * time.Second)
			f.give(p, b)
			<-time.After(2 * time.Second)
		}
		if n := f.made.Load() - made; n != 20 {
			t.Errorf("%d were made for 20 that were taken", n)
		}
		// Single ones go on; the burst is long ago.
		for range 12 {
			<-time.After(time.Minute)
			f.give(p, a)
		}
		<-time.After(time.Second)
		if p.count(a) != 4 || f.alive.Load() != 4 {
			t.Errorf("%d ready of %d long after the burst; want the even share", p.count(a), f.alive.Load())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolHoldsOneOfEachWithoutABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.poolOf(Size{Keys: 2, Extra: 4})
		for n := range 3 {
			p.Take(fmt.Sprint(n), time.Now())
			<-time.After(2 * time.Second)
		}
		if p.count("1") != 1 || p.count("2") != 1 || f.alive.Load() != 2 {
			t.Errorf("%v ready; want one of each of the last two", p.ready)
		}
		f.takes(p, "2", 3)
		<-time.After(2 * time.Second)
		if p.count("2") != 3 {
			t.Errorf("%d ready; want as many as were wanted at once", p.count("2"))
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		f.fail.Store(true)
		p := f.pool(1)
		const k = "a"
		p.Take(k, time.Now())
		<-time.After(time.Second)
		f.fail.Store(false)
		<-time.After(review)
		if p.count(k) != 1 {
			t.Error("a pool that failed once stays empty")
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolLeavesTheMachineToABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(4)
		const k = "a"
		for range 20 {
			p.Take(k, time.Now())
			<-time.After(settle / 2)
		}
		if f.made.Load() != 0 {
			t.Errorf("%d were made while others were asked for", f.made.Load())
		}
		<-time.After(time.Second)
		if p.count(k) != 4 {
			t.Errorf("%d ready after the burst", p.count(k))
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolLeavesTheMachineToCreations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(2)
		const k = "a"
		end := f.load.Begin()
		p.Want(k, time.Now())
		<-time.After(yield / 2)
		if f.made.Load() != 0 {
			t.Errorf("%d were made while another was", f.made.Load())
		}
		end()
		<-time.After(settle * 10)
		if p.count(k) != 2 {
			t.Errorf("%d ready after the creation", p.count(k))
		}
		defer f.load.Begin()() // for good
		f.give(p, k)
		<-time.After(4 * yield)
		if p.count(k) != 2 {
			t.Errorf("%d ready during creations without end", p.count(k))
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}

// What has ended is not given away, and is replaced.
func TestPoolGivesNoneThatEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(2)
		p.Want("a", time.Now())
		<-time.After(time.Second)
		for _, s := range p.Ready("a") {
			s.dead = true
		}
		if has(p, "a") {
			t.Error("the pool gave what had ended")
		}
		<-time.After(time.Second)
		if f.alive.Load() != 2 || p.count("a") != 2 {
			t.Errorf("%d live and %d are ready", f.alive.Load(), p.count("a"))
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}

// Many take and one closes, at the same time.
func TestPoolSideBySide(t *testing.T) {
	f := &plant{t: t}
	p := f.pool(3)
	var wg sync.WaitGroup
	for n := range 8 {
		wg.Go(func() {
			for range 50 {
				if s, ok := p.Take(fmt.Sprint(n%3), time.Now()); ok {
					f.end(s)
				}
			}
			if n == 0 {
				p.Forget(func(k string) bool { return k == "1" })
			}
			if n == 1 {
				if err := p.Close(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if f.alive.Load() != 0 {
		t.Errorf("%d live after the end", f.alive.Load())
	}
}

// While memory is short nothing is made, and without any what is ready goes.
func TestPoolGivesMemoryBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		var room atomic.Int64
		f.load.LimitBy(func() Room { return Room(room.Load()) })
		p := f.pool(4)
		p.Want("a", time.Now())
		<-time.After(time.Second)
		room.Store(int64(Short))
		f.give(p, "a")
		<-time.After(2 * review)
		if f.alive.Load() != 3 {
			t.Errorf("%d ready while memory is short; want what was left", f.alive.Load())
		}
		room.Store(int64(None))
		<-time.After(2 * review)
		if f.alive.Load() != 0 {
			t.Errorf("%d ready without memory", f.alive.Load())
		}
		room.Store(int64(Enough))
		<-time.After(2 * review)
		if f.alive.Load() != 4 {
			t.Errorf("%d ready with memory again", f.alive.Load())
		}
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
}
