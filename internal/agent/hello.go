package agent

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/http"
	"syscall"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/api/gen/agent/v1/agentv1connect"
	"github.com/kernflux/opendsec/internal/agent/proc"
	"github.com/kernflux/opendsec/internal/fault"
)

// agentService answers agent.v1.Agent.
type agentService struct{ s *Server }

var _ agentv1connect.AgentHandler = (*agentService)(nil)

// Hello takes on an identity.
func (a *agentService) Hello(ctx context.Context, req *connect.Request[agentv1.HelloRequest]) (*connect.Response[agentv1.HelloResponse], error) {
	if err := a.s.become(ctx, req.Header(), req.Msg); err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.HelloResponse{
		Version: a.s.cfg.Version, Started: timestamppb.New(a.s.started),
	}), nil
}

// become takes on an identity, if the call may give one: who shows the present
// token, or gives it again, as one does who did not hear the answer. Other
// calls see the old identity until the machine has all of the new one.
func (s *Server) become(call context.Context, h http.Header, msg *agentv1.HelloRequest) error {
	s.hello.Lock()
	defer s.hello.Unlock()
	old := s.identity.Load()
	if old != nil && !old.admits(h) && !old.knows(msg.GetToken()) {
		return connect.NewError(connect.CodeUnauthenticated, errors.New("the sandbox has an identity; a new one needs its present token"))
	}
	if msg.GetToken() == "" {
		return connect.NewError(connect.CodeInvalidArgument, errors.New("token: must not be empty"))
	}
	id := old.next(msg)
	u, err := s.accounts.Load().Find(id.user)
	if err != nil {
		return fault.ToConnect(fault.Invalid("default_user", "%w", err))
	}
	if id.workdir != "" {
		c := caller{User: u}
		if id.workdir, err = c.path(id.workdir); err != nil {
			return fault.ToConnect(fault.Invalid("default_workdir", "%w", err))
		}
	}
	if s.cfg.Machine {
		m := machine{log: s.cfg.Log}
		m.setClock(msg.GetNow())
		m.stir(msg.GetEntropy())
		m.settle(msg, u, id.workdir)
	}
	s.identity.Store(id)
	if old != nil {
		s.leave(call, old, id)
	}
	return nil
}

// leave ends what belonged to the machine's last life: calls whose token does
// not count any more, and after a standstill all connections but the call's
// own. A machine that stood still without being restored has no others, as its
// callers come by one. What callers of the same machine followed keeps their
// places; those of a machine that this one was copied of never come.
func (s *Server) leave(call context.Context, old, id *identity) {
	forked, resumed := id.token != old.token, id.generation != old.generation
	if resumed {
		s.table.Resumed()
	}
	if forked {
		old.revoke()
	}
	if forked || resumed {
		s.conns.cut(call)
	}
	if forked {
		s.table.Forget()
	}
}

// Activity says what runs.
func (a *agentService) Activity(context.Context, *connect.Request[agentv1.ActivityRequest]) (*connect.Response[agentv1.ActivityResponse], error) {
	running, since, any := a.s.table.Activity()
	out := &agentv1.ActivityResponse{RunningCommands: uint32(running)}
	if any {
		out.SinceLastEnd = durationpb.New(since)
	}
	return connect.NewResponse(out), nil
}

// find returns the process with the pid, or with the tag when that is set.
func (a *agentService) find(pid uint32, tag string) (*proc.Process, error) {
	var p *proc.Process
	var err error
	switch {
	case tag != "":
		p, err = a.s.table.ByTag(tag)
	case pid != 0:
		p, err = a.s.table.ByPID(int(pid))
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("process: name one by its pid or its tag"))
	}
	if err != nil {
		return nil, gone(pid, tag)
	}
	return p, nil
}

func gone(pid uint32, tag string) error {
	if tag != "" {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("process with tag %q not found", tag))
	}
	return connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", pid))
}

// Attach streams output that was and that will be.
func (a *agentService) Attach(ctx context.Context, req *connect.Request[agentv1.AttachRequest], stream *connect.ServerStream[agentv1.AttachResponse]) error {
	msg := req.Msg
	p, err := a.find(msg.GetPid(), msg.GetTag())
	if err != nil {
		return err
	}
	sub := p.Subscribe([2]int64{position(msg.GetStdoutOffset()), position(msg.GetStderrOffset())})
	defer unfollow(ctx, sub)
	if !msg.GetNoFollow() {
		sub.Follow()
	}
	held := sub.Held()
	err = stream.Send(&agentv1.AttachResponse{Event: &agentv1.AttachResponse_Started_{Started: &agentv1.AttachResponse_Started{
		Pid: uint32(p.PID), StdoutFrom: uint64(held[proc.Stdout]), StderrFrom: uint64(held[proc.Stderr])}}})
	if err != nil {
		return err
	}
	var buf []byte
	for {
		chunk, ok, ended := sub.Next(&buf)
		switch {
		case ok:
			gather(ctx)
			err = stream.Send(attachOutput(chunk))
		case ended:
			end, _ := p.End()
			return stream.Send(&agentv1.AttachResponse{Event: &agentv1.AttachResponse_End_{End: &agentv1.AttachResponse_End{
				ExitCode: int32(end.Code), Signal: uint32(end.Signal), TimedOut: end.TimedOut}}})
		case msg.GetNoFollow():
			return nil
		default:
			send(ctx)
			select {
			case <-sub.Wake():
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		if err != nil {
			return err
		}
	}
}

func position(offset uint64) int64 { return int64(min(offset, math.MaxInt64)) }

func attachOutput(c proc.Chunk) *agentv1.AttachResponse {
	out := &agentv1.AttachResponse_Output{Offset: uint64(c.Offset), Data: c.Data}
	if c.Stream == proc.Stdout {
		return &agentv1.AttachResponse{Event: &agentv1.AttachResponse_Stdout{Stdout: out}}
	}
	return &agentv1.AttachResponse{Event: &agentv1.AttachResponse_Stderr{Stderr: out}}
}

// Signal sends any signal.
func (a *agentService) Signal(ctx context.Context, req *connect.Request[agentv1.SignalRequest]) (*connect.Response[agentv1.SignalResponse], error) {
	msg := req.Msg
	p, err := a.find(msg.GetPid(), msg.GetTag())
	if err != nil {
		return nil, err
	}
	if n := msg.GetSignal(); n < 1 || n > 64 {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("signal: %d is not one of 1 to 64", n))
	}
	err = signal(ctx, p, syscall.Signal(msg.GetSignal()), msg.GetGroup())
	if errors.Is(err, proc.ErrEnded) {
		return nil, gone(msg.GetPid(), msg.GetTag())
	}
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&agentv1.SignalResponse{}), nil
}
