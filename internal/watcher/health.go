package watcher

import (
	"context"
	"errors"
	"time"

	"github.com/kernflux/opendsec/internal/store"
)

// introduce puts the configured nodes into the table of nodes. One that is
// there keeps its last report.
func (w *Watcher) introduce(ctx context.Context, now time.Time) error {
	records, err := w.records(ctx)
	if err != nil {
		return err
	}
	for _, n := range w.nodes {
		n.mu.Lock()
		n.view.heard = now // its silence counts from here: we have not listened before
		n.mu.Unlock()
		record, known := records[n.Name]
		if !known {
			if record.Report, err = emptyReport(n.Name); err != nil {
				return err
			}
		}
		record.Name, record.Address = n.Name, edgeURL(n.Address)
		if err := w.db.PutNode(ctx, record); err != nil {
			return err
		}
	}
	return nil
}

func (w *Watcher) records(ctx context.Context) (map[string]store.Node, error) {
	all, err := w.db.ListNodes(ctx)
	if err != nil {
		return nil, err
	}
	byName := make(map[string]store.Node, len(all))
	for _, n := range all {
		byName[n.Name] = n
	}
	return byName, nil
}

// health says of nodes that do not report that they are not healthy. That one
// is healthy again is said by its next report.
func (w *Watcher) health(ctx context.Context, now time.Time) error {
	records, err := w.records(ctx)
	if err != nil {
		return err
	}
	var failed []error
	for name, record := range records {
		n := w.byName(name)
		if n == nil {
			failed = append(failed, w.markUnhealthy(ctx, record, "it is not in the watcher's list of nodes"))
			continue
		}
		silence := now.Sub(n.look().heard)
		if silence <= w.cfg.SilentAfter {
			continue
		}
		why := "it has not reported yet"
		if !record.LastSeen.IsZero() {
			why = "no report for " + now.Sub(record.LastSeen).Round(time.Second).String()
		}
		failed = append(failed, w.markUnhealthy(ctx, record, why))
	}
	return errors.Join(failed...)
}

// silent reports whether a node has not been heard for longer than d.
func (w *Watcher) silent(n *node, now time.Time, d time.Duration) bool {
	return now.Sub(n.look().heard) > d
}
