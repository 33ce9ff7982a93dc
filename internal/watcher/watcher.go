// Package watcher keeps the records true to what the nodes say: it follows
// each node's report, records the ends of sandboxes, notices silent and lost
// nodes, ends what should not run, records as lost what should and does not,
// and removes image content that nothing needs. Each pass is a function of the time it is given; Run gives them the
// real one. It keeps no state that it could not find out again, and it makes
// nothing: sandboxes begin with the API.
package watcher

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/api/gen/edge/v1/edgev1connect"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// Node is a machine to watch.
type Node struct {
	Name    string `json:"name"`
	Address string `json:"address"` // of its edge, "https://host:port" or "host:port"
}

// Config says what to watch and how patiently. A zero duration takes its default.
type Config struct {
	Nodes       []Node
	SilentAfter time.Duration // without a report, then a node is not healthy; 10 s
	LostAfter   time.Duration // without a report, then its sandboxes are lost; 5 min
	Grace       time.Duration // how long records and a node may disagree; 60 s
	StartGrace  time.Duration // the same of a sandbox that is being made; 3 min
	ForgetAfter time.Duration // from when an end is recorded until its node may forget it; 5 s
	KeepEnded   time.Duration // how long records of ended sandboxes stay; 24 h
	KeepImages  time.Duration // how long image content stays on a node when nothing needs it; 2 min
}

// Validate reports all faults of a configuration.
func (c Config) Validate() error {
	var faults []error
	seen := map[string]bool{}
	for i, n := range c.Nodes {
		if n.Name == "" || n.Address == "" {
			faults = append(faults, fmt.Errorf("nodes[%d]: want a name and an address", i))
		}
		if seen[n.Name] {
			faults = append(faults, fmt.Errorf("nodes[%d]: the name %q comes twice", i, n.Name))
		}
		seen[n.Name] = true
	}
	return errors.Join(faults...)
}

func (c *Config) fill() {
	for _, d := range []struct {
		value     *time.Duration
		otherwise time.Duration
	}{
		{&c.SilentAfter, 10 * time.Second}, {&c.LostAfter, 5 * time.Minute}, {&c.Grace, time.Minute},
		{&c.StartGrace, 3 * time.Minute}, {&c.ForgetAfter, 5 * time.Second}, {&c.KeepEnded, 24 * time.Hour},
		{&c.KeepImages, 2 * time.Minute},
	} {
		if *d.value == 0 {
			*d.value = d.otherwise
		}
	}
}

// Deps are what the watcher works with.
type Deps struct {
	DB   *store.DB
	Edge *http.Client // to the edges, as role watcher; HTTP/2
	Log  *slog.Logger
	Now  func() time.Time // nil means time.Now
}

// Watcher watches the nodes.
type Watcher struct {
	cfg   Config
	db    *store.DB
	log   *slog.Logger
	now   func() time.Time
	nodes []*node // in the order of the configuration

	// seen remembers since when something has been found wrong, by what and
	// whose it is. Only the passes use it, which run one at a time.
	seen map[finding]time.Time
}

// finding is something that is wrong now and may set itself right.
type finding struct {
	kind string
	node string
	what string // a sandbox's id, or the digest of an image's content
}

// node is a machine as the watcher sees it.
type node struct {
	Node
	edge edgev1connect.EdgeClient

	mu   sync.Mutex // guards view
	view view
}

// New returns a watcher that works with deps.
func New(cfg Config, deps Deps) *Watcher {
	cfg.fill()
	if deps.Now == nil {
		deps.Now = time.Now
	}
	w := &Watcher{cfg: cfg, db: deps.DB, log: deps.Log, now: deps.Now, seen: map[finding]time.Time{}}
	passID := connect.WithInterceptors(rpc.Interceptor(deps.Log))
	for _, n := range cfg.Nodes {
		w.nodes = append(w.nodes, &node{Node: n, edge: edgev1connect.NewEdgeClient(deps.Edge, edgeURL(n.Address), passID)})
	}
	return w
}

