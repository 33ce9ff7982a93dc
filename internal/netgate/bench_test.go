package netgate

import (
	"context"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netgate/gatetest"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// These measure what rules cost. Each prints what it compares in one run, as
// medians: the machine is rarely quiet.

func median(times []time.Duration) time.Duration {
	slices.Sort(times)
	return times[len(times)/2]
}

// BenchmarkOpen is what a create pays for a sandbox's network.
func BenchmarkOpen(b *testing.B) {
	gatetest.New(b)
	g := newGate(b, Config{})
	gu := newGuest(b, g)
	for name, rules := range map[string]map[string]bool{"without rules": nil, "with rules": gatetest.Rules()} {
		b.Run(name, func(b *testing.B) {
			policy := parse(b, rules)
			for b.Loop() {
				gd, err := g.Open(Sandbox{ID: sandbox.NewID(), Slot: gu.slot, Policy: policy})
				must(b, err)
				b.StopTimer()
				gd.Close()
				b.StartTimer()
			}
		})
	}
}

// BenchmarkFurnish is what the pool pays for a slot, ahead of its use.
func BenchmarkFurnish(b *testing.B) {
	g := newGate(b, Config{})
	for name, further := range map[string]func(backend.Slot) error{"bare": nil, "gate": g.Furnish} {
		b.Run(name, func(b *testing.B) {
			p := netslot.NewPool(newLog(b), backend.Prefix(b.TempDir()), 0, further)
			for b.Loop() {
				slot, err := p.Acquire(b.Context())
				must(b, err)
				b.StopTimer()
				must(b, netslot.Remove(slot.Name))
				b.StartTimer()
			}
		})
	}
}

// BenchmarkDNS is what the proxy adds to the resolver's own time.
func BenchmarkDNS(b *testing.B) {
	gatetest.New(b)
	gu := newGuest(b, newGate(b, Config{}))
	gu.open(gatetest.Rules())
	query := []byte("\x00\x07\x01\x00\x00\x01\x00\x00\x00\x00\x00\x00\x07example\x03com\x00\x00\x01\x00\x01")
	ask := func(c net.Conn) time.Duration {
		begin := time.Now()
		c.Write(query)
		c.SetReadDeadline(begin.Add(5 * time.Second))
		if _, err := c.Read(make([]byte, 512)); err != nil {
			b.Fatal(err)
		}
		return time.Since(begin)
	}
	inside, err := gu.dial("udp", gu.slot.GatewayIP+":53")
	must(b, err)
	outside, err := net.Dial("udp", gatetest.Resolver+":53")
	must(b, err)
	var ours, theirs []time.Duration
	for b.Loop() {
		ours = append(ours, ask(inside))
		theirs = append(theirs, ask(outside))
		time.Sleep(12 * time.Millisecond) // below the limit of queries a second
	}
	b.ReportMetric(float64(median(ours).Microseconds()), "µs/proxy")
	b.ReportMetric(float64(median(theirs).Microseconds()), "µs/upstream")
}

// BenchmarkManySandboxes is the time of a round trip of one sandbox's, alone and
// beside 500 others with rules of their own.
func BenchmarkManySandboxes(b *testing.B) {
	w := gatetest.New(b)
	go echo(w.Listen(gatetest.Network + ":9000"))
	g := newGate(b, Config{})
	gu := newGuest(b, g)
	gu.open(map[string]bool{gatetest.Networks: true})
	c, err := gu.dial("tcp", gatetest.Network+":9000")
	must(b, err)
	trips := func() time.Duration {
		var times []time.Duration
		for range 2000 {
			begin := time.Now()
			must(b, ping(c))
			times = append(times, time.Since(begin))
		}
		return median(times)
	}
	alone := trips()
	p := netslot.NewPool(newLog(b), backend.Prefix(b.TempDir()), 0, g.Furnish)
	var mu sync.Mutex
	var others sync.WaitGroup
	for range 8 {
		others.Go(func() {
			for range 500 / 8 {
				slot, err := p.Acquire(context.Background())
				if err != nil {
					b.Error(err)
					return
				}
				rules := map[string]bool{}
				for j := range 100 {
					rules[fmt.Sprintf("10.0.%d.0/24", j)] = true
				}
				gd, err := g.Open(Sandbox{ID: sandbox.NewID(), Slot: slot, Policy: parse(b, rules)})
				if err != nil {
					b.Error(err)
					return
				}
				mu.Lock()
				b.Cleanup(func() { gd.Close(); must(b, netslot.Remove(slot.Name)) })
				mu.Unlock()
			}
		})
	}
	others.Wait()
	var beside time.Duration
	for b.Loop() {
		beside = trips()
	}
	b.ReportMetric(float64(alone.Nanoseconds())/1e3, "µs/alone")
	b.ReportMetric(float64(beside.Nanoseconds())/1e3, "µs/beside-500")
}
