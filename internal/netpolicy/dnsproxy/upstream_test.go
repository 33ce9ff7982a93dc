package dnsproxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/miekg/dns"
)

// says answers every query with a code.
func says(t testing.TB, rcode int) func(asked) [][]byte {
	return func(a asked) [][]byte {
		m := new(dns.Msg)
		m.SetRcode(a.msg, rcode)
		return [][]byte{pack(t, m)}
	}
}

func silent(asked) [][]byte { return nil }

// dead returns an address at which nobody listens.
func dead(t *testing.T) string {
	t.Helper()
	r := serve(t, silent)
	r.udp.Close()
	r.tcp.Close()
	return r.addr()
}

func TestFailOver(t *testing.T) {
	good := zone(t, "example.com. 60 A 192.0.2.1")
	long := Config{Patience: time.Hour, Timeout: 20 * time.Second} // only what fails at once is passed over
	short := Config{Patience: 20 * time.Millisecond, Timeout: 20 * time.Second}
	cases := []struct {
		name  string
		cfg   Config
		first func(asked) [][]byte // nil: nobody listens
		want  string
	}{
		{"down", long, nil, "NOERROR 192.0.2.1"},
		{"failing", long, says(t, dns.RcodeServerFailure), "NOERROR 192.0.2.1"},
		{"refusing", long, says(t, dns.RcodeRefused), "NOERROR 192.0.2.1"},
		{"silent", short, silent, "NOERROR 192.0.2.1"},
		{"lame", long, func(a asked) [][]byte {
			m := new(dns.Msg)
			m.SetRcode(a.msg, dns.RcodeServerFailure)
			m.Question = nil
			return [][]byte{pack(t, m)}
		}, "NOERROR 192.0.2.1"},
		{"saying that there is no such name", long, says(t, dns.RcodeNameError), "NXDOMAIN"},
	}
	for _, c := range cases {
		first, second := dead(t), serve(t, good)
		if c.first != nil {
			first = serve(t, c.first).addr()
		}
		cfg := c.cfg
		cfg.Upstreams = []string{first, second.addr()}
		b := open(t, proxy(t, cfg), "example.com")
		if got := brief(b.send(ask("example.com", dns.TypeA))); got != c.want {
			t.Errorf("with the first resolver %s: %s, want %s", c.name, got, c.want)
		}
	}
}

// A resolver that did not answer comes last for a while, and first again later.
func TestFailedResolverComesLast(t *testing.T) {
	first, second := serve(t, silent), serve(t, zone(t, "example.com. 60 A 192.0.2.1"))
	p := proxy(t, Config{Upstreams: []string{first.addr(), second.addr()}, Patience: 20 * time.Millisecond})
	b := open(t, p, "example.com")
	for range 5 {
		b.send(ask("example.com", dns.TypeA))
	}
	if n := len(first.queries()); n != 1 {
		t.Errorf("the silent resolver was asked %d times of 5", n)
	}
	now := time.Now()
	if got := p.upstreams.current(now)[0].addr.String(); got != second.addr() {
		t.Errorf("%s comes first", got)
	}
	if got := p.upstreams.current(now.Add(sulk + time.Second))[0].addr.String(); got != first.addr() {
		t.Errorf("%s comes first later", got)
	}
}

func TestNobodyAnswers(t *testing.T) {
	cases := map[string]Config{
		"down":   {Upstreams: []string{dead(t), dead(t)}, Patience: time.Hour},
		"silent": {Upstreams: []string{serve(t, silent).addr()}, Patience: 20 * time.Millisecond, Timeout: 200 * time.Millisecond},
		"failing": {Upstreams: []string{serve(t, says(t, dns.RcodeServerFailure)).addr(), serve(t, says(t, dns.RcodeRefused)).addr()},
			Patience: time.Hour},
		"unknown": {ResolvConf: filepath.Join(t.TempDir(), "none")},
	}
	for name, cfg := range cases {
		b := open(t, proxy(t, cfg), "example.com")
		if got := brief(b.send(ask("example.com", dns.TypeA))); got != "SERVFAIL" {
			t.Errorf("%s: %s", name, got)
		}
		if l := b.Log(); len(l) != 1 || l[0].Verdict != Failed || l[0].Why == "" {
			t.Errorf("%s: log %+v", name, l)
		}
	}
}

