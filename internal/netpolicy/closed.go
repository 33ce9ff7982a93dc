package netpolicy

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// closed are ranges that no rule opens on any node: flows begin at the node
// itself, where these addresses mean the node, or nothing.
var closed = []Range{
	v("0.0.0.0/8", "this network"),
	v("127.0.0.0/8", "loopback"),
	v("192.0.0.0/29", "the sandboxes' links"),
	v("224.0.0.0/4", "multicast"),
	v("255.255.255.255/32", "broadcast"),
	v("::/127", "unspecified and loopback"),
	v("fd5e:c0de:5eed::/48", "the sandboxes' links"),
	v("fe80::/10", "link-local"), // would want a link's name
	v("ff00::/8", "multicast"),
}

// Closed returns the ranges that no rule opens on any node, for Host.Never.
func Closed() []netip.Prefix {
	all := make([]netip.Prefix, len(closed))
	for i, r := range closed {
		all[i] = r.Prefix
	}
	return all
}

// Check is Parse for rules that somebody gives: it refuses in addition a rule
// that allows only what is closed on every node, which its writer would take to
// be open. Rules that were accepted before are still good for Parse.
func Check(rules map[string]bool) error {
	if _, err := Parse(rules); err != nil {
		return err
	}
	var wrong []error
	for _, key := range slices.Sorted(maps.Keys(rules)) {
		if !rules[key] {
			continue
		}
		r, err := parseRule(key, true)
		if err != nil {
			return err
		}
		if r.kind != network {
			continue
		}
		if in := closedIn(r.prefix); in != nil {
			wrong = append(wrong, &RuleError{key, fmt.Sprintf("no rule opens %s (%s): connections are made by the node, for which it means something else; leave the rule out, the sandbox's own servers need none", in.Prefix, in.What)})
		}
	}
	return errors.Join(wrong...)
}

// closedIn returns the closed range that a CIDR lies in, nil for none.
func closedIn(p netip.Prefix) *Range {
	for i, r := range closed {
		for _, form := range everywhere.forms(r.Prefix) {
			if within(p, form) {
				return &closed[i]
			}
		}
	}
	return nil
}
