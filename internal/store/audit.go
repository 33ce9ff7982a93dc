package store

import (
	"context"
	"fmt"
	"strconv"
	"time"
)

// Audit is an entry of the audit log: who did what to what, and how it ended.
type Audit struct {
	Time    time.Time
	Caller  string
	TokenID string // "" when no token was used, such as at installation
	Action  string // the procedure, such as "CreateToken"
	Subject string // what it was done to
	Outcome string // "done", or the kind of the error
}

// AddAudit records an entry.
func (db *DB) AddAudit(ctx context.Context, a Audit) error { return addAudit(ctx, db.write, a) }

func addAudit(ctx context.Context, q querier, a Audit) error {
	_, err := q.ExecContext(ctx, `INSERT INTO audit (time, caller, token_id, action, subject, outcome)
		VALUES ($1, $2, $3, $4, $5, $6)`, toDB(a.Time), a.Caller, a.TokenID, a.Action, a.Subject, a.Outcome)
	if err != nil {
		return fmt.Errorf("record %s of %s in the audit log: %w", a.Action, a.Subject, err)
	}
	return nil
}

// ListAudit returns the newest entries from before the time, newest first, at
// most limit.
func (db *DB) ListAudit(ctx context.Context, before time.Time, limit int) ([]Audit, error) {
	all, err := collect(ctx, db.read, func(row scanner) (Audit, error) {
		var a Audit
		var at int64
		err := row.Scan(&at, &a.Caller, &a.TokenID, &a.Action, &a.Subject, &a.Outcome)
		a.Time = fromDB(at)
		return a, err
	}, `SELECT time, caller, token_id, action, subject, outcome FROM audit WHERE time < $1
		ORDER BY time DESC LIMIT `+strconv.Itoa(limit), toDB(before))
	if err != nil {
		return nil, fmt.Errorf("list the audit log: %w", err)
	}
	return all, nil
}
