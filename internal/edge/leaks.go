package edge

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/host"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// leak is a thing on the node that belongs to no sandbox, or a sandbox that
// should be here and is not.
type leak struct {
	kind     leakKind
	name     string
	detail   string
	repaired bool

	remove func(context.Context) error // nil when there is nothing to remove
}

// leakKind is the word that the API has for a kind.
type leakKind string

const (
	leakProcess leakKind = "process"
	leakNetNS   leakKind = "netns"
	leakLink    leakKind = "link"
	leakMount   leakKind = "mount"
	leakCgroup  leakKind = "cgroup"
	leakLoop    leakKind = "loop"
	leakFile    leakKind = "file"
	leakRecord  leakKind = "record"
)

// settleTime is how long after a first look a second one is made. What is on
// its way in or out is found by one of them at most.
const settleTime = 500 * time.Millisecond

// findLeaks compares what should be on the node with what is. recorded names
// the sandboxes that the records place here and that live. What is found twice
// is a leak; with repair it is removed.
func (e *Edge) findLeaks(ctx context.Context, recorded []string, repair bool) ([]leak, error) {
	first, err := e.scanAll(ctx, recorded)
	if err != nil || len(first) == 0 {
		return nil, err
	}
	select {
	case <-time.After(settleTime):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	second, err := e.scanAll(ctx, recorded)
	if err != nil {
		return nil, err
	}
	var leaks []leak
	for _, l := range second {
		same := func(o leak) bool { return o.kind == l.kind && o.name == l.name }
		if slices.ContainsFunc(first, same) {
			leaks = append(leaks, l)
		}
	}
	if repair {
		for i := range leaks {
			leaks[i].repaired = e.repair(ctx, leaks[i])
		}
	}
	return leaks, nil
}

// repair removes a leak and reports whether that is done.
func (e *Edge) repair(ctx context.Context, l leak) bool {
	if l.remove == nil {
		return false
	}
	if err := l.remove(ctx); err != nil {
		e.log.Error("cannot remove a leak", "kind", l.kind, "name", l.name, "error", err)
		return false
	}
	return true
}

// scanAll looks for leaks of all kinds. Not to have looked is an error, and not
// the same as to have found nothing.
func (e *Edge) scanAll(ctx context.Context, recorded []string) ([]leak, error) {
	leaks, err := e.scan(ctx)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, fmt.Errorf("look for leaks: %w", err)
	}
	return append(leaks, e.scanRecords(recorded)...), nil
}

// scan looks for all kinds of leaks but those of records. With an error it
// returns what it found in spite of it.
func (e *Edge) scan(ctx context.Context) ([]leak, error) {
	var leaks []leak
	var errs []error
	for _, look := range []struct {
		what string
		at   func(context.Context, *ownership) ([]leak, error)
	}{
		// Users before what they use: that is the order in which things can be removed.
		{"what backends made", e.scanBackends},
		{"mounts", e.scanMounts},
		{"loop devices", e.scanLoops},
		{"network slots", e.scanSlots},
		{"files", e.scanFiles},
	} {
		found, err := look.at(ctx, e.ownership())
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", look.what, err))
		}
		leaks = append(leaks, found...)
	}
	return unique(leaks), errors.Join(errs...)
}

// unique leaves out what was found by two looks.
func unique(leaks []leak) []leak {
	type key struct {
		kind leakKind
		name string
	}
	seen := map[key]bool{}
	return slices.DeleteFunc(leaks, func(l leak) bool {
		k := key{l.kind, l.name}
		dup := seen[k]
		seen[k] = true
		return dup
	})
}

// ownership is which sandboxes may have things on the node.
type ownership struct {
	holds map[sandbox.ID]bool // what is theirs is in order
	ended map[sandbox.ID]bool // of these there is an entry and nothing else
	knows map[sandbox.ID]bool // all that have an entry
	slots map[string]bool
}

