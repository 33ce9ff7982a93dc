package sim

import (
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"net/http"
	"path"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/api/gen/agent/v1/agentv1connect"
	"github.com/kernflux/opendsec/api/gen/filesystem/filesystemconnect"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
)

// agent imitates the agent of one machine.
type agent struct {
	agentv1connect.UnimplementedAgentHandler
	record  record
	started time.Time
	gate    *gate
	files   *fileTree
	table   *table

	mu    sync.Mutex // guards what follows
	state state
	ended bool // the state is not written any more
}

func newAgent(r record, commandTime time.Duration) (*agent, error) {
	s, err := readState(r.StateDir)
	if err != nil {
		return nil, err
	}
	gate := newGate()
	files, err := openTree(r, gate)
	if err != nil {
		return nil, err
	}
	return &agent{record: r, started: time.Now(), gate: gate, files: files, table: newTable(commandTime), state: s}, nil
}

// close ends what commands seem to run.
func (a *agent) close() {
	a.finish()
	a.gate.end()
	a.table.close()
	a.files.close()
}

// finish has the state stay as it is.
func (a *agent) finish() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
}

// now returns the state.
func (a *agent) now() state {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.state
}

// change changes the state, on the disk first.
func (a *agent) change(f func(*state)) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.ended {
		return errEnded
	}
	next := a.state
	f(&next)
	if next == a.state {
		return nil
	}
	if err := writeState(a.record.StateDir, next); err != nil {
		return err
	}
	a.state = next
	return nil
}

// handler answers the agent's port.
func (a *agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) })
	mux.Handle(agentv1connect.NewAgentHandler(a))
	mux.Handle(processconnect.NewProcessHandler(&processes{table: a.table, gate: a.gate}))
	mux.Handle(filesystemconnect.NewFilesystemHandler(&filesystem{a: a}))
	mux.HandleFunc("GET /files", a.download)
	mux.HandleFunc("POST /files", a.upload)
	mux.HandleFunc("GET /connect", func(w http.ResponseWriter, r *http.Request) {
		httpError(w, http.StatusBadGateway, "nothing listens in a simulated sandbox")
	})
	mux.HandleFunc("GET /archive", a.pack)
	mux.HandleFunc("POST /archive", a.unpack)
	return a.gate.still(a.guard(mux))
}

// guard refuses what comes without the token, and, before there is one, all
// that needs none but the first Hello, which looks at its callers itself.
func (a *agent) guard(next http.Handler) http.Handler {
	writer := connect.NewErrorWriter()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		token := a.now().Token
		hello := r.URL.Path == agentv1connect.AgentHelloProcedure
		var err *connect.Error
		switch {
		case r.URL.Path == "/health" || hello:
		case token == "":
			err = connect.NewError(connect.CodeUnavailable, errors.New("the sandbox has no identity yet; call again in a moment"))
		case !same(r.Header.Get("X-Access-Token"), token):
			err = connect.NewError(connect.CodeUnauthenticated, errors.New("unauthorized access, please provide a valid access token"))
		}
		switch {
		case err == nil:
			next.ServeHTTP(w, r)
		case writer.IsSupported(r):
			_ = writer.Write(w, r, err) // the caller went away
		case err.Code() == connect.CodeUnavailable:
			httpError(w, http.StatusServiceUnavailable, err.Message())
		default:
			httpError(w, http.StatusUnauthorized, err.Message())
		}
	})
}

// httpError answers a plain request in the agent's form.
func httpError(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(map[string]any{"code": status, "message": message})
}

func same(a, b string) bool { return subtle.ConstantTimeCompare([]byte(a), []byte(b)) == 1 }

// Hello takes an identity from whoever shows the present token or gives it
// again. A machine that gets another token is another machine: it forgets the
// commands that ended.
func (a *agent) Hello(_ context.Context, req *connect.Request[agentv1.HelloRequest]) (*connect.Response[agentv1.HelloResponse], error) {
	if req.Msg.GetToken() == "" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("token: must not be empty"))
	}
	err := a.gate.pass(func() error { return a.become(req.Header().Get("X-Access-Token"), req.Msg) })
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.HelloResponse{Version: "simulated", Started: timestamppb.New(a.started)}), nil
}

func (a *agent) become(shown string, id *agentv1.HelloRequest) error {
	old := a.now().Token
	if old != "" && !same(shown, old) && !same(id.GetToken(), old) {
		return connect.NewError(connect.CodeUnauthenticated, errors.New("the sandbox has an identity; a new one needs its present token"))
	}
	err := a.change(func(s *state) {
		s.Token, s.User, s.Workdir = id.GetToken(), id.GetDefaultUser(), id.GetDefaultWorkdir()
	})
	if err != nil {
		return connect.NewError(connect.CodeInternal, err)
	}
	if old != "" && old != id.GetToken() {
		a.table.forget()
	}
	return nil
}

// Activity says what seems to run.
func (a *agent) Activity(context.Context, *connect.Request[agentv1.ActivityRequest]) (*connect.Response[agentv1.ActivityResponse], error) {
	running, last := a.table.activity()
	resp := &agentv1.ActivityResponse{RunningCommands: uint32(running)}
	if !last.IsZero() {
		resp.SinceLastEnd = durationpb.New(time.Since(last))
	}
	return connect.NewResponse(resp), nil
}

// Attach gives the end of a command, which has no output.
func (a *agent) Attach(ctx context.Context, req *connect.Request[agentv1.AttachRequest], out *connect.ServerStream[agentv1.AttachResponse]) error {
	c, err := a.table.find(req.Msg.GetPid(), req.Msg.GetTag())
	if err != nil {
		return err
	}
	err = out.Send(&agentv1.AttachResponse{Event: &agentv1.AttachResponse_Started_{Started: &agentv1.AttachResponse_Started{Pid: c.pid}}})
	if err != nil {
		return err
	}
	if req.Msg.GetNoFollow() && !c.over() {
		return nil
	}
	if err := c.wait(ctx); err != nil {
		return err
	}
	end := &agentv1.AttachResponse_End{Signal: uint32(c.signal)}
	if c.signal != 0 {
		end.ExitCode = -1
	}
	return out.Send(&agentv1.AttachResponse{Event: &agentv1.AttachResponse_End_{End: end}})
}

// Signal ends a command.
func (a *agent) Signal(_ context.Context, req *connect.Request[agentv1.SignalRequest]) (*connect.Response[agentv1.SignalResponse], error) {
	if n := req.Msg.GetSignal(); n < 1 || n > 64 {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("signal: must be 1 to 64"))
	}
	c, err := a.table.find(req.Msg.GetPid(), req.Msg.GetTag())
	if err != nil {
		return nil, err
	}
	if err := a.gate.pass(func() error { c.kill(int(req.Msg.GetSignal())); return nil }); err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.SignalResponse{}), nil
}

// resolve makes a caller's path absolute.
func (a *agent) resolve(name, user string) string {
	s := a.now()
	if user == "" {
		user = s.User
	}
	home := "/root"
	if user != "" && user != "root" && user != "0" {
		home = "/home/" + user
	}
	switch {
	case name == "~":
		return home
	case strings.HasPrefix(name, "~/"):
		name = home + name[1:]
	case !strings.HasPrefix(name, "/") && s.Workdir != "":
		name = s.Workdir + "/" + name
	case !strings.HasPrefix(name, "/"):
		name = home + "/" + name
	}
	return path.Clean("/" + name)
}
