package watcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// applyAll writes into the records what nodes have said and the records do not
// say yet, because writing it failed when it came.
func (w *Watcher) applyAll(ctx context.Context, now time.Time, live []*sandbox.Sandbox) error {
	records := make(map[sandbox.ID]*sandbox.Sandbox, len(live))
	for _, sb := range live {
		records[sb.ID] = sb
	}
	var failed []error
	for _, n := range w.nodes {
		for id, m := range n.look().machines {
			if sb := records[id]; sb != nil && sb.Node == n.Name && !upToDate(sb, m) {
				failed = append(failed, w.apply(ctx, n.Name, m, now))
			}
		}
	}
	return errors.Join(failed...)
}

// apply writes what a node says of a sandbox into its record: its end, that it
// runs, that it is paused. What the node has no business with is left to
// destroyOrphans. That a sandbox could not be started is the API's to record,
// which may try another node; only when that takes too long it is done here.
func (w *Watcher) apply(ctx context.Context, node string, m machine, now time.Time) error {
	sb, err := w.db.GetSandbox(ctx, m.id)
	switch {
	case fault.Is(err, fault.NotFound):
		return nil
	case err != nil:
		return err
	case sb.Node != node || !sb.State.Alive() || upToDate(sb, m):
		return nil
	case m.end != nil && m.startedAt.IsZero() && sb.State == sandbox.Pending && now.Sub(sb.CreatedAt) < w.cfg.StartGrace:
		return nil
	}
	_, err = w.db.UpdateSandbox(ctx, m.id, func(sb *sandbox.Sandbox) error {
		if sb.Node != node {
			return nil
		}
		return update(sb, m)
	})
	if err != nil {
		return fmt.Errorf("record what node %s says of sandbox %s: %w", node, m.id, err)
	}
	return nil
}

// upToDate reports whether a live record says what its node does, or something
// newer.
func upToDate(sb *sandbox.Sandbox, m machine) bool {
	if m.end != nil {
		return false
	}
	next := *sb
	err := update(&next, m)
	return err == nil && next.State == sb.State && next.PausedAt.Equal(sb.PausedAt) && next.PausedFor == sb.PausedFor && next.NetworkRevision == sb.NetworkRevision
}

// update takes a node's word over into a record: its network rules, if they are
// newer, and how it is. It moves a record to Running,
// Paused or Stopping, or ends it; other states are the API's to record. A
// record is not led back by word that is older than it, and one that the API is
// waking does not follow word of the pause from which it is woken: insist sees
// to it when that stands for too long.
func update(sb *sandbox.Sandbox, m machine) error {
	if sb.StartedAt.IsZero() {
		sb.StartedAt = m.startedAt
	}
	if m.backend != "" {
		sb.Spec.Backend = m.backend
	}
	sb.FollowRules(m.rules, m.revision)
	switch {
	case m.end != nil:
		return sb.Finish(*m.end)
	case m.state == sandbox.Stopping && sb.State.CanBecome(sandbox.Stopping):
		return sb.MoveTo(sandbox.Stopping)
	case m.state == sandbox.Paused && sb.State == sandbox.Pending:
		// It has run and is paused before the API recorded that it started.
		if err := sb.MoveTo(sandbox.Starting); err != nil {
			return err
		}
	}
	if follows(sb, m) {
		return sb.Follow(m.state, m.pausedAt, m.pausedFor)
	}
	return nil
}

// follows reports whether the record is one that goes by whether the machine
// runs or is paused.
func follows(sb *sandbox.Sandbox, m machine) bool {
	return (m.state == sandbox.Running || m.state == sandbox.Paused) &&
		(sb.State == m.state || sb.State.CanBecome(m.state))
}

// insist leads records to what their nodes say where that has been another
// state for too long, whatever is older: an API that died while it woke a
// sandbox has left a record that is Starting, and a node whose clock was set
// back may say of a pause that it took no time.
func (w *Watcher) insist(ctx context.Context, now time.Time, live []*sandbox.Sandbox) error {
	var failed []error
	still := map[finding]bool{}
	views := w.views(now)
	for _, sb := range live {
		m, known := views[sb.Node].machines[sb.ID]
		if !known || m.end != nil || sb.State == m.state || !follows(sb, m) || !upToDate(sb, m) {
			continue
		}
		f := finding{"behind", sb.Node, string(sb.ID)}
		still[f] = true
		grace := w.cfg.Grace
		if sb.State == sandbox.Starting {
			grace = w.cfg.StartGrace
		}
		if w.since(f, now) < grace {
			continue
		}
		w.log.Warn("a record follows its node after a while", "sandbox", sb.ID, "node", sb.Node, "record", sb.State, "machine", m.state)
		_, err := w.db.UpdateSandbox(ctx, sb.ID, func(r *sandbox.Sandbox) error {
			if r.Version != sb.Version {
				return nil // it was changed meanwhile, and is looked at again
			}
			if err := r.MoveTo(m.state); err != nil {
				return err
			}
			r.PausedAt, r.PausedFor = m.pausedAt, m.pausedFor
			return nil
		})
		if err != nil {
			failed = append(failed, fmt.Errorf("record that sandbox %s is %s on node %s: %w", sb.ID, m.state, sb.Node, err))
		}
	}
	w.settle("behind", still)
	return errors.Join(failed...)
}

// forgetEnded lets nodes drop what has ended and is recorded. It waits a while
// after the record so that the API, which keeps what it has read for a second,
// tells a caller how the sandbox ended and not that nobody knows it.
func (w *Watcher) forgetEnded(ctx context.Context, now time.Time) error {
	var failed []error
	still := map[finding]bool{}
	for _, n := range w.nodes {
		var ids []sandbox.ID
		for _, m := range n.look().machines {
			if m.end == nil {
				continue
			}
			recorded, err := w.recorded(ctx, n.Name, m.id)
			if err != nil {
				failed = append(failed, err)
			}
			if !recorded {
				continue
			}
			f := finding{"ended", n.Name, string(m.id)}
			still[f] = true
			if w.since(f, now) >= w.cfg.ForgetAfter {
				ids = append(ids, m.id)
			}
		}
		if len(ids) > 0 && !w.silent(n, now, w.cfg.SilentAfter) {
			failed = append(failed, n.forget(ctx, ids))
		}
	}
	w.settle("ended", still)
	return errors.Join(failed...)
}

// recorded reports whether the end of a sandbox on a node needs no recording
// any more: it is recorded, or no record places the sandbox there.
func (w *Watcher) recorded(ctx context.Context, node string, id sandbox.ID) (bool, error) {
	sb, err := w.db.GetSandbox(ctx, id)
	if fault.Is(err, fault.NotFound) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	return sb.End != nil || sb.Node != node, nil
}

// purge removes records of sandboxes that ended long ago.
func (w *Watcher) purge(ctx context.Context, now time.Time) error {
	n, err := w.db.PurgeEnded(ctx, now.Add(-w.cfg.KeepEnded))
	if n > 0 {
		w.log.Info("removed the records of sandboxes that ended long ago", "count", n)
	}
	return err
}
