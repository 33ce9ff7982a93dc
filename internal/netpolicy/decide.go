package netpolicy

import (
	"fmt"
	"net/netip"
	"strings"
)

// Ports that names and addresses are hidden behind.
const (
	dnsPort  = 53
	quicPort = 443 // over UDP
	dotPort  = 853 // and DNS over QUIC
)

// Query asks about a connection that a sandbox may make.
//
// With a name alone it asks what would be if the name led to a public address;
// with an address alone, whether the address may be reached without any name;
// with both, whether it may be reached when that name led to it.
type Query struct {
	Name  string     // "" for none
	Addr  netip.Addr // zero for none
	Port  uint16     // 0 for any: allowed if some port is
	Proto Proto      // "" is TCP, or with Port 0 any
}

// Decision is the answer to a Query.
type Decision struct {
	Allow bool
	Rule  string // the caller's rule that decided, as written; "" if none did
	Why   string // a sentence for a person
}

// ParseQuery reads "HOST", "HOST:PORT" or "HOST:PORT/PROTO", HOST being a name
// or an address, one of IPv6 in brackets if a port follows.
func ParseQuery(s string) (Query, error) {
	const want = "want HOST, HOST:PORT or HOST:PORT/udp, such as github.com:443 or [2001:db8::1]:443"
	rest, proto, _ := cutProto(s)
	host, port, why := cutPorts(rest)
	if why != "" {
		return Query{}, fmt.Errorf("%.100q: %s; %s", s, why, want)
	}
	q := Query{Proto: proto}
	if port != "" {
		var ok bool
		if q.Port, ok = parsePort(port); !ok {
			return Query{}, fmt.Errorf("%.100q: the port %.20q must be a number from 1 to 65535; %s", s, port, want)
		}
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		q.Addr = addr.WithZone("")
		return q, nil
	}
	name, why := parseDomain(host)
	if why != "" {
		return Query{}, fmt.Errorf("%.100q: %s; %s", s, why, want)
	}
	q.Name = name
	return q, nil
}

// Decide says whether a connection is allowed, and why.
func (p *Policy) Decide(q Query) Decision {
	c, wrong := p.candidates(q)
	if wrong != "" {
		return Decision{Why: wrong}
	}
	if q.Port != 0 {
		proto := q.Proto
		if proto == "" {
			proto = TCP
		}
		return c.say(c.judge(q.Port, proto))
	}
	return c.judgeAny(q.Proto)
}

// Resolve says whether DNS may be asked for a name: whether some port of it is
// allowed.
func (p *Policy) Resolve(name string) Decision {
	if name == "" {
		return Decision{Why: "there is no name"}
	}
	return p.Decide(Query{Name: name})
}

// Leads returns what Decide says of a name and an address, on any port, for one
// address after the other of a long answer. It is for one goroutine.
func (p *Policy) Leads(name string) func(netip.Addr) Decision {
	var public *Decision // of all addresses of which no rule and no range speaks
	return func(a netip.Addr) Decision {
		if !a.IsValid() {
			return Decision{Why: "there is no address"}
		}
		c, wrong := p.candidates(Query{Name: name, Addr: a})
		switch {
		case wrong != "":
			return Decision{Why: wrong}
		case !c.plain():
			return c.judgeAny("")
		case public == nil:
			d := c.judgeAny("")
			public = &d
		}
		return *public
	}
}

// Link says whether a name may be a link in the chain of aliases (CNAME) from
// an allowed name to its addresses. It may, unless a rule that names it, other
// than "*", denies it on every port: the name that was asked for decides.
func (p *Policy) Link(name string) Decision {
	c, wrong := p.candidates(Query{Name: name})
	if wrong != "" {
		return Decision{Why: wrong}
	}
	c.any = nil
	var deny *rule
	for _, s := range c.steps() {
		for _, proto := range protos {
			r := best(c.names, s, proto)
			if r == nil || r.allow {
				return Decision{Allow: true, Why: "no rule denies it"}
			}
			deny = r
		}
	}
	return Decision{Rule: deny.key, Why: fmt.Sprintf("the rule %s denies %s, a link on the way", deny.quote(), c.name)}
}

