// Package ahead makes things before they are wanted, in the moments in which
// nobody waits for the machine. What is made, and how, is its callers' matter,
// and so is how much of it there may be.
package ahead

import (
	"context"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// settle is how long it has to be calm before anything is made ahead, so that
	// a burst of creations has the machine for itself.
	settle = 20 * time.Millisecond
	// rest is the longest time left to several who got something at once, for their
	// first calls, which come at once too. They get half as long as they waited.
	rest = 250 * time.Millisecond
	// yield is how long work under way is waited for. Under a steady stream of it
	// things must be made all the same.
	yield = time.Second
)

// Load says what else a machine has to do and to hold: the work that somebody
// waits for, and that would be slower with anything made beside it, and memory.
// The zero value and nil have no work and enough memory.
type Load struct {
	room atomic.Pointer[func() Room]

	mu    sync.Mutex
	n     int
	begin time.Time // of the present work
	many  bool      // it is for several
	until time.Time // when the first calls of several are over
}

// Room is how much memory there is for what is made ahead.
type Room int

// The rooms, each less than the one before.
const (
	Enough Room = iota
	Short       // for what is ready, and no more
	None        // not even for that
)

// LimitBy has the memory looked at by room, which is quick.
func (l *Load) LimitBy(room func() Room) {
	if l != nil {
		l.room.Store(&room)
	}
}

// Room returns how much memory there is.
func (l *Load) Room() Room {
	if l == nil {
		return Enough
	}
	if room := l.room.Load(); room != nil {
		return (*room)()
	}
	return Enough
}

// Begin counts one more, until end is called.
func (l *Load) Begin() (end func()) {
	if l == nil {
		return func() {}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n == 0 {
		l.begin, l.many = time.Now(), false
	}
	l.n++
	l.many = l.many || l.n > 1
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.n--
		if now := time.Now(); l.n == 0 && l.many {
			l.until = now.Add(min(now.Sub(l.begin)/2, rest))
		}
	}
}

// Busy reports whether somebody waits, or several got something a moment ago.
func (l *Load) Busy() bool { return l.left(time.Now()) > 0 }

// left returns how long to wait before looking again, 0 if it is calm.
func (l *Load) left(now time.Time) time.Duration {
	if l == nil {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.n > 0 {
		return settle
	}
	return max(0, l.until.Sub(now))
}

// Calm returns when nothing came from used for a while and the load is not busy, or
// after yield, or when ctx is done.
func Calm(ctx context.Context, used <-chan struct{}, load *Load) {
	begin := time.Now()
	timer := time.NewTimer(settle)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-used:
			if time.Since(begin) > yield {
				return
			}
			timer.Reset(settle)
		case <-timer.C:
			left := load.left(time.Now())
			if left == 0 || time.Since(begin) > yield {
				return
			}
			timer.Reset(left)
		}
	}
}
