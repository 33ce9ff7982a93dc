package store

import (
	"context"
	"fmt"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
)

// Node is one machine of the cluster.
type Node struct {
	Name     string
	Address  string    // "https://host:port" of its edge
	Report   []byte    // its last report, JSON as the watcher wrote it
	LastSeen time.Time // when that came
	Drained  bool      // whether it was taken out of placement; only SetDrained changes it
}

const nodeColumns = `name, address, report, last_seen, drained`

func scanNode(row scanner) (Node, error) {
	var n Node
	var seen int64
	err := row.Scan(&n.Name, &n.Address, &n.Report, &seen, &n.Drained)
	n.LastSeen = fromDB(seen)
	return n, err
}

// PutNode records a node's report. A new node is not drained; one that is
// there stays as it is in that.
func (db *DB) PutNode(ctx context.Context, n Node) error {
	_, err := db.write.ExecContext(ctx, `INSERT INTO nodes (name, address, report, last_seen, drained)
		VALUES ($1, $2, $3, $4, FALSE)
		ON CONFLICT (name) DO UPDATE SET address = excluded.address, report = excluded.report, last_seen = excluded.last_seen`,
		n.Name, n.Address, string(n.Report), toDB(n.LastSeen))
	if err != nil {
		return fmt.Errorf("record node %s: %w", n.Name, err)
	}
	return nil
}

// ListNodes returns all nodes by name.
func (db *DB) ListNodes(ctx context.Context) ([]Node, error) { return listNodes(ctx, db.read) }

func listNodes(ctx context.Context, q querier) ([]Node, error) {
	all, err := collect(ctx, q, scanNode, `SELECT `+nodeColumns+` FROM nodes ORDER BY name`)
	if err != nil {
		return nil, fmt.Errorf("list nodes: %w", err)
	}
	return all, nil
}

// SetDrained takes a node out of placement or back in; NotFound when there is
// no such node.
func (db *DB) SetDrained(ctx context.Context, name string, drained bool) error {
	n, err := affected(db.write.ExecContext(ctx, `UPDATE nodes SET drained = $1 WHERE name = $2`, drained, name))
	if err != nil {
		return fmt.Errorf("drain node %s: %w", name, err)
	}
	if n == 0 {
		e := fault.New(fault.NotFound, "there is no node %s", name)
		e.Field = "node"
		return e
	}
	return nil
}
