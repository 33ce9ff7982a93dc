// Package ingress is the way for browsers and programs that know an address to
// an HTTP server in a sandbox: it reads the address, checks the token in it,
// and passes requests on, WebSockets included, so that the server sees neither
// the token nor anything else that is not meant for it, and pages of one server
// cannot use what belongs to another or to the API.
//
// An address has one of two forms. With a domain for sandboxes,
// PORT-SANDBOX.DOMAIN/~TOKEN/, each server has an origin of its own, as browsers
// keep things apart. Without, ADDRESS/p/SANDBOX/PORT/TOKEN/, all have the API's
// name, and their pages are kept apart by being sandboxed: they have no cookies,
// no storage, and no right to any other page.
//
// How a sandbox is reached, and whether it lives, is its caller's affair.
package ingress

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/rpc"
)

// Dial connects to a port of a sandbox. Its errors are told to whoever asks.
type Dial func(ctx context.Context, t Target) (net.Conn, error)

// Proxy passes visits on to their servers.
type Proxy struct {
	dial    Dial
	reverse *httputil.ReverseProxy
	log     *slog.Logger
}

// New returns a Proxy that reaches servers by dial.
func New(dial Dial, log *slog.Logger) *Proxy {
	p := &Proxy{dial: dial, log: log}
	p.reverse = &httputil.ReverseProxy{
		Rewrite: rewrite,
		Transport: &http.Transport{
			DialContext: p.connect,
			// Each request has a connection of its own. One that is kept for the
			// next would count as use of the sandbox, and holds up a server that
			// does one thing at a time.
			DisableKeepAlives:  true,
			DisableCompression: true, // bytes are passed on as they are
		},
		FlushInterval:  -1,
		ModifyResponse: modify,
		ErrorHandler:   p.failed,
		BufferPool:     new(rpc.Buffers),
		ErrorLog:       slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	return p
}

type visitKey struct{}

func visitOf(r *http.Request) *Visit { return r.Context().Value(visitKey{}).(*Visit) }

// Serve answers a visit that was let in.
func (p *Proxy) Serve(w http.ResponseWriter, r *http.Request, v Visit) {
	switch {
	case v.rest == "": // a name without the slash after it would break what is relative to it
		redirect(w, v.prefix+"/", r.URL.RawQuery)
		return
	case !v.host && preflight(w, r):
		return
	}
	p.reverse.ServeHTTP(finalOnly{w}, r.WithContext(context.WithValue(r.Context(), visitKey{}, &v)))
}

// finalOnly keeps back what a server says before its answer, such as early
// hints: nothing takes out of that what is not the server's to say.
type finalOnly struct{ http.ResponseWriter }

// WriteHeader begins the answer.
func (w finalOnly) WriteHeader(code int) {
	if code >= 200 || code == http.StatusSwitchingProtocols {
		w.ResponseWriter.WriteHeader(code)
	}
}

// Unwrap lets http.ResponseController find what w can do.
func (w finalOnly) Unwrap() http.ResponseWriter { return w.ResponseWriter }

func redirect(w http.ResponseWriter, to, query string) {
	if query != "" {
		to += "?" + query
	}
	w.Header().Set("Location", to)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(http.StatusTemporaryRedirect)
}

// connect is the transport's dial; the address is the visit's target, see rewrite.
func (p *Proxy) connect(ctx context.Context, _, addr string) (net.Conn, error) {
	id, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	return p.dial(ctx, parseTarget(port, id))
}

// local is the name by which a server knows itself.
func local(port int) string { return "localhost:" + strconv.Itoa(port) }

// rewrite makes the request that the server gets.
func rewrite(pr *httputil.ProxyRequest) {
	v := visitOf(pr.In)
	u := pr.Out.URL
	u.Scheme, u.Host = "http", net.JoinHostPort(string(v.Sandbox), strconv.Itoa(v.Port))
	u.RawPath = v.rest
	u.Path, _ = url.PathUnescape(v.rest) // it was a part of one that could be read
	u.RawQuery = pr.In.URL.RawQuery
	pr.SetXForwarded()
	pr.Out.Host = local(v.Port)
	h := pr.Out.Header
	h.Del("Proxy-Authorization")
	if slices.ContainsFunc(h.Values("Authorization"), isAPIToken) {
		h.Del("Authorization") // it was not meant for a server in a sandbox
	}
	takeCookie(h, cookieName)
	// The server is asked by its own name, and so are these.
	own := "http://" + local(v.Port)
	if o := h.Get("Origin"); o == origin(pr.In) || o == "null" && !v.host {
		h.Set("Origin", own)
	}
	if rest, ok := strings.CutPrefix(h.Get("Referer"), origin(pr.In)); ok {
		rest, _ = strings.CutPrefix(rest, v.prefix)
		h.Set("Referer", own+rest)
	}
}

// apiTokens is how tokens of the API begin.
const apiTokens = "ods_"

// isAPIToken reports whether credentials are a token of the API. The word before
// it is read in any case.
func isAPIToken(credentials string) bool {
	scheme, token, _ := strings.Cut(strings.TrimSpace(credentials), " ")
	return strings.EqualFold(scheme, "Bearer") && strings.HasPrefix(strings.TrimLeft(token, " "), apiTokens)
}

// status is what a visitor is answered when it cannot be passed on.
func status(err error) (int, string) {
	var f *fault.Error
	if !errors.As(err, &f) {
		return http.StatusBadGateway, "the server broke off, or does not speak HTTP: " + err.Error()
	}
	switch f.Kind {
	case fault.NotFound:
		if f.Field == "port" {
			return http.StatusBadGateway, f.Error()
		}
		return http.StatusNotFound, f.Error()
	case fault.SandboxEnded:
		return http.StatusGone, f.Error()
	case fault.PermissionDenied:
		return http.StatusForbidden, f.Error()
	case fault.InvalidArgument:
		return http.StatusBadRequest, f.Error()
	case fault.Internal:
		return http.StatusInternalServerError, "something went wrong here; the server's log has more"
	}
	return http.StatusServiceUnavailable, f.Error()
}

// Refuse tells a visitor why it is not let in.
func (p *Proxy) Refuse(w http.ResponseWriter, err error) {
	code, text := status(err)
	h := w.Header()
	h.Set("Content-Type", "text/plain; charset=utf-8")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(code)
	_, _ = w.Write([]byte(text + "\n")) // the visitor may be gone
}

func (p *Proxy) failed(w http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() != nil {
		panic(http.ErrAbortHandler) // nobody is there to read it
	}
	p.log.Debug("a request to a server in a sandbox failed", "sandbox", visitOf(r).Sandbox, "port", visitOf(r).Port, "error", err)
	p.Refuse(w, err)
}

// modify makes the answer that the visitor gets.
func modify(res *http.Response) error {
	v, in := visitOf(res.Request), res.Request
	h := res.Header
	public := in.Header.Get("X-Forwarded-Host")
	for _, name := range []string{"Location", "Content-Location"} {
		if to := h.Get(name); to != "" {
			h.Set(name, v.outward(to, public))
		}
	}
	cookies := h.Values("Set-Cookie")
	h.Del("Set-Cookie")
	for _, c := range cookies {
		if c = v.cookie(c); c != "" {
			h.Add("Set-Cookie", c)
		}
	}
	// These speak for more than the server.
	h.Del("Strict-Transport-Security")
	h.Del("Alt-Svc")
	h.Del("Clear-Site-Data")
	h.Del("NEL") // would have browsers report to it what they ask of the API's whole name, tokens in paths included
	h.Del("Report-To")
	if !v.host {
		confine(h, in.Header.Get("Origin") == "http://"+local(v.Port))
	}
	return nil
}

// outward makes an address that a server gives of itself one that its visitors
// can use.
func (v *Visit) outward(to, public string) string {
	u, err := url.Parse(to)
	if err != nil {
		return to
	}
	if u.Host != "" {
		name, port := splitPort(u.Host)
		if port == "" && v.Port == 80 && u.Scheme != "https" {
			port = "80"
		}
		own := port == strconv.Itoa(v.Port) && (name == "localhost" || name == "127.0.0.1" || name == "[::1]")
		if !own && u.Host != public {
			return to
		}
		u.Scheme, u.Host = "", ""
		if u.Path == "" {
			u.Path = "/"
		}
	}
	if strings.HasPrefix(u.Path, "/") {
		return v.prefix + u.String()
	}
	return to
}
