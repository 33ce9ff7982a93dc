package netgate

import (
	"context"
	"sync"
	"time"
)

// pace is a bucket of bytes: it fills at a rate, and who takes more than is in
// it waits.
type pace struct {
	rate  float64 // bytes a second
	burst float64

	mu   sync.Mutex
	left float64 // below zero: they are lent
	at   time.Time
}

// newPace returns a bucket that holds a tenth of a second.
func newPace(rate float64) *pace { return &pace{rate: rate, burst: rate / 10, left: rate / 10} }

// chunk is how many bytes are moved before they are taken.
func (p *pace) chunk() int64 { return int64(min(max(p.burst, 4<<10), 1<<20)) }

// take takes n bytes and returns how long to wait before more are moved.
func (p *pace) take(n int64, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.at.IsZero() {
		p.left = min(p.burst, p.left+p.rate*max(0, now.Sub(p.at).Seconds()))
	}
	p.at = now
	p.left -= float64(n)
	if p.left >= 0 {
		return 0
	}
	return time.Duration(-p.left / p.rate * float64(time.Second))
}

// spent takes n bytes that were moved and waits until more may be.
func (p *pace) spent(ctx context.Context, n int64) error {
	d := p.take(n, time.Now())
	if d <= 0 {
		return ctx.Err()
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
