package apiserver

import (
	"bytes"
	"context"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/tunnel"
)

// routeFresh is how long the data plane uses what it has read about a sandbox.
// A stale route does no harm: a sandbox never changes its project or node, and
// its node knows best whether it lives. It must stay below the time after
// which the watcher lets a node forget a sandbox that has ended, so that a
// caller is told how it ended.
const routeFresh = time.Second

// maxRoutes bounds the cache of routes; it is emptied when it is full.
const maxRoutes = 20000

// route is where the calls to a sandbox go.
type route struct {
	project sandbox.Project
	node    *url.URL
	end     *sandbox.End // it has ended
	revoked []sandbox.RevokedURL
	until   time.Time
}

func newRoutes() *routes { return &routes{byID: map[sandbox.ID]route{}} }

type routes struct {
	mu   sync.Mutex // guards byID
	byID map[sandbox.ID]route
}

func (r *routes) get(id sandbox.ID, now time.Time) (route, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	rt, ok := r.byID[id]
	return rt, ok && now.Before(rt.until)
}

func (r *routes) put(id sandbox.ID, rt route) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.byID) >= maxRoutes {
		clear(r.byID)
	}
	r.byID[id] = rt
}

func (r *routes) drop(id sandbox.ID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.byID, id)
}

// dataPath is where the sandboxes' data planes are.
const dataPath = "/sandboxes/"

// dataPlane passes calls under /sandboxes/ID/ to the node of the sandbox, byte
// for byte and both ways at once. The caller's token ends here.
type dataPlane struct {
	server *Server
	proxy  *httputil.ReverseProxy
}

type (
	routeKey  struct{}
	unreadKey struct{} // of an unread
)

// unread is how to end the reading of a request.
type unread struct {
	stop func()
	hard bool // it ends the answer too, where that is not whole yet
}

func newDataPlane(s *Server) *dataPlane {
	return &dataPlane{server: s, proxy: &httputil.ReverseProxy{
		Transport:      s.deps.Edge.Transport,
		FlushInterval:  -1,
		BufferPool:     new(rpc.Buffers),
		ModifyResponse: readNoMore,
		ErrorLog:       quiet(s.log),
		Rewrite: func(r *httputil.ProxyRequest) {
			rt := r.In.Context().Value(routeKey{}).(route)
			r.Out.URL.Scheme, r.Out.URL.Host = rt.node.Scheme, rt.node.Host
			r.Out.Host = ""
			r.Out.Header.Del("Authorization")
			// Nothing here is asked for by an upgrade, and HTTP/2 has none.
			r.Out.Header.Del("Upgrade")
			r.Out.Header.Del("Connection")
		},
		ErrorHandler: s.proxyFailed,
	}}
}

// mostWords bounds an error that is read whole, in bytes.
const mostWords = 64 << 10

// readNoMore stops reading a request once its answer needs no more of it. Over
// HTTP/2 an answer above 299 ends the sending of the body at each hop, and a
// proxy that still waits for the rest of it would wait for ever; so it would
// after the end of a tunnel.
func readNoMore(res *http.Response) error {
	request := res.Request.Context().Value(unreadKey{}).(unread)
	switch {
	case res.StatusCode > 299 && request.hard:
		words, err := io.ReadAll(io.LimitReader(res.Body, mostWords))
		if err != nil {
			return err
		}
		res.Body = &lastly{struct {
			io.Reader
			io.Closer
		}{bytes.NewReader(words), res.Body}, request.stop}
	case res.StatusCode > 299:
		request.stop()
	case res.Header.Get("Content-Type") == tunnel.ContentType:
		res.Body = &lastly{res.Body, request.stop}
	}
	return nil
}

func (d *dataPlane) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	// HTTP/1.1 would otherwise read the whole request before the answer begins,
	// be it a refusal. HTTP/2 always allows both at once and says that it cannot
	// be asked to.
	control := http.NewResponseController(w)
	_ = control.EnableFullDuplex()
	rt, err := d.admit(r)
	if err != nil {
		d.server.fail(w, r, err)
		return
	}
	ctx := context.WithValue(r.Context(), routeKey{}, rt)
	body := r.Body
	reading := unread{stop: func() { _ = body.Close() }} // it only unblocks a read
	if isTunnel(r.URL.Path) {
		reading.hard = true
		if r.ProtoMajor == 1 {
			// There closing a body waits for a read, which may last as long as the
			// tunnel; and what was said last is lost if it does not wait at all.
			waited := &untilEnd{ReadCloser: body}
			r.Body = waited
			reading.stop = func() {
				if !waited.ended.Load() {
					_ = control.SetReadDeadline(time.Now().Add(lastWords))
				}
			}
		}
	}
	d.proxy.ServeHTTP(w, r.WithContext(context.WithValue(ctx, unreadKey{}, reading)))
}

