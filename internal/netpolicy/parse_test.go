package netpolicy

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
)

func parse(t testing.TB, rules map[string]bool) *Policy {
	t.Helper()
	p, err := Parse(rules)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// Each rule is read as what the second column says in one form.
func TestRuleForms(t *testing.T) {
	cases := []struct{ key, means string }{
		{"*", "*"},
		{"*:443", "*:443"},
		{"*:1-65535", "*"},
		{"*/udp", "*/udp"},
		{"*:443/TCP", "*:443/tcp"},
		{"example.com", "example.com"},
		{"Example.COM.", "example.com"},
		{"example.com:443", "example.com:443"},
		{"example.com.:443", "example.com:443"},
		{"example.com:8000-8099", "example.com:8000-8099"},
		{"example.com:443-443/tcp", "example.com:443/tcp"},
		{"example.com/udp", "example.com/udp"},
		{"*.Example.com:80", "*.example.com:80"},
		{"*.com", "*.com"},
		{"host.", "host"},
		{"*.internal", "*.internal"},
		{"_dns-sd._udp.example.com", "_dns-sd._udp.example.com"},
		{"münchen.example:443", "xn--mnchen-3ya.example:443"},
		{"*.MÜNCHEN.example", "*.xn--mnchen-3ya.example"},
		{"faß.example", "xn--fa-hia.example"},
		{"例え。テスト", "xn--r8jz45g.xn--zckzah"},
		{"192.0.2.1", "192.0.2.1"},
		{"192.0.2.1/32", "192.0.2.1"},
		{"192.0.2.1:443", "192.0.2.1:443"},
		{"192.0.2.0/24", "192.0.2.0/24"},
		{"192.0.2.0/24:443", "192.0.2.0/24:443"},
		{"192.0.2.0/24/udp", "192.0.2.0/24/udp"},
		{"192.0.2.0/24:1-100/udp", "192.0.2.0/24:1-100/udp"},
		{"0.0.0.0/0", "0.0.0.0/0"},
		{"2001:db8::1", "2001:db8::1"},
		{"2001:DB8:0::1", "2001:db8::1"},
		{"2001:db8::1:443", "2001:db8::1:443"}, // an address: ports want brackets
		{"[2001:db8::1]", "2001:db8::1"},
		{"[2001:db8::1]:443", "[2001:db8::1]:443"},
		{"[2001:db8::1]:443-500/udp", "[2001:db8::1]:443-500/udp"},
		{"2001:db8::/32", "2001:db8::/32"},
		{"2001:db8::/32/tcp", "2001:db8::/32/tcp"},
		{"[2001:db8::/32]:443", "[2001:db8::/32]:443"},
		{"[2001:db8::/32]/tcp", "2001:db8::/32/tcp"},
		{"::/0", "::/0"},
		{"pypi", "pypi"},
		{"PyPI", "pypi"},
	}
	for _, c := range cases {
		r, err := parseRule(c.key, true)
		if err != nil {
			t.Errorf("%v", err)
			continue
		}
		if got := r.String(); got != c.means {
			t.Errorf("%q is read as %q, want %q", c.key, got, c.means)
		}
		again, err := parseRule(c.means, true)
		if err != nil || again.String() != c.means {
			t.Errorf("%q is not read as itself: %v, %v", c.means, again, err)
		}
	}
}

// Each wrong rule is named, and told what would be right.
func TestWrongRules(t *testing.T) {
	long := strings.Repeat("a", 64)
	cases := []struct{ key, why string }{
		{"", "want"},
		{" pypi", "no spaces"},
		{"example.com\n", "no spaces"},
		{"exam\x00ple.com", "no spaces"},
		{strings.Repeat("a.", 200) + "com", "at most 300 bytes"},
		{strings.Repeat("a.", 130) + "com", "253 in all"},
		{"https://github.com", "no URL"},
		{"github.com/path", "not a protocol"},
		{"github.com/icmp", "not a protocol"},
		{"example.com:443/sctp", "not a protocol"},
		{"nothere", "no preset"},
		{"localhost", "no preset"},
		{"pypi:443", "ports of its own"},
		{"pypi/tcp", "ports of its own"},
		{"example.com:", "no port after the colon"},
		{"example.com:0", "1 to 65535"},
		{"example.com:65536", "1 to 65535"},
		{"example.com:+80", "1 to 65535"},
		{"example.com:-80", "1 to 65535"},
		{"example.com:80-", "1 to 65535"},
		{"example.com:http", "1 to 65535"},
		{"example.com:80,443", "1 to 65535"},
		{"example.com:1-2-3", "1 to 65535"},
		{"example.com:90-80", "wrong order"},
		{":443", "no preset"},
		{".", "not an IPv4"},
		{"..", "not an IPv4"},
		{".example.com", "not a domain"},
		{"example..com", "not a domain"},
		{"example.com..", "not a domain"},
		{"exa$mple.com", "not a domain"},
		{"-a.example.com", "dash"},
		{"a-.example.com", "dash"},
		{long + ".example.com", "not a domain"},
		{"xn--zzzzzz9999999.example", "not a domain"},
		{"0\xc3.example", "IDNA"},
		{"exa\u2028mple.example", "IDNA"},
		{"*example.com", "a star stands alone"},
		{"www.*.com", "a star stands alone"},
		{"*.*.com", "not a domain"},
		{"*.", "not a domain"},
		{"**", "a star stands alone"},
		{"*.192.0.2.1", "no domain ends in a number"},
		{"example.1", "no domain ends in a number"},
		{"10.0.0", "not an IPv4 address"},
		{"1.2.3.400", "not an IPv4 address"},
		{"01.2.3.4", "not an IPv4 address"},
		{"3232235777", "not an IPv4 address"},
		{"10.0.0.0/33", "not a CIDR"},
		{"10.0.0.0/", "not a CIDR"},
		{"10.0.0.0/08", "not a CIDR"},
		{"10.0.0.1/8", "10.0.0.0/8"},
		{"2001:db8::1/32", "2001:db8::/32"},
		{"2001:db8::/129", "not an IPv6"},
		{"2001:db8::g", "not an IPv6"},
		{"2001:db8::1:443:", "not an IPv6"},
		{"[2001:db8::1", "not closed"},
		{"[2001:db8::1]443", "want"},
		{"[2001:db8::1]:", "want"},
		{"[2001:db8::]/32", "brackets"},
		{"[192.0.2.1]:443", "IPv6 addresses only"},
		{"[example.com]:443", "IPv6 addresses only"},
		{"::ffff:192.0.2.1", "without ::ffff:"},
		{"::ffff:0:0/96", "without ::ffff:"},
		{"fe80::1%eth0", "zone"},
		{"[fe80::1%eth0]:80", "zone"},
		{"example.com:53", "never open"},
		{"*:53/udp", "never open"},
		{"192.0.2.1:53", "never open"},
		{"example.com:853", "DNS over TLS"},
		{"*.example.com:853/udp", "DNS over TLS"},
		{"example.com:443/udp", "QUIC"},
	}
	for _, c := range cases {
		_, err := Parse(map[string]bool{c.key: true, "example.org": true})
		var re *RuleError
		if !errors.As(err, &re) {
			t.Errorf("%q is accepted, or its error names no rule: %v", c.key, err)
			continue
		}
		if re.Rule != c.key || !strings.Contains(re.Why, c.why) {
			t.Errorf("%q: got %q, want it to say %q", c.key, err, c.why)
		}
		if strings.Count(err.Error(), "\n") > 0 {
			t.Errorf("%q: more than one error: %q", c.key, err)
		}
	}
}

// What may be denied although allowing it would open nothing.
func TestDenyWhatIsNeverOpen(t *testing.T) {
	for _, key := range []string{"*:53", "example.com:853", "example.com:443/udp"} {
		parse(t, map[string]bool{key: false})
	}
}

func TestContradictions(t *testing.T) {
	cases := []struct {
		a, b     string
		contrary bool
	}{
		{"example.com", "EXAMPLE.com.", true},
		{"example.com", "example.com:1-65535", true},
		{"example.com:443", "example.com:443-443", true},
		{"bücher.example", "xn--bcher-kva.example", true},
		{"10.0.0.1", "10.0.0.1/32", true},
		{"2001:db8::1", "[2001:0db8::1]", true},
		{"pypi", "PyPI", true},
		{"*", "*:1-65535", true},
		{"example.com", "*.example.com", false},
		{"example.com", "example.com:443", false},
		{"example.com:444/udp", "example.com:444", false},
		{"pypi", "pypi.org:443", false},
		{"10.0.0.0/8", "10.0.0.0/9", false},
		{"*", "0.0.0.0/0", false},
	}
	for _, c := range cases {
		for _, first := range []bool{true, false} {
			_, err := Parse(map[string]bool{c.a: first, c.b: !first})
			if contrary := err != nil; contrary != c.contrary {
				t.Errorf("%q %v and %q %v: %v", c.a, first, c.b, !first, err)
			}
			if err != nil && (!strings.Contains(err.Error(), c.a) || !strings.Contains(err.Error(), c.b)) {
				t.Errorf("the error names not both rules: %v", err)
			}
		}
		if _, err := Parse(map[string]bool{c.a: true, c.b: true}); err != nil {
			t.Errorf("said twice: %v", err)
		}
	}
}

func TestParseReportsAllFaults(t *testing.T) {
	_, err := Parse(map[string]bool{"nothere": true, "1.2.3": true, "example.com": true, "a:0": false})
	if err == nil || strings.Count(err.Error(), "\n") != 2 {
		t.Errorf("want three faults, got %v", err)
	}
}

func TestTooManyRules(t *testing.T) {
	rules := map[string]bool{}
	for i := range MaxRules {
		rules[fmt.Sprintf("a%d.example.com", i)] = true
	}
	parse(t, rules)
	rules["one.more.example.com"] = true
	if _, err := Parse(rules); err == nil {
		t.Errorf("%d rules are accepted", len(rules))
	}
}

func TestRulesAreKept(t *testing.T) {
	rules := map[string]bool{"pypi": true, "*.Example.com": false}
	p := parse(t, rules)
	p.Rules()["more"] = true
	if got := p.Rules(); !maps.Equal(got, rules) {
		t.Errorf("got %v, want %v", got, rules)
	}
	rules["later"] = true
	if _, ok := p.Rules()["later"]; ok {
		t.Error("a change of the caller's map reaches the policy")
	}
}

func TestPresetFiles(t *testing.T) {
	for _, p := range Presets() {
		if !strings.HasSuffix(p.About, ".") {
			t.Errorf("%s: %q is no sentence", p.Name, p.About)
		}
		pol := parse(t, map[string]bool{p.Name: true})
		for i, rule := range p.Rules {
			if slices.Contains(p.Rules[:i], rule) {
				t.Errorf("%s: %s twice", p.Name, rule)
			}
			r, err := parseRule(rule, true)
			if err != nil {
				t.Fatal(err)
			}
			if r.String() != rule || r.anyPort() {
				t.Errorf("%s: %q: want the normal form %q, with a port", p.Name, rule, r)
			}
			name := strings.Replace(r.name, "*.", "x.", 1)
			if r.kind == below {
				name = "x." + name
			}
			if d := pol.Decide(Query{Name: name, Port: r.lo}); !d.Allow || d.Rule != p.Name || !strings.Contains(d.Why, rule) {
				t.Errorf("%s: %s: %+v", p.Name, rule, d)
			}
		}
	}
	for name, text := range map[string]string{
		"no comment": "example.com:443\n", "no rules": "# About.\n", "no domain": "# About.\n10.0.0.0/8\n",
		"a preset": "# About.\npypi\n", "a wrong rule": "# About.\nexample.com:0\n",
	} {
		if _, err := readPreset("p", text); err == nil {
			t.Errorf("a preset with %s is accepted", name)
		}
	}
}

func TestParseQuery(t *testing.T) {
	good := map[string]string{
		"github.com":             "{github.com invalid IP 0 }",
		"GitHub.com.:443":        "{github.com invalid IP 443 }",
		"github.com:443/udp":     "{github.com invalid IP 443 udp}",
		"bücher.example":         "{xn--bcher-kva.example invalid IP 0 }",
		"192.0.2.1":              "{ 192.0.2.1 0 }",
		"192.0.2.1:22":           "{ 192.0.2.1 22 }",
		"2001:db8::1":            "{ 2001:db8::1 0 }",
		"[2001:db8::1]:22/tcp":   "{ 2001:db8::1 22 tcp}",
		"[::ffff:192.0.2.1]:443": "{ ::ffff:192.0.2.1 443 }",
		"fe80::1%eth0":           "{ fe80::1 0 }",
		"localhost:80":           "{localhost invalid IP 80 }",
	}
	for s, want := range good {
		q, err := ParseQuery(s)
		if got := fmt.Sprint(q); err != nil || got != want {
			t.Errorf("%q: got %s, %v, want %s", s, got, err, want)
		}
	}
	for _, s := range []string{"", ":443", "a b", "github.com:0", "github.com:1-2", "github.com:x", "1.2.3.400", "10.0.0.0/8", "*", "*.example.com", "[2001:db8::1", "https://github.com"} {
		if q, err := ParseQuery(s); err == nil {
			t.Errorf("%q is read as %v", s, q)
		}
	}
}

// A rule that could never open anything is refused by its name, and only when it
// is given: what was accepted once is read as it was.
func TestCheckClosed(t *testing.T) {
	for rule, why := range map[string]string{
		"127.0.0.1:80": "loopback", "127.0.0.0/8": "loopback", "127.1.0.0/16:1-5/udp": "loopback", "0.0.0.0": "this network",
		"0.0.0.0/8": "this network", "224.0.0.251:5353/udp": "multicast", "239.0.0.0/8": "multicast", "255.255.255.255": "broadcast",
		"::1": "loopback", "[::]:80": "unspecified", "fe80::1": "link-local", "[fe80::/64]:80": "link-local", "ff02::fb": "multicast",
		"192.0.0.2": "links", "fd5e:c0de:5eed:1::2": "links", "64:ff9b::7f00:1": "loopback", "2002:7f00:1::/48": "loopback",
	} {
		err := Check(map[string]bool{rule: true, "example.com": true})
		var wrong *RuleError
		if !errors.As(err, &wrong) || wrong.Rule != rule || !strings.Contains(err.Error(), why) {
			t.Errorf("%s: got %v; want an error that names it and says %q", rule, err, why)
		}
		if err := Check(map[string]bool{rule: false, "example.com": true}); err != nil {
			t.Errorf("denied: %v", err)
		}
		if _, err := Parse(map[string]bool{rule: true}); err != nil {
			t.Errorf("it was good once: %v", err)
		}
	}
	open := map[string]bool{}
	for _, rule := range []string{"0.0.0.0/0", "::/0", "*", "126.0.0.0/7", "fe80::/9", "192.0.0.0/24", "10.0.0.1", "169.254.169.254", "fd5e:c0de::/32", "localhost."} {
		open[rule] = true
	}
	if err := Check(open); err != nil {
		t.Error(err)
	}
	if err := Check(map[string]bool{"127.0.0.1": true, "::1": true}); err == nil || strings.Count(err.Error(), "network rule") != 2 {
		t.Errorf("not each is named: %v", err)
	}
	if err := Check(map[string]bool{"http://x": true}); err == nil {
		t.Error("Parse is not asked")
	}
}
