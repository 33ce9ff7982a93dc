package dnsproxy

import (
	"fmt"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"
)

func TestPace(t *testing.T) {
	now := time.Unix(1000, 0)
	p := newPace(100, 5)
	for i := range 5 {
		if d := p.take(now); d != 0 {
			t.Errorf("query %d waits %s", i, d)
		}
	}
	for i := range 3 {
		if d, want := p.take(now), time.Duration(i+1)*10*time.Millisecond; d != want {
			t.Errorf("query %d over the burst waits %s, want %s", i, d, want)
		}
	}
	if d := p.take(now.Add(40 * time.Millisecond)); d != 0 {
		t.Errorf("after the wait: %s", d)
	}
	now = now.Add(time.Hour)
	for i := range 5 {
		if d := p.take(now); d != 0 {
			t.Errorf("after an hour query %d waits %s", i, d)
		}
	}
	if d := p.take(now); d == 0 {
		t.Error("an hour is saved up")
	}
	if d := p.take(now.Add(-time.Hour)); d == 0 {
		t.Error("a clock that goes back gives tokens")
	}
}

func TestInformation(t *testing.T) {
	for _, c := range []struct {
		s        string
		from, to float64
	}{
		{"", 0, 0}, {"a", 1, 1}, {"aaaaaaaa", 8, 8}, {"www", 3, 3}, {"cdn-lfs", 15, 20}, {"abcdefgh", 24, 24},
		{"6aa30f8b08e16409b46e0173d6de2f56", 105, 128}, {strings.Repeat("0123456789abcdef", 4), 256, 256},
	} {
		if got := information(c.s); got < c.from || got > c.to {
			t.Errorf("%q: %.1f bits, want %.0f to %.0f", c.s, got, c.from, c.to)
		}
	}
}

func TestBudget(t *testing.T) {
	now := time.Unix(1000, 0)
	b := newBudget(Limits{FreeLength: 40, NameBits: 100, Bits: 10, BitsBurst: 100})
	spend := func(free string) bool { return b.spend(now, free+".example.com", free) == "" }
	for i, c := range []struct {
		free string
		ok   bool
	}{
		{"", true},
		{strings.Repeat("a", 41), false},
		{strings.Repeat("a", 40), true},            // 40 bits
		{"abcdefghijklmnopqrstuvwxyz01234", false}, // 154 bits
		{"abcdefghijklmnop", false},                // 64 bits: 60 are left
		{"abcdefgh", true},                         // 24 bits: 36 are left
		{"abcdefgh", true},                         // known
		{"abcdefgi", true},                         // 12 are left
		{"abcdefgj", false},
		{"abcdefgh", true}, // still known
	} {
		if got := spend(c.free); got != c.ok {
			t.Errorf("%d: %q may be asked for: %v", i, c.free, got)
		}
	}
	now = now.Add(1200 * time.Millisecond)
	if !spend("abcdefgj") {
		t.Error("nothing comes back with time")
	}
	now = now.Add(time.Hour)
	for i := range 3 * remembered { // each costs something, so that time must pass
		now = now.Add(10 * time.Second)
		if !spend(fmt.Sprintf("n%d", i)) {
			t.Fatalf("name %d may not be asked for", i)
		}
	}
	if len(b.known) != remembered || len(b.order) != remembered {
		t.Errorf("%d and %d names are remembered, want %d", len(b.known), len(b.order), remembered)
	}
}

