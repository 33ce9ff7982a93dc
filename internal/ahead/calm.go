// Package ahead makes things before they are wanted, in the moments in which
// nobody waits for the machine. What is made, and how, is its callers' matter,
// and so is how much of it there may be.
package ahead

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	// settle is how long it has to be calm before anything is made ahead, so that
	// a burst of creations has the machine for itself.
	settle = 20 * time.Millisecond
	// yield is how long work under way is waited for. Under a steady stream of it
	// things must be made all the same.
	yield = time.Second
)

// Load says what else a machine has to do and to hold: the work that somebody
// waits for, and that would be slower with anything made beside it, and memory.
// The zero value and nil have no work and enough memory.
type Load struct {
	n    atomic.Int64
	room atomic.Pointer[func() Room]
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
	l.n.Add(1)
	return func() { l.n.Add(-1) }
}

// Busy reports whether somebody waits.
func (l *Load) Busy() bool { return l != nil && l.n.Load() > 0 }

// Calm returns when nothing came from used for a while and there is no load, or
// has been for long, or ctx is done.
func Calm(ctx context.Context, used <-chan struct{}, load *Load) {
	begin := time.Now()
	timer := time.NewTimer(settle)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-used:
			timer.Reset(settle)
		case <-timer.C:
			if !load.Busy() || time.Since(begin) > yield {
				return
			}
			timer.Reset(settle)
		}
	}
}
