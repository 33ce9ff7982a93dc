package dnsproxy

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// asked is a query as the test's resolver got it.
type asked struct {
	msg *dns.Msg
	tcp bool
}

// resolver is the test's own DNS server. Its answer function returns the bytes
// of the messages to send, in order.
type resolver struct {
	t      testing.TB
	udp    net.PacketConn
	tcp    net.Listener
	answer func(asked) [][]byte
	work   sync.WaitGroup

	mu  sync.Mutex
	got []asked
}

// serve starts a resolver on 127.0.0.1.
func serve(t testing.TB, answer func(asked) [][]byte) *resolver {
	t.Helper()
	r := &resolver{t: t, answer: answer}
	for r.tcp == nil { // until a port is free for both
		var err error
		if r.udp, err = net.ListenPacket("udp", "127.0.0.1:0"); err != nil {
			t.Fatal(err)
		}
		if r.tcp, err = net.Listen("tcp", r.udp.LocalAddr().String()); err != nil {
			r.udp.Close()
		}
	}
	r.work.Go(r.serveUDP)
	r.work.Go(r.serveTCP)
	t.Cleanup(func() {
		r.udp.Close()
		r.tcp.Close()
		r.work.Wait()
	})
	return r
}

func (r *resolver) addr() string { return r.udp.LocalAddr().String() }

func (r *resolver) serveUDP() {
	buf := make([]byte, 65535)
	for {
		n, from, err := r.udp.ReadFrom(buf)
		if err != nil {
			return
		}
		wire := bytes.Clone(buf[:n])
		r.work.Go(func() {
			for _, answer := range r.take(wire, false) {
				r.udp.WriteTo(answer, from)
			}
		})
	}
}

func (r *resolver) serveTCP() {
	for {
		conn, err := r.tcp.Accept()
		if err != nil {
			return
		}
		r.work.Go(func() {
			defer conn.Close()
			wire, err := readFrame(conn, 65535)
			if err != nil {
				return
			}
			for _, answer := range r.take(wire, true) {
				conn.Write(framed(answer))
			}
			io.Copy(io.Discard, conn)
		})
	}
}

func (r *resolver) take(wire []byte, tcp bool) [][]byte {
	m := new(dns.Msg)
	if err := m.Unpack(wire); err != nil {
		r.t.Errorf("the resolver got a malformed query: %v", err)
		return nil
	}
	a := asked{m, tcp}
	r.mu.Lock()
	r.got = append(r.got, a)
	r.mu.Unlock()
	return r.answer(a)
}

// queries returns what came so far.
func (r *resolver) queries() []asked {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

// names returns the names that were asked for so far, in lower case.
func (r *resolver) names() []string {
	var all []string
	for _, a := range r.queries() {
		all = append(all, strings.ToLower(a.msg.Question[0].Name))
	}
	return all
}

// zone answers from records in the form of a zone file: those of the name and
// type that is asked for, and along aliases. A name without any does not exist.
func zone(t testing.TB, records ...string) func(asked) [][]byte {
	var all []dns.RR
	for _, s := range records {
		all = append(all, record1(t, s))
	}
	return func(a asked) [][]byte {
		m := new(dns.Msg)
		m.SetReply(a.msg)
		q := a.msg.Question[0]
		exists := false
		for name, again := q.Name, true; again; {
			again = false
			for _, rr := range all {
				if !strings.EqualFold(rr.Header().Name, name) {
					continue
				}
				exists = true
				if alias, ok := rr.(*dns.CNAME); ok && q.Qtype != dns.TypeCNAME {
					m.Answer = append(m.Answer, rr)
					name, again = alias.Target, len(m.Answer) < 40
					break
				}
				if rr.Header().Rrtype == q.Qtype {
					m.Answer = append(m.Answer, rr)
				}
			}
		}
		if !exists {
			m.Rcode = dns.RcodeNameError
		}
		if size := 512; !a.tcp {
			if opt := a.msg.IsEdns0(); opt != nil {
				size = int(opt.UDPSize())
			}
			m.Truncate(size)
		}
		return [][]byte{pack(t, m)}
	}
}

func record1(t testing.TB, s string) dns.RR {
	t.Helper()
	rr, err := dns.NewRR(s)
	if err != nil {
		t.Fatal(err)
	}
	return rr
}

func pack(t testing.TB, m *dns.Msg) []byte {
	wire, err := m.Pack()
	if err != nil {
		t.Errorf("the resolver cannot write its answer: %v", err)
	}
	return wire
}

// box is a sandbox that is served, and what was told of it.
type box struct {
	*Handle
	t        testing.TB
	udp, tcp string

	mu     sync.Mutex
	pins   []Pin
	events []Event
	pin    func(Pin) error // nil: accept
}

func (b *box) Pinned() []Pin {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.pins)
}

