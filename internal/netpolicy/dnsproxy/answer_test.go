package dnsproxy

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

func TestAllowedName(t *testing.T) {
	b, r := one(t, "example.com:443", zone(t, "example.com. 300 A 192.0.2.1", "example.com. 300 A 192.0.2.2", "example.com. 300 AAAA 2001:db8::1"))
	q := ask("eXample.COM", dns.TypeA)
	before := time.Now()
	a := b.send(q)
	if got := brief(a); got != "NOERROR 192.0.2.1 192.0.2.2" {
		t.Errorf("got %s", got)
	}
	if a.Question[0] != q.Question[0] || a.Answer[0].Header().Name != "eXample.COM." {
		t.Errorf("the case of letters is not the sandbox's own: %v", a)
	}
	if !a.RecursionAvailable || a.Authoritative || a.AuthenticatedData || a.IsEdns0() != nil {
		t.Errorf("header: %v", a)
	}
	b.send(ask("example.com", dns.TypeAAAA))
	pins := b.Pinned()
	if len(pins) != 2 || pins[0].Name != "example.com" || !slices.Equal(pins[0].Addrs, addrs(t, "192.0.2.1", "192.0.2.2")) ||
		!slices.Equal(pins[1].Addrs, addrs(t, "2001:db8::1")) || pins[0].Policy != b.Policy() {
		t.Fatalf("pinned %v", pins)
	}
	if d := pins[0].Until.Sub(before); d < 360*time.Second || d > 380*time.Second {
		t.Errorf("pinned for %s: want the lifetime of 300 s and 60 s more", d)
	}
	if got := r.names(); len(got) != 2 {
		t.Errorf("the resolver was asked for %v", got)
	}
}

func TestDeniedNameIsNotForwarded(t *testing.T) {
	b, r := one(t, "example.com *.example.org !bad.example.org 192.0.2.0/24", zone(t))
	for _, name := range []string{"example.net", "www.example.com", "com", "example.org", "bad.example.org", "x.localhost", "1.2.0.192.in-addr.arpa"} {
		for _, typ := range []uint16{dns.TypeA, dns.TypeAAAA, dns.TypeTXT, dns.TypeHTTPS, dns.TypeANY, dns.TypeNS, dns.TypePTR} {
			if got := brief(b.send(ask(name, typ))); got != "NXDOMAIN" {
				t.Errorf("%s %s: %s", name, typeName(typ), got)
			}
		}
	}
	if got := r.names(); len(got) > 0 {
		t.Errorf("the resolver was asked for %v", got)
	}
	if len(b.Pinned()) > 0 {
		t.Errorf("pinned %v", b.Pinned())
	}
	events := b.Events()
	if len(events) != 49 {
		t.Fatalf("%d events: want one for each query", len(events))
	}
	e := events[28]
	if e.Kind != DeniedName || e.Name != "bad.example.org" || e.Type != "A" || e.Rule != "bad.example.org" || e.Why == "" || e.Sandbox != "sb-000000000001" {
		t.Errorf("event %+v", e)
	}
}

// The answer waits until its addresses are open.
func TestPinComesBeforeTheAnswer(t *testing.T) {
	b, _ := one(t, "example.com", zone(t, "example.com. 300 A 192.0.2.1"))
	pinning, release := make(chan struct{}), make(chan struct{})
	b.mu.Lock()
	b.pin = func(Pin) error { close(pinning); <-release; return nil }
	b.mu.Unlock()
	conn, err := net.Dial("udp", b.udp)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	conn.Write(pack(t, ask("example.com", dns.TypeA)))
	<-pinning
	buf := make([]byte, 512)
	conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if n, err := conn.Read(buf); err == nil {
		t.Errorf("%d bytes came before the addresses were open", n)
	}
	close(release)
	conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := conn.Read(buf); err != nil {
		t.Error(err)
	}
}

func TestFailureToPinIsNoAnswer(t *testing.T) {
	b, _ := one(t, "example.com", zone(t, "example.com. 300 A 192.0.2.1"))
	b.mu.Lock()
	b.pin = func(Pin) error { return errors.New("the filter is away") }
	b.mu.Unlock()
	if got := brief(b.send(ask("example.com", dns.TypeA))); got != "SERVFAIL" {
		t.Errorf("got %s", got)
	}
	if c := b.Counters(); c.Failed != 1 {
		t.Errorf("counters %+v", c)
	}
}

