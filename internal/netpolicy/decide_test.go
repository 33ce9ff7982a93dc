package netpolicy

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestZeroPolicyAllowsNothing(t *testing.T) {
	empty := parse(t, nil)
	for _, p := range []*Policy{nil, {}, empty} {
		for _, q := range []Query{
			{}, {Name: "example.com"}, {Name: "example.com", Port: 443}, {Addr: netip.MustParseAddr("192.0.2.1")},
			{Name: "example.com", Addr: netip.MustParseAddr("10.0.0.1"), Port: 443, Proto: UDP},
		} {
			if d := p.Decide(q); d.Allow || d.Rule != "" || d.Why == "" {
				t.Errorf("%+v: %+v", q, d)
			}
		}
		if d := p.Link("example.com"); !d.Allow {
			t.Errorf("link: %+v", d)
		}
		if p.Spans("example.com", netip.Addr{}) != nil || p.Direct() != nil || p.Free("example.com") != "" || p.Resolve("").Allow {
			t.Error("something is open")
		}
		if q, err := p.On(Host{}); err != nil || q.Decide(Query{Name: "example.com"}).Allow {
			t.Errorf("on a host: %v", err)
		}
	}
}

func TestQueriesThatMeanNothing(t *testing.T) {
	p := parse(t, map[string]bool{"*": true, "0.0.0.0/0": true, "example.com": true})
	for _, q := range []Query{
		{},
		{Port: 443},
		{Name: "example..com"},
		{Name: "exa mple.com"},
		{Name: `a\.example.com`},
		{Name: "a\x00.example.com"},
		{Name: strings.Repeat("a", 64) + ".example.com"},
		{Name: strings.Repeat("a.", 130) + "com"},
		{Name: "example.com", Proto: "icmp"},
		{Addr: netip.MustParseAddr("192.0.2.1"), Proto: "TCP"},
	} {
		if d := p.Decide(q); d.Allow || d.Rule != "" || d.Why == "" {
			t.Errorf("%+v: %+v", q, d)
		}
	}
	if d := p.Leads("example.com")(netip.Addr{}); d.Allow || d.Why == "" {
		t.Errorf("a name leads to no address: %+v", d)
	}
	if p.Link(`a\.example.com`).Allow {
		t.Error("a link of no name is allowed")
	}
}

// A query without a protocol is about TCP, and without a port about any.
func TestDefaultsOfAQuery(t *testing.T) {
	p := parse(t, map[string]bool{"example.com:444/udp": true})
	for q, want := range map[Query]bool{
		{Name: "example.com"}:                        true,
		{Name: "example.com", Proto: UDP}:            true,
		{Name: "example.com", Proto: TCP}:            false,
		{Name: "example.com", Port: 444}:             false,
		{Name: "example.com", Port: 444, Proto: UDP}: true,
	} {
		if got := p.Decide(q).Allow; got != want {
			t.Errorf("%+v: %v", q, got)
		}
	}
}

// A refusal for any port names the rule that has a part in it.
func TestRefusalNamesTheRule(t *testing.T) {
	p := parse(t, map[string]bool{"*": true, "evil.example": false, "192.0.2.0/24": false})
	for asked, rule := range map[string]string{"evil.example": "evil.example", "192.0.2.1": "192.0.2.0/24", "198.51.100.1": "evil.example"} {
		q, err := ParseQuery(asked)
		if err != nil {
			t.Fatal(err)
		}
		if d := p.Decide(q); d.Allow || d.Rule != rule {
			t.Errorf("%s: %+v", asked, d)
		}
	}
}

