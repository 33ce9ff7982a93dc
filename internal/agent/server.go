// Package agent is the server inside every sandbox: process 1 of the machine,
// which runs its commands, moves its files and knows its identity. It speaks
// E2B's envd contract (process.Process, filesystem.Filesystem, /files,
// /health, /metrics, /envs) and our own agent.v1, /archive and /connect on one
// port.
//
// It answers in the words of those contracts, so its errors are Connect
// errors and {"code","message"} as E2B's clients read them. It limits nothing
// and isolates nothing: that is the machine's part. It mounts nothing.
package agent

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/api/gen/agent/v1/agentv1connect"
	"github.com/kernflux/opendsec/api/gen/filesystem/filesystemconnect"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/agent/account"
	"github.com/kernflux/opendsec/internal/agent/proc"
)

// Port is where the agent listens in a sandbox: backend.AgentPort, which is
// not imported, because what comes with it would be loaded in every sandbox.
const Port = 49983

// Bounds of the server.
const (
	maxMessage = 16 << 20               // bytes of one RPC message
	maxStreams = 10000                  // calls at once on one connection
	grace      = 500 * time.Millisecond // for commands to end when the agent is told to
)

// Config is what a server is made with.
type Config struct {
	Log     *slog.Logger
	Version string
	// Machine says that the server is process 1 of a machine of its own, whose
	// host name, clock and standard directories it then keeps. An ordinary
	// process must not touch those of the machine it runs on.
	Machine bool
}

// Server is the agent. Its zero value is of no use; New makes one.
type Server struct {
	cfg      Config
	started  time.Time
	accounts *account.DB
	table    *proc.Table
	own      ownership
	load     cpuMeter

	identity atomic.Pointer[identity]
	hello    sync.Mutex // held while an identity is being taken on
	conns    *conns

	process    http.Handler
	filesystem http.Handler
	agent      http.Handler
	errors     *connect.ErrorWriter
}

// New returns a server that has no identity yet.
func New(cfg Config, now time.Time) *Server {
	s := &Server{
		cfg: cfg, started: now, accounts: account.New("/etc"), table: proc.New(), own: ownOwnership(),
		errors: connect.NewErrorWriter(),
	}
	options := []connect.HandlerOption{
		connect.WithCompression("gzip", nil, nil), // some clients that ask for it cannot read it
		connect.WithReadMaxBytes(maxMessage),
	}
	_, s.process = processconnect.NewProcessHandler(&processService{s: s}, options...)
	_, s.filesystem = filesystemconnect.NewFilesystemHandler(&filesystemService{s: s}, options...)
	_, s.agent = agentv1connect.NewAgentHandler(&agentService{s: s}, options...)
	return s
}

// Run serves on the listener until ctx ends, then ends all commands and
// returns when they are gone.
func (s *Server) Run(ctx context.Context, l net.Listener) error {
	s.conns = listenThrough(l)
	server := &http.Server{
		Handler: s, ConnContext: withConn, Protocols: new(http.Protocols), ReadHeaderTimeout: 30 * time.Second,
		ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelWarn),
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams: maxStreams, MaxReadFrameSize: 256 << 10,
			// One call whose body waits must not hold up the others.
			MaxReceiveBufferPerStream: 256 << 10, MaxReceiveBufferPerConnection: 4<<20 - 1,
		},
	}
	server.Protocols.SetHTTP1(true)
	server.Protocols.SetUnencryptedHTTP2(true)

	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	served := make(chan error, 1)
	go func() {
		served <- server.Serve(s.conns)
		cancel()
	}()
	err := s.table.Run(ctx, grace)
	server.Close()
	if serr := <-served; !errors.Is(serr, http.ErrServerClosed) {
		return errors.Join(err, serr)
	}
	return err
}

