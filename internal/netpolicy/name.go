package netpolicy

import (
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

// mapped turns a name in any script into the form that is asked of DNS, as
// browsers do. Underscores stay: names of services have them.
var mapped = idna.New(idna.MapForLookup(), idna.Transitional(false), idna.BidiRule(), idna.StrictDomainName(false))

// NormalName returns the one form of a name that DNS is asked for: in lower
// case and without a dot at its end. It reports false for what no rule can
// mean: a label that is empty, longer than 63, or of other characters than
// letters, digits, dashes and underscores, or more than 253 characters in all.
func NormalName(s string) (string, bool) {
	s = strings.TrimSuffix(s, ".")
	if s == "" || len(s) > 253 {
		return "", false
	}
	label, upper := 0, false
	for i := range len(s) {
		switch c := s[i]; {
		case c == '.':
			if label == 0 {
				return "", false
			}
			label = 0
			continue
		case 'a' <= c && c <= 'z', '0' <= c && c <= '9', c == '-', c == '_':
		case 'A' <= c && c <= 'Z':
			upper = true
		default:
			return "", false
		}
		if label++; label > 63 {
			return "", false
		}
	}
	if label == 0 {
		return "", false
	}
	if upper {
		s = strings.ToLower(s)
	}
	return s, true
}

// parseDomain reads the domain of a rule, in any script.
func parseDomain(s string) (name, why string) {
	const want = `not a domain: want labels of letters, digits and dashes, up to 63 each and 253 in all, such as "example.com"`
	if strings.ContainsFunc(s, func(c rune) bool { return c > 0x7f }) || strings.Contains(strings.ToLower(s), "xn--") {
		ascii, err := mapped.ToASCII(s)
		if err == nil && utf8.ValidString(s) {
			s, err = mapped.ToASCII(ascii) // what it made must be a name to it too
		}
		if err != nil || s != ascii {
			return "", want + "; a name in another script must be one that IDNA knows"
		}
	}
	name, ok := NormalName(s)
	if !ok {
		return "", want
	}
	last := name[strings.LastIndexByte(name, '.')+1:]
	if onlyDigitsAndDots(last) {
		return "", "neither an IPv4 address nor a domain: no domain ends in a number"
	}
	for label := range strings.SplitSeq(name, ".") {
		if strings.HasPrefix(label, "-") || strings.HasSuffix(label, "-") {
			return "", "a domain's label neither begins nor ends with a dash"
		}
	}
	return name, ""
}

// local are domains whose names mean something on one machine or in one
// network only. "*" does not cover them: who means them names them.
var local = []string{"localhost", "local", "internal", "home.arpa", "onion", "invalid"}

// isLocal reports whether "*" leaves a name out: one of the local domains, of
// one label, of digits at its end, or the reverse name of no public address.
func (p *Policy) isLocal(name string) bool {
	i := strings.LastIndexByte(name, '.')
	if i < 0 || onlyDigitsAndDots(name[i+1:]) {
		return true
	}
	if slices.ContainsFunc(local, func(d string) bool { return isBelow(name, d) || name == d }) {
		return true
	}
	if isBelow(name, "in-addr.arpa") || isBelow(name, "ip6.arpa") {
		addr := reverse(name)
		return !addr.IsValid() || p.guarded(addr) != nil
	}
	return false
}

// isBelow reports whether a name is a part of a domain, and not the domain itself.
func isBelow(name, domain string) bool {
	rest, ok := strings.CutSuffix(name, domain)
	return ok && strings.HasSuffix(rest, ".")
}

// reverse returns the address whose reverse name this is, none if it is not the
// name of one whole address.
func reverse(name string) netip.Addr {
	if rest, ok := strings.CutSuffix(name, ".in-addr.arpa"); ok {
		labels := strings.Split(rest, ".")
		if len(labels) != 4 {
			return netip.Addr{}
		}
		slices.Reverse(labels)
		addr, _ := netip.ParseAddr(strings.Join(labels, "."))
		return addr
	}
	rest, ok := strings.CutSuffix(name, ".ip6.arpa")
	nibbles := strings.Split(rest, ".")
	if !ok || len(nibbles) != 32 {
		return netip.Addr{}
	}
	var a [16]byte
	for i, n := range nibbles {
		v, err := strconv.ParseUint(n, 16, 4)
		if err != nil || len(n) != 1 {
			return netip.Addr{}
		}
		a[15-i/2] |= byte(v) << (4 * (i % 2))
	}
	return netip.AddrFrom16(a)
}