// ownership is taken anew for each look. A half-made sandbox of an earlier run
// that has no handle owns nothing: what there is of it can only be found this way.
func (e *Edge) ownership() *ownership {
	o := &ownership{holds: map[sandbox.ID]bool{}, ended: map[sandbox.ID]bool{}, knows: map[sandbox.ID]bool{}, slots: map[string]bool{}}
	for _, b := range e.all() {
		o.knows[b.id] = true
		o.ended[b.id] = b.status().End != nil
		if b.owns() {
			o.holds[b.id] = true
		}
		b.mu.Lock()
		if b.entry.Slot != nil {
			o.slots[b.entry.Slot.Name] = true
		}
		b.mu.Unlock()
	}
	return o
}

// owns reports whether what bears the box's id is the box's.
func (b *box) owns() bool {
	select {
	case <-b.ended:
		return false
	default:
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.entry.Handle != nil || !b.old || b.waking
}

func (o *ownership) ids() []sandbox.ID {
	ids := make([]sandbox.ID, 0, len(o.holds))
	for id := range o.holds {
		ids = append(ids, id)
	}
	return ids
}

// scanBackends asks the backends for what they left.
func (e *Edge) scanBackends(ctx context.Context, o *ownership) ([]leak, error) {
	var leaks []leak
	var errs []error
	for _, b := range e.deps.Backends {
		auditor, ok := b.(backend.Auditor)
		if !ok {
			continue
		}
		left, err := auditor.Audit(ctx, o.ids())
		if err != nil {
			errs = append(errs, fmt.Errorf("backend %s: %w", b.Name(), err))
		}
		for _, l := range left {
			leaks = append(leaks, leak{
				kind: kindOf(l.Kind), name: l.Name, detail: describeLeftover(b.Name(), l),
				remove: func(ctx context.Context) error { return auditor.Remove(ctx, l) },
			})
		}
	}
	return leaks, errors.Join(errs...)
}

func kindOf(k backend.LeftoverKind) leakKind {
	switch k {
	case backend.LeftoverProcess:
		return leakProcess
	case backend.LeftoverNetNS:
		return leakNetNS
	case backend.LeftoverLink:
		return leakLink
	case backend.LeftoverMount:
		return leakMount
	case backend.LeftoverCgroup:
		return leakCgroup
	case backend.LeftoverLoop:
		return leakLoop
	case backend.LeftoverFile, backend.LeftoverContainer:
		return leakFile
	}
	return leakKind(k)
}

func describeLeftover(name sandbox.Backend, l backend.Leftover) string {
	text := fmt.Sprintf("of backend %s", name)
	if l.ID != "" {
		text += fmt.Sprintf(", made for sandbox %s, which does not live", l.ID)
	}
	if l.Detail != "" {
		text += ": " + l.Detail
	}
	return text
}

// ownerOf returns the sandbox in whose directory a path is.
func (e *Edge) ownerOf(path string) (sandbox.ID, bool) {
	rest, ok := strings.CutPrefix(path, e.journal.Root()+"/")
	if !ok {
		return "", false
	}
	name, _, _ := strings.Cut(rest, "/")
	return sandbox.ID(name), true
}

// scanMounts looks in all mount namespaces for mounts in the directories of
// sandboxes that do not live.
func (e *Edge) scanMounts(_ context.Context, o *ownership) ([]leak, error) {
	mounts, err := host.Mounts(func(m host.Mount) bool {
		id, ok := e.ownerOf(m.Point)
		return ok && !o.holds[id]
	})
	if err != nil {
		return nil, err
	}
	var leaks []leak
	for _, m := range slices.Backward(mounts) { // a mount on a mount comes later in the list
		leaks = append(leaks, leak{
			kind: leakMount, name: m.Point, detail: fmt.Sprintf("in the mount namespace of process %d", m.PID),
			remove: func(context.Context) error { return host.Unmount(m) },
		})
	}
	return leaks, nil
}

// scanLoops looks for loop devices on files of sandboxes that do not live.
func (e *Edge) scanLoops(_ context.Context, o *ownership) ([]leak, error) {
	loops, err := host.Loops()
	if err != nil {
		return nil, err
	}
	var leaks []leak
	for _, l := range loops {
		id, ok := e.ownerOf(l.Backing)
		if !ok || o.holds[id] && !l.Deleted {
			continue
		}
		leaks = append(leaks, leak{
			kind: leakLoop, name: l.Device, detail: "on " + l.Backing,
			remove: func(context.Context) error { return host.DetachLoop(l) },
		})
	}
	return leaks, nil
}

// scanSlots looks for network slots that are neither a sandbox's nor the pool's.
func (e *Edge) scanSlots(_ context.Context, o *ownership) ([]leak, error) {
	names, err := netslot.List(e.prefix)
	if err != nil {
		return nil, err
	}
	var leaks []leak
	for _, name := range names {
		if o.slots[name] || e.deps.Slots.Holds(name) {
			continue
		}
		leaks = append(leaks, leak{
			kind: leakNetNS, name: name, detail: "a network slot that no sandbox uses",
			remove: func(context.Context) error { return netslot.Remove(name) },
		})
	}
	return leaks, nil
}

// scanFiles looks at the journal's directory: for what is no sandbox's, and for
// what ended ones have beside their entry.
func (e *Edge) scanFiles(_ context.Context, o *ownership) ([]leak, error) {
	names, err := e.journal.Names()
	if err != nil {
		return nil, err
	}
	var leaks []leak
	for _, name := range names {
		id := sandbox.ID(name)
		switch {
		case !o.knows[id]:
			leaks = append(leaks, leak{
				kind: leakFile, name: filepath.Join(e.journal.Root(), name), detail: "belongs to no sandbox",
				remove: func(context.Context) error { return e.removeStray(name) },
			})
		case o.ended[id]:
			for _, dir := range []string{e.journal.MachineDir(id), e.journal.SavedDir(id)} {
				if _, err := os.Lstat(dir); err == nil {
					leaks = append(leaks, leak{
						kind: leakFile, name: dir, detail: "belongs to a sandbox that has ended",
						remove: func(context.Context) error { return e.journal.RemoveFiles(id) },
					})
				}
			}
		}
	}
	return leaks, nil
}

// removeStray removes what is in the journal's directory and no entry, unless
// something is mounted in it: then the removal would reach what is mounted.
func (e *Edge) removeStray(name string) error {
	mounts, err := host.Mounts(func(m host.Mount) bool {
		id, ok := e.ownerOf(m.Point)
		return ok && string(id) == name
	})
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("%s is still mounted in it", mounts[0].Point)
	}
	return e.journal.RemoveStray(name)
}

