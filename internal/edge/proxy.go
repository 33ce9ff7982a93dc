package edge

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/rpc"
)

// dataPlane is where sandboxes are reached: /sandboxes/ID/PATH goes to PATH of
// the sandbox's agent, but for tunnelPath.
const dataPlane = "/sandboxes/"

// open lists what of the agent may be reached from outside: an exact path, or
// with a slash at its end all below it. Hello, which would change a sandbox's
// identity and token, is not here, nor is envd's /init.
var open = []string{
	"/process.Process/",
	"/filesystem.Filesystem/",
	"/agent.v1.Agent/Activity",
	"/agent.v1.Agent/Attach",
	"/agent.v1.Agent/Signal",
	"/files",
	"/archive",
	"/health",
	"/metrics",
	"/envs",
}

// secrets are headers that are meant for those in front of the edge. A Basic
// Authorization names a user inside the sandbox and goes on.
var secrets = []string{"X-Api-Key", "X-Access-Token", "Cookie", "E2b-Traffic-Access-Token", "Proxy-Authorization"}

// proxy passes requests to agents and answers back, as streams in both
// directions.
type proxy struct {
	e       *Edge
	reverse *httputil.ReverseProxy
	errors  *connect.ErrorWriter
}

// passage is one request on its way.
type passage struct {
	box   *box
	spell *spell
	path  string
	agent http.RoundTripper
	body  io.Closer // the request's
	// cancel ends it, for a reason.
	cancel context.CancelCauseFunc
}

type passageKey struct{}

func passageOf(ctx context.Context) *passage { return ctx.Value(passageKey{}).(*passage) }

func (e *Edge) newProxy() *proxy {
	p := &proxy{e: e, errors: connect.NewErrorWriter()}
	p.reverse = &httputil.ReverseProxy{
		Rewrite:        rewrite,
		Transport:      toAgent{},
		FlushInterval:  -1,
		ModifyResponse: p.modify,
		ErrorHandler:   p.broken,
		BufferPool:     new(rpc.Buffers),
		ErrorLog:       slog.NewLogLogger(e.log.Handler(), slog.LevelDebug),
	}
	return p
}

// takes reports whether the request is for the data plane.
func (p *proxy) takes(r *http.Request) bool { return strings.HasPrefix(r.URL.Path, dataPlane) }

func (p *proxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx := rpc.WithRequestID(r.Context(), r.Header)
	r = r.WithContext(ctx)
	if err := p.e.wait(ctx); err != nil {
		p.refuse(w, r, err)
		return
	}
	id, path, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, dataPlane), "/")
	path = "/" + path
	b, err := p.e.get(id)
	port := 0 // none: it is a call to the agent
	switch {
	case err != nil:
	case strings.HasPrefix(path, tunnelPath):
		port, err = checkTunnel(r, path)
	case !allowed(path):
		err = fault.New(fault.NotFound, "a sandbox has no %s to be reached from outside", path)
	}
	if err != nil {
		p.refuse(w, r, err)
		return
	}
	sp, err := p.e.enter(ctx, b)
	if err != nil {
		p.refuse(w, r, err)
		return
	}
	defer func() { b.leave(p.e.now()) }()

	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	// A machine that is gone sends no word of it over a connection that is open.
	defer context.AfterFunc(sp.ctx, func() { cancel(context.Cause(sp.ctx)) })()
	ctx = context.WithValue(ctx, passageKey{}, &passage{b, sp, path, sp.agent.Transport(), r.Body, cancel})
	if port != 0 {
		p.tunnel(ctx, w, r, port)
		return
	}
	// HTTP/1.1 reads no more of a request once an answer has begun, unless told to.
	_ = http.NewResponseController(w).EnableFullDuplex() // HTTP/2 always does, and says "not supported"
	p.reverse.ServeHTTP(w, r.WithContext(ctx))
}

func allowed(path string) bool {
	for _, o := range open {
		if path == o || strings.HasSuffix(o, "/") && strings.HasPrefix(path, o) && !strings.Contains(path[len(o):], "/") {
			return true
		}
	}
	return false
}

