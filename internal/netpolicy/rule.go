package netpolicy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

const maxPort = 65535

type kind int

const (
	everything kind = iota // "*"
	aName                  // "example.com"
	below                  // "*.example.com"
	network                // "10.0.0.0/8"
	aPreset                // "pypi"
)

// rule is one rule, or one entry of a preset.
type rule struct {
	key   string // as the caller wrote it
	entry string // the preset's entry; "" for a rule of the caller's own
	allow bool

	kind   kind
	name   string // a domain, without "*.", or a preset's name
	prefix netip.Prefix
	lo, hi uint16
	proto  Proto // "" for both
}

// covers reports whether the rule speaks of a port of a protocol.
func (r *rule) covers(port uint16, proto Proto) bool {
	return r.lo <= port && port <= r.hi && (r.proto == "" || r.proto == proto)
}

// anyPort reports whether the rule speaks of all ports.
func (r *rule) anyPort() bool { return r.lo == 1 && r.hi == maxPort }

// over reports whether r decides rather than o, when both are of the same
// target: the caller's own over a preset's, fewer ports over more, a named
// protocol over none, and deny over allow.
func (r *rule) over(o *rule) bool {
	if o == nil {
		return true
	}
	if own, others := r.entry == "", o.entry == ""; own != others {
		return own
	}
	if a, b := r.hi-r.lo, o.hi-o.lo; a != b {
		return a < b
	}
	if a, b := r.proto != "", o.proto != ""; a != b {
		return a
	}
	return !r.allow && o.allow
}

// rank says how specific a rule's target is, for a name and an address of the
// same connection: everything, every address of a family, something named.
func (r *rule) rank() int {
	switch {
	case r == nil:
		return -1
	case r.kind == everything:
		return 0
	case r.kind == network && r.prefix.Bits() == 0:
		return 1
	}
	return 2
}

// stronger returns that of two rules which decides: the more specific one, or
// that which denies.
func stronger(a, b *rule) *rule {
	ra, rb := a.rank(), b.rank()
	if rb > ra || rb == ra && b != nil && !b.allow {
		return b
	}
	return a
}

// String returns the rule in the form that the documentation prints.
func (r *rule) String() string {
	var s string
	switch r.kind {
	case everything:
		s = "*"
	case aName, aPreset:
		s = r.name
	case below:
		s = "*." + r.name
	case network:
		s = r.prefix.String()
		if r.prefix.IsSingleIP() {
			s = r.prefix.Addr().String()
		}
		if r.prefix.Addr().Is6() && !r.anyPort() {
			s = "[" + s + "]"
		}
	}
	switch {
	case r.anyPort():
	case r.lo == r.hi:
		s += fmt.Sprintf(":%d", r.lo)
	default:
		s += fmt.Sprintf(":%d-%d", r.lo, r.hi)
	}
	if r.proto != "" {
		s += "/" + string(r.proto)
	}
	return s
}

// parseRule reads a rule's key. It does not ask whether there is such a preset.
func parseRule(key string, allow bool) (*rule, error) {
	r := &rule{key: key, allow: allow}
	why := r.parse(key)
	if why == "" && allow {
		why = r.opensNothing()
	}
	if why != "" {
		return nil, &RuleError{key, why}
	}
	return r, nil
}

// parse fills r in and returns what is wrong with s, "" if nothing is.
func (r *rule) parse(s string) string {
	switch {
	case s == "":
		return `want "*", a preset ("pypi"), a domain ("github.com"), an address or a CIDR`
	case len(s) > 300:
		return "it is longer than any name: at most 300 bytes"
	case strings.ContainsFunc(s, func(c rune) bool { return c <= ' ' || c == 0x7f }):
		return "a rule has no spaces"
	case strings.Contains(s, "://"):
		return `a rule is no URL: write the host and the port, such as "github.com:443"`
	}
	s, r.proto, _ = cutProto(s)
	target, ports, why := cutPorts(s)
	if why != "" {
		return why
	}
	if r.lo, r.hi, why = parsePorts(ports); why != "" {
		return why
	}
	if why := r.parseTarget(target); why != "" {
		return why
	}
	return ""
}

// checkPreset checks a rule that names a preset.
func (r *rule) checkPreset() error {
	if _, known := presets()[r.name]; !known {
		return &RuleError{r.key, fmt.Sprintf("there is no preset %.63q: \"opendsecctl network presets\" lists them; a domain of one label is written with a dot at its end", r.name)}
	}
	if !r.anyPort() || r.proto != "" {
		return &RuleError{r.key, fmt.Sprintf("a preset has ports of its own: write %q, or the domain itself with the port", r.name)}
	}
	return nil
}

// cutProto cuts "/tcp" or "/udp" off. What else follows a slash is left: the
// length of a CIDR.
func cutProto(s string) (rest string, proto Proto, found bool) {
	i := strings.LastIndexByte(s, '/')
	if i < 0 {
		return s, "", false
	}
	switch p := Proto(strings.ToLower(s[i+1:])); p {
	case TCP, UDP:
		return s[:i], p, true
	}
	return s, "", false
}