// The rhythm of the passes.
const (
	healthEvery    = 2 * time.Second
	reconcileEvery = 3 * time.Second
	imagesEvery    = 20 * time.Second
	purgeEvery     = 10 * time.Minute
)

// Run watches until the context ends.
func (w *Watcher) Run(ctx context.Context) error {
	if err := w.introduce(ctx, w.now()); err != nil {
		return err
	}
	var group errgroup.Group
	for _, n := range w.nodes {
		group.Go(func() error { w.follow(ctx, n); return nil })
	}
	group.Go(func() error { w.passes(ctx); return nil })
	return group.Wait()
}

// passes runs the passes, one at a time. One that fails is logged and comes
// again: what it has not done is still there to be done.
func (w *Watcher) passes(ctx context.Context) {
	var due [4]time.Time
	all := [4]struct {
		name  string
		every time.Duration
		run   func(context.Context, time.Time) error
	}{
		{"health", healthEvery, w.health}, {"reconcile", reconcileEvery, w.reconcile},
		{"images", imagesEvery, w.dropUnused}, {"purge", purgeEvery, w.purge},
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := w.now()
		for i, p := range all {
			if now.Before(due[i]) {
				continue
			}
			due[i] = now.Add(p.every)
			if err := p.run(ctx, now); err != nil && ctx.Err() == nil {
				w.log.Error("a pass failed and comes again", "pass", p.name, "error", err)
			}
		}
	}
}

// reconcile brings records and nodes together.
func (w *Watcher) reconcile(ctx context.Context, now time.Time) error {
	live, err := w.live(ctx)
	if err != nil {
		return err
	}
	return errors.Join(
		w.applyAll(ctx, now, live),
		w.insist(ctx, now, live),
		w.endExpired(ctx, now, live),
		w.finishStopping(ctx, now, live),
		w.failLost(ctx, now, live),
		w.failMissing(ctx, now, live),
		w.destroyOrphans(ctx, now, live),
		w.forgetEnded(ctx, now),
	)
}

// live returns all records of sandboxes that have not ended.
func (w *Watcher) live(ctx context.Context) ([]*sandbox.Sandbox, error) {
	var all []*sandbox.Sandbox
	filter := store.SandboxFilter{Limit: 1000}
	for {
		page, err := w.db.ListSandboxes(ctx, filter)
		if err != nil {
			return nil, err
		}
		all = append(all, page.Sandboxes...)
		if page.Next == "" {
			return all, nil
		}
		filter.PageToken = page.Next
	}
}

// since returns for how long a finding has stood, when it is found again now.
func (w *Watcher) since(f finding, now time.Time) time.Duration {
	first, ok := w.seen[f]
	if !ok {
		w.seen[f] = now
		return 0
	}
	return now.Sub(first)
}

// settle forgets the findings of a kind that were not found again.
func (w *Watcher) settle(kind string, still map[finding]bool) {
	for f := range w.seen {
		if f.kind == kind && !still[f] {
			delete(w.seen, f)
		}
	}
}

// byName returns the node of a name, nil for one that is not watched.
func (w *Watcher) byName(name string) *node {
	for _, n := range w.nodes {
		if n.Name == name {
			return n
		}
	}
	return nil
}

// finish records how a sandbox ended.
func (w *Watcher) finish(ctx context.Context, id sandbox.ID, end sandbox.End) error {
	_, err := w.db.UpdateSandbox(ctx, id, func(sb *sandbox.Sandbox) error { return sb.Finish(end) })
	if err != nil {
		return fmt.Errorf("record that sandbox %s ended (%s): %w", id, end.Reason, err)
	}
	w.log.Info("a sandbox ended", "sandbox", id, "reason", end.Reason, "domain", end.Domain)
	return nil
}