// lastWords is how long a caller that sends may take to see that a tunnel is over.
const lastWords = time.Second

// tunnelDir is where in a data plane connections to ports begin.
const tunnelDir = "tunnel"

// isTunnel reports whether a path is that of a connection to a sandbox's port.
func isTunnel(path string) bool {
	_, rest, _ := strings.Cut(strings.TrimPrefix(path, dataPath), "/")
	return strings.HasPrefix(rest, tunnelDir+"/")
}

// untilEnd is a body that knows whether it has ended.
type untilEnd struct {
	io.ReadCloser
	ended atomic.Bool
}

// Read reads.
func (u *untilEnd) Read(p []byte) (int, error) {
	n, err := u.ReadCloser.Read(p)
	if err != nil {
		u.ended.Store(true)
	}
	return n, err
}

// lastly does something at the end of a body.
type lastly struct {
	io.ReadCloser
	do func()
}

// Read reads.
func (l *lastly) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	if err != nil {
		l.do()
	}
	return n, err
}

// admit finds the sandbox of a call and checks that the caller may use it.
func (d *dataPlane) admit(r *http.Request) (route, error) {
	c, err := d.server.door.authenticate(r.Context(), r.Header)
	if err != nil {
		return route{}, err
	}
	name, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, dataPath), "/")
	id, err := sandbox.ParseID(name)
	if err != nil {
		return route{}, unknownSandbox(name)
	}
	rt, err := d.server.route(r.Context(), id)
	if err != nil {
		return route{}, err
	}
	if err := mayUse(c, role.Developer, id, rt.project); err != nil {
		return route{}, err
	}
	if rt.end != nil {
		return route{}, ended(id, *rt.end)
	}
	return rt, nil
}

// route returns where the calls to a sandbox go.
func (s *Server) route(ctx context.Context, id sandbox.ID) (route, error) {
	now := s.deps.Now()
	if rt, ok := s.routes.get(id, now); ok {
		return rt, nil
	}
	sb, err := s.load(ctx, id)
	if err != nil {
		return route{}, err
	}
	rt := route{project: sb.Project, end: sb.End, revoked: sb.RevokedURLs, until: now.Add(routeFresh)}
	if sb.End == nil {
		address, err := s.nodes.of(ctx, sb.Node)
		if err != nil {
			return route{}, err
		}
		if rt.node, err = url.Parse(edgeURL(address)); err != nil {
			return route{}, fault.New(fault.Internal, "address %q of node %s: %w", address, sb.Node, err)
		}
	}
	s.routes.put(id, rt)
	return rt, nil
}

// newIdentityProxy passes the calls of IdentityService to iam as they are,
// with the caller's token, which iam checks itself.
func newIdentityProxy(s *Server) http.Handler {
	return &httputil.ReverseProxy{
		Transport:     s.deps.IAM.Transport,
		FlushInterval: -1,
		ErrorLog:      quiet(s.log),
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.Scheme, r.Out.URL.Host = "https", s.cfg.IAMAddress
			r.Out.Host = ""
		},
		ErrorHandler: s.proxyFailed,
	}
}

// quiet is for what the proxy says besides ErrorHandler: that a stream was cut.
func quiet(to *slog.Logger) *log.Logger { return slog.NewLogLogger(to.Handler(), slog.LevelDebug) }

// proxyFailed answers a call that could not be passed on.
func (s *Server) proxyFailed(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		// The caller is gone; ending its stream is all that is left to do.
		panic(http.ErrAbortHandler)
	}
	where := "the iam service"
	if strings.HasPrefix(r.URL.Path, dataPath) {
		where = "the sandbox's node"
	}
	// Where things are inside is not the caller's matter; the log has it.
	s.log.Warn("a call could not be passed on", "path", r.URL.Path, "request_id", rpc.RequestID(r.Context()), "error", err)
	s.fail(w, r, fault.New(fault.Unavailable, "%s could not be reached: try again", where))
}

// fail answers a call outside the Connect handlers with an error, in the form
// of the protocol that the caller speaks; JSON when it speaks none.
func (s *Server) fail(w http.ResponseWriter, r *http.Request, err error) {
	told := rpc.Fault(r.Context(), err)
	s.log.Debug("call failed", "path", r.URL.Path, "request_id", told.RequestID, "kind", told.Kind, "error", err)
	w.Header().Set(rpc.Header, told.RequestID)
	if werr := s.errors.Write(w, r, fault.ToConnect(told)); werr != nil {
		s.log.Debug("write an error", "error", werr)
	}
}
