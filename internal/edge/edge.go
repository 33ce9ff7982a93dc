// Package edge owns the sandboxes of one machine. It creates and ends them,
// finds them again after it was killed, keeps their deadlines, passes bytes to
// their agents, and says what of them lies on the machine that should not.
//
// It places nothing and knows no caller: who may do what, and on which node, is
// decided before it is asked. It holds no credential of anybody; its records
// are the journal in its own directory.
package edge

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/internal/ahead"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/takeover"
)

// Deps is what an edge works with. The caller closes what it opened, after Run
// has returned.
type Deps struct {
	Backends []backend.Backend
	Agent    backend.Agent // what new sandboxes run
	Images   Images
	Slots    Slots
	Gate     Gate // nil: all networks are closed
	// Load gets the sandboxes that are being made or resumed, so that nothing is made ahead
	// meanwhile; nil when nothing is.
	Load *ahead.Load
	Log  *slog.Logger
	// Now is the clock for what is compared with times from elsewhere; nil
	// takes time.Now.
	Now func() time.Time
}

// Slots is what an edge asks of the pool of network slots.
type Slots interface {
	// Run keeps slots ready until ctx is done. The edge starts it, once it has
	// removed what an earlier run left.
	Run(ctx context.Context) error
	Acquire(ctx context.Context) (backend.Slot, error)
	Release(slot backend.Slot)
	// Holds reports whether a slot is the pool's own.
	Holds(name string) bool
}

// Edge is the owner of one machine's sandboxes.
type Edge struct {
	cfg      Config
	deps     Deps
	log      *slog.Logger
	now      func() time.Time
	prefix   string
	backends map[sandbox.Backend]backend.Backend
	handler  http.Handler
	ready    chan struct{} // closed when calls are answered

	// Set by Run before ready is closed, and never changed.
	journal  *journal.Journal
	capacity sandbox.Resources
	reserve  int64 // MiB of disk that stay free
	floor    int64 // MiB of memory that stay free
	notes    []string
	run      context.Context // ends when Run is to return

	probes probes

	// mu guards what follows, and is never held while anything slow is done.
	mu      sync.Mutex
	boxes   map[sandbox.ID]*box
	used    sandbox.Resources // sum over the boxes that have not ended
	subs    map[*subscriber]bool
	closing bool           // no more goroutines
	work    sync.WaitGroup // goroutines of boxes; Add only with mu held and closing false
}

// New returns an edge. cfg must be valid; nothing happens before Run.
func New(cfg Config, deps Deps) *Edge {
	e := &Edge{
		cfg: cfg.withDefaults(), deps: deps, log: deps.Log, now: deps.Now,
		prefix:   backend.Prefix(cfg.StateDir),
		backends: map[sandbox.Backend]backend.Backend{},
		ready:    make(chan struct{}),
		boxes:    map[sandbox.ID]*box{},
		subs:     map[*subscriber]bool{},
	}
	if e.now == nil {
		e.now = time.Now
	}
	for _, b := range deps.Backends {
		e.backends[b.Name()] = b
	}
	e.probes.known = map[sandbox.Backend]probe{}
	e.handler = e.routes()
	return e
}

// Handler serves the Edge service and the data plane to components, which it
// knows by the role in their certificate. Calls that come before the edge is
// ready wait for it.
func (e *Edge) Handler() http.Handler { return guard(e.handler) }

// Ready is closed when the edge has found its sandboxes again and answers.
func (e *Edge) Ready() <-chan struct{} { return e.ready }