func (b *box) Events() []Event {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.events)
}

func policy(t testing.TB, rules string) *netpolicy.Policy {
	t.Helper()
	all := map[string]bool{}
	for rule := range strings.FieldsSeq(rules) {
		name, denied := strings.CutPrefix(rule, "!")
		all[name] = !denied
	}
	p, err := netpolicy.Parse(all)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// quiet throws logs away.
var quiet = slog.New(slog.DiscardHandler)

func proxy(t testing.TB, cfg Config) *Proxy {
	t.Helper()
	p, err := New(quiet, cfg)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// open serves a sandbox under rules, "!" before those that deny.
func open(t testing.TB, p *Proxy, rules string, more ...func(*Sandbox)) *box {
	t.Helper()
	udp, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b := &box{t: t, udp: udp.LocalAddr().String(), tcp: tcp.Addr().String()}
	sb := Sandbox{
		ID: sandbox.ID("sb-000000000001"), Policy: policy(t, rules), UDP: udp, TCP: tcp,
		Pin: func(p Pin) error {
			b.mu.Lock()
			b.pins = append(b.pins, p)
			pin := b.pin
			b.mu.Unlock()
			if pin != nil {
				return pin(p)
			}
			return nil
		},
		Event: func(e Event) {
			b.mu.Lock()
			defer b.mu.Unlock()
			b.events = append(b.events, e)
		},
	}
	for _, f := range more {
		f(&sb)
	}
	b.Handle = p.Serve(context.Background(), sb)
	t.Cleanup(b.Close)
	return b
}

// one serves one sandbox with one resolver.
func one(t testing.TB, rules string, answer func(asked) [][]byte) (*box, *resolver) {
	t.Helper()
	r := serve(t, answer)
	return open(t, proxy(t, Config{Upstreams: []string{r.addr()}}), rules), r
}

func ask(name string, typ uint16) *dns.Msg {
	m := new(dns.Msg)
	m.SetQuestion(dns.Fqdn(name), typ)
	return m
}

// send sends a query by UDP and returns the answer.
func (b *box) send(m *dns.Msg) *dns.Msg {
	b.t.Helper()
	c := dns.Client{Timeout: 20 * time.Second}
	answer, _, err := c.Exchange(m, b.udp)
	if err != nil {
		b.t.Fatalf("%s: %v", m.Question[0].Name, err)
	}
	return answer
}

// sendTCP sends a query by TCP and returns the answer.
func (b *box) sendTCP(m *dns.Msg) *dns.Msg {
	b.t.Helper()
	c := dns.Client{Net: "tcp", Timeout: 20 * time.Second}
	answer, _, err := c.Exchange(m, b.tcp)
	if err != nil {
		b.t.Fatalf("%s: %v", m.Question[0].Name, err)
	}
	return answer
}

// brief is an answer in a line: its code and its records.
func brief(m *dns.Msg) string {
	s := dns.RcodeToString[m.Rcode]
	if m.Truncated {
		s += " cut"
	}
	for _, rr := range m.Answer {
		s += " " + strings.Join(strings.Fields(strings.TrimPrefix(rr.String(), rr.Header().String())), " ")
	}
	if len(m.Ns) > 0 {
		s += fmt.Sprintf(" authority:%d", len(m.Ns))
	}
	for _, rr := range m.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			s += " additional:" + rr.String()
		}
	}
	return s
}

func addrs(t testing.TB, s ...string) []netip.Addr {
	var all []netip.Addr
	for _, a := range s {
		all = append(all, netip.MustParseAddr(a))
	}
	return all
}