// Free returns the part of a name that the rule which lets it be resolved leaves
// to the sandbox: "a.b" of a.b.example.com for "*.example.com". It can carry data
// out to the domain's own servers. For a rule that names the whole it is "", and
// for "*" too: whoever may reach everything needs no such way.
func (p *Policy) Free(name string) string {
	c, wrong := p.candidates(Query{Name: name})
	if wrong != "" {
		return ""
	}
	for _, level := range c.names {
		for _, r := range level {
			if r.allow && r.kind == aName {
				return ""
			}
			if r.allow {
				return strings.TrimSuffix(c.name, "."+r.name)
			}
		}
	}
	return ""
}

// candidates are the rules that speak of a name, an address or both, on
// whatever port.
type candidates struct {
	p      *Policy
	name   string
	addr   netip.Addr
	any    []*rule
	names  [][]*rule // the most specific target first
	nets   [][]*rule // likewise
	inner  [][]*rule // of the IPv4 address in an IPv6 one
	local  bool      // "*" does not cover the name
	closed *Range    // the range that keeps addr closed
}

// plain reports whether no rule and no range speaks of the address.
func (c *candidates) plain() bool { return c.closed == nil && len(c.nets) == 0 && len(c.inner) == 0 }

// candidates collects them, or says why the query allows nothing.
func (p *Policy) candidates(q Query) (c candidates, wrong string) {
	c = candidates{p: p, addr: q.Addr.WithZone("")}
	if q.Name == "" && !q.Addr.IsValid() {
		return c, "there is neither a name nor an address"
	}
	if q.Proto != "" && q.Proto != TCP && q.Proto != UDP {
		return c, fmt.Sprintf("only TCP and UDP leave a sandbox, not %.20q", q.Proto)
	}
	if q.Name != "" {
		name, ok := NormalName(q.Name)
		if !ok {
			return c, fmt.Sprintf("%.100q is not a domain name", q.Name)
		}
		c.name = name
		c.local = p.isLocal(name)
	}
	if c.addr.IsValid() {
		if n, never := p.never(c.addr); never {
			return c, fmt.Sprintf("%s is in %s, which this host keeps closed", c.addr, n)
		}
		c.closed = p.guarded(c.addr)
	}
	if p == nil {
		return c, ""
	}
	c.any = p.any
	if c.name != "" {
		c.names = p.namesFor(c.name)
	}
	if c.addr.IsValid() {
		c.nets = p.netsFor(c.addr)
		c.inner = p.netsFor(p.guard().embedded(c.addr))
	}
	return c, ""
}

// namesFor returns the rules for a name, the most specific first.
func (p *Policy) namesFor(name string) [][]*rule {
	var levels [][]*rule
	if rs := p.exact[name]; rs != nil {
		levels = append(levels, rs)
	}
	if len(p.wild) == 0 {
		return levels
	}
	for rest := name; ; {
		_, above, ok := strings.Cut(rest, ".")
		if !ok {
			return levels
		}
		if rs := p.wild[above]; rs != nil {
			levels = append(levels, rs)
		}
		rest = above
	}
}

// netsFor returns the rules for an address, the most specific first.
func (p *Policy) netsFor(a netip.Addr) [][]*rule {
	if !a.IsValid() {
		return nil
	}
	var levels [][]*rule
	for _, rs := range p.nets {
		if rs[0].prefix.Contains(a) {
			levels = append(levels, rs)
		}
	}
	return levels
}

// best returns the rule that decides about a port: of the most specific target
// that speaks of it.
func best(levels [][]*rule, port uint16, proto Proto) *rule {
	var found *rule
	for _, level := range levels {
		for _, r := range level {
			if r.covers(port, proto) && r.over(found) {
				found = r
			}
		}
		if found != nil {
			return found
		}
	}
	return nil
}

// verdict is a decision before it is worded.
type verdict struct {
	allow  bool
	reason reason
	rule   *rule // that decided, nil if none did
	over   *rule // byPin: the "*" that it narrows
}

type reason int

const (
	byRule   reason = iota // or by none, if there is none
	dnsOnly                // port 53
	notHere                // an address of a closed range
	byPin                  // a bare address, where a name is denied
	hidesSNI               // QUIC
	hidesDNS               // DNS over TLS
)