// Who goes away while a resolver is asked says nothing about the resolver,
// whichever of the two is heard of first.
func TestGoneBlamesNobody(t *testing.T) {
	p := proxy(t, Config{Upstreams: []string{serve(t, silent).addr()}, Patience: 1}) // which keeps it busy, so that the answer and the end are both there when it looks
	for range 200 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		time.AfterFunc(time.Millisecond, cancel)
		if _, err := p.upstreams.exchange(ctx, question{"example.com", dns.TypeA}); !errors.Is(err, context.Canceled) {
			t.Errorf("exchange = %v; want canceled", err)
		}
	}
	if p.upstreams.all[0].badUntil.Load() != 0 {
		t.Error("the resolver is blamed")
	}
}

// A lost packet is sent again to the only resolver there is.
func TestLostPacket(t *testing.T) {
	var n atomic.Int32
	answer := zone(t, "example.com. 60 A 192.0.2.1")
	r := serve(t, func(a asked) [][]byte {
		if n.Add(1) == 1 {
			return nil
		}
		return answer(a)
	})
	b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}, Patience: 20 * time.Millisecond}), "example.com")
	if got := brief(b.send(ask("example.com", dns.TypeA))); got != "NOERROR 192.0.2.1" {
		t.Errorf("got %s", got)
	}
}

// What does not fit the question is no answer, and the right one is waited for.
func TestForgedAnswers(t *testing.T) {
	good := zone(t, "example.com. 60 A 192.0.2.1")
	forge := func(change func(*dns.Msg)) func(asked) [][]byte {
		return func(a asked) [][]byte {
			m := new(dns.Msg)
			m.SetReply(a.msg)
			m.Answer = append(m.Answer, record1(t, "example.com. 60 A 198.51.100.66"))
			m.Question[0].Name = a.msg.Question[0].Name
			if !a.tcp {
				change(m)
			}
			return append([][]byte{pack(t, m)}, good(a)...)
		}
	}
	cases := map[string]func(asked) [][]byte{
		"another number":   forge(func(m *dns.Msg) { m.Id++ }),
		"another name":     forge(func(m *dns.Msg) { m.Question[0].Name = "example.org." }),
		"another type":     forge(func(m *dns.Msg) { m.Question[0].Qtype = dns.TypeTXT }),
		"another class":    forge(func(m *dns.Msg) { m.Question[0].Qclass = dns.ClassCHAOS }),
		"no response":      forge(func(m *dns.Msg) { m.Response = false }),
		"another opcode":   forge(func(m *dns.Msg) { m.Opcode = dns.OpcodeUpdate }),
		"a short message":  func(a asked) [][]byte { return append([][]byte{{1, 2, 3}}, good(a)...) },
		"a header of none": func(a asked) [][]byte { return append([][]byte{make([]byte, 12)}, good(a)...) },
	}
	for name, answer := range cases {
		r := serve(t, func(a asked) [][]byte {
			if a.tcp {
				return good(a)
			}
			return answer(a)
		})
		b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}, Patience: time.Hour}), "example.com")
		if got := brief(b.send(ask("example.com", dns.TypeA))); got != "NOERROR 192.0.2.1" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// An answer with the right number and the wrong rest is asked for over TCP.
