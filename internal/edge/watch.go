package edge

import (
	"context"
	"slices"
	"strings"
	"sync"
	"time"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// heartbeat is how often a report is sent without a change.
const heartbeat = 2 * time.Second

// subscriber is one that watches the node. What it holds is bounded by the
// sandboxes there are: of each it keeps the last state only.
type subscriber struct {
	news chan struct{} // holds one when pending is not empty

	mu      sync.Mutex // guards pending
	pending map[sandbox.ID]status
}

// publish tells all subscribers of a sandbox's state.
func (e *Edge) publish(s status) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for sub := range e.subs {
		sub.add(s)
	}
}

func (s *subscriber) add(st status) {
	s.mu.Lock()
	s.pending[st.ID] = st
	s.mu.Unlock()
	select {
	case s.news <- struct{}{}:
	default:
	}
}

// take returns what changed since the last call.
func (s *subscriber) take() []status {
	s.mu.Lock()
	defer s.mu.Unlock()
	changed := make([]status, 0, len(s.pending))
	for _, st := range s.pending {
		changed = append(changed, st)
	}
	clear(s.pending)
	return changed
}

// watch sends reports until ctx or the edge ends: a complete one first, then
// each change at once, and one with every heartbeat.
func (e *Edge) watch(ctx context.Context, send func(*edgev1.WatchResponse) error) error {
	sub := &subscriber{news: make(chan struct{}, 1), pending: map[sandbox.ID]status{}}
	e.mu.Lock()
	e.subs[sub] = true // before the complete report is made, so that nothing falls between
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.subs, sub)
	}()

	first := &edgev1.WatchResponse{Node: e.report(), Complete: true}
	for _, b := range e.all() {
		first.Sandboxes = append(first.Sandboxes, statusToProto(b.status()))
	}
	slices.SortFunc(first.Sandboxes, func(a, b *edgev1.SandboxStatus) int { return strings.Compare(a.GetId(), b.GetId()) })
	if err := send(first); err != nil {
		return err
	}
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-e.run.Done():
			return errEdgeStops
		case <-sub.news:
		case <-tick.C:
		}
		next := &edgev1.WatchResponse{Node: e.report()}
		for _, st := range sub.take() {
			next.Sandboxes = append(next.Sandboxes, statusToProto(st))
		}
		if err := send(next); err != nil {
			return err
		}
	}
}