// Names of a domain that the sandbox may ask any name of carry little out; names
// of everyday use, and those that a rule names whole, pass.
func TestExfiltration(t *testing.T) {
	r := serve(t, func(a asked) [][]byte {
		m := new(dns.Msg)
		m.SetReply(a.msg)
		m.Answer = append(m.Answer, record1(t, a.msg.Question[0].Name+" 60 A 192.0.2.1"))
		return [][]byte{pack(t, m)}
	})
	p := proxy(t, Config{Upstreams: []string{r.addr()}})
	everyday := []string{"cdn-lfs", "cas-bridge.xethub", "docker-images-prod.6aa30f8b08e16409b46e0173d6de2f56", "ec2-203-0-113-25.compute-1",
		"rr3---sn-4g5e6nsz", "bafybeigdyrzt5sfp7udm7hu76uh7y26nf3efuylqabf3oclgtqy55fbzdi", "a.very.long.name.of.many.short.labels.that.somebody.thought.of"}
	b := open(t, p, "*.example.com exact.example.org")
	for range 3 {
		for _, name := range everyday {
			if got := b.send(ask(name+".example.com", dns.TypeA)); got.Rcode != dns.RcodeSuccess {
				t.Errorf("%s: %s", name, brief(got))
			}
		}
	}

	const letters = "abcdefghijklmnopqrstuvwxyz234567"
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(n int) string {
		var s strings.Builder
		for range n {
			s.WriteByte(letters[rng.IntN(len(letters))])
		}
		return s.String()
	}
	for name, free := range map[string]string{"too long": random(63) + "." + random(63) + "." + random(63), "too full": random(60) + "." + random(60)} {
		if got := brief(b.send(ask(free+".example.com", dns.TypeA))); got != "REFUSED" {
			t.Errorf("%s: %s", name, got)
		}
	}
	passed, limited := 0, 0
	before := time.Now()
	for range 300 {
		switch got := b.send(ask(random(50)+".example.com", dns.TypeA)); got.Rcode {
		case dns.RcodeSuccess:
			passed++
		case dns.RcodeRefused:
			limited++
		}
	}
	most := (16384+64*time.Since(before).Seconds())/200 + 1
	if limited == 0 || float64(passed) > most {
		t.Errorf("of 300 names of 250 bits %d passed, %d did not: want %.0f at most", passed, limited, most)
	}
	if c := b.Counters(); c.Limited != uint64(limited+2) {
		t.Errorf("counters %+v", c)
	}
	if got := brief(b.send(ask("exact.example.org", dns.TypeA))); got != "NOERROR 192.0.2.1" {
		t.Errorf("a name that a rule names whole: %s", got)
	}
	e := b.Events()[0]
	if e.Kind != DeniedQuery || e.Why == "" || e.Name == "" {
		t.Errorf("event %+v", e)
	}
	if other := open(t, p, "*.example.com"); brief(other.send(ask(random(50)+".example.com", dns.TypeA))) != "NOERROR 192.0.2.1" {
		t.Error("another sandbox pays for it")
	}
}

// Queries over the rate wait, and are answered.
func TestRate(t *testing.T) {
	r := serve(t, zone(t))
	b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}, Limits: Limits{Rate: 200, Burst: 10}}), "example.com")
	start := time.Now()
	for range 30 {
		if got := brief(b.send(ask("example.org", dns.TypeA))); got != "NXDOMAIN" {
			t.Fatal(got)
		}
	}
	if took := time.Since(start); took < 90*time.Millisecond {
		t.Errorf("30 queries took %s: 20 of them at 200 a second take 100 ms", took)
	}
	if c := b.Counters(); c.Delayed == 0 || c.Queries != 30 {
		t.Errorf("counters %+v", c)
	}
}

// The document names the limits that are in force.
func TestDocumentNamesTheLimits(t *testing.T) {
	data, err := os.ReadFile("../../../docs/concepts/network.md")
	if err != nil {
		t.Fatal(err)
	}
	c := Config{}.filled()
	l := c.Limits
	for _, want := range []string{
		fmt.Sprintf("| queries | %.0f a second, %d at once |", l.Rate, l.Burst),
		fmt.Sprintf("| queries that are out | %d |", l.InFlight),
		fmt.Sprintf("| TCP connections to the resolver | %d |", l.Conns),
		fmt.Sprintf("| characters of a name that a `*.` rule leaves free | %d |", l.FreeLength),
		fmt.Sprintf("| information in them | %.0f bits |", l.NameBits),
		fmt.Sprintf("| information in new ones | %.0f bits a second, %.0f at once |", l.Bits, l.BitsBurst),
		fmt.Sprintf("| addresses in an answer | %d |", addrsMost),
		fmt.Sprintf("| aliases from a name to its addresses | %d |", chainMost),
		fmt.Sprintf("| lifetime of an answer | %s to %s |", c.MinTTL, c.MaxTTL),
		fmt.Sprintf("| longer that an address stays open | %s |", c.Grace),
		fmt.Sprintf("| queries in the log | %d |", l.Log),
	} {
		if !strings.Contains(string(data), want) {
			t.Errorf("the document does not say %q", want)
		}
	}
}
