package store

import (
	"context"
	"database/sql"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

const (
	sandboxColumns = `id, project, caller, state, node, image_digest, spec, parent, created_at, started_at,
		paused_at, paused_for, network_revision, revoked_urls, ended_at, end_reason, end_domain, end_detail, version`
	// live is the condition of the indexes sandboxes_live…; both must say the same.
	live = `state NOT IN ('stopped', 'failed')`
)

func scanSandbox(row scanner) (*sandbox.Sandbox, error) {
	var (
		sb                        sandbox.Sandbox
		spec, revoked             []byte
		created, started, ended   int64
		pausedAt, pausedForMicros int64
		end                       sandbox.End
	)
	err := row.Scan(&sb.ID, &sb.Project, &sb.Caller, &sb.State, &sb.Node, &sb.ImageDigest, &spec, &sb.Parent, &created, &started,
		&pausedAt, &pausedForMicros, &sb.NetworkRevision, &revoked, &ended, &end.Reason, &end.Domain, &end.Detail, &sb.Version)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(spec, &sb.Spec); err != nil {
		return nil, fmt.Errorf("read the spec of sandbox %s: %w", sb.ID, err)
	}
	if len(revoked) > 0 {
		if err := json.Unmarshal(revoked, &sb.RevokedURLs); err != nil {
			return nil, fmt.Errorf("read the revoked addresses of sandbox %s: %w", sb.ID, err)
		}
	}
	sb.CreatedAt, sb.StartedAt = fromDB(created), fromDB(started)
	sb.PausedAt, sb.PausedFor = fromDB(pausedAt), fromMicros(pausedForMicros)
	if end.Reason != "" {
		end.Time = fromDB(ended)
		sb.End = &end
	}
	return &sb, nil
}

func insertSandbox(ctx context.Context, tx *sql.Tx, sb *sandbox.Sandbox) error {
	r, err := rowOf(sb)
	if err != nil {
		return err
	}
	_, err = tx.ExecContext(ctx, `INSERT INTO sandboxes (id, project, caller, parent, created_at, version, state, node, image_digest, spec,
		held_cpu, held_memory_mb, held_disk_mb, started_at, paused_at, paused_for, network_revision, revoked_urls, ended_at, end_reason, end_domain, end_detail)
		VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, $18, $19, $20, $21, $22)`,
		append([]any{sb.ID, sb.Project, sb.Caller, sb.Parent, toDB(sb.CreatedAt), sb.Version}, r.args()...)...)
	switch {
	case isDuplicate(err):
		return fault.New(fault.AlreadyExists, "there is a sandbox %s already", sb.ID)
	case isDangling(err):
		return noProject(sb.Project)
	case err != nil:
		return fmt.Errorf("record sandbox %s: %w", sb.ID, err)
	}
	return insertLabels(ctx, tx, sb)
}

func insertLabels(ctx context.Context, tx *sql.Tx, sb *sandbox.Sandbox) error {
	for _, name := range slices.Sorted(maps.Keys(sb.Spec.Labels)) {
		_, err := tx.ExecContext(ctx, `INSERT INTO sandbox_labels (sandbox, name, value) VALUES ($1, $2, $3)`,
			sb.ID, name, sb.Spec.Labels[name])
		if err != nil {
			return fmt.Errorf("record the labels of sandbox %s: %w", sb.ID, err)
		}
	}
	return nil
}

// GetSandbox returns a sandbox; NotFound when there is no record of it.
func (db *DB) GetSandbox(ctx context.Context, id sandbox.ID) (*sandbox.Sandbox, error) {
	return getSandbox(ctx, db.read, id)
}

func getSandbox(ctx context.Context, q querier, id sandbox.ID) (*sandbox.Sandbox, error) {
	sb, err := scanSandbox(q.QueryRowContext(ctx, `SELECT `+sandboxColumns+` FROM sandboxes WHERE id = $1`, id))
	if errors.Is(err, sql.ErrNoRows) {
		return nil, fault.New(fault.NotFound, "there is no sandbox %s", id)
	}
	if err != nil {
		return nil, fmt.Errorf("read sandbox %s: %w", id, err)
	}
	return sb, nil
}

// UpdateSandbox changes a record: it reads it, has change alter it, and writes
// it if it is still as it was read, or else begins anew, so change may run more
// than once and must only alter its argument. An error of change is returned
// as it is and writes nothing; a change that alters nothing writes nothing
// either. Id, project, caller, parent and creation time cannot be changed. The sandbox
// returned is as it is recorded now.
func (db *DB) UpdateSandbox(ctx context.Context, id sandbox.ID, change func(*sandbox.Sandbox) error) (*sandbox.Sandbox, error) {
	for {
		sb, err := db.GetSandbox(ctx, id)
		if err != nil {
			return nil, err
		}
		before, err := rowOf(sb)
		if err != nil {
			return nil, err
		}
		keep, labels := *sb, maps.Clone(sb.Spec.Labels)
		if err := change(sb); err != nil {
			return nil, err
		}
		sb.ID, sb.Project, sb.Caller, sb.Parent, sb.CreatedAt, sb.Version =
			keep.ID, keep.Project, keep.Caller, keep.Parent, keep.CreatedAt, keep.Version
		after, err := rowOf(sb)
		if err != nil {
			return nil, err
		}
		if before == after {
			return sb, nil
		}
		written, err := db.swap(ctx, sb, after, !maps.Equal(labels, sb.Spec.Labels))
		if err != nil {
			return nil, fmt.Errorf("update sandbox %s: %w", id, err)
		}
		if written {
			return sb, nil
		}
	}
}

// row holds the columns of a sandbox that can change.
type row struct {
	state  sandbox.State
	node   string
	digest string
	spec   string
	// held is what Sandbox.Holds says, so that the sums of admission, which the
	// database makes, are of what it says.
	held      sandbox.Resources
	started   int64
	pausedAt  int64
	pausedFor int64
	network   int64 // revision
	revoked   string
	ended     int64
	end       sandbox.End // without its time
}

func rowOf(sb *sandbox.Sandbox) (row, error) {
	spec, err := json.Marshal(sb.Spec)
	if err != nil {
		return row{}, fmt.Errorf("encode the spec of sandbox %s: %w", sb.ID, err)
	}
	r := row{
		state: sb.State, node: sb.Node, digest: sb.ImageDigest, spec: string(spec), held: sb.Holds(),
		started: toDB(sb.StartedAt), pausedAt: toDB(sb.PausedAt), pausedFor: sb.PausedFor.Microseconds(),
		network: sb.NetworkRevision,
	}
	if len(sb.RevokedURLs) > 0 {
		revoked, err := json.Marshal(sb.RevokedURLs)
		if err != nil {
			return row{}, fmt.Errorf("encode the revoked addresses of sandbox %s: %w", sb.ID, err)
		}
		r.revoked = string(revoked)
	}
	if sb.End != nil {
		r.ended, r.end = toDB(sb.End.Time), *sb.End
		r.end.Time = time.Time{}
	}
	return r, nil
}

// args returns the columns in the order that the statements name them in.
func (r row) args() []any {
	return []any{
		r.state, r.node, r.digest, r.spec, r.held.CPU, r.held.MemoryMB, r.held.DiskMB,
		r.started, r.pausedAt, r.pausedFor, r.network, r.revoked, r.ended, r.end.Reason, r.end.Domain, r.end.Detail,
	}
}

// settle makes the sandbox what was recorded of it.
func (r row) settle(sb *sandbox.Sandbox) {
	sb.StartedAt, sb.PausedAt, sb.PausedFor = fromDB(r.started), fromDB(r.pausedAt), fromMicros(r.pausedFor)
	if sb.End != nil {
		sb.End.Time = fromDB(r.ended)
	}
}

// write writes the row if the record's version is still the sandbox's, and
// makes the sandbox what is recorded then.
func (r row) write(ctx context.Context, q querier, sb *sandbox.Sandbox) (written bool, err error) {
	n, err := affected(q.ExecContext(ctx, `UPDATE sandboxes SET state = $1, node = $2, image_digest = $3, spec = $4,
		held_cpu = $5, held_memory_mb = $6, held_disk_mb = $7, started_at = $8, paused_at = $9, paused_for = $10,
		network_revision = $11, revoked_urls = $12, ended_at = $13, end_reason = $14, end_domain = $15, end_detail = $16,
		version = version + 1 WHERE id = $17 AND version = $18`, append(r.args(), sb.ID, sb.Version)...))
	if err != nil || n == 0 {
		return false, err
	}
	sb.Version++
	r.settle(sb)
	return true, nil
}

// swap is row.write, with the labels if they changed.
func (db *DB) swap(ctx context.Context, sb *sandbox.Sandbox, r row, labels bool) (written bool, err error) {
	if !labels {
		return r.write(ctx, db.write, sb)
	}
	version := sb.Version
	err = db.inTx(ctx, nil, func(tx *sql.Tx) error {
		if written, err = r.write(ctx, tx, sb); err != nil || !written {
			return err
		}
		if _, err := tx.ExecContext(ctx, `DELETE FROM sandbox_labels WHERE sandbox = $1`, sb.ID); err != nil {
			return err
		}
		return insertLabels(ctx, tx, sb)
	})
	if err != nil {
		sb.Version = version
		return false, err
	}
	return written, nil
}

// SandboxFilter says which sandboxes are wanted. Its zero value wants all that
// live.
type SandboxFilter struct {
	Project sandbox.Project // of this project and those below it; "" for all
	States  []sandbox.State // in one of these; none means all that live, or with Ended all
	Ended   bool            // whether ended ones are included when States names none
	Labels  map[string]string
	Node    string // on this node; "" for all
	// PageToken is Next of an earlier page with the same filter; "" begins.
	PageToken string
	// Limit is how many at most; 0 means 100, and 1000 is the most.
	Limit int
}

// SandboxPage is a part of a list.
type SandboxPage struct {
	Sandboxes []*sandbox.Sandbox
	Next      string // the token of the next page, "" on the last
}

// ListSandboxes returns sandboxes, newest first. A sandbox that is there
// throughout is in exactly one of the pages, whatever happens between them.
// InvalidArgument names page_token when that is not one of ours.
func (db *DB) ListSandboxes(ctx context.Context, f SandboxFilter) (SandboxPage, error) {
	limit := f.Limit
	if limit <= 0 {
		limit = 100
	}
	limit = min(limit, 1000)
	where, err := f.where()
	if err != nil {
		return SandboxPage{}, err
	}
	query := `SELECT ` + sandboxColumns + ` FROM sandboxes` + where.String() +
		` ORDER BY created_at DESC, id DESC LIMIT ` + strconv.Itoa(limit+1)
	all, err := collect(ctx, db.read, scanSandbox, query, where.args...)
	if err != nil {
		return SandboxPage{}, fmt.Errorf("list sandboxes: %w", err)
	}
	page := SandboxPage{Sandboxes: all}
	if len(all) > limit {
		page.Sandboxes = all[:limit]
		page.Next = pageToken(all[limit-1])
	}
	return page, nil
}

func (f SandboxFilter) where() (*conditions, error) {
	w := new(conditions)
	if f.Project != "" {
		w.below("project", f.Project)
	}
	switch {
	case len(f.States) > 0:
		w.in("state", f.States)
	case !f.Ended:
		w.add(live)
	}
	if f.Node != "" {
		w.add(`node = ?`, f.Node)
	}
	for _, name := range slices.Sorted(maps.Keys(f.Labels)) {
		w.add(`id IN (SELECT sandbox FROM sandbox_labels WHERE name = ? AND value = ?)`, name, f.Labels[name])
	}
	if f.PageToken != "" {
		created, id, err := parsePageToken(f.PageToken)
		if err != nil {
			return nil, err
		}
		w.add(`(created_at, id) < (?, ?)`, created, id)
	}
	return w, nil
}

func pageToken(last *sandbox.Sandbox) string {
	return base64.RawURLEncoding.EncodeToString(fmt.Appendf(nil, "%d.%s", toDB(last.CreatedAt), last.ID))
}

func parsePageToken(token string) (created int64, id sandbox.ID, err error) {
	bad := fault.Invalid("page_token", "page token %q is none of this list; begin without one", token)
	data, derr := base64.RawURLEncoding.DecodeString(token)
	if derr != nil {
		return 0, "", bad
	}
	us, rest, ok := strings.Cut(string(data), ".")
	created, nerr := strconv.ParseInt(us, 10, 64)
	id, ierr := sandbox.ParseID(rest)
	if !ok || nerr != nil || ierr != nil {
		return 0, "", bad
	}
	return created, id, nil
}

// conditions are the parts of a WHERE clause, all of which must hold.
type conditions struct {
	parts []string
	args  []any
}

// add takes a condition with a ? for each argument.
func (c *conditions) add(part string, args ...any) {
	for _, a := range args {
		c.args = append(c.args, a)
		part = strings.Replace(part, "?", "$"+strconv.Itoa(len(c.args)), 1)
	}
	c.parts = append(c.parts, part)
}

func (c *conditions) in(column string, states []sandbox.State) {
	args := make([]any, len(states))
	for i, s := range states {
		args[i] = s
	}
	c.add(column+` IN (?`+strings.Repeat(`, ?`, len(states)-1)+`)`, args...)
}

// below asks for a project and those below it. Text is compared by its bytes
// and not in the database's collation.
func (c *conditions) below(column string, p sandbox.Project) {
	prefix := string(p) + "/"
	c.add(`(`+column+` = ? OR substr(`+column+`, 1, `+strconv.Itoa(len(prefix))+`) = ?)`, p, prefix)
}

func (c *conditions) String() string {
	if len(c.parts) == 0 {
		return ""
	}
	return " WHERE " + strings.Join(c.parts, " AND ")
}

// LiveOnNode returns the sandboxes that the records place on a node and that
// have not ended, oldest first.
func (db *DB) LiveOnNode(ctx context.Context, node string) ([]*sandbox.Sandbox, error) {
	all, err := collect(ctx, db.read, scanSandbox,
		`SELECT `+sandboxColumns+` FROM sandboxes WHERE node = $1 AND `+live+` ORDER BY created_at, id`, node)
	if err != nil {
		return nil, fmt.Errorf("list the sandboxes of node %s: %w", node, err)
	}
	return all, nil
}

// PurgeEnded removes the records of sandboxes that ended before the time, and
// the idempotency keys that had expired then. It returns how many sandboxes it
// removed.
func (db *DB) PurgeEnded(ctx context.Context, before time.Time) (int64, error) {
	n, err := affected(db.write.ExecContext(ctx, `DELETE FROM sandboxes WHERE ended_at > 0 AND ended_at < $1`, toDB(before)))
	if err != nil {
		return 0, fmt.Errorf("remove ended sandboxes: %w", err)
	}
	_, err = db.write.ExecContext(ctx, `DELETE FROM idempotency WHERE created_at < $1`, toDB(before.Add(-keyLife)))
	if err != nil {
		return n, fmt.Errorf("remove expired idempotency keys: %w", err)
	}
	return n, nil
}