func TestHost(t *testing.T) {
	host := Host{
		Own:   []netip.Addr{netip.MustParseAddr("192.168.1.5"), netip.MustParseAddr("203.0.113.9"), netip.MustParseAddr("2001:db8::9"), netip.MustParseAddr("fe80::9%eth0")},
		Never: []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16")},
		NAT64: []netip.Prefix{netip.MustParsePrefix("2001:db8:64::/96")},
	}
	cases := []struct {
		rules string
		addr  string
		allow bool
	}{
		{`{"*": true}`, "203.0.113.9", false},
		{`{"*": true}`, "203.0.113.10", true},
		{`{"*": true}`, "2001:db8::9", false},
		{`{"*": true}`, "2001:db8::a", true},
		{`{"*": true}`, "64:ff9b::203.0.113.9", false},
		{`{"*": true}`, "2001:db8:64::203.0.113.9", false},
		{`{"*": true}`, "2001:db8:64::203.0.113.10", true},
		{`{"*": true}`, "2001:db8:64::10.0.0.1", false},
		{`{"*": true, "203.0.113.10": false}`, "2001:db8:64::203.0.113.10", false},
		{`{"203.0.113.0/24": true}`, "203.0.113.9", false},
		{`{"203.0.113.9": true}`, "203.0.113.9", true},
		{`{"192.168.0.0/16": true}`, "192.168.1.4", true},
		{`{"192.168.0.0/16": true}`, "192.168.1.5", false},
		{`{"192.168.1.5": true}`, "192.168.1.5", true},
		{`{"10.0.0.0/8": true}`, "10.76.0.1", true},
		{`{"10.0.0.0/8": true}`, "10.77.0.1", false},
		{`{"10.77.0.1": true}`, "10.77.0.1", false},
		{`{"64:ff9b::/96": true, "64:ff9b::a4d:1": true}`, "64:ff9b::10.77.0.1", false},
		{`{"fe80::/10": true}`, "fe80::8", true},
		{`{"fe80::/10": true}`, "fe80::9", false},
	}
	for _, c := range cases {
		p, err := parse(t, rulesOf(t, c.rules)).On(host)
		if err != nil {
			t.Fatal(err)
		}
		addr := netip.MustParseAddr(c.addr)
		if d := p.Decide(Query{Addr: addr, Port: 443}); d.Allow != c.allow {
			t.Errorf("%s %s: %+v", c.rules, c.addr, d)
		}
		if open := inRegions(p.Direct(), addr, 443, TCP); open != c.allow {
			t.Errorf("%s %s: in the direct regions: %v", c.rules, c.addr, open)
		}
	}
	for _, h := range []Host{
		{Own: []netip.Addr{{}}},
		{Never: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/8")}},
		{Never: []netip.Prefix{{}}},
		{NAT64: []netip.Prefix{netip.MustParsePrefix("2001:db8::/64")}},
		{NAT64: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}},
	} {
		if _, err := new(Policy).On(h); err == nil {
			t.Errorf("%+v is accepted", h)
		}
	}
}

func rulesOf(t testing.TB, text string) map[string]bool {
	t.Helper()
	var rules map[string]bool
	if err := json.Unmarshal([]byte(text), &rules); err != nil {
		t.Fatal(err)
	}
	return rules
}

func TestFree(t *testing.T) {
	p := parse(t, map[string]bool{"*": true, "*.example.com": true, "a.example.com": true, "*.deep.example.com": false, "*.x.deep.example.com": true, "huggingface": true})
	for name, want := range map[string]string{
		"data.here.example.com":   "data.here",
		"Data.Here.Example.com.":  "data.here",
		"a.example.com":           "",
		"b.a.example.com":         "b.a",
		"q.x.deep.example.com":    "q",
		"cdn-lfs.huggingface.co":  "cdn-lfs",
		"huggingface.co":          "",
		"anything.example.org":    "",
		"not a name.example.com":  "",
		"r.s.deep.example.com":    "r.s.deep",
		"www.data.here.test.org.": "",
	} {
		if got := p.Free(name); got != want {
			t.Errorf("%s: %q, want %q", name, got, want)
		}
	}
}