func TestTypes(t *testing.T) {
	b, r := one(t, "example.com", zone(t,
		"example.com. 300 A 192.0.2.1",
		"example.com. 300 MX 10 mail.example.net.",
		`example.com. 300 TXT "hello"`,
		"example.com. 300 SRV 1 2 443 other.example.net.",
		"example.com. 300 PTR host.example.net.",
		`example.com. 300 HTTPS 1 . ipv4hint=192.0.2.9 ech=AAAA`,
		`example.com. 300 SVCB 1 other.example.net. ipv6hint=2001:db8::9`,
		"example.com. 300 NS ns.example.com.",
		"example.com. 300 DNSKEY 257 3 13 AAAA",
		`example.com. 300 HINFO "a" "b"`,
		"example.com. 300 NULL \\# 1 00",
	))
	cases := []struct {
		typ   uint16
		want  string
		asked bool
	}{
		{dns.TypeA, "NOERROR 192.0.2.1", true},
		{dns.TypeAAAA, "NOERROR", true},
		{dns.TypeMX, "NOERROR 10 mail.example.net.", true},
		{dns.TypeTXT, `NOERROR "hello"`, true},
		{dns.TypeSRV, "NOERROR 1 2 443 other.example.net.", true},
		{dns.TypePTR, "NOERROR host.example.net.", true},
		{dns.TypeCNAME, "NOERROR", true},
		{dns.TypeHTTPS, "NOERROR", false},
		{dns.TypeSVCB, "NOERROR", false},
		{dns.TypeNS, "NOERROR", false},
		{dns.TypeSOA, "NOERROR", false},
		{dns.TypeDNSKEY, "NOERROR", false},
		{dns.TypeHINFO, "NOERROR", false},
		{dns.TypeNULL, "NOERROR", false},
		{65280, "NOERROR", false},
		{dns.TypeANY, "REFUSED", false},
		{dns.TypeAXFR, "REFUSED", false},
		{dns.TypeIXFR, "REFUSED", false},
		{dns.TypeMAILA, "REFUSED", false},
		{dns.TypeMAILB, "REFUSED", false},
	}
	for _, c := range cases {
		before := len(r.queries())
		if got := brief(b.sendTCP(ask("example.com", c.typ))); got != c.want {
			t.Errorf("%s: got %s, want %s", typeName(c.typ), got, c.want)
		}
		if forwarded := len(r.queries()) > before; forwarded != c.asked {
			t.Errorf("%s: forwarded: %v", typeName(c.typ), forwarded)
		}
	}
	for _, p := range b.Pinned() {
		if !slices.Equal(p.Addrs, addrs(t, "192.0.2.1")) {
			t.Errorf("pinned %v", p)
		}
	}
}

func TestIPv4Only(t *testing.T) {
	r := serve(t, zone(t, "example.com. 300 AAAA 2001:db8::1"))
	b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}}), "example.com", func(sb *Sandbox) { sb.IPv4Only = true })
	if got := brief(b.send(ask("example.com", dns.TypeAAAA))); got != "NOERROR" || len(r.queries()) > 0 {
		t.Errorf("got %s after %d queries", got, len(r.queries()))
	}
}