// judge decides about one port.
func (c *candidates) judge(port uint16, proto Proto) verdict {
	if port == dnsPort {
		return verdict{reason: dnsOnly}
	}
	any := best([][]*rule{c.any}, port, proto)
	byName := best(c.names, port, proto)
	if byName == nil && c.name != "" && !c.local {
		byName = any
	}
	named := best(c.nets, port, proto) // a rule for the address
	byAddr := named
	if byAddr == nil {
		byAddr = any
	}
	if in := best(c.inner, port, proto); in != nil && !in.allow {
		byAddr = stronger(byAddr, in)
	}
	r := byAddr
	switch {
	case c.name != "" && !c.addr.IsValid():
		r = byName
	case c.name != "":
		r = stronger(byName, unlessAny(byAddr))
	}
	if r == nil || !r.allow {
		return verdict{rule: r}
	}
	if c.closed != nil && (named == nil || !named.allow || !within(named.prefix, c.closed.Prefix)) {
		return verdict{reason: notHere}
	}
	return c.hidden(port, proto, r, byAddr)
}

// unlessAny returns r unless it is "*", which speaks of a name if there is one.
func unlessAny(r *rule) *rule {
	if r.rank() == 0 {
		return nil
	}
	return r
}

// hidden finishes: r allows, unless names mean nothing at the port and the
// address is not open by itself.
func (c *candidates) hidden(port uint16, proto Proto, r, byAddr *rule) verdict {
	open := byAddr != nil && byAddr.allow
	if open && byAddr.kind == everything {
		deny := c.p.denies(port, proto)
		open = deny == nil
		if !open && c.name == "" {
			return verdict{reason: byPin, rule: deny, over: byAddr}
		}
	}
	switch hides := port == dotPort || port == quicPort && proto == UDP; {
	case !hides:
		return verdict{allow: true, rule: r}
	case open:
		return verdict{allow: true, rule: byAddr}
	case port == quicPort:
		return verdict{reason: hidesSNI}
	}
	return verdict{reason: hidesDNS}
}

// denies returns a rule that denies some name on a port.
func (p *Policy) denies(port uint16, proto Proto) *rule {
	for _, r := range p.deny {
		if r.covers(port, proto) {
			return r
		}
	}
	return nil
}

// say words a verdict.
func (c *candidates) say(v verdict) Decision {
	d := Decision{Allow: v.allow}
	if v.rule != nil {
		d.Rule = v.rule.key
	}
	what := c.name
	if what == "" {
		what = c.addr.String()
	}
	switch v.reason {
	case dnsOnly:
		d.Why = "port 53 is never open: names are answered by the sandbox's own resolver only"
	case notHere:
		d.Why = fmt.Sprintf("%s is not public (%s, %s): only a rule for it, or for a CIDR within that range, opens it", c.addr, c.closed.What, c.closed.Prefix)
	case byPin:
		d.Why = fmt.Sprintf("the rule %s denies a name, so %s opens only addresses that another name led to", v.rule.quote(), v.over.quote())
	case hidesSNI:
		d.Why = fmt.Sprintf("QUIC (UDP port 443) hides the name it speaks to, and %s is allowed by name; clients fall back to TCP", what)
	case hidesDNS:
		d.Why = fmt.Sprintf("DNS over TLS (port 853) would get around the rules for names, and %s is allowed by name", what)
	case byRule:
		d.Why = v.rule.says(what)
		if v.rule == nil && c.local && len(c.any) > 0 {
			d.Why = fmt.Sprintf("%s is a name of one machine or network, which \"*\" does not cover, and no rule names it", what)
		}
	}
	return d
}

// says words what a rule says of something; nil is no rule.
func (r *rule) says(what string) string {
	switch {
	case r == nil:
		return "no rule allows " + what
	case r.allow:
		return fmt.Sprintf("the rule %s allows %s", r.quote(), what)
	}
	return fmt.Sprintf("the rule %s denies %s", r.quote(), what)
}

// quote names a rule for a person.
func (r *rule) quote() string {
	if r.entry != "" {
		return fmt.Sprintf("%q (%s)", r.key, r.entry)
	}
	return fmt.Sprintf("%q", r.key)
}
