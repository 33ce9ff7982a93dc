package store

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// MoveSandbox places a sandbox that has not run yet on another node, in one
// transaction like CreateSandboxes. The place gets no projects: the sandbox has
// been admitted before and counts in their sums already. The error is a
// sandbox.WrongStateError when the sandbox is neither pending nor starting, or
// has run: what was paused can be woken where it is only.
func (db *DB) MoveSandbox(ctx context.Context, id sandbox.ID, place Place) (moved *sandbox.Sandbox, err error) {
	err = db.inTx(ctx, []int64{admission}, func(tx *sql.Tx) error {
		sb, err := getSandbox(ctx, tx, id)
		if err != nil {
			return err
		}
		if sb.State != sandbox.Pending && sb.State != sandbox.Starting || !sb.StartedAt.IsZero() {
			return &sandbox.WrongStateError{ID: id, State: sb.State, Want: sandbox.Pending}
		}
		nodes, err := listNodes(ctx, tx)
		if err != nil {
			return err
		}
		all, err := sumsOf(ctx, tx)
		if err != nil {
			return err
		}
		sb.Node, err = place(sb, all.nodes(nodes), nil)
		if err != nil {
			return err
		}
		_, err = tx.ExecContext(ctx, `UPDATE sandboxes SET node = $1, version = version + 1 WHERE id = $2`, sb.Node, id)
		if err != nil {
			return fmt.Errorf("move sandbox %s to node %s: %w", id, sb.Node, err)
		}
		sb.Version++
		moved = sb
		return nil
	})
	if err != nil {
		return nil, err
	}
	return moved, nil
}

// WakeSandbox moves a paused sandbox to starting if place lets it, in one
// transaction like CreateSandboxes: awake it holds more than paused. The place
// gets nodes and projects whose sums leave this sandbox out, and may return the
// sandbox's own node only. A sandbox that runs or is starting is returned as it
// is; in another state the error is a sandbox.WrongStateError. Since when it is
// paused stays recorded until it runs.
func (db *DB) WakeSandbox(ctx context.Context, id sandbox.ID, place Place) (woken *sandbox.Sandbox, err error) {
	err = db.inTx(ctx, []int64{admission}, func(tx *sql.Tx) error {
		for {
			sb, err := getSandbox(ctx, tx, id)
			if err != nil {
				return err
			}
			if sb.State == sandbox.Running || sb.State == sandbox.Starting {
				woken = sb
				return nil
			}
			written, err := wake(ctx, tx, sb, place)
			if err != nil {
				return err
			}
			if written {
				woken = sb
				return nil
			}
			// On PostgreSQL others write records meanwhile; it is read again.
		}
	})
	if err != nil {
		return nil, err
	}
	return woken, nil
}

// wake is one attempt of WakeSandbox; written is false if the record was
// changed since it was read.
func wake(ctx context.Context, tx *sql.Tx, sb *sandbox.Sandbox, place Place) (written bool, err error) {
	if sb.State != sandbox.Paused {
		return false, &sandbox.WrongStateError{ID: sb.ID, State: sb.State, Want: sandbox.Running}
	}
	projects, err := lineage(ctx, tx, sb.Project)
	if err != nil {
		return false, err
	}
	nodes, err := listNodes(ctx, tx)
	if err != nil {
		return false, err
	}
	all, err := sumsOf(ctx, tx)
	if err != nil {
		return false, err
	}
	others := all.without(sb)
	node, err := place(sb, others.nodes(nodes), others.projects(projects))
	if err != nil {
		return false, err
	}
	if node != sb.Node {
		return false, fmt.Errorf("wake sandbox %s: it was placed on node %q, and its state is on %q", sb.ID, node, sb.Node)
	}
	if err := sb.MoveTo(sandbox.Starting); err != nil {
		return false, err
	}
	r, err := rowOf(sb)
	if err != nil {
		return false, err
	}
	if written, err = r.write(ctx, tx, sb); err != nil {
		return false, fmt.Errorf("wake sandbox %s: %w", sb.ID, err)
	}
	return written, nil
}

// ForgetKey makes an idempotency key of a project free again, because the call
// that used it has failed and may be repeated.
func (db *DB) ForgetKey(ctx context.Context, project sandbox.Project, key Idempotency) error {
	if key.Key == "" {
		return nil
	}
	_, err := db.write.ExecContext(ctx, `DELETE FROM idempotency WHERE caller = $1 AND project = $2 AND key = $3 AND request_hash = $4`,
		key.Caller, project, key.Key, key.RequestHash)
	if err != nil {
		return fmt.Errorf("forget an idempotency key: %w", err)
	}
	return nil
}
