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
// sandbox.WrongStateError when the sandbox is neither pending nor starting.
func (db *DB) MoveSandbox(ctx context.Context, id sandbox.ID, place Place) (moved *sandbox.Sandbox, err error) {
	err = db.inTx(ctx, []int64{admission}, func(tx *sql.Tx) error {
		sb, err := getSandbox(ctx, tx, id)
		if err != nil {
			return err
		}
		if sb.State != sandbox.Pending && sb.State != sandbox.Starting {
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
