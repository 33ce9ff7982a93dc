package dnsproxy

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// Queries that are no questions: each is answered with a code, or not at all.
func TestQueriesThatAreNotAnswered(t *testing.T) {
	b, r := one(t, "*", zone(t))
	good := ask("example.com", dns.TypeA)
	with := func(change func(*dns.Msg)) []byte {
		m := good.Copy()
		change(m)
		return pack(t, m)
	}
	edns := func(version uint8) *dns.OPT {
		o := &dns.OPT{Hdr: dns.RR_Header{Name: ".", Rrtype: dns.TypeOPT}}
		o.SetVersion(version)
		return o
	}
	raw := pack(t, good)
	label := append(slices.Clone(raw[:12]), 3, 'a', 0, 'b', 3, 'c', 'o', 'm', 0, 0, 1, 0, 1)
	dot := append(slices.Clone(raw[:12]), 3, 'a', '.', 'b', 3, 'c', 'o', 'm', 0, 0, 1, 0, 1)
	loop := append(slices.Clone(raw[:12]), 0xc0, 12, 0, 1, 0, 1)
	cases := []struct {
		name string
		wire []byte
		want int // -1: no answer
	}{
		{"nothing", nil, -1},
		{"a byte", []byte{1}, -1},
		{"less than a header", raw[:11], -1},
		{"a response", with(func(m *dns.Msg) { m.Response = true }), -1},
		{"a header alone", raw[:12], dns.RcodeFormatError},
		{"half a question", raw[:20], dns.RcodeFormatError},
		{"a loop of pointers", loop, dns.RcodeFormatError},
		{"no question", with(func(m *dns.Msg) { m.Question = nil }), dns.RcodeFormatError},
		{"two questions", with(func(m *dns.Msg) { m.Question = append(m.Question, m.Question[0]) }), dns.RcodeFormatError},
		{"an answer", with(func(m *dns.Msg) { m.Answer = append(m.Answer, record1(t, "example.com. 1 A 192.0.2.1")) }), dns.RcodeFormatError},
		{"an update", with(func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }), dns.RcodeNotImplemented},
		{"a notification", with(func(m *dns.Msg) { m.Opcode = dns.OpcodeNotify }), dns.RcodeNotImplemented},
		{"another class", with(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }), dns.RcodeRefused},
		{"the root", with(func(m *dns.Msg) { m.Question[0].Name = "." }), dns.RcodeRefused},
		{"a zero in a label", label, dns.RcodeRefused},
		{"a dot in a label", dot, dns.RcodeRefused},
		{"two EDNS records", with(func(m *dns.Msg) { m.Extra = append(m.Extra, edns(0), edns(0)) }), dns.RcodeFormatError},
		{"a later EDNS", with(func(m *dns.Msg) { m.Extra = append(m.Extra, edns(1)) }), dns.RcodeBadVers},
		{"too long", append(slices.Clone(raw), make([]byte, queryMost)...), dns.RcodeFormatError},
	}
	conn, err := net.Dial("udp", b.udp)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	buf := make([]byte, 4096)
	for i, c := range cases {
		wire := slices.Clone(c.wire)
		if len(wire) > 2 {
			binary.BigEndian.PutUint16(wire, uint16(1000+i))
		}
		conn.Write(wire)
		if c.want < 0 {
			continue // the next answer would have its number
		}
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		n, err := conn.Read(buf)
		if err != nil {
			t.Fatalf("%s: %v", c.name, err)
		}
		m := new(dns.Msg)
		if err := m.Unpack(buf[:n]); err != nil {
			t.Fatalf("%s: the answer is malformed: %v", c.name, err)
		}
		if m.Id != uint16(1000+i) || m.Rcode != c.want || !m.Response || len(m.Answer) > 0 {
			t.Errorf("%s: %v", c.name, m)
		}
	}
	if n := len(r.queries()); n > 0 {
		t.Errorf("%d of them were forwarded", n)
	}
	if c := b.Counters(); c.Refused != uint64(len(cases)-4) {
		t.Errorf("counters %+v", c)
	}
}