func TestAliases(t *testing.T) {
	records := []string{
		"www.example.com. 300 CNAME a.cdn.example.net.", "a.cdn.example.net. 20 CNAME B.edge.example.org.", "b.edge.example.org. 5 A 192.0.2.7",
		"evil.example.com. 300 CNAME tracker.example. ", "tracker.example. 300 A 192.0.2.8",
		"loop.example.com. 300 CNAME loop2.example.com.", "loop2.example.com. 300 CNAME loop.example.com.",
		"odd.example.com. 300 CNAME a\\.b.example.net.", "a\\.b.example.net. 300 A 192.0.2.9",
		"gone.example.com. 300 CNAME nowhere.example.net.",
		"ends.example.com. 300 CNAME printer.local.", "printer.local. 300 A 192.0.2.10",
		"both.example.com. 300 CNAME both2.example.com.", "both.example.com. 300 A 192.0.2.66", "both2.example.com. 300 A 192.0.2.67",
	}
	for i := range 20 {
		records = append(records, fmt.Sprintf("l%d.example.com. 300 CNAME l%d.example.com.", i, i+1))
	}
	records = append(records, "l20.example.com. 300 A 192.0.2.11")
	b, _ := one(t, "*.example.com !tracker.example !openai", zone(t, records...))
	cases := []struct {
		name string
		typ  uint16
		want string
	}{
		{"www.example.com", dns.TypeA, "NOERROR a.cdn.example.net. b.edge.example.org. 192.0.2.7"},
		{"www.example.com", dns.TypeAAAA, "NOERROR a.cdn.example.net. b.edge.example.org."},
		{"www.example.com", dns.TypeCNAME, "NOERROR a.cdn.example.net."},
		{"evil.example.com", dns.TypeA, "NXDOMAIN"},
		{"evil.example.com", dns.TypeTXT, "NXDOMAIN"},
		{"evil.example.com", dns.TypeCNAME, "NXDOMAIN"},
		{"loop.example.com", dns.TypeA, "SERVFAIL"},
		{"odd.example.com", dns.TypeA, "SERVFAIL"},
		{"gone.example.com", dns.TypeA, "NXDOMAIN nowhere.example.net."},
		{"ends.example.com", dns.TypeA, "NOERROR printer.local. 192.0.2.10"},
		{"both.example.com", dns.TypeA, "NOERROR both2.example.com. 192.0.2.67"},
		{"l0.example.com", dns.TypeA, "SERVFAIL"},
		{"l4.example.com", dns.TypeA, "NOERROR l5.example.com. l6.example.com. l7.example.com. l8.example.com. l9.example.com. l10.example.com. l11.example.com. " +
			"l12.example.com. l13.example.com. l14.example.com. l15.example.com. l16.example.com. l17.example.com. l18.example.com. l19.example.com. l20.example.com. 192.0.2.11"},
		{"a.cdn.example.net", dns.TypeA, "NXDOMAIN"}, // a link, not a name to ask for
	}
	for _, c := range cases {
		if got := brief(b.sendTCP(ask(c.name, c.typ))); got != c.want {
			t.Errorf("%s %s: got %s, want %s", c.name, typeName(c.typ), got, c.want)
		}
	}
	pins := b.Pinned()
	if len(pins) != 4 || pins[0].Name != "www.example.com" || pins[0].Addrs[0] != netip.MustParseAddr("192.0.2.7") {
		t.Errorf("pinned %v", pins)
	}
	i := slices.IndexFunc(b.Events(), func(e Event) bool { return e.Kind == DeniedLink })
	if i < 0 {
		t.Fatalf("no event of a link: %+v", b.Events())
	}
	if e := b.Events()[i]; e.Link != "tracker.example" || e.Rule != "tracker.example" || e.Name != "evil.example.com" {
		t.Errorf("event %+v", e)
	}
}

// A resolver that gives an alias and no more is asked for the rest, but never
// for a name that a rule denies.
func TestUnfinishedChain(t *testing.T) {
	next := map[string]string{"www.example.com.": "a.example.net.", "a.example.net.": "b.example.net.", "bad.example.com.": "tracker.example."}
	b, r := one(t, "*.example.com !tracker.example", func(a asked) [][]byte {
		m := new(dns.Msg)
		m.SetReply(a.msg)
		name := strings.ToLower(a.msg.Question[0].Name)
		if target := next[name]; target != "" {
			m.Answer = append(m.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: 9}, Target: target})
		} else if name == "b.example.net." {
			m.Answer = append(m.Answer, record1(t, "b.example.net. 5 A 192.0.2.1"))
		}
		return [][]byte{pack(t, m)}
	})
	if got := brief(b.send(ask("www.example.com", dns.TypeA))); got != "NOERROR a.example.net. b.example.net. 192.0.2.1" {
		t.Errorf("got %s", got)
	}
	if got := brief(b.send(ask("bad.example.com", dns.TypeA))); got != "NXDOMAIN" {
		t.Errorf("got %s", got)
	}
	if got := fmt.Sprint(r.names()); got != "[www.example.com. a.example.net. b.example.net. bad.example.com.]" {
		t.Errorf("asked for %s", got)
	}
}

