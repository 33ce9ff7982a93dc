package store

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// keyLife is how long an idempotency key holds.
const keyLife = 24 * time.Hour

// Idempotency names a call that may be repeated. With an empty Key every call
// is a new one.
type Idempotency struct {
	Caller string // whose key it is
	Key    string // as the caller gave it
	// RequestHash tells requests apart: a key that comes again with another
	// hash is refused.
	RequestHash string
}

// NodeUsage is a node and what its live sandboxes hold.
type NodeUsage struct {
	Node Node
	Used sandbox.Resources
}

// ProjectUsage is a project and what its live sandboxes, and those of the
// projects below it, hold.
type ProjectUsage struct {
	Project Project
	Used    sandbox.Resources
}

// Place says on which node a sandbox is to be, or refuses it. It gets all nodes
// by name, and the sandbox's project and those above it, the sandbox's first;
// what was admitted before it in the same call is in the sums. It runs inside
// the transaction: it must be quick and must not use the database.
type Place func(sb *sandbox.Sandbox, nodes []NodeUsage, projects []ProjectUsage) (node string, err error)

// ErrLeaveOut is returned by a Place to leave its sandbox out and go on with
// the others. Any other error admits none.
var ErrLeaveOut = errors.New("leave this sandbox out")

// CreateSandbox is CreateSandboxes for one.
func (db *DB) CreateSandbox(ctx context.Context, sb *sandbox.Sandbox, key Idempotency, place Place) (existing *sandbox.Sandbox, err error) {
	all, err := db.CreateSandboxes(ctx, []*sandbox.Sandbox{sb}, key, place)
	if err != nil || len(all) == 0 {
		return nil, err
	}
	return all[0], nil
}

// CreateSandboxes admits, places and records sandboxes of one project in one
// transaction: no two calls ever see the same room. Each gets its node and
// version 1. Nothing is recorded when place refuses one, but for those that it
// leaves out with ErrLeaveOut, whose Node stays "".
//
// When the key was used within the last 24 hours (before the first sandbox's
// creation time), what was made then is returned and nothing is recorded; with
// another request hash the error is InvalidArgument for idempotency_key.
// NotFound means that the project does not exist.
func (db *DB) CreateSandboxes(ctx context.Context, sbs []*sandbox.Sandbox, key Idempotency, place Place) (existing []*sandbox.Sandbox, err error) {
	if len(sbs) == 0 {
		return nil, errors.New("create sandboxes: none were given")
	}
	err = db.inTx(ctx, []int64{admission}, func(tx *sql.Tx) error {
		a := admitter{tx: tx, key: key, project: sbs[0].Project, now: sbs[0].CreatedAt}
		existing, err = a.repeated(ctx)
		if err != nil || existing != nil {
			return err
		}
		return a.admit(ctx, sbs, place)
	})
	if err != nil {
		return nil, err
	}
	return existing, nil
}

// admitter is one call of CreateSandboxes.
type admitter struct {
	tx      *sql.Tx
	key     Idempotency
	project sandbox.Project
	now     time.Time
}

// repeated returns what an earlier call with the same key made, nil for none.
func (a admitter) repeated(ctx context.Context) ([]*sandbox.Sandbox, error) {
	if a.key.Key == "" {
		return nil, nil
	}
	var hash, ids string
	err := a.tx.QueryRowContext(ctx, `SELECT request_hash, sandboxes FROM idempotency
		WHERE caller = $1 AND project = $2 AND key = $3 AND created_at > $4`,
		a.key.Caller, a.project, a.key.Key, toDB(a.now.Add(-keyLife))).Scan(&hash, &ids)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("look up the idempotency key: %w", err)
	}
	if hash != a.key.RequestHash {
		return nil, fault.Invalid("idempotency_key", "idempotency key %q was used for another request; take a new one", a.key.Key)
	}
	var all []*sandbox.Sandbox
	for _, id := range strings.Fields(ids) {
		sb, err := getSandbox(ctx, a.tx, sandbox.ID(id))
		if fault.Is(err, fault.NotFound) {
			continue // purged long after its end
		}
		if err != nil {
			return nil, err
		}
		all = append(all, sb)
	}
	return all, nil
}