// scanRecords compares the sandboxes here with those that the records place
// here. One that came a moment ago may not be in a list that was made before.
func (e *Edge) scanRecords(recorded []string) []leak {
	const moment = 5 * time.Second
	var leaks []leak
	want := map[sandbox.ID]bool{}
	for _, id := range recorded {
		want[sandbox.ID(id)] = true
		if e.find(sandbox.ID(id)) == nil {
			leaks = append(leaks, leak{kind: leakRecord, name: id, detail: "is recorded as living here; the node knows nothing of it"})
		}
	}
	for _, b := range e.all() {
		if want[b.id] || !b.owns() || e.now().Sub(b.arrived) < moment {
			continue
		}
		leaks = append(leaks, leak{
			kind: leakRecord, name: string(b.id), detail: "lives here; no record places it here",
			remove: func(ctx context.Context) error { return e.destroyOrphan(ctx, b.id) },
		})
	}
	return leaks
}

func (e *Edge) destroyOrphan(ctx context.Context, id sandbox.ID) error {
	st, known, err := e.destroy(ctx, id, sandbox.End{
		Reason: sandbox.ReasonLost, Domain: sandbox.Infra, Time: e.now(), Detail: "no record places it on its node",
	})
	if err == nil && known && st.State.Alive() {
		err = fault.New(fault.Unavailable, "sandbox %s is not removed yet", id)
	}
	return err
}