// What a name leads to is refused unless it is public or named by a CIDR rule.
func TestRebinding(t *testing.T) {
	refused := []string{"127.0.0.1", "127.1.2.3", "0.0.0.0", "10.0.0.1", "172.16.5.4", "192.168.1.1", "100.64.0.1", "169.254.1.1", "169.254.169.254", "168.63.129.16",
		"224.0.0.1", "255.255.255.255", "203.0.113.77", "::", "::1", "::ffff:192.0.2.1", "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::127.0.0.1",
		"fe80::1", "fd00::1", "fd00:ec2::254", "ff02::1", "64:ff9b::10.0.0.1", "64:ff9b::127.0.0.1", "2002:7f00:1::", "2001:db8::77"}
	passed := []string{"192.0.2.1", "198.51.100.1", "203.0.113.80", "2001:db8::1", "2606:4700::1", "64:ff9b::192.0.2.1", "10.9.0.1"}
	var records []string
	for i, a := range slices.Concat(refused, passed) {
		typ := "A"
		if strings.Contains(a, ":") {
			typ = "AAAA"
		}
		records = append(records, fmt.Sprintf("n%d.example.com. 300 %s %s", i, typ, a), fmt.Sprintf("mixed.example.com. 300 %s %s", typ, a))
	}
	r := serve(t, zone(t, records...))
	host := netpolicy.Host{Own: addrs(t, "203.0.113.77", "2001:db8::77")}
	pol, err := policy(t, "*.example.com * 10.9.0.0/16:80").On(host)
	if err != nil {
		t.Fatal(err)
	}
	b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}}), "", func(sb *Sandbox) { sb.Policy = pol })
	for i, a := range slices.Concat(refused, passed) {
		typ := dns.TypeA
		if strings.Contains(a, ":") {
			typ = dns.TypeAAAA
		}
		got := b.send(ask(fmt.Sprintf("n%d.example.com", i), typ))
		if want := i >= len(refused); got.Rcode != dns.RcodeSuccess || len(got.Answer) == 1 != want {
			t.Errorf("%s: %s, want it to pass: %v", a, brief(got), want)
		}
	}
	mixed := addrsIn(b.sendTCP(ask("mixed.example.com", dns.TypeA)).Answer)
	if !slices.Equal(mixed, addrs(t, "192.0.2.1", "198.51.100.1", "203.0.113.80", "10.9.0.1")) {
		t.Errorf("of a mixed answer passed %v", mixed)
	}
	var pinned []netip.Addr
	for _, p := range b.Pinned() {
		pinned = append(pinned, p.Addrs...)
	}
	for _, a := range refused {
		if slices.Contains(pinned, netip.MustParseAddr(a)) {
			t.Errorf("%s is pinned", a)
		}
	}
	seen := 0
	for _, e := range b.Events() {
		if e.Kind == DeniedAddress && e.Why != "" && e.Addr.IsValid() {
			seen++
		}
	}
	if c := b.Counters(); seen < len(refused) || c.Dropped != uint64(seen) || c.Denied != uint64(len(refused)) {
		t.Errorf("%d events of addresses, counters %+v", seen, c)
	}
}

// Records that were not asked for do not pass, whatever section they are in.
func TestPoison(t *testing.T) {
	b, _ := one(t, "example.com", func(a asked) [][]byte {
		m := new(dns.Msg)
		m.SetReply(a.msg)
		m.Authoritative, m.AuthenticatedData = true, true
		for _, s := range []string{
			"example.com. 300 A 192.0.2.1", "bank.example. 300 A 198.51.100.66", "example.com. 300 AAAA 2001:db8::66", "other.example. 300 CNAME example.com.",
			`example.com. 300 TXT "x"`, "www.example.com. 300 A 198.51.100.67", "example.com. 300 CH A 198.51.100.68", "example.com. 300 A 192.0.2.1",
		} {
			m.Answer = append(m.Answer, record1(t, s))
		}
		m.Ns = append(m.Ns, record1(t, "com. 300 NS ns.evil.example."), record1(t, "com. 300 SOA a. b. 1 2 3 4 5"))
		m.Extra = append(m.Extra, record1(t, "ns.evil.example. 300 A 198.51.100.69"), record1(t, "bank.example. 300 A 198.51.100.70"))
		return [][]byte{pack(t, m)}
	})
	a := b.sendTCP(ask("example.com", dns.TypeA))
	if got := brief(a); got != "NOERROR 192.0.2.1" || a.Authoritative || a.AuthenticatedData {
		t.Errorf("got %v", a)
	}
	if p := b.Pinned(); len(p) != 1 || !slices.Equal(p[0].Addrs, addrs(t, "192.0.2.1")) {
		t.Errorf("pinned %v", p)
	}
}

