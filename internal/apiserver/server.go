// Package apiserver is the public API: it knows the caller, checks what is
// asked, places and records a sandbox in one transaction, asks the node's edge
// to make it, and passes the bytes of the data plane on. It keeps no state of
// its own but caches of a second or two; several may run side by side on one
// database. It does not watch nodes or deadlines, that is the watcher's part,
// and it does not look into what it passes on.
package apiserver

import (
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"connectrpc.com/connect"
	"connectrpc.com/grpchealth"
	"connectrpc.com/grpcreflect"

	"github.com/kernflux/opendsec/api/gen/iam/v1/iamv1connect"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/ingress"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/store"
)

// Config says how the API is to work.
type Config struct {
	// IAMAddress is where iam listens for components, "host:port".
	IAMAddress string
	// CPUOvercommit is how many times a node's cores its edge reports as
	// capacity; 0 means 8. One sandbox gets no more cores than a node has.
	CPUOvercommit float64
	// StopTimeout is how long StopSandbox waits for a node before it leaves
	// the rest to the watcher; 0 means 20 s, which is longer than a node waits
	// for itself.
	StopTimeout time.Duration
	// Domain is below which servers in sandboxes have names of their own, all of
	// which lead here: "sandboxes.example.com", with a port where that is not the
	// one by which callers reach the API. "" means that there are no such names.
	Domain string
	// Version is what GetVersion answers.
	Version string
}

// Validate reports all faults of a configuration.
func (c Config) Validate() error {
	var faults []error
	if _, _, err := net.SplitHostPort(c.IAMAddress); err != nil {
		faults = append(faults, errors.New("iam_address: want host:port, not "+c.IAMAddress))
	}
	if c.CPUOvercommit < 0 {
		faults = append(faults, errors.New("cpu_overcommit: must not be negative"))
	}
	if err := ingress.CheckDomain(c.Domain); err != nil {
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

// Deps are what the API works with.
type Deps struct {
	DB   *store.DB
	IAM  *http.Client // to iam, as role apiserver
	Edge *http.Client // to the edges, as role apiserver; HTTP/2
	Log  *slog.Logger
	Now  func() time.Time // nil means time.Now
}

// Server is the API. It serves what Handler returns and runs nothing else.
type Server struct {
	cfg    Config
	deps   Deps
	log    *slog.Logger
	door   *door
	edges  *edges
	routes *routes
	urls   *urls
	nodes  *nodeTable
	errors *connect.ErrorWriter
	making claims
	turns  turns
}

// New returns an API that works with deps.
func New(cfg Config, deps Deps) *Server {
	if cfg.CPUOvercommit == 0 {
		cfg.CPUOvercommit = 8
	}
	if cfg.StopTimeout == 0 {
		cfg.StopTimeout = 20 * time.Second
	}
	if deps.Now == nil {
		deps.Now = time.Now
	}
	passID := connect.WithInterceptors(rpc.Interceptor(deps.Log))
	auth := iamv1connect.NewAuthClient(deps.IAM, "https://"+cfg.IAMAddress, passID)
	s := &Server{
		cfg: cfg, deps: deps, log: deps.Log,
		door:   newDoor(auth, deps.Now),
		edges:  newEdges(deps.Edge, passID),
		routes: newRoutes(),
		nodes:  &nodeTable{db: deps.DB, now: deps.Now, overcommit: cfg.CPUOvercommit},
		errors: connect.NewErrorWriter(),
	}
	s.urls = newURLs(s)
	return s
}

// maxMessage bounds a request of the API, in bytes; the data plane has no bound.
const maxMessage = 4 << 20

// Handler returns all that the public port serves. It wants TLS around it.
func (s *Server) Handler() http.Handler {
	options := connect.WithHandlerOptions(
		connect.WithInterceptors(rpc.Interceptor(s.log), s.door.identify()),
		connect.WithReadMaxBytes(maxMessage),
	)
	services := []string{
		opendsecv1connect.SandboxServiceName, opendsecv1connect.ImageServiceName,
		opendsecv1connect.ClusterServiceName, opendsecv1connect.IdentityServiceName,
	}
	mux := http.NewServeMux()
	mux.Handle(opendsecv1connect.NewSandboxServiceHandler(sandboxRPC{s}, options))
	mux.Handle(opendsecv1connect.NewImageServiceHandler(imageRPC{s}, options))
	mux.Handle(opendsecv1connect.NewClusterServiceHandler(clusterRPC{s}, options))
	mux.Handle("/"+opendsecv1connect.IdentityServiceName+"/", newIdentityProxy(s))

	reflector := grpcreflect.NewStaticReflector(services...)
	mux.Handle(grpcreflect.NewHandlerV1(reflector))
	mux.Handle(grpcreflect.NewHandlerV1Alpha(reflector))
	mux.Handle(grpchealth.NewHandler(grpchealth.NewStaticChecker(services...)))
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("/", s.unknownPath)
	data := newDataPlane(s)
	return withRequestID(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Not by the mux: it would redirect paths that it finds unclean, and
		// what they mean is the agent's matter.
		switch {
		case s.urls.serve(w, r):
			return
		case strings.HasPrefix(r.URL.Path, dataPath):
			data.ServeHTTP(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	}))
}

// withRequestID gives every request its id before anything else sees it, so
// that what is passed on and what fails outside the Connect handlers has one.
func withRequestID(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := rpc.WithRequestID(r.Context(), r.Header)
		r.Header.Set(rpc.Header, rpc.RequestID(ctx))
		next.ServeHTTP(w, r.WithContext(withHost(ctx, r.Host)))
	})
}

// healthz says whether the API can do its work: its database answers.
func (s *Server) healthz(w http.ResponseWriter, r *http.Request) {
	if err := s.deps.DB.Ping(r.Context()); err != nil {
		s.log.Warn("the database does not answer", "error", err)
		http.Error(w, "the database does not answer", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	_, _ = w.Write([]byte("ok\n")) // the caller is gone
}

func (s *Server) unknownPath(w http.ResponseWriter, r *http.Request) {
	s.fail(w, r, fault.New(fault.NotFound, "nothing is served at %.200s: the API is at /opendsec.v1.SandboxService/ and its neighbours, a sandbox at /sandboxes/ID/", r.URL.Path))
}
