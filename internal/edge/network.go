package edge

import (
	"context"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/netgate"
	"github.com/kernflux/opendsec/internal/netpolicy"
)

// Gate is what lets sandboxes' packets out; see package netgate.
type Gate interface {
	// Open begins to serve a sandbox.
	Open(sb netgate.Sandbox) (*netgate.Guard, error)
	// Lack says why sandboxes with rules cannot be made, nil when they can.
	Lack() error
	// Run follows the node's own network until ctx is done.
	Run(ctx context.Context) error
}

// keepEvery is how often the addresses that are open by name, and what was
// denied, are written to the disk, if they changed. Addresses that came after that are
// asked for again, denials are forgotten if the edge is killed.
const keepEvery = time.Second

// network serves a machine's network under the box's rules, as long as its spell
// lasts. A sandbox that is allowed nothing may be without.
func (e *Edge) network(b *box, sp *spell, slot backend.Slot) error {
	if slot.NetNS == "" || e.deps.Gate == nil {
		return nil
	}
	b.netting.Lock()
	defer b.netting.Unlock()
	if err := e.networkLocked(b, sp, slot); err != nil {
		if opens(b.spec().NetworkRules) {
			return err
		}
		e.log.Warn("a sandbox without network rules has no resolver either, and is refused by silence", "sandbox", b.id, "error", err)
	}
	return nil
}

// renetwork is network for a machine of an earlier run, if that is to go on.
func (e *Edge) renetwork(b *box, sp *spell, slot backend.Slot, phase journal.Phase) error {
	if phase != journal.Running && phase != journal.Paused {
		return nil
	}
	return e.network(b, sp, slot)
}

// networkLocked opens the network of a spell that has none. b.netting is held.
func (e *Edge) networkLocked(b *box, sp *spell, slot backend.Slot) error {
	b.mu.Lock()
	rules, pins := b.entry.Spec.NetworkRules, b.entry.Pins
	b.mu.Unlock()
	policy, err := parseRules(rules)
	if err != nil {
		return err
	}
	guard, err := e.deps.Gate.Open(netgate.Sandbox{
		ID: b.id, Slot: slot, Policy: policy, Pins: pins, Pinned: func() { b.pinned.Store(true) }, Denials: b.denials,
	})
	if err != nil {
		f := fault.New(fault.Unavailable, "node %s cannot enforce network rules, so the sandbox has no network: %w", e.cfg.Name, err)
		f.Field = "spec.network_rules"
		return f
	}
	b.mu.Lock()
	sp.guard = guard
	b.mu.Unlock()
	sp.undo.add("close its network", func(context.Context) error { e.closeNetwork(b, sp); return nil })
	return nil
}

// opens reports whether rules allow anything.
func opens(rules map[string]bool) bool {
	for _, allow := range rules {
		if allow {
			return true
		}
	}
	return false
}

func parseRules(rules map[string]bool) (*netpolicy.Policy, error) {
	policy, err := netpolicy.Parse(rules)
	if err != nil {
		return nil, fault.Invalid("network_rules", "%w", err)
	}
	return policy, nil
}

// closeNetwork cuts all that goes out of a machine, and keeps what names have
// led to for its next one. It may be repeated.
func (e *Edge) closeNetwork(b *box, sp *spell) {
	b.mu.Lock()
	guard := sp.guard
	sp.guard = nil
	if guard != nil {
		b.entry.Pins = guard.Pins()
	}
	b.mu.Unlock()
	if guard != nil {
		guard.Close()
	}
}

// guarded returns what serves the box's network, nil for nothing.
func (b *box) guarded() *netgate.Guard {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.spell == nil {
		return nil
	}
	return b.spell.guard
}

// updateNetwork replaces a box's rules and returns the number of this change.
// Calls at the same time, of whichever server, have their order here. The journal
// has the rules first: what a killed edge had not put in force then the next one
// does.
func (e *Edge) updateNetwork(b *box, rules map[string]bool) (revision int64, err error) {
	policy, err := parseRules(rules)
	if err != nil {
		return 0, err
	}
	b.netting.Lock()
	defer b.netting.Unlock()
	b.mu.Lock()
	end, sp, slot := b.entry.End, b.spell, b.entry.Slot
	sync := journal.Lazy
	if b.entry.Phase == journal.Paused {
		sync = journal.Durable // it outlives the host
	}
	b.mu.Unlock()
	if end != nil {
		return 0, endedFault(b.id, *end)
	}
	if sp != nil && slot != nil && b.guarded() == nil && opens(rules) && slot.NetNS != "" && e.deps.Gate != nil {
		if err := e.networkLocked(b, sp, *slot); err != nil {
			return 0, err
		}
	}
	err = e.record(b, sync, func(entry *journal.Entry) {
		entry.Spec.NetworkRules = rules
		entry.NetworkRevision++
		revision = entry.NetworkRevision
	})
	if err != nil {
		return 0, outOfDisk(err)
	}
	e.publish(b.status())
	if guard := b.guarded(); guard != nil {
		err = guard.SetPolicy(policy)
	}
	return revision, err
}

// explain says whether a box may reach something.
func (e *Edge) explain(b *box, target string) (netpolicy.Decision, error) {
	var d netpolicy.Decision
	var err error
	if guard := b.guarded(); guard != nil {
		d, err = guard.Explain(target)
	} else {
		d, err = explainRules(b.spec().NetworkRules, target)
	}
	if err != nil {
		return d, fault.Invalid("target", "%w", err)
	}
	return d, nil
}

// explainRules is explain of a box that has no machine.
func explainRules(rules map[string]bool, target string) (netpolicy.Decision, error) {
	policy, err := netpolicy.Parse(rules)
	if err != nil {
		return netpolicy.Decision{}, err
	}
	q, err := netpolicy.ParseQuery(target)
	if err != nil {
		return netpolicy.Decision{}, err
	}
	return policy.Decide(q), nil
}

// keepNetworks writes to the disk what names have led to and what was denied,
// once in a while.
func (e *Edge) keepNetworks(ctx context.Context) {
	tick := time.NewTicker(keepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			for _, b := range e.all() {
				e.keepPinsOf(b)
				e.keepDenials(b)
			}
		}
	}
}

func (e *Edge) keepPinsOf(b *box) {
	if !b.pinned.Swap(false) || b.end() != nil {
		return
	}
	guard := b.guarded()
	if guard == nil {
		return
	}
	pins := guard.Pins()
	if err := e.record(b, journal.Lazy, func(entry *journal.Entry) { entry.Pins = pins }); err != nil {
		e.log.Error("cannot record what names of a sandbox led to", "sandbox", b.id, "error", err)
	}
}

// keepDenials writes what the box was denied, if that is more than was written.
func (e *Edge) keepDenials(b *box) {
	if b.end() != nil {
		return
	}
	denied, changed := b.denials.Changed()
	if !changed {
		return
	}
	if err := e.journal.WriteDenied(b.id, denied); err != nil && b.end() == nil {
		e.log.Error("cannot record what a sandbox was denied on the network", "sandbox", b.id, "error", err)
	}
}

// recallDenials gives a box of an earlier run what it was denied then.
func (e *Edge) recallDenials(b *box) {
	denied, err := e.journal.ReadDenied(b.id)
	if err != nil {
		e.log.Error("what a sandbox was denied on the network before is not known any more", "sandbox", b.id, "error", err)
	}
	b.denials = netgate.NewDenials(denied)
}

// pinsOf returns what names have led a box to.
func (b *box) pinsOf() []netgate.Pin {
	if guard := b.guarded(); guard != nil {
		return guard.Pins()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.entry.Pins
}