// An address record without an address is none.
func TestEmptyRecords(t *testing.T) {
	for _, typ := range []uint16{dns.TypeA, dns.TypeAAAA} {
		b, _ := one(t, "example.com", func(a asked) [][]byte {
			m := new(dns.Msg)
			m.SetReply(a.msg)
			m.Answer = append(m.Answer, &dns.RFC3597{Hdr: dns.RR_Header{Name: "example.com.", Rrtype: typ, Class: dns.ClassINET, Ttl: 60}})
			return [][]byte{pack(t, m)}
		})
		if got := brief(b.send(ask("example.com", typ))); got != "NOERROR" {
			t.Errorf("%s: got %s", typeName(typ), got)
		}
		if p, e := b.Pinned(), b.Events(); len(p)+len(e) > 0 {
			t.Errorf("%s: pinned %v, events %v", typeName(typ), p, e)
		}
	}
}

func TestManyAddresses(t *testing.T) {
	var records []string
	for i := range 400 {
		records = append(records, fmt.Sprintf("example.com. 60 A 198.51.%d.%d", 100+i/200, i%200+1))
	}
	b, r := one(t, "example.com", zone(t, records...))

	plain := b.send(ask("example.com", dns.TypeA))
	plain.Compress = true // as it came
	if !plain.Truncated || plain.Len() > 512 {
		t.Errorf("without EDNS: truncated %v, %d bytes", plain.Truncated, plain.Len())
	}
	q := ask("example.com", dns.TypeA)
	q.SetEdns0(4096, false)
	large := b.send(q)
	large.Compress = true
	if !large.Truncated || large.Len() > payload || len(large.Answer) <= len(plain.Answer) {
		t.Errorf("with EDNS: truncated %v, %d bytes, %d records", large.Truncated, large.Len(), len(large.Answer))
	}
	whole := b.sendTCP(ask("example.com", dns.TypeA))
	if whole.Truncated || len(whole.Answer) != addrsMost {
		t.Errorf("over TCP: truncated %v, %d records, want %d", whole.Truncated, len(whole.Answer), addrsMost)
	}
	for i, m := range []*dns.Msg{plain, large, whole} {
		if got := b.Pinned()[i].Addrs; !slices.Equal(got, addrsIn(m.Answer)) {
			t.Errorf("query %d: %d addresses pinned, %d answered", i, len(got), len(m.Answer))
		}
	}
	tcp := 0
	for _, a := range r.queries() {
		if a.tcp {
			tcp++
		}
	}
	if tcp != 3 {
		t.Errorf("the resolver was asked %d times over TCP, want 3", tcp)
	}
}

func TestLifetimes(t *testing.T) {
	r := serve(t, zone(t, "short.example.com. 0 A 192.0.2.1", "long.example.com. 1000000 A 192.0.2.2", "x.example.com. 2147483648 A 192.0.2.3",
		"two.example.com. 20 A 192.0.2.4", "two.example.com. 50 A 192.0.2.5", "alias.example.com. 1 CNAME two.example.com."))
	b := open(t, proxy(t, Config{Upstreams: []string{r.addr()}, MinTTL: 15 * time.Second, MaxTTL: time.Minute, Grace: 30 * time.Second}), "*.example.com")
	for i, c := range []struct {
		name  string
		ttls  string
		until time.Duration
	}{
		{"short", "15", 45}, {"long", "60", 90}, {"x", "60", 90}, {"two", "20 50", 80}, {"alias", "15 20 50", 80},
	} {
		before := time.Now()
		var ttls []string
		for _, rr := range b.send(ask(c.name+".example.com", dns.TypeA)).Answer {
			ttls = append(ttls, fmt.Sprint(rr.Header().Ttl))
		}
		if got := strings.Join(ttls, " "); got != c.ttls {
			t.Errorf("%s: lifetimes %s, want %s", c.name, got, c.ttls)
		}
		if d := b.Pinned()[i].Until.Sub(before); d < c.until*time.Second || d > (c.until+10)*time.Second {
			t.Errorf("%s: pinned for %s, want %d s", c.name, d, c.until)
		}
	}
}

