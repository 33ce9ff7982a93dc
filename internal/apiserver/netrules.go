package apiserver

import (
	"net/netip"
	"regexp"
	"strconv"
	"strings"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

const maxRules = 256

// rulesNotInForce is what a sandbox with rules that open something is warned of.
const rulesNotInForce = "network rules are kept but not in force yet: this version's network is closed"

var (
	presetForm = regexp.MustCompile(`^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$`)
	domainForm = regexp.MustCompile(`^(\*\.)?([A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9])?\.)+[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?\.?$`)
)

// checkRules checks the form of each rule's key: "*", a preset, a domain, an
// address or a CIDR, with or without a port.
func checkRules(s *sandbox.Spec) error {
	if len(s.NetworkRules) > maxRules {
		return fault.Invalid("spec.network_rules", "%d network rules: at most %d", len(s.NetworkRules), maxRules)
	}
	for key := range s.NetworkRules {
		if why := wrongRule(key); why != "" {
			return fault.Invalid("spec.network_rules", "network rule %.80q: %s", key, why)
		}
	}
	return nil
}

// wrongRule says what is wrong with a rule's key, "" when nothing is.
func wrongRule(key string) string {
	const forms = `want "*", a preset ("pypi"), a domain ("github.com"), an address or a CIDR, each with ":port" if need be`
	target := key
	if _, err := netip.ParseAddr(key); err == nil {
		return "" // an IPv6 address has colons of its own
	}
	if _, err := netip.ParsePrefix(key); err == nil {
		return ""
	}
	if i := strings.LastIndexByte(key, ':'); i >= 0 {
		port, err := strconv.ParseUint(key[i+1:], 10, 16)
		if err != nil || port == 0 {
			return "the port must be from 1 to 65535"
		}
		target = key[:i]
	}
	if in, ok := strings.CutPrefix(target, "["); ok {
		target = strings.TrimSuffix(in, "]")
	}
	if _, err := netip.ParseAddr(target); err == nil {
		return ""
	}
	if strings.Contains(target, "/") {
		if _, err := netip.ParsePrefix(target); err != nil {
			return "not a CIDR, such as 10.0.0.0/8"
		}
		return ""
	}
	if target == "*" || presetForm.MatchString(target) && !allDigits(target) {
		return ""
	}
	if len(target) <= 253 && domainForm.MatchString(target) && !looksLikeAddress(target) {
		return ""
	}
	return forms
}

func allDigits(s string) bool { return strings.Trim(s, "0123456789") == "" }

// looksLikeAddress reports whether s is of digits and dots only, so that
// "10.0.0" or "1.2.3.400" is not taken for a domain.
func looksLikeAddress(s string) bool { return strings.Trim(s, "0123456789.") == "" }

// warnings says what the caller of a sandbox should know.
func warnings(sb *sandbox.Sandbox) []string {
	for _, open := range sb.Spec.NetworkRules {
		if open {
			return []string{rulesNotInForce}
		}
	}
	return nil
}
