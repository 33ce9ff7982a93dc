package proc

import (
	"cmp"
	"slices"
	"sync"
	"time"
)

// How exactly running time is measured: what is due is waited for in slices,
// and a slice that takes longer than it was meant to shows that the machine
// stood still.
const (
	commandGrain = 250 * time.Millisecond // slices while a command has a deadline
	keepGrain    = time.Minute            // slices while only ended processes are kept
	lateness     = 100 * time.Millisecond // a slice may take longer by so much, from load
)

// clock measures the time in which the machine ran. In a machine that was
// paused, frozen or restored, the kernel's clocks have gone on meanwhile, and
// all that was to happen by them is due at once when it goes on. By this clock
// nothing is. An alarm's slices wake the machine, so there are none without
// alarms; then all time counts.
type clock struct {
	mu     sync.Mutex // guards what follows; may be taken with a Table's or a Process's mu held, and holds neither
	at     time.Time  // until when time was counted
	ran    time.Duration
	slice  time.Duration // how long the present slice is meant to be, 0 for none
	late   bool          // the last slice was late
	alarms map[*alarm]struct{}
	timer  *time.Timer
	closed bool
}

// alarm is something to do at a time by the clock.
type alarm struct {
	due   time.Duration
	grain time.Duration // longest slice while it is set
	ring  func()        // called in a goroutine of the clock's
}

func newClock(now time.Time) *clock {
	return &clock{at: now, alarms: map[*alarm]struct{}{}}
}

// now returns the running time so far.
func (c *clock) now() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanceLocked(time.Now(), lateness)
	return c.ran
}

// after has ring called when the machine ran for d more.
func (c *clock) after(d, grain time.Duration, ring func()) *alarm {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	c.advanceLocked(now, lateness)
	a := &alarm{due: c.ran + d, grain: grain, ring: ring}
	c.alarms[a] = struct{}{}
	c.planLocked()
	return a
}

// cancel takes an alarm back; nil is none. One that rings already goes on.
func (c *clock) cancel(a *alarm) {
	if a == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.alarms, a) // the slice that is planned finds nothing due
}

// resumed says that the machine stood still until a moment ago.
func (c *clock) resumed(now time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.advanceLocked(now, 0)
	c.late = false
	c.planLocked()
}

// close ends the slices.
func (c *clock) close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	if c.timer != nil {
		c.timer.Stop()
	}
}

// wake is called at the end of a slice.
func (c *clock) wake() {
	for _, a := range c.due(time.Now()) {
		a.ring()
	}
}

// due returns the alarms that are due, in their order, and plans for the others.
func (c *clock) due(now time.Time) []*alarm {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.late = c.advanceLocked(now, lateness)
	var due []*alarm
	for a := range c.alarms {
		if a.due <= c.ran {
			due = append(due, a)
			delete(c.alarms, a)
		}
	}
	c.planLocked()
	slices.SortFunc(due, func(a, b *alarm) int { return cmp.Compare(a.due, b.due) })
	return due
}

// advanceLocked counts the time until now. A slice that was late by more than
// the allowance had a standstill in it, somewhere; half of what it was meant to
// be is counted, so nothing comes due by it. When slices keep being late, the
// machine is only busy, and all counts. It reports whether this one was late.
func (c *clock) advanceLocked(now time.Time, allowance time.Duration) (late bool) {
	took := now.Sub(c.at)
	if took <= 0 {
		return false
	}
	c.at = now
	late = c.slice > 0 && took > c.slice+allowance
	if late && !c.late {
		took = c.slice / 2
		c.late = true
	}
	c.ran += took
	if c.slice > 0 { // what is left of it, should more be counted before its end
		c.slice = max(c.slice-took, 1)
	}
	return late
}

// planLocked begins a slice.
func (c *clock) planLocked() {
	c.slice = 0
	for a := range c.alarms {
		left := max(min(a.due-c.ran, a.grain), 1)
		if c.slice == 0 || left < c.slice {
			c.slice = left
		}
	}
	switch {
	case c.closed || c.slice == 0:
	case c.timer == nil:
		c.timer = time.AfterFunc(c.slice, c.wake)
	default:
		c.timer.Reset(c.slice)
	}
}