func TestTCP(t *testing.T) {
	b, _ := one(t, "example.com", zone(t, "example.com. 60 A 192.0.2.1"))
	conn, err := net.Dial("tcp", b.tcp)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	var many []byte
	for i, name := range []string{"example.com", "example.org", "example.com"} {
		q := ask(name, dns.TypeA)
		q.Id = uint16(i)
		many = append(many, framed(pack(t, q))...)
	}
	for _, c := range many { // byte for byte
		if _, err := conn.Write([]byte{c}); err != nil {
			t.Fatal(err)
		}
	}
	for i, want := range []string{"NOERROR 192.0.2.1", "NXDOMAIN", "NOERROR 192.0.2.1"} {
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		wire, err := readFrame(conn, 65535)
		if err != nil {
			t.Fatal(err)
		}
		m := new(dns.Msg)
		if err := m.Unpack(wire); err != nil || m.Id != uint16(i) || brief(m) != want {
			t.Errorf("answer %d: %v, %v", i, m, err)
		}
	}
	for name, wire := range map[string][]byte{"a query too long": {0xff, 0xff, 1, 2}, "no query": {0, 3, 1, 2, 3}} {
		conn, err := net.Dial("tcp", b.tcp)
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(wire)
		conn.SetReadDeadline(time.Now().Add(20 * time.Second))
		if n, err := conn.Read(make([]byte, 1)); err == nil || n > 0 {
			t.Errorf("%s is answered", name)
		} else if ne, ok := err.(net.Error); ok && ne.Timeout() {
			t.Errorf("%s: the connection stays open", name)
		}
		conn.Close()
	}
}

func TestTooManyConnections(t *testing.T) {
	r := serve(t, zone(t))
	b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}, Limits: Limits{Conns: 2}}), "")
	query := framed(pack(t, ask("example.com", dns.TypeA)))
	var conns []net.Conn
	for range 2 {
		conn, err := net.Dial("tcp", b.tcp)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		conn.Write(query)
		if _, err := readFrame(conn, 65535); err != nil {
			t.Fatal(err)
		}
		conns = append(conns, conn)
	}
	third, err := net.Dial("tcp", b.tcp)
	if err != nil {
		t.Fatal(err)
	}
	defer third.Close()
	third.Write(query)
	if _, err := readFrame(third, 65535); err == nil {
		t.Error("a third connection is served")
	}
	if _, err := conns[0].Write(query); err != nil {
		t.Error(err)
	}
	if _, err := readFrame(conns[0], 65535); err != nil {
		t.Errorf("the first connection: %v", err)
	}
}

// No more queries of a sandbox are out than may be, and a refused name is
// answered while they are.
func TestQueriesInFlight(t *testing.T) {
	var mu sync.Mutex
	out, most := 0, 0
	release := make(chan struct{})
	full := make(chan struct{}, 100)
	r := serve(t, func(a asked) [][]byte {
		mu.Lock()
		out++
		most = max(most, out)
		mu.Unlock()
		full <- struct{}{}
		<-release
		mu.Lock()
		out--
		mu.Unlock()
		return zone(t, "example.com. 60 A 192.0.2.1")(a)
	})
	b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}, Patience: time.Hour, Timeout: time.Hour, Limits: Limits{InFlight: 4}}), "example.com")
	var asking sync.WaitGroup
	for i := range 20 {
		asking.Go(func() {
			if got := brief(b.send(ask("example.com", dns.TypeA))); got != "NOERROR 192.0.2.1" {
				t.Error(got)
			}
		})
		if i == 2 {
			for range 3 {
				<-full
			}
			if got := brief(b.send(ask("example.org", dns.TypeA))); got != "NXDOMAIN" {
				t.Errorf("while queries are out: %s", got)
			}
		}
	}
	<-full
	close(release)
	asking.Wait()
	mu.Lock()
	defer mu.Unlock()
	if most != 4 {
		t.Errorf("%d queries were out at once, want 4", most)
	}
}

func TestLogAndCounters(t *testing.T) {
	r := serve(t, zone(t, "example.com. 60 A 192.0.2.1"))
	b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}, Limits: Limits{Log: 4}}), "example.com !bad.example.com")
	b.send(ask("example.com", dns.TypeA))
	b.send(ask("bad.example.com", dns.TypeAAAA))
	b.send(ask("example.com", dns.TypeANY))
	log := b.Log()
	if len(log) != 3 {
		t.Fatalf("log %+v", log)
	}
	e := log[0]
	if e.Name != "example.com" || e.Type != "A" || e.Verdict != Allowed || e.Rule != "example.com" || e.Why == "" ||
		!slices.Equal(e.Addrs, addrs(t, "192.0.2.1")) || e.Took <= 0 || time.Since(e.Time) > time.Minute {
		t.Errorf("first entry %+v", e)
	}
	if e := log[1]; e.Name != "bad.example.com" || e.Type != "AAAA" || e.Verdict != Denied || e.Rule != "bad.example.com" {
		t.Errorf("second entry %+v", e)
	}
	if e := log[2]; e.Verdict != Refused || e.Type != "ANY" {
		t.Errorf("third entry %+v", e)
	}
	for i := range 10 {
		b.send(ask(fmt.Sprintf("n%d.example.org", i), dns.TypeA))
	}
	var names []string
	for _, e := range b.Log() {
		names = append(names, e.Name)
	}
	if got := fmt.Sprint(names); got != "[n6.example.org n7.example.org n8.example.org n9.example.org]" {
		t.Errorf("the log has %s", got)
	}
	if got := b.Counters(); got != (Counters{Queries: 13, Allowed: 1, Denied: 11, Refused: 1}) {
		t.Errorf("counters %+v", got)
	}
}