// A name whose addresses change with every answer is pinned anew each time.
func TestResolvingAgain(t *testing.T) {
	n := make(chan int, 1)
	n <- 0
	b, _ := one(t, "example.com", func(a asked) [][]byte {
		m := new(dns.Msg)
		m.SetReply(a.msg)
		i := <-n + 1
		n <- i
		m.Answer = append(m.Answer, record1(t, fmt.Sprintf("example.com. 1 A 192.0.2.%d", i)))
		return [][]byte{pack(t, m)}
	})
	for i := range 5 {
		a := b.send(ask("example.com", dns.TypeA))
		want := fmt.Sprintf("192.0.2.%d", i+1)
		if got := brief(a); got != "NOERROR "+want {
			t.Errorf("got %s", got)
		}
		if p := b.Pinned(); len(p) != i+1 || p[i].Addrs[0].String() != want {
			t.Errorf("pinned %v", p)
		}
	}
}

// The answer to a query that is out obeys the policy of when it goes out.
func TestPolicyChangesWhileAQueryIsOut(t *testing.T) {
	cases := []struct{ before, after, want string }{
		{"example.com", "example.org", "NXDOMAIN"},
		{"example.com", "example.com !192.0.2.0/24", "NOERROR"},
		{"example.com", "* !cdn.example.net", "NXDOMAIN"},
		{"example.com:80", "example.com:443 !192.0.2.2", "NOERROR cdn.example.net. 192.0.2.1"},
		{"example.com", "", "NXDOMAIN"},
	}
	for _, c := range cases {
		out, release := make(chan struct{}), make(chan struct{})
		answer := zone(t, "example.com. 60 CNAME cdn.example.net.", "cdn.example.net. 60 A 192.0.2.1", "cdn.example.net. 60 A 192.0.2.2")
		b, _ := one(t, c.before, func(a asked) [][]byte {
			close(out)
			<-release
			return answer(a)
		})
		got := make(chan *dns.Msg)
		go func() {
			m, err := dns.Exchange(ask("example.com", dns.TypeA), b.udp)
			if err != nil {
				t.Error(err)
			}
			got <- m
		}()
		<-out
		b.SetPolicy(policy(t, c.after))
		close(release)
		if m := <-got; m != nil && brief(m) != c.want {
			t.Errorf("%q to %q: got %s, want %s", c.before, c.after, brief(m), c.want)
		}
		for _, p := range b.Pinned() {
			if p.Policy != b.Policy() || len(p.Addrs) != strings.Count(c.want, "192") {
				t.Errorf("%q to %q: pinned %v", c.before, c.after, p)
			}
		}
	}
}

// A policy that changes while addresses are opened: the answer is judged anew.
func TestPolicyChangesWhilePinning(t *testing.T) {
	for _, refuse := range []bool{true, false} {
		b, r := one(t, "example.com", zone(t, "example.com. 60 A 192.0.2.1"))
		b.mu.Lock()
		b.pin = func(p Pin) error {
			if len(b.Pinned()) > 1 {
				return nil
			}
			b.SetPolicy(policy(t, "example.com:443")) // as an owner that changes it in the middle does
			if refuse {
				return ErrPolicyChanged
			}
			return nil
		}
		b.mu.Unlock()
		if got := brief(b.send(ask("example.com", dns.TypeA))); got != "NOERROR 192.0.2.1" {
			t.Errorf("got %s", got)
		}
		if p := b.Pinned(); len(p) != 2 || p[1].Policy != b.Policy() {
			t.Errorf("pinned %v", p)
		}
		if n := len(r.queries()); n != 1 {
			t.Errorf("the resolver was asked %d times", n)
		}
	}
	b, _ := one(t, "example.com", zone(t, "example.com. 60 A 192.0.2.1"))
	b.mu.Lock()
	b.pin = func(Pin) error { return ErrPolicyChanged }
	b.mu.Unlock()
	if got := brief(b.send(ask("example.com", dns.TypeA))); got != "SERVFAIL" {
		t.Errorf("a policy that is never right: %s", got)
	}
}