// cutPorts splits a target from what follows its colon.
func cutPorts(s string) (target, ports, why string) {
	if in, ok := strings.CutPrefix(s, "["); ok {
		target, rest, ok := strings.Cut(in, "]")
		if !ok {
			return "", "", `the bracket "[" is not closed`
		}
		if !strings.Contains(target, ":") {
			return "", "", "brackets are for IPv6 addresses only"
		}
		if rest == "" {
			return target, "", ""
		}
		ports, ok := strings.CutPrefix(rest, ":")
		if !ok || ports == "" {
			return "", "", `after "]" want ":port", ":port-port" or nothing; the length of a CIDR goes into the brackets`
		}
		return target, ports, ""
	}
	switch strings.Count(s, ":") {
	case 0:
		return s, "", ""
	case 1:
		target, ports, _ = strings.Cut(s, ":")
		if ports == "" {
			return "", "", "there is no port after the colon"
		}
		return target, ports, ""
	}
	return s, "", "" // an IPv6 address, which has colons of its own
}

// parsePorts reads "443" or "8000-8099"; "" is every port.
func parsePorts(s string) (lo, hi uint16, why string) {
	if s == "" {
		return 1, maxPort, ""
	}
	from, to, isRange := strings.Cut(s, "-")
	if !isRange {
		to = from
	}
	lo, ok := parsePort(from)
	hi, ok2 := parsePort(to)
	switch {
	case strings.Contains(s, "/"):
		return 0, 0, `what follows the ports is not a protocol: only "/tcp" and "/udp" are`
	case !ok || !ok2:
		return 0, 0, fmt.Sprintf("the port %.20q must be a number from 1 to 65535, or two with a dash between", s)
	case lo > hi:
		return 0, 0, fmt.Sprintf("the ports %d-%d are in the wrong order", lo, hi)
	}
	return lo, hi, ""
}

func parsePort(s string) (uint16, bool) {
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return 0, false // ParseUint would take a sign
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint16(n), err == nil && n > 0
}

// parseTarget reads what comes before the port.
func (r *rule) parseTarget(s string) (why string) {
	if s == "*" {
		r.kind = everything
		return ""
	}
	if strings.ContainsAny(s, "/:") || onlyDigitsAndDots(s) {
		r.kind = network
		r.prefix, why = parsePrefix(s)
		return why
	}
	if domain, ok := strings.CutPrefix(s, "*."); ok {
		r.kind = below
		r.name, why = parseDomain(domain)
		return why
	}
	if strings.Contains(s, "*") {
		return `a star stands alone ("*") or before a whole domain ("*.example.com")`
	}
	if !strings.ContainsAny(s, ".。．｡") { // the full stops that IDNA takes for a dot
		r.kind, r.name = aPreset, strings.ToLower(s)
		return ""
	}
	r.kind = aName
	r.name, why = parseDomain(s)
	return why
}

// onlyDigitsAndDots reports whether s is meant for an address, so that
// "10.0.0" or "1.2.3.400" is not taken for a domain.
func onlyDigitsAndDots(s string) bool { return s != "" && strings.Trim(s, "0123456789.") == "" }

// parsePrefix reads an address or a CIDR.
func parsePrefix(s string) (netip.Prefix, string) {
	prefix, err := netip.ParsePrefix(s)
	if !strings.Contains(s, "/") {
		var addr netip.Addr
		addr, err = netip.ParseAddr(s)
		if addr.Zone() != "" {
			return prefix, "an address with a zone means nothing outside its machine: leave the zone out"
		}
		if err == nil {
			prefix = netip.PrefixFrom(addr, addr.BitLen())
		}
	}
	switch {
	case err != nil && strings.Contains(s, ":"):
		return prefix, "not an IPv6 address or CIDR; one with a port is written [2001:db8::1]:443 or [2001:db8::/32]:443"
	case err != nil && strings.Contains(s, "/"):
		return prefix, `not a CIDR, such as 10.0.0.0/8, and not a protocol: only "/tcp" and "/udp" are`
	case err != nil:
		return prefix, "not an IPv4 address, such as 192.0.2.1"
	case prefix.Addr().Is4In6():
		return prefix, "write the IPv4 address itself, without ::ffff:"
	case prefix.Masked() != prefix:
		return prefix, fmt.Sprintf("the address has bits below its length: write %s or a longer one", prefix.Masked())
	}
	return prefix, ""
}

// opensNothing says of a rule that allows why it would be without effect.
func (r *rule) opensNothing() string {
	if r.lo == dnsPort && r.hi == dnsPort {
		return "port 53 is never open: names are answered by the sandbox's own resolver only"
	}
	if r.kind != aName && r.kind != below {
		return ""
	}
	switch {
	case r.lo == dotPort && r.hi == dotPort:
		return "DNS over TLS (port 853) is not opened by name: names are answered by the sandbox's own resolver; a rule for an address or a CIDR opens it"
	case r.lo == quicPort && r.hi == quicPort && r.proto == UDP:
		return "QUIC (UDP port 443) hides the name it speaks to, so it is not opened by name: a rule for an address or a CIDR opens it"
	}
	return ""
}