func TestDoubtfulAnswers(t *testing.T) {
	good := zone(t, "example.com. 60 A 192.0.2.1")
	cases := map[string]func(asked) [][]byte{
		"the case of letters": func(a asked) [][]byte {
			m := new(dns.Msg)
			m.SetReply(a.msg)
			m.Question[0].Name = flip(m.Question[0].Name)
			return [][]byte{pack(t, m)}
		},
		"malformed": func(a asked) [][]byte { return [][]byte{append(good(a)[0][:30], 0xc0, 0xff)} },
		"two questions": func(a asked) [][]byte {
			m := new(dns.Msg)
			m.SetReply(a.msg)
			m.Question = append(m.Question, m.Question[0])
			return [][]byte{pack(t, m)}
		},
		"too long": func(a asked) [][]byte {
			m := new(dns.Msg)
			m.SetReply(a.msg)
			for i := range 300 {
				m.Answer = append(m.Answer, record1(t, fmt.Sprintf("example.com. 60 A 198.51.100.%d", i%256)))
			}
			return [][]byte{pack(t, m)}
		},
		"cut": func(a asked) [][]byte {
			m := new(dns.Msg)
			m.SetReply(a.msg)
			m.Truncated = true
			m.Answer = append(m.Answer, record1(t, "example.com. 60 A 198.51.100.66"))
			return [][]byte{pack(t, m)}
		},
	}
	for name, answer := range cases {
		r := serve(t, func(a asked) [][]byte {
			if a.tcp {
				return good(a)
			}
			return answer(a)
		})
		b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}, Patience: time.Hour}), "example.com")
		got := brief(b.send(ask("example.com", dns.TypeA)))
		if got != "NOERROR 192.0.2.1" || len(r.queries()) != 2 {
			t.Errorf("%s: %s after %d queries", name, got, len(r.queries()))
		}
	}
}

func flip(s string) string {
	return strings.Map(func(c rune) rune {
		switch {
		case 'a' <= c && c <= 'z':
			return c - 'a' + 'A'
		case 'A' <= c && c <= 'Z':
			return c - 'A' + 'a'
		}
		return c
	}, s)
}

// A resolver that loses the case of letters is believed by UDP after a while.
func TestResolverThatLosesCase(t *testing.T) {
	good := zone(t, "an.example.with.many.letters.example.com. 60 A 192.0.2.1")
	b, r := one(t, "*.example.com", func(a asked) [][]byte {
		if !a.tcp {
			a.msg.Question[0].Name = strings.ToLower(a.msg.Question[0].Name)
		}
		return good(a)
	})
	for range 10 {
		if got := brief(b.send(ask("an.example.with.many.letters.example.com", dns.TypeA))); got != "NOERROR 192.0.2.1" {
			t.Errorf("got %s", got)
		}
	}
	tcp := 0
	for _, a := range r.queries() {
		if a.tcp {
			tcp++
		}
	}
	if tcp != odd {
		t.Errorf("%d queries over TCP, want %d", tcp, odd)
	}
}

// Queries go out with another number, port and case of letters each time, and
// with nothing of the sandbox's own but name and type.
func TestWhatGoesUpstream(t *testing.T) {
	b, r := one(t, "*.example.com", zone(t, "www.many.letters.example.com. 60 A 192.0.2.1"))
	ids, cases := map[uint16]bool{}, map[string]bool{}
	for range 20 {
		q := ask("www.many.letters.example.com", dns.TypeA)
		q.Id, q.CheckingDisabled, q.AuthenticatedData = 7, true, true
		q.SetEdns0(4096, true)
		opt := q.IsEdns0()
		opt.Option = append(opt.Option,
			&dns.EDNS0_SUBNET{Code: dns.EDNS0SUBNET, Family: 1, SourceNetmask: 32, Address: []byte{1, 2, 3, 4}},
			&dns.EDNS0_COOKIE{Code: dns.EDNS0COOKIE, Cookie: "0011223344556677"},
			&dns.EDNS0_LOCAL{Code: 65001, Data: []byte("secret")},
			&dns.EDNS0_PADDING{Padding: make([]byte, 100)})
		a := b.send(q)
		if o := a.IsEdns0(); a.Id != 7 || brief(a) != "NOERROR 192.0.2.1" || o == nil || len(o.Option) > 0 || o.Do() {
			t.Errorf("got %v", a)
		}
	}
	for _, a := range r.queries() {
		m := a.msg
		opt := m.IsEdns0()
		if opt == nil || len(opt.Option) > 0 || opt.Do() || opt.UDPSize() != payload || len(m.Extra) != 1 || len(m.Answer)+len(m.Ns) > 0 ||
			!m.RecursionDesired || m.CheckingDisabled || m.AuthenticatedData || len(m.Question) != 1 {
			t.Errorf("upstream got %v", m)
		}
		ids[m.Id] = true
		cases[m.Question[0].Name] = true
	}
	if len(ids) < 18 || len(cases) < 18 {
		t.Errorf("of 20 queries %d numbers and %d cases of letters differ", len(ids), len(cases))
	}
}