func TestSpans(t *testing.T) {
	cases := []struct{ rules, name, addr, want string }{
		{`{"example.com": true}`, "example.com", "", "[{tcp 1 52} {tcp 54 852} {tcp 854 65535} {udp 1 52} {udp 54 442} {udp 444 852} {udp 854 65535}]"},
		{`{"example.com:443": true}`, "example.com", "192.0.2.1", "[{tcp 443 443}]"},
		{`{"example.com:443": true}`, "example.com", "10.0.0.1", "[]"},
		{`{"example.com:443": true}`, "example.org", "", "[]"},
		{`{"example.com:400-500": true, "example.com:450/udp": false}`, "example.com", "", "[{tcp 400 500} {udp 400 442} {udp 444 449} {udp 451 500}]"},
		{`{"*": true}`, "", "192.0.2.1", "[{tcp 1 52} {tcp 54 65535} {udp 1 52} {udp 54 65535}]"},
		{`{"*:80-81/tcp": true, "evil.example:81": false}`, "", "192.0.2.1", "[{tcp 80 80}]"},
		{`{"*:80-81/tcp": true, "evil.example:81": false}`, "example.com", "192.0.2.1", "[{tcp 80 81}]"},
		{`{"10.0.0.0/8:1-10": true, "10.1.0.0/16:5": false}`, "", "10.1.0.1", "[{tcp 1 4} {tcp 6 10} {udp 1 4} {udp 6 10}]"},
	}
	for _, c := range cases {
		var addr netip.Addr
		if c.addr != "" {
			addr = netip.MustParseAddr(c.addr)
		}
		if got := fmt.Sprint(parse(t, rulesOf(t, c.rules)).Spans(c.name, addr)); got != c.want {
			t.Errorf("%s %s %s: %s, want %s", c.rules, c.name, c.addr, got, c.want)
		}
	}
}