// Run finds the sandboxes of an earlier run again and then works until ctx is
// done. Sandboxes live on; a create that is not finished is undone.
func (e *Edge) Run(ctx context.Context) error {
	unlock, err := lock(e.cfg.StateDir)
	if err != nil {
		return err
	}
	defer unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	e.run = ctx
	if err := e.open(ctx); err != nil {
		cancel(err)
		e.quiesce()
		if errors.Is(err, context.Canceled) {
			return nil // it was stopped before it was ready
		}
		return fmt.Errorf("start the edge on %s: %w", e.cfg.StateDir, err)
	}
	e.log.Info("ready", "node", e.cfg.Name, "sandboxes", e.count(), "backends", e.available())
	close(e.ready)

	// The pool goes on until no box works any more: what one gives back at the
	// end is still taken care of.
	idle, boxesDone := context.WithCancel(context.WithoutCancel(ctx))
	defer boxesDone()
	var g errgroup.Group
	g.Go(func() error {
		err := e.deps.Slots.Run(idle)
		cancel(err)
		return err
	})
	if e.deps.Gate != nil {
		g.Go(func() error { return e.deps.Gate.Run(idle) })
	}
	g.Go(func() error { e.keepNetworks(ctx); return nil })
	g.Go(func() error { e.sweep(ctx); return nil })
	g.Go(func() error { e.probes.refresh(ctx, e); return nil })
	<-ctx.Done()
	e.quiesce()
	boxesDone()
	return g.Wait()
}

// quiesce waits for the goroutines of the boxes, and lets no more begin.
func (e *Edge) quiesce() {
	e.mu.Lock()
	e.closing = true
	e.mu.Unlock()
	e.work.Wait()
}

// spawn runs f as a goroutine that Run waits for, and reports whether it did.
func (e *Edge) spawn(f func()) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.spawnLocked(f)
}

func (e *Edge) spawnLocked(f func()) bool {
	if e.closing {
		return false
	}
	e.work.Go(f)
	return true
}

// open prepares all that calls need: the node's measure, what is left of an
// earlier run, and what the backends can do.
func (e *Edge) open(ctx context.Context) error {
	var err error
	if e.journal, err = journal.Open(filepath.Join(e.cfg.StateDir, "sandboxes")); err != nil {
		return err
	}
	if err := e.measure(); err != nil {
		return err
	}
	e.deps.Load.LimitBy(e.roomAhead)
	if err := e.recover(ctx); err != nil {
		return err
	}
	return e.probes.first(ctx, e)
}

// lock keeps a second edge away from the same directory.
func lock(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o711); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	f, err := takeover.Lock(filepath.Join(dir, "edge.lock"), takeover.Patience)
	if errors.Is(err, takeover.ErrHeld) {
		return nil, fmt.Errorf("another edge runs on the state directory %s: stop it first, or choose another directory", dir)
	}
	if err != nil {
		return nil, fmt.Errorf("lock the state directory: %w", err)
	}
	return func() { f.Close() }, nil
}

// find returns the box of an id, nil for none.
func (e *Edge) find(id sandbox.ID) *box {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.boxes[id]
}

// all returns the boxes as they are now.
func (e *Edge) all() []*box {
	e.mu.Lock()
	defer e.mu.Unlock()
	all := make([]*box, 0, len(e.boxes))
	for _, b := range e.boxes {
		all = append(all, b)
	}
	return all
}

func (e *Edge) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.boxes)
}

// wait returns once the edge is ready; Unavailable when it does not become so
// while the caller waits.
func (e *Edge) wait(ctx context.Context) error {
	select {
	case <-e.ready:
		return nil
	default:
	}
	patience := time.NewTimer(5 * time.Second)
	defer patience.Stop()
	select {
	case <-e.ready:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-patience.C:
		return fault.New(fault.Unavailable, "the edge of node %s is starting; try again in a moment", e.cfg.Name)
	}
}

// sweep forgets ended sandboxes that nobody asked about, once in a while.
func (e *Edge) sweep(ctx context.Context) {
	tick := time.NewTicker(time.Hour)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			e.forgetOld(e.now())
		}
	}
}

// forgetOld drops what ended longer than KeepEnded before now.
func (e *Edge) forgetOld(now time.Time) {
	for _, b := range e.all() {
		if st := b.status(); st.End != nil && now.Sub(st.End.Time) > time.Duration(e.cfg.KeepEnded) {
			e.forget(b)
		}
	}
}
