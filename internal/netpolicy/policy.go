// Package netpolicy says what a sandbox may reach. It reads the rules that a
// caller writes, such as {"pypi": true, "10.1.0.0/16:5432": true}, and answers
// with one piece of code all who ask: the DNS proxy (may this name be resolved,
// may this answer pass), the packet filter (which addresses and ports are
// open), the check of names on connections, and the caller who asks why.
//
// It is functions of their arguments only: it resolves no name, opens no
// socket and installs no filter. docs/concepts/network.md is its specification;
// the package's tests read the tables there.
package netpolicy

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
)

// MaxRules is how many rules a sandbox may have. A preset counts as one.
const MaxRules = 256

// Proto is a transport protocol.
type Proto string

// The protocols that can leave a sandbox.
const (
	TCP Proto = "tcp"
	UDP Proto = "udp"
)

var protos = []Proto{TCP, UDP}

// Policy is what a set of rules means. It is never changed, so any number of
// goroutines may ask it. The zero Policy, and nil, allow nothing.
type Policy struct {
	rules map[string]bool // as written

	any   []*rule            // "*"
	exact map[string][]*rule // "example.com"
	wild  map[string][]*rule // "*.example.com", by "example.com"
	nets  [][]*rule          // addresses and CIDRs: the longest first, those of one CIDR together
	deny  []*rule            // those of exact and wild that deny

	host guard
}

// Parse reads rules: what may be reached, and true to allow or false to deny
// it. Its error has a *RuleError for each rule that is wrong.
func Parse(rules map[string]bool) (*Policy, error) {
	if len(rules) > MaxRules {
		return nil, fmt.Errorf("%d network rules: at most %d", len(rules), MaxRules)
	}
	p := &Policy{rules: maps.Clone(rules)}
	var wrong []error
	said := map[rule]string{} // what has been said, by which key
	for _, key := range slices.Sorted(maps.Keys(rules)) {
		r, err := parseRule(key, rules[key])
		if err == nil && r.kind == aPreset {
			err = r.checkPreset()
		}
		if err != nil {
			wrong = append(wrong, err)
			continue
		}
		same := *r
		same.key, same.allow = "", false
		if other, ok := said[same]; ok && rules[other] != rules[key] {
			wrong = append(wrong, &RuleError{key, fmt.Sprintf("the rule %q says the opposite of the same thing: keep one of them", other)})
			continue
		} else if ok {
			continue
		}
		said[same] = key
		p.add(r)
	}
	if len(wrong) > 0 {
		return nil, errors.Join(wrong...)
	}
	p.arrange()
	return p, nil
}

// RuleError says what is wrong with a rule.
type RuleError struct {
	Rule string // its key, as written
	Why  string // and what would be right
}

func (e *RuleError) Error() string { return fmt.Sprintf("network rule %.100q: %s", e.Rule, e.Why) }

// add takes a rule in; those that a preset stands for in its place.
func (p *Policy) add(r *rule) {
	switch r.kind {
	case everything:
		p.any = append(p.any, r)
	case aName:
		if p.exact == nil {
			p.exact = map[string][]*rule{}
		}
		p.exact[r.name] = append(p.exact[r.name], r)
	case below:
		if p.wild == nil {
			p.wild = map[string][]*rule{}
		}
		p.wild[r.name] = append(p.wild[r.name], r)
	case network:
		p.nets = append(p.nets, []*rule{r})
	case aPreset:
		for _, e := range presets()[r.name].entries {
			e.key, e.entry, e.allow = r.key, e.String(), r.allow
			if !r.allow {
				e.lo, e.hi, e.proto = 1, maxPort, "" // denied is denied on every port
			}
			p.add(&e)
		}
		return
	}
	if !r.allow && (r.kind == aName || r.kind == below) {
		p.deny = append(p.deny, r)
	}
}

// arrange puts the rules for addresses in order, those of one CIDR together.
func (p *Policy) arrange() {
	slices.SortStableFunc(p.nets, func(a, b []*rule) int {
		return cmp.Or(b[0].prefix.Bits()-a[0].prefix.Bits(), a[0].prefix.Addr().Compare(b[0].prefix.Addr()))
	})
	var grouped [][]*rule
	for _, n := range p.nets {
		if i := len(grouped) - 1; i >= 0 && grouped[i][0].prefix == n[0].prefix {
			grouped[i] = append(grouped[i], n...)
			continue
		}
		grouped = append(grouped, n)
	}
	p.nets = grouped
}

// Rules returns a copy of what the policy was read from.
func (p *Policy) Rules() map[string]bool {
	if p == nil {
		return nil
	}
	return maps.Clone(p.rules)
}

// Host is what a policy must know of the machine that enforces it.
type Host struct {
	// Own are addresses of the machine itself. A rule opens one of them only by
	// naming it: a CIDR around it does not.
	Own []netip.Addr
	// Never are addresses that no rule opens, such as those of other sandboxes.
	Never []netip.Prefix
	// NAT64 are prefixes of /96 that a translator of the network gives IPv4
	// addresses, besides the well-known 64:ff9b::/96.
	NAT64 []netip.Prefix
}

// On returns the same policy on a host, in place of the one it was on. The
// error names an entry of h that cannot be.
func (p *Policy) On(h Host) (*Policy, error) {
	g, err := newGuard(h)
	if err != nil {
		return nil, err
	}
	q := Policy{}
	if p != nil {
		q = *p
	}
	q.host = g
	return &q, nil
}
