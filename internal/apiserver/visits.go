package apiserver

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// visits are the open requests that came by addresses of servers in sandboxes,
// WebSockets among them. They end when their address is taken back: at once on the
// server that is asked to, and within two routeFresh on others.
type visits struct {
	revoked func(context.Context, sandbox.ID) ([]sandbox.RevokedURL, error) // what the record says

	mu        sync.Mutex // guards what follows
	open      map[sandbox.ID]map[*visit]bool
	following bool // follow runs
}

// visit is one of them.
type visit struct {
	token string // the ID of its address's token
	end   context.CancelFunc
}

func newVisits(revoked func(context.Context, sandbox.ID) ([]sandbox.RevokedURL, error)) *visits {
	return &visits{revoked: revoked, open: map[sandbox.ID]map[*visit]bool{}}
}

// begin returns a context that ends with the address, and what is to be called at
// the visit's end.
func (vs *visits) begin(ctx context.Context, id sandbox.ID, token string) (context.Context, func()) {
	ctx, cancel := context.WithCancel(ctx)
	v := &visit{token, cancel}
	vs.mu.Lock()
	defer vs.mu.Unlock()
	if vs.open[id] == nil {
		vs.open[id] = map[*visit]bool{}
	}
	vs.open[id][v] = true
	if !vs.following {
		vs.following = true
		go vs.follow()
	}
	return ctx, func() {
		cancel()
		vs.mu.Lock()
		defer vs.mu.Unlock()
		delete(vs.open[id], v)
		if len(vs.open[id]) == 0 {
			delete(vs.open, id)
		}
	}
}

// follow looks for addresses that other servers took back, as long as there are
// visits: a server that ends has none, since it ends its requests first.
func (vs *visits) follow() {
	tick := time.NewTicker(routeFresh)
	defer tick.Stop()
	for range tick.C {
		ids := vs.sandboxes()
		if len(ids) == 0 {
			return
		}
		vs.look(ids)
	}
}

// sandboxes returns those that are visited. With none, following ends.
func (vs *visits) sandboxes() (ids []sandbox.ID) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for id := range vs.open {
		ids = append(ids, id)
	}
	vs.following = len(ids) > 0
	return ids
}

// look ends the visits of sandboxes by addresses that were taken back. One that
// cannot be looked up now is in the next round.
func (vs *visits) look(ids []sandbox.ID) {
	ctx, cancel := context.WithTimeout(context.Background(), routeFresh)
	defer cancel()
	for _, id := range ids {
		if revoked, err := vs.revoked(ctx, id); err == nil {
			vs.cut(id, revoked)
		}
	}
}

// cut ends visits by addresses that were taken back.
func (vs *visits) cut(id sandbox.ID, revoked []sandbox.RevokedURL) {
	vs.mu.Lock()
	defer vs.mu.Unlock()
	for v := range vs.open[id] {
		if slices.ContainsFunc(revoked, func(r sandbox.RevokedURL) bool { return r.ID == v.token }) {
			v.end()
		}
	}
}
