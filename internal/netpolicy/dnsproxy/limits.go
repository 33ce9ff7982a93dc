package dnsproxy

import (
	"fmt"
	"hash/maphash"
	"math"
	"sync"
	"time"
)

// pace is a bucket of tokens, one for each query.
type pace struct {
	rate  float64 // a second
	burst float64

	mu     sync.Mutex
	tokens float64 // below zero: they are lent
	at     time.Time
}

func newPace(rate float64, burst int) *pace {
	return &pace{rate: rate, burst: float64(burst), tokens: float64(burst)}
}

// take takes a token and returns how long to wait before it may be used.
func (p *pace) take(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.tokens = refill(p.tokens, p.rate, p.burst, p.at, now) - 1
	p.at = now
	if p.tokens >= 0 {
		return 0
	}
	return time.Duration(-p.tokens / p.rate * float64(time.Second))
}

// refill returns what a bucket holds now that held so much at a time.
func refill(held, rate, most float64, at, now time.Time) float64 {
	if at.IsZero() {
		return held
	}
	return min(most, held+rate*max(0, now.Sub(at).Seconds()))
}

// remembered is how many names a sandbox may ask again at no cost.
const remembered = 1024

// budget bounds how much information the names that a sandbox asks for can
// carry to the servers of a domain that it may ask any name of.
type budget struct {
	length int
	name   float64 // bits
	rate   float64 // bits a second
	burst  float64 // bits

	mu    sync.Mutex
	bits  float64
	at    time.Time
	seed  maphash.Seed
	known map[uint64]bool
	order []uint64 // a ring of what is known
	next  int
}

func newBudget(l Limits) *budget {
	return &budget{length: l.FreeLength, name: l.NameBits, rate: l.Bits, burst: l.BitsBurst, bits: l.BitsBurst,
		seed: maphash.MakeSeed(), known: map[uint64]bool{}}
}

// spend takes the cost of asking for a name of which a part is free. It returns
// why it may not be asked for, "" if it may.
func (b *budget) spend(now time.Time, name, free string) string {
	if free == "" {
		return ""
	}
	if len(free) > b.length {
		return fmt.Sprintf("%d characters of the name are the sandbox's own: at most %d, so that names carry no data out", len(free), b.length)
	}
	cost := information(free)
	if cost > b.name {
		return fmt.Sprintf("the name holds %.0f bits of information: at most %.0f, so that names carry no data out", cost, b.name)
	}
	key := maphash.String(b.seed, name)
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.known[key] {
		return ""
	}
	b.bits = refill(b.bits, b.rate, b.burst, b.at, now)
	b.at = now
	if cost > b.bits {
		return fmt.Sprintf("the sandbox asks for too many new names: %.0f bits of information in a second at most, so that names carry no data out", b.rate)
	}
	b.bits -= cost
	b.remember(key)
	return ""
}

func (b *budget) remember(key uint64) {
	b.known[key] = true
	if len(b.order) < remembered {
		b.order = append(b.order, key)
		return
	}
	delete(b.known, b.order[b.next])
	b.order[b.next] = key
	b.next = (b.next + 1) % remembered
}

// information estimates how many bits a text holds: its length times the
// entropy of its characters, and no less than one bit for each.
func information(s string) float64 {
	var count [256]int
	for i := range len(s) {
		count[s[i]]++
	}
	var entropy float64
	for _, n := range count {
		if n > 0 {
			share := float64(n) / float64(len(s))
			entropy -= share * math.Log2(share)
		}
	}
	return float64(len(s)) * max(entropy, 1)
}
