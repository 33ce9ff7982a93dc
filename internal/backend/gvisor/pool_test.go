package gvisor

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
)

// plant makes sentries without a process and counts those that are not ended.
type plant struct {
	t     *testing.T
	alive atomic.Int64
	made  atomic.Int64
	fail  atomic.Bool
	busy  atomic.Bool
}

func (f *plant) pool(size int) *pool { return f.poolOf(poolSize{keys: size, even: size}) }

func (f *plant) poolOf(size poolSize) *pool {
	return newPool(slog.New(slog.NewTextHandler(f.t.Output(), nil)), size, f.launch, f.end, f.busy.Load)
}

// launch takes the 30 ms of a real one, and holds this process, which lives.
func (f *plant) launch(ctx context.Context, k key) (*sentry, error) {
	if f.fail.Load() {
		return nil, errors.New("no")
	}
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-time.After(30 * time.Millisecond):
	}
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return nil, err
	}
	f.alive.Add(1)
	return &sentry{Name: fmt.Sprintf("%s-%d", k.rootfs, f.made.Add(1)), pidfd: os.NewFile(uintptr(fd), "pidfd")}, nil
}

func (f *plant) end(s *sentry) error {
	f.alive.Add(-1)
	return s.pidfd.Close()
}

// give ends a sentry that a test took.
func (f *plant) give(s *sentry) {
	f.t.Helper()
	if s == nil {
		f.t.Fatal("the pool had none")
	}
	f.end(s)
}

func (p *pool) count(k key) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.ready[k])
}

func TestPoolFillsAfterUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(4)
		a, b := key{rootfs: "a"}, key{rootfs: "b"}
		if p.take(a, time.Now()) != nil {
			t.Error("a new pool has something")
		}
		<-time.After(time.Second)
		if p.count(a) != 4 {
			t.Errorf("%d ready; want the whole pool for the only key", p.count(a))
		}
		f.give(p.take(a, time.Now()))
		if p.take(b, time.Now()) != nil {
			t.Error("b was never made")
		}
		<-time.After(time.Second)
		if p.count(a) != 2 || p.count(b) != 2 {
			t.Errorf("%d and %d ready; want a half each", p.count(a), p.count(b))
		}
		// b is not used any more: its share goes to a.
		for range 12 {
			<-time.After(time.Minute)
			f.give(p.take(a, time.Now()))
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
		if err := p.close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolHoldsNoMoreThanItsSize(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(2)
		for n := range 5 {
			p.take(key{rootfs: fmt.Sprint(n)}, time.Now())
			<-time.After(time.Second)
		}
		if f.alive.Load() != 2 || p.count(key{rootfs: "4"}) != 1 || p.count(key{rootfs: "3"}) != 1 {
			t.Errorf("%d ready: %v; want one of each of the last two", f.alive.Load(), p.ready)
		}
		p.forget("4")
		if p.count(key{rootfs: "4"}) != 0 {
			t.Error("what was forgotten is ready")
		}
		if err := p.close(); err != nil {
			t.Error(err)
		}
		if f.alive.Load() != 0 {
			t.Errorf("%d live after the end", f.alive.Load())
		}
		if p.take(key{rootfs: "3"}, time.Now()) != nil {
			t.Error("a closed pool gives something")
		}
	})
}

// takes takes n machines at once, and ends them.
func (f *plant) takes(p *pool, k key, n int) (had int) {
	for range n {
		if s := p.take(k, time.Now()); s != nil {
			f.end(s)
			had++
		}
	}
	return had
}

func TestPoolHoldsWhatWasWantedAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.poolOf(poolSize{keys: 4, even: 4, extra: 8})
		a, b := key{rootfs: "a"}, key{rootfs: "b"}
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
			f.give(p.take(a, time.Now()))
			<-time.After(2 * time.Second)
			f.give(p.take(b, time.Now()))
			<-time.After(2 * time.Second)
		}
		if n := f.made.Load() - made; n != 20 {
			t.Errorf("%d were made for 20 that were taken", n)
		}
		// Single ones go on; the burst is long ago.
		for range 12 {
			<-time.After(time.Minute)
			f.give(p.take(a, time.Now()))
		}
		<-time.After(time.Second)
		if p.count(a) != 4 || f.alive.Load() != 4 {
			t.Errorf("%d ready of %d long after the burst; want the even share", p.count(a), f.alive.Load())
		}
		if err := p.close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolHoldsOneOfEachWithoutABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.poolOf(poolSize{keys: 2, extra: 4})
		for n := range 3 {
			p.take(key{rootfs: fmt.Sprint(n)}, time.Now())
			<-time.After(2 * time.Second)
		}
		if p.count(key{rootfs: "1"}) != 1 || p.count(key{rootfs: "2"}) != 1 || f.alive.Load() != 2 {
			t.Errorf("%v ready; want one of each of the last two", p.ready)
		}
		f.takes(p, key{rootfs: "2"}, 3)
		<-time.After(2 * time.Second)
		if p.count(key{rootfs: "2"}) != 3 {
			t.Errorf("%d ready; want as many as were wanted at once", p.count(key{rootfs: "2"}))
		}
		if err := p.close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolTriesAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		f.fail.Store(true)
		p := f.pool(1)
		k := key{rootfs: "a"}
		p.take(k, time.Now())
		<-time.After(time.Second)
		f.fail.Store(false)
		<-time.After(review)
		if p.count(k) != 1 {
			t.Error("a pool that failed once stays empty")
		}
		if err := p.close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolLeavesTheMachineToABurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(4)
		k := key{rootfs: "a"}
		for range 20 {
			p.take(k, time.Now())
			<-time.After(settle / 2)
		}
		if f.made.Load() != 0 {
			t.Errorf("%d were made while others were asked for", f.made.Load())
		}
		<-time.After(time.Second)
		if p.count(k) != 4 {
			t.Errorf("%d ready after the burst", p.count(k))
		}
		if err := p.close(); err != nil {
			t.Error(err)
		}
	})
}

func TestPoolLeavesTheMachineToCreations(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &plant{t: t}
		p := f.pool(2)
		k := key{rootfs: "a"}
		f.busy.Store(true)
		p.want(k, time.Now())
		<-time.After(yield / 2)
		if f.made.Load() != 0 {
			t.Errorf("%d were made while another was", f.made.Load())
		}
		f.busy.Store(false)
		<-time.After(settle * 10)
		if p.count(k) != 2 {
			t.Errorf("%d ready after the creation", p.count(k))
		}
		f.busy.Store(true) // for good
		f.give(p.take(k, time.Now()))
		<-time.After(4 * yield)
		if p.count(k) != 2 {
			t.Errorf("%d ready during creations without end", p.count(k))
		}
		if err := p.close(); err != nil {
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
				if s := p.take(key{rootfs: fmt.Sprint(n % 3)}, time.Now()); s != nil {
					f.end(s)
				}
			}
			if n == 0 {
				p.forget("1")
			}
			if n == 1 {
				if err := p.close(); err != nil {
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