func TestDirect(t *testing.T) {
	if r := parse(t, map[string]bool{"pypi": true, "*.example.com": true}).Direct(); r != nil {
		t.Errorf("rules for names open addresses: %v", r)
	}
	p := parse(t, map[string]bool{"10.0.0.0/8:443": true, "10.1.0.0/16": false, "[2001:db8::/32]:80/tcp": true})
	want := "[{10.0.0.0 10.0.255.255 [{tcp 443 443} {udp 443 443}]} {10.2.0.0 10.255.255.255 [{tcp 443 443} {udp 443 443}]} " +
		"{2001:db8:: 2001:db8:ffff:ffff:ffff:ffff:ffff:ffff [{tcp 80 80}]}]"
	if got := fmt.Sprint(p.Direct()); got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

func inRegions(regions []Region, a netip.Addr, port uint16, proto Proto) bool {
	for _, r := range regions {
		if a.BitLen() == r.From.BitLen() && r.From.Compare(a) <= 0 && a.Compare(r.To) <= 0 {
			return inSpans(r.Spans, port, proto)
		}
	}
	return false
}

func inSpans(spans []Span, port uint16, proto Proto) bool {
	return slices.ContainsFunc(spans, func(s Span) bool { return s.Proto == proto && s.From <= port && port <= s.To })
}

// chance makes rules and queries that meet often.
type chance struct{ *rand.Rand }

func (c chance) of(s ...string) string { return s[c.IntN(len(s))] }

func (c chance) port() uint16 {
	return []uint16{1, 22, 52, 53, 54, 80, 442, 443, 444, 852, 853, 854, 8000, 65535}[c.IntN(14)]
}

func (c chance) name() string {
	return c.of("example.com", "a.example.com", "b.a.example.com", "example.org", "x.example.org", "pypi.org", "localhost", "a.internal", "1.0.0.10.in-addr.arpa")
}

func (c chance) addr() netip.Addr {
	return netip.MustParseAddr(c.of("10.0.0.0", "10.0.0.1", "10.1.2.3", "10.255.255.255", "11.0.0.0", "192.0.2.1", "192.0.2.255", "192.0.3.0", "169.254.169.254",
		"0.0.0.0", "255.255.255.255", "127.0.0.1", "2001:db8::", "2001:db8::1", "2001:db9::1", "fd00::1", "fd00:ec2::254", "::", "::1", "::ffff:10.0.0.1",
		"64:ff9b::10.1.2.3", "64:ff9b::192.0.2.1", "64:ff9b::203.0.113.1", "2002:c000:201::1", "2002:a01:203::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"))
}

func (c chance) rules() map[string]bool {
	rules := map[string]bool{}
	for range c.IntN(8) {
		target := c.of("*", "*", "example.com", "*.example.com", "*.a.example.com", "a.example.com", "*.com", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "192.0.2.0/24",
			"0.0.0.0/0", "::/0", "2001:db8::/32", "fd00::/8", "64:ff9b::/96", "2002::/16", "169.254.169.254", "pypi")
		ports := ""
		if c.IntN(2) == 0 && target != "pypi" {
			lo, hi := c.port(), c.port()
			ports = fmt.Sprintf(":%d-%d", min(lo, hi), max(lo, hi))
			if strings.Count(target, ":") > 0 {
				target = "[" + target + "]"
			}
			ports += c.of("", "/tcp", "/udp")
		}
		rules[target+ports] = c.IntN(3) > 0
	}
	return rules
}

// parse reads the rules, without those that alone or together are wrong.
func (c chance) policy() *Policy {
	for {
		if p, err := Parse(c.rules()); err == nil {
			return p
		}
	}
}

// Spans and Direct are Decide, said for all ports and addresses at once.
func TestSpansAndDirectAgreeWithDecide(t *testing.T) {
	c := chance{rand.New(rand.NewPCG(1, 2))}
	host := Host{Own: []netip.Addr{netip.MustParseAddr("192.0.2.255")}, Never: []netip.Prefix{netip.MustParsePrefix("10.255.0.0/16")}}
	allowed := 0
	for range 1500 {
		p := c.policy()
		if c.IntN(2) == 0 {
			var err error
			if p, err = p.On(host); err != nil {
				t.Fatal(err)
			}
		}
		direct := p.Direct()
		checkOrder(t, direct)
		for range 20 {
			q := Query{Port: c.port(), Proto: Proto(c.of("tcp", "udp"))}
			if c.IntN(3) > 0 {
				q.Addr = c.addr()
			}
			if !q.Addr.IsValid() || c.IntN(2) == 0 {
				q.Name = c.name()
			}
			d := p.Decide(q)
			if d.Allow {
				allowed++
			}
			if got := inSpans(p.Spans(q.Name, q.Addr), q.Port, q.Proto); got != d.Allow {
				t.Fatalf("%v\n%+v: decided %+v, spans say %v", p.rules, q, d, got)
			}
			if q.Name == "" {
				if got := inRegions(direct, q.Addr, q.Port, q.Proto); got != d.Allow {
					t.Fatalf("%v\n%+v: decided %+v, the direct regions say %v", p.rules, q, d, got)
				}
			}
			if d.Allow && d.Rule == "" {
				t.Fatalf("%v\n%+v: allowed by no rule", p.rules, q)
			}
			if q.Name != "" {
				leads := p.Leads(q.Name)
				for range 3 {
					a := c.addr()
					if got, want := leads(a), p.Decide(Query{Name: q.Name, Addr: a}); got != want {
						t.Fatalf("%v\n%s at %s: leads %+v, decided %+v", p.rules, q.Name, a, got, want)
					}
				}
			}
			if any := p.Decide(Query{Name: q.Name, Addr: q.Addr}); d.Allow && !any.Allow {
				t.Fatalf("%v\n%+v: allowed on a port and on none", p.rules, q)
			}
		}
	}
	if allowed < 2500 {
		t.Errorf("only %d queries were allowed: the test tells little", allowed)
	}
}

// checkOrder checks that regions are in order, apart, and none is empty.
func checkOrder(t *testing.T, regions []Region) {
	t.Helper()
	for i, r := range regions {
		if r.From.Compare(r.To) > 0 || len(r.Spans) == 0 {
			t.Fatalf("region %v", r)
		}
		if i > 0 && regions[i-1].To.Compare(r.From) >= 0 {
			t.Fatalf("regions %v and %v", regions[i-1], r)
		}
	}
}

// One rule that denies more never opens anything; one that allows more never
// closes anything, but for the names' own check of "*".
func TestMoreDenyIsNeverMore(t *testing.T) {
	c := chance{rand.New(rand.NewPCG(3, 4))}
	for range 4000 {
		rules := c.rules()
		p, err := Parse(rules)
		if err != nil {
			continue
		}
		more := p.Rules()
		if more == nil {
			more = map[string]bool{}
		}
		more[c.of("*", "example.com", "*.example.com:443", "10.0.0.0/8", "0.0.0.0/0:80", "192.0.2.1/udp", "pypi")] = false
		q, err := Parse(more)
		if err != nil {
			continue
		}
		for range 10 {
			ask := Query{Name: c.name(), Addr: c.addr(), Port: c.port(), Proto: Proto(c.of("tcp", "udp"))}
			if c.IntN(2) == 0 {
				ask.Name = ""
			}
			if q.Decide(ask).Allow && !p.Decide(ask).Allow {
				// A narrower denial may stand below an allowed rule only if that rule was there.
				t.Fatalf("%v\nwith %v\n%+v: %+v", rules, more, ask, q.Decide(ask))
			}
		}
	}
}

// What rules for one family or name say changes nothing for another.
func TestNothingIsOpenWithoutARule(t *testing.T) {
	c := chance{rand.New(rand.NewPCG(5, 6))}
	for range 2000 {
		p := c.policy()
		q := Query{Name: c.name(), Addr: c.addr(), Port: c.port()}
		d := p.Decide(q)
		if !d.Allow {
			continue
		}
		if !p.rules[d.Rule] {
			t.Fatalf("%v\n%+v: allowed by %q, which allows nothing", p.rules, q, d.Rule)
		}
		if g := p.guarded(q.Addr); g != nil && !slices.ContainsFunc(p.nets, func(rs []*rule) bool {
			return rs[0].prefix.Contains(q.Addr) && within(rs[0].prefix, g.Prefix)
		}) {
			t.Fatalf("%v\n%+v: %s is open", p.rules, q, g.What)
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"*", "pypi", "example.com:443/udp", "*.bücher.example", "[2001:db8::/32]:1-2/tcp", "10.0.0.0/8", "::1", "xn--a", "a/b:c", "[", "。.", "*.:1"} {
		f.Add(s, true)
	}
	f.Fuzz(func(t *testing.T, key string, allow bool) {
		p, err := Parse(map[string]bool{key: allow})
		if err != nil {
			if !strings.Contains(err.Error(), "network rule") {
				t.Fatalf("%q: %v", key, err)
			}
			return
		}
		r, err := parseRule(key, allow)
		if err != nil {
			t.Fatal(err)
		}
		again, err := parseRule(r.String(), allow)
		if err != nil || again.String() != r.String() {
			t.Fatalf("%q is %q, which is read as %v, %v", key, r, again, err)
		}
		if r.kind == aName {
			name, ok := NormalName(r.name)
			if !ok || name != r.name {
				t.Fatalf("%q is not in its normal form: %q", r.name, name)
			}
			if allow != p.Resolve(r.name).Allow {
				t.Fatalf("%q: its own name: %+v", key, p.Resolve(r.name))
			}
		}
		if !allow && p.Direct() != nil {
			t.Fatalf("%q: a denial opens %v", key, p.Direct())
		}
	})
}

func FuzzDecide(f *testing.F) {
	f.Add("*", true, "example.com", false, "www.example.com", []byte{192, 0, 2, 1}, uint16(443), "tcp")
	f.Add("10.0.0.0/8:80", true, "*.a.b", true, "x.a.b", []byte{10, 0, 0, 1}, uint16(80), "udp")
	f.Add("64:ff9b::/96", true, "10.0.0.0/8", false, "", netip.MustParseAddr("64:ff9b::a00:1").AsSlice(), uint16(0), "")
	f.Fuzz(func(t *testing.T, a string, allowA bool, b string, allowB bool, name string, ip []byte, port uint16, proto string) {
		p, err := Parse(map[string]bool{a: allowA, b: allowB})
		if err != nil {
			return
		}
		addr, _ := netip.AddrFromSlice(ip)
		q := Query{Name: name, Addr: addr, Port: port, Proto: Proto(proto)}
		d := p.Decide(q)
		if d.Why == "" {
			t.Fatalf("%+v: no reason", q)
		}
		if d.Allow && !p.Rules()[d.Rule] {
			t.Fatalf("%+v: allowed by %q", q, d.Rule)
		}
		if d.Allow && !allowA && !allowB {
			t.Fatalf("%+v: allowed by denials", q)
		}
		if d.Allow && addr.Is4In6() {
			t.Fatalf("%+v: an IPv4-mapped address is allowed", q)
		}
		if port != 0 && proto != "" && (name != "" || addr.IsValid()) {
			if got := inSpans(p.Spans(name, addr), port, Proto(proto)); got != d.Allow {
				t.Fatalf("%+v: decided %+v, spans say %v", q, d, got)
			}
		}
		if port != 0 && proto != "" && name == "" && addr.IsValid() {
			if got := inRegions(p.Direct(), addr, port, Proto(proto)); got != d.Allow {
				t.Fatalf("%+v: decided %+v, the direct regions say %v", q, d, got)
			}
		}
		p.Link(name)
		p.Free(name)
	})
}

func BenchmarkDecide(b *testing.B) {
	p := parse(b, map[string]bool{"pypi": true, "github": true, "*.example.com:443": true, "10.0.0.0/8": true, "10.1.0.0/16": false})
	q := Query{Name: "a.b.example.com", Addr: netip.MustParseAddr("203.0.113.9"), Port: 443}
	for b.Loop() {
		p.Decide(q)
	}
}

func BenchmarkParse(b *testing.B) {
	rules := map[string]bool{"pypi": true, "github": true, "*.example.com:443": true, "10.0.0.0/8": true, "10.1.0.0/16": false}
	for b.Loop() {
		parse(b, rules)
	}
}

// worst are rules that make as much work as a caller can.
func worst() map[string]map[string]bool {
	all := map[string]map[string]bool{"cidrs": {}, "ports": {"*": true}, "names": {}, "nested": {"*": true}}
	for i := range MaxRules - 1 {
		all["cidrs"][fmt.Sprintf("[2001:db8:%x::/48]:%d", i, 100+2*i)] = true
		all["ports"][fmt.Sprintf("*:%d", 100+2*i)] = false
		all["names"][fmt.Sprintf("example.com:%d-%d", 1+i, 65000-i)] = i%2 == 0
		all["nested"][fmt.Sprintf("[2000::/%d]:%d", 1+i%125+3, 100+2*i)] = i%2 == 0
	}
	return all
}

func BenchmarkWorst(b *testing.B) {
	for name, rules := range worst() {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				p := parse(b, rules)
				p.Direct()
				p.Spans("example.com", netip.MustParseAddr("2000::1"))
				p.Resolve("example.com")
			}
		})
	}
}

func BenchmarkDirect(b *testing.B) {
	for name, rules := range map[string]map[string]bool{
		"names": {"pypi": true, "github": true}, "everything": {"*": true}, "cidrs": {"10.0.0.0/8": true, "10.1.0.0/16": false, "2001:db8::/32": true},
	} {
		p := parse(b, rules)
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				p.Direct()
			}
		})
	}
}

func BenchmarkSpans(b *testing.B) {
	p := parse(b, map[string]bool{"pypi": true, "github": true, "*.example.com:443": true, "10.0.0.0/8": true})
	a := netip.MustParseAddr("203.0.113.9")
	for b.Loop() {
		p.Spans("pypi.org", a)
	}
}