// rewrite makes the request that the agent gets.
func rewrite(pr *httputil.ProxyRequest) {
	p := passageOf(pr.In.Context())
	u := pr.Out.URL
	u.Scheme, u.Host = "http", "sandbox"
	u.Path, u.RawPath = p.path, "" // what was checked, and nothing that decodes to something else
	u.RawQuery = pr.In.URL.RawQuery
	pr.Out.Host = "sandbox"
	for _, h := range secrets {
		pr.Out.Header.Del(h)
	}
	if auth := pr.Out.Header.Get("Authorization"); auth != "" && !strings.HasPrefix(strings.ToLower(auth), "basic ") {
		pr.Out.Header.Del("Authorization")
	}
}

// toAgent sends a request over the agent's own transport.
type toAgent struct{}

func (toAgent) RoundTrip(r *http.Request) (*http.Response, error) {
	return passageOf(r.Context()).agent.RoundTrip(r)
}

// modify makes a streaming call end with the reason if its sandbox dies, and
// stops reading a request that was refused: over HTTP/2 an answer above 299
// ends the sending of the body at each hop, and a proxy that still waits for
// the rest of it would wait for ever.
func (p *proxy) modify(res *http.Response) error {
	ctx := res.Request.Context()
	if res.StatusCode > 299 {
		_ = passageOf(ctx).body.Close() // it only unblocks a read
	}
	if strings.HasPrefix(res.Header.Get("Content-Type"), "application/connect+") {
		s := &envelopes{from: res.Body}
		s.why = func(err error) *fault.Error {
			f := p.explain(ctx, err)
			if !s.begun {
				f = unanswered(f)
			}
			return f
		}
		res.Body = s
	}
	return nil
}

// broken answers a request that the agent did not.
func (p *proxy) broken(w http.ResponseWriter, r *http.Request, err error) {
	p.refuse(w, r, unanswered(p.explain(r.Context(), err)))
}

// unanswered returns the error of a call that the agent got and has not
// answered. A wrong state says that a call was refused and did nothing. One
// that was on its way when the sandbox was paused may have done something, or
// do it after the resume, so its error is that of a connection that broke.
func unanswered(f *fault.Error) *fault.Error {
	if f.Kind != fault.WrongState {
		return f
	}
	return &fault.Error{
		Kind: fault.Unavailable, RequestID: f.RequestID, Err: f.Err,
		Message: "the sandbox was paused before the call was answered, so it may have had an effect; resume it and look",
	}
}

// graceToKnow is how long after a connection broke the machine's end may come
// to be known.
const graceToKnow = time.Second

// explain says why the way to an agent broke: with the sandbox's end or pause
// if there is one, or is found to be within a moment.
func (p *proxy) explain(ctx context.Context, err error) *fault.Error {
	b, sp := passageOf(ctx).box, passageOf(ctx).spell
	grace := time.NewTimer(graceToKnow)
	defer grace.Stop()
	if context.Cause(ctx) == nil {
		select {
		case <-sp.ctx.Done():
		case <-ctx.Done():
		case <-grace.C:
		}
	}
	if cause := context.Cause(sp.ctx); cause != nil {
		return rpc.Fault(ctx, cause)
	}
	p.e.log.Debug("the way to an agent broke", "sandbox", b.id, "request_id", rpc.RequestID(ctx), "error", err)
	return rpc.Fault(ctx, fault.New(fault.Unavailable, "the agent of sandbox %s broke off; try again", b.id))
}

// refuse answers with an error, in the form that the caller's protocol has;
// JSON when it has none.
func (p *proxy) refuse(w http.ResponseWriter, r *http.Request, err error) {
	if errors.Is(err, context.Canceled) {
		panic(http.ErrAbortHandler) // nobody is there to read it
	}
	f := rpc.Fault(r.Context(), err)
	w.Header().Set(rpc.Header, rpc.RequestID(r.Context()))
	_ = p.errors.Write(w, r, fault.ToConnect(f)) // a failure is the caller's having gone
}
