package apiserver

import (
	"context"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/ingress"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/tunnel"
)

// How long an address of a server in a sandbox may be good for.
const (
	leastURL   = time.Second
	defaultURL = 24 * time.Hour
	mostURL    = 30 * 24 * time.Hour
)

// urlSecret names the secret that addresses are signed with.
const urlSecret = "urls"

// urls answers those who come by an address of a server in a sandbox. They need
// no token of the API's: the address has its own.
type urls struct {
	server *Server
	proxy  *ingress.Proxy
	visits *visits

	mu  sync.Mutex // guards key
	key ingress.Key
}

func newURLs(s *Server) *urls {
	u := &urls{server: s}
	u.visits = newVisits(func(ctx context.Context, id sandbox.ID) ([]sandbox.RevokedURL, error) {
		rt, err := s.route(ctx, id)
		return rt.revoked, err
	})
	u.proxy = ingress.New(u.dial, s.log)
	return u
}

// signing returns the key, which is read from the database once.
func (u *urls) signing(ctx context.Context) (ingress.Key, error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.key == nil {
		key, err := u.server.deps.DB.Secret(ctx, urlSecret)
		if err != nil {
			return nil, err
		}
		u.key = key
	}
	return u.key, nil
}

// serve answers a request if it is for a server in a sandbox.
func (u *urls) serve(w http.ResponseWriter, r *http.Request) bool {
	v, ok := ingress.Find(r, u.server.cfg.Domain)
	if !ok {
		return false
	}
	by, done, err := u.admit(w, r, v)
	switch {
	case err != nil:
		told := rpc.Fault(r.Context(), err)
		u.server.log.Debug("refused a visit", "sandbox", v.Sandbox, "port", v.Port, "request_id", told.RequestID, "error", err)
		w.Header().Set(rpc.Header, told.RequestID)
		u.proxy.Refuse(w, told)
	case !done:
		r.Header.Del(rpc.Header) // ours, of the server's affair it is none
		ctx, end := u.visits.begin(r.Context(), v.Sandbox, by.ID)
		defer end()
		u.proxy.Serve(w, r.WithContext(ctx), v)
	}
	return true
}

// admit checks the token of a visit first, so that who has none learns nothing.
func (u *urls) admit(w http.ResponseWriter, r *http.Request, v ingress.Visit) (by ingress.Token, done bool, err error) {
	if v.Target == (ingress.Target{}) {
		return by, false, fault.New(fault.NotFound, "this is no address of a server in a sandbox; ask for one with get_url")
	}
	key, err := u.signing(r.Context())
	if err != nil {
		return by, false, err
	}
	by, done, err = key.Admit(w, r, v, u.server.deps.Now())
	if done || err != nil {
		return by, done, err
	}
	rt, err := u.server.route(r.Context(), v.Sandbox)
	switch {
	case err != nil:
	case rt.end != nil:
		err = ended(v.Sandbox, *rt.end)
	case slices.ContainsFunc(rt.revoked, func(r sandbox.RevokedURL) bool { return r.ID == by.ID }):
		err = fault.New(fault.PermissionDenied, "this address of %s was revoked; ask for another with get_url", v.Target)
	}
	return by, false, err
}

// dial connects to a port of a sandbox.
func (u *urls) dial(ctx context.Context, t ingress.Target) (net.Conn, error) {
	rt, err := u.server.route(ctx, t.Sandbox)
	if err != nil {
		return nil, err
	}
	if rt.end != nil {
		return nil, ended(t.Sandbox, *rt.end)
	}
	to := rt.node.JoinPath(dataPath, string(t.Sandbox), tunnelDir, strconv.Itoa(t.Port))
	return tunnel.Dial(ctx, u.server.deps.Edge.Transport, to.String(), nil)
}

// madeURL is an address, and when it ends.
type madeURL struct {
	address string
	expires time.Time
}

// getURL returns the address of a port of a sandbox, for a caller that reached
// the API by a host.
func (s *Server) getURL(ctx context.Context, id string, port int64, ttl time.Duration) (madeURL, error) {
	if ttl == 0 {
		ttl = defaultURL
	}
	if err := checkURL(port, ttl); err != nil {
		return madeURL{}, err
	}
	sb, err := s.find(ctx, id, role.Developer)
	if err != nil {
		return madeURL{}, err
	}
	if sb.End != nil {
		return madeURL{}, ended(sb.ID, *sb.End)
	}
	key, err := s.urls.signing(ctx)
	if err != nil {
		return madeURL{}, err
	}
	t := ingress.Target{Sandbox: sb.ID, Port: int(port)}
	until := s.deps.Now().Add(ttl).Truncate(time.Second)
	return madeURL{ingress.Address(t, key.Sign(t, until), s.cfg.Domain, hostOf(ctx)), until}, nil
}

// revokeURL takes an address back. One that has expired, or whose sandbox has
// ended, is good for nothing any more, and so is revoked.
func (s *Server) revokeURL(ctx context.Context, id, address string) error {
	sb, err := s.find(ctx, id, role.Developer)
	if err != nil {
		return err
	}
	key, err := s.urls.signing(ctx)
	if err != nil {
		return err
	}
	token, err := s.readURL(key, sb.ID, address)
	if err != nil {
		return err
	}
	// Of one that has expired, or is about to, what is open ends on other servers
	// too: the record has it until they have looked.
	now := s.deps.Now()
	until := token.Until
	if least := now.Add(10 * routeFresh); until.Before(least) {
		until = least
	}
	revoked := sandbox.RevokedURL{ID: token.ID, Until: until.UTC()}
	_, err = s.deps.DB.UpdateSandbox(ctx, sb.ID, func(r *sandbox.Sandbox) error {
		if r.End != nil || r.RevokeURL(revoked, now) {
			return nil
		}
		return fault.New(fault.QuotaExceeded, "too many addresses of sandbox %s are revoked and have not expired: stop it, or wait", sb.ID)
	})
	s.routes.drop(sb.ID)
	if err == nil {
		s.urls.visits.cut(sb.ID, []sandbox.RevokedURL{revoked})
	}
	return err
}

// readURL returns the token of an address of a sandbox's.
func (s *Server) readURL(key ingress.Key, id sandbox.ID, address string) (ingress.Token, error) {
	wrong := fault.Invalid("url", "this is no address of sandbox %s that get_url returned", id)
	at, err := url.Parse(address)
	if err != nil {
		return ingress.Token{}, wrong
	}
	v, ok := ingress.Find(&http.Request{URL: at, Host: at.Host}, s.cfg.Domain)
	if !ok || v.Sandbox != id {
		return ingress.Token{}, wrong
	}
	token, err := key.Read(v.Token(), v.Target)
	if err != nil {
		return ingress.Token{}, wrong
	}
	return token, nil
}

func checkURL(port int64, ttl time.Duration) error {
	if err := tunnel.CheckPort(port); err != nil {
		return err
	}
	if port == backend.AgentPort {
		return fault.Invalid("port", "port %d is that of the sandbox's agent; it is reached by the API", port)
	}
	if ttl < leastURL || ttl > mostURL {
		return fault.Invalid("ttl", "ttl must be from %s to %s, not %s", leastURL, mostURL, ttl)
	}
	return nil
}

type hostKey struct{}

// withHost keeps by what a caller reached the API.
func withHost(ctx context.Context, host string) context.Context {
	return context.WithValue(ctx, hostKey{}, host)
}

func hostOf(ctx context.Context) string {
	host, _ := ctx.Value(hostKey{}).(string)
	return host
}