// Close ends all that Serve began, whatever it was doing, and so does the end
// of the context.
func TestClose(t *testing.T) {
	before := runtime.NumGoroutine()
	for _, byContext := range []bool{false, true} {
		out := make(chan struct{}, 9)
		r := serve(t, func(asked) [][]byte { out <- struct{}{}; return nil })
		p := proxy(t, Config{Upstreams: []string{r.addr()}, Patience: time.Hour, Timeout: time.Hour})
		udp, err := net.ListenPacket("udp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		tcp, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		h := p.Serve(ctx, Sandbox{Policy: policy(t, "*"), UDP: udp, TCP: tcp, Pin: func(Pin) error { return nil }})
		asking, err := net.Dial("udp", udp.LocalAddr().String())
		if err != nil {
			t.Fatal(err)
		}
		asking.Write(pack(t, ask("example.com", dns.TypeA)))
		conn, err := net.Dial("tcp", tcp.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		conn.Write(framed(pack(t, ask("example.com", dns.TypeA))))
		idle, err := net.Dial("tcp", tcp.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		idle.Write([]byte{0})
		<-out
		<-out
		if byContext {
			cancel()
		} else {
			h.Close()
		}
		io.Copy(io.Discard, conn)
		io.Copy(io.Discard, idle)
		if _, err := net.Dial("tcp", tcp.Addr().String()); err == nil {
			t.Error("the port is still open")
		}
		h.Close()
		cancel()
		asking.Close()
		conn.Close()
		idle.Close()
		if p.upstreams.all[0].badUntil.Load() != 0 {
			t.Error("a resolver is blamed for a sandbox's end")
		}
		r.udp.Close()
		r.tcp.Close()
		r.work.Wait()
	}
	for n := 0; runtime.NumGoroutine() > before && n < 1000; n++ {
		time.Sleep(time.Millisecond)
	}
	if n := runtime.NumGoroutine(); n > before {
		t.Errorf("%d goroutines, %d before", n, before)
	}
}

// A thousand sandboxes, each with sockets and a policy of its own, asking at
// once: each gets its own answers and pins.
func TestThousandSandboxes(t *testing.T) {
	const n = 1000
	r := serve(t, func(a asked) [][]byte {
		m := new(dns.Msg)
		m.SetReply(a.msg)
		m.Answer = append(m.Answer, record1(t, a.msg.Question[0].Name+" 60 A 192.0.2.1"))
		return [][]byte{pack(t, m)}
	})
	p := proxy(t, Config{Upstreams: []string{r.addr()}, Timeout: time.Minute})
	var boxes []*box
	for i := range n {
		boxes = append(boxes, open(t, p, fmt.Sprintf("s%d.example.com", i)))
	}
	var asking sync.WaitGroup
	places := make(chan struct{}, 64)
	for i, b := range boxes {
		places <- struct{}{}
		asking.Go(func() {
			defer func() { <-places }()
			own, other := fmt.Sprintf("s%d.example.com", i), fmt.Sprintf("s%d.example.com", (i+1)%n)
			if got := brief(b.send(ask(own, dns.TypeA))); got != "NOERROR 192.0.2.1" {
				t.Errorf("%s: %s", own, got)
			}
			if got := brief(b.sendTCP(ask(own, dns.TypeA))); got != "NOERROR 192.0.2.1" {
				t.Errorf("%s: %s", own, got)
			}
			if got := brief(b.send(ask(other, dns.TypeA))); got != "NXDOMAIN" {
				t.Errorf("%s: %s", other, got)
			}
			if pins := b.Pinned(); len(pins) != 2 || pins[0].Name != own {
				t.Errorf("%s: pinned %v", own, pins)
			}
		})
	}
	asking.Wait()
	if got := len(r.queries()); got != 2*n {
		t.Errorf("the resolver was asked %d times, want %d", got, 2*n)
	}
}

// A defect ends the query that met it, and nothing else.
func TestDefect(t *testing.T) {
	b, _ := one(t, "example.com", zone(t, "example.com. 60 A 192.0.2.1"))
	met := make(chan struct{}, 1)
	b.mu.Lock()
	b.pin = func(Pin) error {
		if len(b.Pinned()) == 1 {
			met <- struct{}{}
			panic("a defect")
		}
		return nil
	}
	b.mu.Unlock()
	conn, err := net.Dial("udp", b.udp)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.Write(pack(t, ask("example.com", dns.TypeA)))
	<-met
	if got := brief(b.send(ask("example.com", dns.TypeA))); got != "NOERROR 192.0.2.1" {
		t.Errorf("the next query: %s", got)
	}
}
