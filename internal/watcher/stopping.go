package watcher

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

const (
	// stoppingGrace is how long a stop is left to the API, which has begun it.
	stoppingGrace = 20 * time.Second
	// lifetimeGrace is how long past its lifetime a sandbox is left to its
	// node, which keeps deadlines itself.
	lifetimeGrace = 30 * time.Second
)

// stoppedEnd returns the end of a sandbox whose stop was begun, for when its
// node has none to tell.
func stoppedEnd(sb *sandbox.Sandbox, now time.Time) sandbox.End {
	if expired(sb, now) {
		return lifetimeEnd(sb, now)
	}
	return sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Detail: "stopped by a call", Time: now}
}

func lifetimeEnd(sb *sandbox.Sandbox, now time.Time) sandbox.End {
	return sandbox.End{
		Reason: sandbox.ReasonLifetime, Domain: sandbox.Policy, Time: now,
		Detail: fmt.Sprintf("its lifetime of %s has passed", sb.Spec.Deadlines.Lifetime),
	}
}

func expired(sb *sandbox.Sandbox, now time.Time) bool {
	at := sb.ExpiresAt()
	return !at.IsZero() && now.After(at)
}

// finishStopping goes on with stops that the API could not finish.
func (w *Watcher) finishStopping(ctx context.Context, now time.Time, live []*sandbox.Sandbox) error {
	var failed []error
	still := map[finding]bool{}
	for _, sb := range live {
		if sb.State != sandbox.Stopping {
			continue
		}
		f := finding{"stopping", sb.Node, string(sb.ID)}
		still[f] = true
		n := w.byName(sb.Node)
		if w.since(f, now) < stoppingGrace || n == nil || w.silent(n, now, w.cfg.SilentAfter) {
			continue
		}
		failed = append(failed, w.stop(ctx, n, sb, now))
	}
	w.settle("stopping", still)
	return errors.Join(failed...)
}

func (w *Watcher) stop(ctx context.Context, n *node, sb *sandbox.Sandbox, now time.Time) error {
	end := stoppedEnd(sb, now)
	first, err := n.destroy(ctx, sb.ID, end)
	if err != nil {
		return fmt.Errorf("go on stopping sandbox %s on node %s: %w", sb.ID, n.Name, err)
	}
	if first != nil {
		end = *first
	}
	return w.finish(ctx, sb.ID, end)
}

// endExpired stops sandboxes whose node has let their lifetime pass. Idle
// times are known to the node only.
func (w *Watcher) endExpired(ctx context.Context, now time.Time, live []*sandbox.Sandbox) error {
	var failed []error
	for _, sb := range live {
		if sb.State == sandbox.Stopping || !expired(sb, now.Add(-lifetimeGrace)) {
			continue
		}
		n := w.byName(sb.Node)
		if n == nil || w.silent(n, now, w.cfg.SilentAfter) {
			continue // it ends with its node, or when that is back
		}
		record, err := w.db.UpdateSandbox(ctx, sb.ID, func(sb *sandbox.Sandbox) error {
			if !sb.State.Alive() || !expired(sb, now.Add(-lifetimeGrace)) {
				return nil // its lifetime was changed meanwhile, or it was paused
			}
			return sb.MoveTo(sandbox.Stopping)
		})
		if err != nil {
			failed = append(failed, err)
			continue
		}
		if record.State == sandbox.Stopping {
			failed = append(failed, w.stop(ctx, n, record, now))
		}
	}
	return errors.Join(failed...)
}