// ServeHTTP answers one call. Until the first Hello everything but that and
// /health is refused; later everything but those two wants the token.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	path := r.URL.Path
	if path == "/health" {
		w.Header().Set("Cache-Control", "no-store")
		w.WriteHeader(http.StatusNoContent)
		return
	}
	if path == agentv1connect.AgentHelloProcedure {
		s.agent.ServeHTTP(w, r) // checks the token itself
		return
	}
	id := s.identity.Load()
	if id == nil {
		s.refuse(w, r, connect.CodeUnavailable, http.StatusServiceUnavailable, "the sandbox has no identity yet; call again in a moment")
		return
	}
	if !id.admits(r.Header) {
		httpError(w, http.StatusUnauthorized, "unauthorized access, please provide a valid access token or method signing if supported")
		return
	}
	r, done := id.bind(w, r)
	defer done()
	switch {
	case strings.HasPrefix(path, "/process.Process/"):
		s.serveProcess(w, r)
	case strings.HasPrefix(path, "/filesystem.Filesystem/"):
		s.filesystem.ServeHTTP(w, r)
	case strings.HasPrefix(path, "/agent.v1.Agent/"):
		gathered(s.agent, w, r)
	default:
		s.serveHTTP(w, r, id)
	}
}

// serveHTTP answers the calls that are no RPC.
func (s *Server) serveHTTP(w http.ResponseWriter, r *http.Request, id *identity) {
	switch {
	case r.URL.Path == "/files" && (r.Method == http.MethodGet || r.Method == http.MethodHead):
		s.download(w, r)
	case r.URL.Path == "/files" && r.Method == http.MethodPost:
		s.upload(w, r)
	case r.URL.Path == "/archive" && r.Method == http.MethodGet:
		s.pack(w, r)
	case r.URL.Path == "/archive" && r.Method == http.MethodPost:
		s.unpack(w, r)
	case r.URL.Path == "/connect" && r.Method == http.MethodGet:
		s.connect(w, r)
	case r.URL.Path == "/metrics" && r.Method == http.MethodGet:
		httpJSON(w, s.metrics(time.Now()))
	case r.URL.Path == "/envs" && r.Method == http.MethodGet:
		httpJSON(w, id.env)
	default:
		httpError(w, http.StatusNotFound, r.Method+" "+r.URL.Path+" is not something the sandbox's agent answers")
	}
}

// serveProcess answers process.Process. On HTTP/1.1 an answer to a stream of
// input can come before that stream's end, as an error must.
func (s *Server) serveProcess(w http.ResponseWriter, r *http.Request) {
	if r.URL.Path == processconnect.ProcessStreamInputProcedure && r.ProtoMajor == 1 {
		_ = http.NewResponseController(w).EnableFullDuplex() // the answer then only comes later
		r = r.WithContext(r.Context())
		r.Body = unclosed{r.Body}
	}
	gathered(s.process, w, r)
}

// unclosed is a body whose closing is left to the server, which does it after
// the answer went out: it waits for what the caller has still to send.
type unclosed struct{ io.Reader }

// Close does nothing.
func (unclosed) Close() error { return nil }

// refuse answers a call of any kind with an error.
func (s *Server) refuse(w http.ResponseWriter, r *http.Request, code connect.Code, status int, message string) {
	if s.errors.IsSupported(r) {
		_ = s.errors.Write(w, r, connect.NewError(code, errors.New(message))) // a caller that left does not need it
		return
	}
	httpError(w, status, message)
}

// httpError answers in the form that E2B's clients read.
func httpError(w http.ResponseWriter, status int, message string) {
	body, err := json.Marshal(struct {
		Code    int    `json:"code"`
		Message string `json:"message"`
	}{status, message})
	if err != nil {
		panic(err) // a number and a string
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	w.WriteHeader(status)
	_, _ = w.Write(body)
}

func httpJSON(w http.ResponseWriter, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		panic(err) // our own plain types
	}
	w.Header().Set("Content-Type", "application/json; charset=utf-8")
	_, _ = w.Write(body)
}
