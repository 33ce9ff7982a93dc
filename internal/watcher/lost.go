package watcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// failLost ends the records of sandboxes whose node has been silent for so
// long that nobody should wait for it. If it comes back with them they are
// orphans and go. Paused ones whose state is on the node's disk run nowhere and
// are lost only if the node comes back without them.
func (w *Watcher) failLost(ctx context.Context, now time.Time, live []*sandbox.Sandbox) error {
	var failed []error
	still := map[finding]bool{}
	for _, sb := range live {
		if sb.State == sandbox.Paused && sb.Spec.Backend.PausesToDisk() {
			continue
		}
		n := w.byName(sb.Node)
		gone := false
		if n == nil {
			f := finding{kind: "unwatched", node: sb.Node}
			still[f] = true
			gone = w.since(f, now) > w.cfg.LostAfter
		} else {
			gone = w.silent(n, now, w.cfg.LostAfter)
		}
		if !gone {
			continue
		}
		end := sandbox.End{
			Reason: sandbox.ReasonLost, Domain: sandbox.Infra, Time: now,
			Detail: fmt.Sprintf("its node %s has not reported for more than %s", sb.Node, w.cfg.LostAfter),
		}
		if sb.State == sandbox.Stopping {
			end = stoppedEnd(sb, now)
		}
		failed = append(failed, w.finish(ctx, sb.ID, end))
	}
	w.settle("unwatched", still)
	return errors.Join(failed...)
}

// failMissing ends the records of sandboxes that their node, which has told
// all it knows, does not know.
func (w *Watcher) failMissing(ctx context.Context, now time.Time, live []*sandbox.Sandbox) error {
	var failed []error
	still := map[finding]bool{}
	views := w.views(now)
	for _, sb := range live {
		v, heard := views[sb.Node]
		if !heard || sb.State == sandbox.Stopping {
			continue
		}
		if _, known := v.machines[sb.ID]; known {
			continue
		}
		f := finding{"missing", sb.Node, string(sb.ID)}
		still[f] = true
		grace := w.cfg.Grace
		if sb.State == sandbox.Pending || sb.State == sandbox.Starting {
			grace = w.cfg.StartGrace
		}
		if w.since(f, now) < grace {
			continue
		}
		failed = append(failed, w.finish(ctx, sb.ID, sandbox.End{
			Reason: sandbox.ReasonLost, Domain: sandbox.Infra, Time: now,
			Detail: fmt.Sprintf("node %s does not know it", sb.Node),
		}))
	}
	w.settle("missing", still)
	return errors.Join(failed...)
}

// views returns what the nodes that report have said, of those that have told
// all they know.
func (w *Watcher) views(now time.Time) map[string]view {
	out := map[string]view{}
	for _, n := range w.nodes {
		v := n.look()
		if v.complete && now.Sub(v.heard) <= w.cfg.SilentAfter {
			out[n.Name] = v
		}
	}
	return out
}

// destroyOrphans ends machines that no live record places on their node.
func (w *Watcher) destroyOrphans(ctx context.Context, now time.Time, live []*sandbox.Sandbox) error {
	placed := make(map[sandbox.ID]string, len(live))
	for _, sb := range live {
		placed[sb.ID] = sb.Node
	}
	var failed []error
	still := map[finding]bool{}
	for name, v := range w.views(now) {
		for id, m := range v.machines {
			if m.end != nil || placed[id] == name {
				continue
			}
			f := finding{"orphan", name, string(id)}
			still[f] = true
			if w.since(f, now) >= w.cfg.Grace {
				failed = append(failed, w.destroyOrphan(ctx, w.byName(name), id, now))
			}
		}
	}
	w.settle("orphan", still)
	return errors.Join(failed...)
}

func (w *Watcher) destroyOrphan(ctx context.Context, n *node, id sandbox.ID, now time.Time) error {
	// The record may be newer than the list of live ones.
	recorded, err := w.recorded(ctx, n.Name, id)
	if err != nil || !recorded {
		return err
	}
	w.log.Warn("ending a sandbox that no record places on its node", "sandbox", id, "node", n.Name)
	_, err = n.destroy(ctx, id, sandbox.End{
		Reason: sandbox.ReasonLost, Domain: sandbox.Infra, Time: now, Detail: "no record places it on this node",
	})
	if err != nil {
		return fmt.Errorf("end orphan %s on node %s: %w", id, n.Name, err)
	}
	return nil
}
