package store

import (
	"context"
	"database/sql"
	"encoding/hex"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Change is a transaction over projects, callers, grants and tokens.
type Change struct {
	tx *sql.Tx
}

// Change runs do in one transaction, one at a time, and records entry with the
// outcome "done" in it: no change without its record. When do fails nothing is
// changed, and entry is recorded with the error's kind as its outcome.
func (db *DB) Change(ctx context.Context, entry Audit, do func(*Change) error) error {
	err := db.inTx(ctx, []int64{identity, admission}, func(tx *sql.Tx) error {
		if err := do(&Change{tx}); err != nil {
			return err
		}
		entry.Outcome = "done"
		return addAudit(ctx, tx, entry)
	})
	if err == nil {
		return nil
	}
	entry.Outcome = string(fault.Of(err).Kind)
	return errors.Join(err, db.AddAudit(context.WithoutCancel(ctx), entry))
}

// Caller is a person or a program that calls the API.
type Caller struct {
	Name      string
	Grants    []role.Grant // by project
	CreatedAt time.Time
}

// Token is a token without its secret.
type Token struct {
	ID          string
	Caller      string
	Hash        []byte // of its secret
	Description string
	CreatedAt   time.Time
	ExpiresAt   time.Time // zero for never
	RevokedAt   time.Time // zero while it holds
}

func noCaller(name string) error {
	e := fault.New(fault.NotFound, "there is no caller %s", name)
	e.Field = "caller"
	return e
}

// GetCaller returns a caller with its grants; NotFound when there is none.
func (db *DB) GetCaller(ctx context.Context, name string) (Caller, error) {
	return getCaller(ctx, db.read, name)
}

// GetCaller is DB.GetCaller as the transaction sees it.
func (c *Change) GetCaller(ctx context.Context, name string) (Caller, error) {
	return getCaller(ctx, c.tx, name)
}

func getCaller(ctx context.Context, q querier, name string) (Caller, error) {
	all, err := callers(ctx, q, `WHERE callers.name = $1`, name)
	if err != nil {
		return Caller{}, fmt.Errorf("read caller %s: %w", name, err)
	}
	if len(all) == 0 {
		return Caller{}, noCaller(name)
	}
	return all[0], nil
}

// ListCallers returns all callers by name.
func (db *DB) ListCallers(ctx context.Context) ([]Caller, error) {
	all, err := callers(ctx, db.read, ``)
	if err != nil {
		return nil, fmt.Errorf("list callers: %w", err)
	}
	return all, nil
}

func callers(ctx context.Context, q querier, where string, args ...any) ([]Caller, error) {
	rows, err := q.QueryContext(ctx, `SELECT callers.name, callers.created_at, grants.project, grants.role
		FROM callers LEFT JOIN grants ON grants.caller = callers.name `+where, args...)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	byName := map[string]*Caller{}
	for rows.Next() {
		var name string
		var created int64
		var project, r sql.NullString
		if err := rows.Scan(&name, &created, &project, &r); err != nil {
			return nil, err
		}
		c := byName[name]
		if c == nil {
			c = &Caller{Name: name, CreatedAt: fromDB(created)}
			byName[name] = c
		}
		if project.Valid {
			c.Grants = append(c.Grants, role.Grant{Project: sandbox.Project(project.String), Role: role.Role(r.String)})
		}
	}
	if err := rows.Err(); err != nil {
		return nil, err
	}
	all := make([]Caller, 0, len(byName))
	for _, c := range byName {
		slices.SortFunc(c.Grants, func(a, b role.Grant) int { return strings.Compare(string(a.Project), string(b.Project)) })
		all = append(all, *c)
	}
	slices.SortFunc(all, func(a, b Caller) int { return strings.Compare(a.Name, b.Name) })
	return all, nil
}

// CreateCaller makes a caller with its grants; AlreadyExists when it is there,
// NotFound when a project is not.
func (c *Change) CreateCaller(ctx context.Context, caller Caller) error {
	_, err := c.tx.ExecContext(ctx, `INSERT INTO callers (name, created_at) VALUES ($1, $2)`, caller.Name, toDB(caller.CreatedAt))
	if isDuplicate(err) {
		return fault.New(fault.AlreadyExists, "there is a caller %s already", caller.Name)
	}
	if err != nil {
		return fmt.Errorf("record caller %s: %w", caller.Name, err)
	}
	for _, g := range caller.Grants {
		if err := c.putGrant(ctx, caller.Name, g); err != nil {
			return err
		}
	}
	return nil
}

// DeleteCaller deletes a caller with its grants and tokens; NotFound when
// there is none, WrongState when it is the last admin of the topmost project.
func (c *Change) DeleteCaller(ctx context.Context, name string) error {
	before, err := getCaller(ctx, c.tx, name)
	if err != nil {
		return err
	}
	if _, err := c.tx.ExecContext(ctx, `DELETE FROM callers WHERE name = $1`, name); err != nil {
		return fmt.Errorf("delete caller %s: %w", name, err)
	}
	return c.keepAnAdmin(ctx, before)
}

// SetGrant gives a caller a role on a project instead of the one it had there;
// "" takes that away. It returns the caller; NotFound when the caller or the
// project does not exist, WrongState when it would leave the topmost project
// without an admin.
func (c *Change) SetGrant(ctx context.Context, caller string, g role.Grant) (Caller, error) {
	before, err := getCaller(ctx, c.tx, caller)
	if err != nil {
		return Caller{}, err
	}
	if g.Role != "" {
		if err := c.putGrant(ctx, caller, g); err != nil {
			return Caller{}, err
		}
	} else {
		_, err := c.tx.ExecContext(ctx, `DELETE FROM grants WHERE caller = $1 AND project = $2`, caller, g.Project)
		if err != nil {
			return Caller{}, fmt.Errorf("take away the role of caller %s on %s: %w", caller, g.Project, err)
		}
	}
	if err := c.keepAnAdmin(ctx, before); err != nil {
		return Caller{}, err
	}
	return getCaller(ctx, c.tx, caller)
}

func (c *Change) putGrant(ctx context.Context, caller string, g role.Grant) error {
	if _, err := getProject(ctx, c.tx, g.Project); err != nil {
		return err
	}
	_, err := c.tx.ExecContext(ctx, `INSERT INTO grants (caller, project, role) VALUES ($1, $2, $3)
		ON CONFLICT (caller, project) DO UPDATE SET role = excluded.role`, caller, g.Project, g.Role)
	if err != nil {
		return fmt.Errorf("give caller %s the role %s on %s: %w", caller, g.Role, g.Project, err)
	}
	return nil
}

// keepAnAdmin refuses a change to a caller, given as it was before, after which
// nobody could manage the topmost project.
func (c *Change) keepAnAdmin(ctx context.Context, before Caller) error {
	if !role.Allows(before.Grants, role.Root, role.Admin) {
		return nil
	}
	var left int64
	err := c.tx.QueryRowContext(ctx, `SELECT COUNT(*) FROM grants WHERE project = $1 AND role = $2`, role.Root, role.Admin).Scan(&left)
	if err != nil {
		return fmt.Errorf("count the admins of %s: %w", role.Root, err)
	}
	if left == 0 {
		return fault.New(fault.WrongState, "caller %s is the last admin on project %s; make another one first", before.Name, role.Root)
	}
	return nil
}

const tokenColumns = `id, caller, hash, description, created_at, expires_at, revoked_at`

func scanToken(row scanner) (Token, error) {
	var t Token
	var hash string
	var created, expires, revoked int64
	err := row.Scan(&t.ID, &t.Caller, &hash, &t.Description, &created, &expires, &revoked)
	if err != nil {
		return Token{}, err
	}
	t.CreatedAt, t.ExpiresAt, t.RevokedAt = fromDB(created), fromDB(expires), fromDB(revoked)
	if t.Hash, err = hex.DecodeString(hash); err != nil {
		return Token{}, fmt.Errorf("read the hash of token %s: %w", t.ID, err)
	}
	return t, nil
}

// GetToken returns a token, also one that has ended; NotFound when there is
// none.
func (db *DB) GetToken(ctx context.Context, id string) (Token, error) {
	return getToken(ctx, db.read, id)
}

// GetToken is DB.GetToken as the transaction sees it.
func (c *Change) GetToken(ctx context.Context, id string) (Token, error) {
	return getToken(ctx, c.tx, id)
}

func getToken(ctx context.Context, q querier, id string) (Token, error) {
	t, err := scanToken(q.QueryRowContext(ctx, `SELECT `+tokenColumns+` FROM tokens WHERE id = $1`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return Token{}, noToken(id)
	}
	if err != nil {
		return Token{}, fmt.Errorf("read token %s: %w", id, err)
	}
	return t, nil
}

func noToken(id string) error {
	e := fault.New(fault.NotFound, "there is no token %s", id)
	e.Field = "id"
	return e
}

// ListTokens returns a caller's tokens that were not revoked, newest first.
func (db *DB) ListTokens(ctx context.Context, caller string) ([]Token, error) {
	all, err := collect(ctx, db.read, scanToken, `SELECT `+tokenColumns+` FROM tokens
		WHERE caller = $1 AND revoked_at = 0 ORDER BY created_at DESC, id`, caller)
	if err != nil {
		return nil, fmt.Errorf("list the tokens of caller %s: %w", caller, err)
	}
	return all, nil
}

// CountTokens returns how many tokens of a caller hold at the time.
func (c *Change) CountTokens(ctx context.Context, caller string, now time.Time) (int64, error) {
	var n int64
	err := c.tx.QueryRowContext(ctx, `SELECT COUNT(*) FROM tokens
		WHERE caller = $1 AND revoked_at = 0 AND (expires_at = 0 OR expires_at > $2)`, caller, toDB(now)).Scan(&n)
	if err != nil {
		return 0, fmt.Errorf("count the tokens of caller %s: %w", caller, err)
	}
	return n, nil
}

// CreateToken records a token; NotFound when its caller does not exist.
func (c *Change) CreateToken(ctx context.Context, t Token) error {
	_, err := c.tx.ExecContext(ctx, `INSERT INTO tokens (`+tokenColumns+`) VALUES ($1, $2, $3, $4, $5, $6, $7)`,
		t.ID, t.Caller, hex.EncodeToString(t.Hash), t.Description, toDB(t.CreatedAt), toDB(t.ExpiresAt), toDB(t.RevokedAt))
	if isDangling(err) {
		return noCaller(t.Caller)
	}
	if err != nil {
		return fmt.Errorf("record token %s: %w", t.ID, err)
	}
	return nil
}

// RevokeToken ends a token at the time; one that was revoked stays as it is.
// NotFound when there is none.
func (c *Change) RevokeToken(ctx context.Context, id string, now time.Time) error {
	n, err := affected(c.tx.ExecContext(ctx, `UPDATE tokens SET revoked_at = CASE WHEN revoked_at = 0 THEN $1 ELSE revoked_at END
		WHERE id = $2`, toDB(now), id))
	if err != nil {
		return fmt.Errorf("revoke token %s: %w", id, err)
	}
	if n == 0 {
		return noToken(id)
	}
	return nil
}