// admit places and records the sandboxes.
func (a admitter) admit(ctx context.Context, sbs []*sandbox.Sandbox, place Place) error {
	projects, err := lineage(ctx, a.tx, a.project)
	if err != nil {
		return err
	}
	nodes, err := listNodes(ctx, a.tx)
	if err != nil {
		return err
	}
	sums, err := sumsOf(ctx, a.tx)
	if err != nil {
		return err
	}
	nodeUse, projectUse := sums.nodes(nodes), sums.projects(projects)
	var ids []string
	for _, sb := range sbs {
		if sb.Project != a.project {
			return fmt.Errorf("create sandboxes: %s is of project %s, the first of %s", sb.ID, sb.Project, a.project)
		}
		node, err := place(sb, nodeUse, projectUse)
		if errors.Is(err, ErrLeaveOut) {
			sb.Node = ""
			continue
		}
		if err != nil {
			return err
		}
		sb.Node, sb.Version = node, 1
		sb.CreatedAt = fromDB(toDB(sb.CreatedAt))
		if err := insertSandbox(ctx, a.tx, sb); err != nil {
			return err
		}
		ids = append(ids, string(sb.ID))
		for i := range nodeUse {
			if nodeUse[i].Node.Name == node {
				nodeUse[i].Used = nodeUse[i].Used.Add(sb.Holds())
			}
		}
		for i := range projectUse {
			projectUse[i].Used = projectUse[i].Used.Add(sb.Holds())
		}
	}
	return a.remember(ctx, ids)
}

// remember records what the key stands for from now on.
func (a admitter) remember(ctx context.Context, ids []string) error {
	if a.key.Key == "" || len(ids) == 0 {
		return nil
	}
	_, err := a.tx.ExecContext(ctx, `INSERT INTO idempotency (caller, project, key, request_hash, sandboxes, created_at)
		VALUES ($1, $2, $3, $4, $5, $6)
		ON CONFLICT (caller, project, key) DO UPDATE SET request_hash = excluded.request_hash,
		sandboxes = excluded.sandboxes, created_at = excluded.created_at`,
		a.key.Caller, a.project, a.key.Key, a.key.RequestHash, strings.Join(ids, " "), toDB(a.now))
	if err != nil {
		return fmt.Errorf("record the idempotency key: %w", err)
	}
	return nil
}

// sum is what the live sandboxes of one project on one node hold.
type sum struct {
	node    string
	project sandbox.Project
	used    sandbox.Resources
}

type sums []sum

func sumsOf(ctx context.Context, q querier) (sums, error) {
	all, err := collect(ctx, q, func(row scanner) (sum, error) {
		var s sum
		err := row.Scan(&s.node, &s.project, &s.used.CPU, &s.used.MemoryMB, &s.used.DiskMB, &s.used.Sandboxes)
		return s, err
	}, `SELECT node, project, SUM(held_cpu), CAST(SUM(held_memory_mb) AS BIGINT), CAST(SUM(held_disk_mb) AS BIGINT), COUNT(*)
		FROM sandboxes WHERE `+live+` GROUP BY node, project`)
	if err != nil {
		return nil, fmt.Errorf("sum up what sandboxes hold: %w", err)
	}
	return all, nil
}

// without returns the sums as they are when a sandbox that is in them is left out.
func (all sums) without(sb *sandbox.Sandbox) sums {
	return append(all, sum{node: sb.Node, project: sb.Project, used: sandbox.Resources{}.Sub(sb.Holds())})
}

func (all sums) nodes(nodes []Node) []NodeUsage {
	out := make([]NodeUsage, len(nodes))
	for i, n := range nodes {
		out[i].Node = n
		for _, s := range all {
			if s.node == n.Name {
				out[i].Used = out[i].Used.Add(s.used)
			}
		}
	}
	return out
}

func (all sums) projects(projects []Project) []ProjectUsage {
	out := make([]ProjectUsage, len(projects))
	for i, p := range projects {
		out[i].Project = p
		for _, s := range all {
			if p.Path.Contains(s.project) {
				out[i].Used = out[i].Used.Add(s.used)
			}
		}
	}
	return out
}

// NodeUsages returns all nodes by name with what their live sandboxes hold.
func (db *DB) NodeUsages(ctx context.Context) ([]NodeUsage, error) {
	nodes, err := listNodes(ctx, db.read)
	if err != nil {
		return nil, err
	}
	all, err := sumsOf(ctx, db.read)
	if err != nil {
		return nil, err
	}
	return all.nodes(nodes), nil
}