// A resolver that does not know EDNS is asked without it.
func TestResolverWithoutEDNS(t *testing.T) {
	good := zone(t, "example.com. 60 A 192.0.2.1")
	b, r := one(t, "example.com", func(a asked) [][]byte {
		if a.msg.IsEdns0() != nil {
			return says(t, dns.RcodeFormatError)(a)
		}
		return good(a)
	})
	for range 3 {
		if got := brief(b.send(ask("example.com", dns.TypeA))); got != "NOERROR 192.0.2.1" {
			t.Errorf("got %s", got)
		}
	}
	if n := len(r.queries()); n != 4 {
		t.Errorf("the resolver was asked %d times, want 4", n)
	}
}

func TestResolvConf(t *testing.T) {
	file := filepath.Join(t.TempDir(), "resolv.conf")
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(file+".new", []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(file+".new", file); err != nil {
			t.Fatal(err)
		}
	}
	us, err := newUpstreams(quiet, Config{ResolvConf: file}.filled())
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	look := func() string {
		now = now.Add(lookAgain)
		return fmt.Sprint(addrsOf(us.current(now)))
	}
	if got := look(); got != "[]" {
		t.Errorf("without the file: %s", got)
	}
	write("# comment\nsearch example.com\nnameserver 192.0.2.53\nnameserver\t2001:db8::53 # x\nnameserver fe80::1%lo\nnameserver nonsense\noptions rotate\n")
	if got := look(); got != "[192.0.2.53:53 [2001:db8::53]:53 [fe80::1%lo]:53]" {
		t.Errorf("got %s", got)
	}
	kept := us.all[0]
	write("nameserver 192.0.2.54\nnameserver 192.0.2.53\n")
	if got := fmt.Sprint(addrsOf(us.current(now))); strings.Contains(got, "192.0.2.54") {
		t.Errorf("read again at once: %s", got)
	}
	if got := look(); got != "[192.0.2.54:53 192.0.2.53:53]" || us.all[1] != kept {
		t.Errorf("after the change: %s, what was known of a resolver kept: %v", got, us.all[1] == kept)
	}
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	if got := look(); got != "[192.0.2.54:53 192.0.2.53:53]" {
		t.Errorf("after the file is gone: %s", got)
	}
	write("")
	if got := look(); got != "[127.0.0.1:53]" {
		t.Errorf("of an empty file: %s", got)
	}
}

func TestParseUpstream(t *testing.T) {
	for s, want := range map[string]string{
		"192.0.2.53": "192.0.2.53:53", "192.0.2.53:5353": "192.0.2.53:5353", "2001:db8::53": "[2001:db8::53]:53", "[2001:db8::53]": "[2001:db8::53]:53",
		"[2001:db8::53]:5353": "[2001:db8::53]:5353", "::ffff:192.0.2.53": "192.0.2.53:53", "127.0.0.53": "127.0.0.53:53",
	} {
		got, err := ParseUpstream(s)
		if err != nil || got != netip.MustParseAddrPort(want) {
			t.Errorf("%s: %v, %v", s, got, err)
		}
	}
	for _, s := range []string{"", "dns.example", "192.0.2.53:0", "192.0.2.53:x", "192.0.2.53:99999", "https://192.0.2.53", "192.0.2"} {
		if got, err := ParseUpstream(s); err == nil {
			t.Errorf("%q is read as %v", s, got)
		}
	}
	if _, err := New(quiet, Config{Upstreams: []string{"nonsense"}}); err == nil {
		t.Error("New accepts an upstream that is no address")
	}
	if _, err := New(quiet, Config{MinTTL: time.Hour, MaxTTL: time.Minute}); err == nil {
		t.Error("New accepts lifetimes in the wrong order")
	}
}
