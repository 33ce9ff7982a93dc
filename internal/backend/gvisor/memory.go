package gvisor

import (
	"runtime"
	"strings"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// To write its state down or to take one up, a sentry needs memory for a while:
// some tens of MiB more with 20,000 files. Within its usual limit a sandbox could
// end in the middle. It also has more to do than a sandbox with a part of a CPU
// may. Nothing inside runs then that could use either.
const (
	liftTimes = 3   // the limit meanwhile, in usual ones
	liftLeast = 256 // MiB that there are beyond the usual limit at least
)

// settleEvery is how often the limit is tried to be put back. The sentry gives
// memory back some seconds after it needed it.
const settleEvery = 2 * time.Second

// slack is what must be below the usual limit to put it back, in bytes. On
// cgroup v2 a limit below what is in use ends the sandbox.
const slack = 4 << 20

const megabyte = 1 << 20

// lifted is the limit of a group, in MiB, whose usual limit is usual.
func lifted(usual int64) int64 { return max(usual+liftLeast, liftTimes*usual) }

// headroom is a control group's limits while they are lifted.
type headroom struct {
	mu    sync.Mutex
	users int  // that need them lifted
	waits bool // somebody waits to put that of memory back
}

// lift lifts the limits of memory and CPU until settle.
func (s *sentry) lift() error {
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	if s.group == nil {
		return nil
	}
	limit := sandbox.Limits{MemoryMB: lifted(s.usualMB()), CPU: float64(runtime.NumCPU())}
	err := s.group.SetLimits(limit)
	if err != nil {
		// With swap accounting the limit of both must be lifted before that of
		// one, which the first try has done.
		err = s.group.SetLimits(limit)
	}
	if err != nil {
		return err
	}
	s.room.users++
	return nil
}

// settle ends what lift began: the limit of CPU is put back now, that of memory
// now, or as soon as less than that is in use.
func (b *Backend) settle(s *sentry) error {
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	if s.room.users > 1 {
		s.room.users--
		return nil
	}
	if s.room.users == 1 { // else it was made without
		s.room.users = 0
		b.settleLater(s, s.lower())
	}
	return s.slow()
}

// resettle puts the limits back that an earlier run may have left lifted.
func (b *Backend) resettle(s *sentry) error {
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	b.settleLater(s, false)
	return s.slow()
}

// slow sets the CPU's limit.
func (s *sentry) slow() error {
	if s.group == nil || s.exited() {
		return nil
	}
	return s.group.SetLimits(sandbox.Limits{CPU: s.Limits.CPU})
}

// settleLater waits until the limit can be put back. s.room.mu is held.
func (b *Backend) settleLater(s *sentry, done bool) {
	if done || s.room.waits || s.group == nil || s.Limits.MemoryMB <= 0 {
		return
	}
	s.room.waits = b.work.start(func(stop <-chan struct{}) {
		tick := time.NewTicker(settleEvery)
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-s.gone:
				return
			case <-tick.C:
			}
			// One that stands still may be about to be written down for a run
			// that was killed.
			if state, err := s.processState(); err != nil || strings.HasPrefix(state, "D") {
				continue
			}
			s.room.mu.Lock()
			if s.lower() {
				s.room.waits = false
				s.room.mu.Unlock()
				return
			}
			s.room.mu.Unlock()
		}
	})
}

// lower puts the limit back if that is possible. s.room.mu is held.
func (s *sentry) lower() bool {
	if s.room.users > 0 || s.group == nil {
		return s.group == nil
	}
	usual := s.usualMB()
	_, used, _, err := s.group.Usage()
	if err != nil || used+slack > usual<<20 {
		return false
	}
	return s.group.SetLimits(sandbox.Limits{MemoryMB: usual}) == nil
}

// usualMB is the usual limit of memory of the sentry's group, in MiB. Memory
// that is frozen for others stays the group's after the machine has written to
// it and has a copy, and all of it may be written to at once. That the machine
// does not use it for more than it may have is what guard sees to.
func (s *sentry) usualMB() int64 {
	return hostMemoryMB(s.Limits.MemoryMB) + (s.held.Load()+megabyte-1)/megabyte
}

// resize puts the limit of memory to what it is usually, now or soon.
func (b *Backend) resize(s *sentry) {
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	b.settleLater(s, s.lower())
}

// workers are goroutines that end with the backend.
type workers struct {
	mu      sync.Mutex
	stopped bool
	quit    chan struct{}
	all     sync.WaitGroup
}

func newWorkers() *workers { return &workers{quit: make(chan struct{})} }

// start runs f, which returns when its channel is closed. It reports whether it
// does, which it does not after stop.
func (w *workers) start(f func(stop <-chan struct{})) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.stopped {
		return false
	}
	w.all.Go(func() { f(w.quit) })
	return true
}

// stop ends all and waits for it. It may be repeated.
func (w *workers) stop() {
	w.mu.Lock()
	if !w.stopped {
		w.stopped = true
		close(w.quit)
	}
	w.mu.Unlock()
	w.all.Wait()
}
