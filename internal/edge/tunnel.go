package edge

import (
	"context"
	"errors"
	"net/http"
	"strings"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/tunnel"
)

// tunnelPath is, below a sandbox's data plane, where a connection to a port of
// it begins: /tunnel/PORT. The sandbox's own agent makes it, and is told the
// port alone, so that it ends in the sandbox whatever is asked for.
const tunnelPath = "/tunnel/"

// checkTunnel reports what is wrong with a request for a tunnel, and returns the
// port that it asks for.
func checkTunnel(r *http.Request, path string) (port int, err error) {
	port, err = tunnel.ParsePort(strings.TrimPrefix(path, tunnelPath))
	switch {
	case err != nil:
		return 0, err
	case port == backend.AgentPort:
		return 0, fault.Invalid("port", "port %d is that of the sandbox's agent; it is reached by the API", port)
	case r.Method != http.MethodPost:
		return 0, fault.Invalid("method", "a tunnel is asked for by POST, not %s", r.Method)
	}
	return port, nil
}

// tunnel answers with a tunnel to a port. The context's cause tells the caller
// why it ends, if it is cut.
func (p *proxy) tunnel(ctx context.Context, w http.ResponseWriter, r *http.Request, port int) {
	pass := passageOf(ctx)
	forget, err := pass.box.cuts(pass.cancel)
	if err != nil {
		p.refuse(w, r, err)
		return
	}
	defer forget()
	conn, err := pass.spell.agent.Connect(ctx, port)
	if err != nil {
		p.refuse(w, r, p.notConnected(ctx, err))
		return
	}
	tunnel.Serve(w, r.WithContext(ctx), conn, func(err error) *fault.Error {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		var f *fault.Error
		if errors.As(err, &f) {
			return f
		}
		return fault.New(fault.Unavailable, "the connection to port %d of sandbox %s broke: %w", port, pass.box.id, err)
	})
}

// notConnected is the error of a connection that did not come about.
func (p *proxy) notConnected(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	f := fault.Of(err)
	switch f.Kind {
	case fault.NotFound:
		f = fault.New(fault.NotFound, "%s in sandbox %s: start a server there first", f.Message, passageOf(ctx).box.id)
		f.Field = "port"
		return f
	case fault.Unavailable:
		return p.explain(ctx, err)
	}
	return err
}

// maxTunnels bounds the connections that are open to one sandbox's ports, so
// that it cannot use up what the node has for all.
const maxTunnels = 1000

// cuts notes how to cut a connection when the sandbox is paused; forget takes
// that back.
func (b *box) cuts(cut context.CancelCauseFunc) (forget func(), err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.tunnels) >= maxTunnels {
		return nil, fault.New(fault.QuotaExceeded, "%d connections to ports of sandbox %s are open, and more are not allowed: close some", maxTunnels, b.id)
	}
	if b.tunnels == nil {
		b.tunnels = map[*context.CancelCauseFunc]bool{}
	}
	key := &cut
	b.tunnels[key] = true
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		delete(b.tunnels, key)
	}, nil
}

// cutTunnels cuts the connections to the sandbox's ports, for a reason.
func (b *box) cutTunnels(why error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for cut := range b.tunnels {
		(*cut)(why) // does not wait
	}
}
