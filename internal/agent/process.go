package agent

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/agent/proc"
)

// processService answers process.Process.
type processService struct{ s *Server }

var _ processconnect.ProcessHandler = (*processService)(nil)

// How long things are waited for.
const (
	defaultKeepalive = 90 * time.Second // between signs of life on a silent stream
	connectFor       = 30 * time.Second // how long an ended process can still be connected to
	reapFor          = time.Second      // for a killed process to be gone
)

var errNoTerminals = connect.NewError(connect.CodeUnimplemented, errors.New("this version has no terminals"))

// Start runs a process and streams what it does.
func (ps *processService) Start(ctx context.Context, req *connect.Request[process.StartRequest], stream *connect.ServerStream[process.StartResponse]) error {
	msg := req.Msg
	if msg.GetPty() != nil {
		return errNoTerminals
	}
	c, err := ps.s.rpcCaller(req.Header())
	if err != nil {
		return err
	}
	var timeout time.Duration
	if deadline, ok := ctx.Deadline(); ok {
		timeout = max(time.Until(deadline), 1)
	}
	config := msg.GetProcess()
	request := proc.Request{Cmd: config.GetCmd(), Args: config.GetArgs(), Env: config.GetEnvs(), Tag: msg.GetTag()}
	if config != nil {
		request.Dir = config.Cwd
	}
	p, sub, err := ps.s.start(c, request, msg.Stdin == nil || msg.GetStdin(), timeout)
	if err != nil {
		return err
	}
	call := withoutDeadline(ctx)
	defer unfollow(call, sub)
	f := follower{p: p, sub: sub, keepalive: keepalive(req.Header()), start: true, send: func(e *process.ProcessEvent) error {
		return stream.Send(&process.StartResponse{Event: e})
	}}
	return f.follow(call)
}

// Connect streams what a running process does from now on.
func (ps *processService) Connect(ctx context.Context, req *connect.Request[process.ConnectRequest], stream *connect.ServerStream[process.ConnectResponse]) error {
	p, err := ps.find(req.Msg.GetProcess())
	if err != nil {
		return err
	}
	if p.SinceEnd() > connectFor {
		return notFound(req.Msg.GetProcess())
	}
	sub := p.Subscribe([2]int64{proc.Live, proc.Live})
	defer unfollow(ctx, sub)
	sub.Follow()
	f := follower{p: p, sub: sub, keepalive: keepalive(req.Header()), send: func(e *process.ProcessEvent) error {
		return stream.Send(&process.ConnectResponse{Event: e})
	}}
	return f.follow(ctx)
}

// unfollow ends a subscription. When its caller was cut off, its place is kept.
func unfollow(call context.Context, sub *proc.Subscription) {
	if comesBack(call) {
		sub.Leave()
		return
	}
	sub.Close()
}

// keepalive reads after how much silence a caller wants a sign of life.
func keepalive(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get("Keepalive-Ping-Interval"))
	if err != nil || n < 1 || n > 3600 {
		return defaultKeepalive
	}
	return time.Duration(n) * time.Second
}

// follower streams one process to one caller.
type follower struct {
	p         *proc.Process
	sub       *proc.Subscription
	keepalive time.Duration
	start     bool // the caller's deadline is the process's
	send      func(*process.ProcessEvent) error
}

func (f *follower) follow(ctx context.Context) error {
	err := f.send(&process.ProcessEvent{Event: &process.ProcessEvent_Start{
		Start: &process.ProcessEvent_StartEvent{Pid: uint32(f.p.PID)}}})
	if err != nil {
		return err
	}
	var buf []byte
	var timer *time.Timer
	for {
		chunk, ok, ended := f.sub.Next(&buf)
		switch {
		case ok:
			gather(ctx) // there may be more, or the end
			if err := f.send(dataEvent(chunk)); err != nil {
				return err
			}
			continue
		case ended:
			return f.end(ctx)
		}
		send(ctx)
		if timer == nil {
			timer = time.NewTimer(f.keepalive)
			defer timer.Stop()
		} else {
			timer.Reset(f.keepalive)
		}
		select {
		case <-f.sub.Wake():
		case <-timer.C:
			if err := f.send(&process.ProcessEvent{Event: &process.ProcessEvent_Keepalive{Keepalive: &process.ProcessEvent_KeepAlive{}}}); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err() // the process goes on
		}
	}
}

// end sends how the process ended. One that its deadline ended has no end
// event, or E2B's clients would take it for a command that failed.
func (f *follower) end(ctx context.Context) error {
	end, _ := f.p.End()
	if end.TimedOut && f.start {
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the command's deadline passed; it was killed with its process group"))
	}
	gather(ctx) // the end of the stream goes with it
	return f.send(&process.ProcessEvent{Event: &process.ProcessEvent_End{End: endEvent(end)}})
}

func dataEvent(c proc.Chunk) *process.ProcessEvent {
	data := &process.ProcessEvent_DataEvent{}
	if c.Stream == proc.Stdout {
		data.Output = &process.ProcessEvent_DataEvent_Stdout{Stdout: c.Data}
	} else {
		data.Output = &process.ProcessEvent_DataEvent_Stderr{Stderr: c.Data}
	}
	return &process.ProcessEvent{Event: &process.ProcessEvent_Data{Data: data}}
}

func endEvent(end proc.End) *process.ProcessEvent_EndEvent {
	e := &process.ProcessEvent_EndEvent{ExitCode: int32(end.Code), Exited: end.Signal == 0}
	if end.Signal != 0 {
		e.Status = "signal: " + end.Signal.String()
	} else {
		e.Status = "exit status " + strconv.Itoa(end.Code)
	}
	if end.Code != 0 {
		e.Error = &e.Status
	}
	return e
}

// find returns the process that a selector names.
func (ps *processService) find(sel *process.ProcessSelector) (*proc.Process, error) {
	var p *proc.Process
	var err error
	switch by := sel.GetSelector().(type) {
	case *process.ProcessSelector_Pid:
		p, err = ps.s.table.ByPID(int(by.Pid))
	case *process.ProcessSelector_Tag:
		p, err = ps.s.table.ByTag(by.Tag)
	default:
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("process: name one by its pid or its tag"))
	}
	if err != nil {
		return nil, notFound(sel)
	}
	return p, nil
}

func notFound(sel *process.ProcessSelector) error {
	if by, ok := sel.GetSelector().(*process.ProcessSelector_Tag); ok {
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("process with tag %q not found", by.Tag))
	}
	return connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", sel.GetPid()))
}

// List lists what runs.
func (ps *processService) List(context.Context, *connect.Request[process.ListRequest]) (*connect.Response[process.ListResponse], error) {
	out := &process.ListResponse{}
	for _, p := range ps.s.table.Running() {
		r := p.Request
		info := &process.ProcessInfo{Pid: uint32(p.PID), Config: &process.ProcessConfig{Cmd: r.Cmd, Args: r.Args, Envs: r.Env, Cwd: r.Dir}}
		if r.Tag != "" {
			info.Tag = &r.Tag
		}
		out.Processes = append(out.Processes, info)
	}
	return connect.NewResponse(out), nil
}

// Update would resize a terminal.
func (ps *processService) Update(context.Context, *connect.Request[process.UpdateRequest]) (*connect.Response[process.UpdateResponse], error) {
	return nil, errNoTerminals
}

// StreamInput writes pieces of input as they come. The end of the stream does
// not end the process's input.
func (ps *processService) StreamInput(ctx context.Context, stream *connect.ClientStream[process.StreamInputRequest]) (*connect.Response[process.StreamInputResponse], error) {
	var sel *process.ProcessSelector
	var p *proc.Process
	for stream.Receive() {
		switch e := stream.Msg().GetEvent().(type) {
		case *process.StreamInputRequest_Start:
			sel = e.Start.GetProcess()
			var err error
			if p, err = ps.find(sel); err != nil {
				return nil, err
			}
			if _, ended := p.End(); ended {
				return nil, notFound(sel)
			}
		case *process.StreamInputRequest_Data:
			if p == nil {
				return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("the stream's first message must name the process"))
			}
			if err := ps.input(ctx, &process.SendInputRequest{Process: sel, Input: e.Data.GetInput()}, p); err != nil {
				return nil, err
			}
		}
	}
	if err := stream.Err(); err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.StreamInputResponse{}), nil
}

// SendInput writes one piece of input.
func (ps *processService) SendInput(ctx context.Context, req *connect.Request[process.SendInputRequest]) (*connect.Response[process.SendInputResponse], error) {
	p, err := ps.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := ps.input(ctx, req.Msg, p); err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.SendInputResponse{}), nil
}

func (ps *processService) input(ctx context.Context, req *process.SendInputRequest, p *proc.Process) error {
	switch i := req.GetInput().GetInput().(type) {
	case *process.ProcessInput_Stdin:
		return stdinError(req.GetProcess(), p.Write(ctx, req.GetPiece(), i.Stdin))
	case *process.ProcessInput_Pty:
		return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("process %d has no terminal; send stdin", p.PID))
	}
	return connect.NewError(connect.CodeInvalidArgument, errors.New("input: name stdin or pty"))
}

func stdinError(sel *process.ProcessSelector, err error) error {
	switch {
	case errors.Is(err, proc.ErrEnded):
		return notFound(sel)
	case errors.Is(err, proc.ErrNoStdin):
		return connect.NewError(connect.CodeFailedPrecondition, err)
	}
	return err
}

// SendSignal signals a process and its group. After SIGKILL it answers when
// the process is gone.
func (ps *processService) SendSignal(ctx context.Context, req *connect.Request[process.SendSignalRequest]) (*connect.Response[process.SendSignalResponse], error) {
	sel, sig := req.Msg.GetProcess(), syscall.Signal(req.Msg.GetSignal())
	p, err := ps.find(sel)
	if err != nil {
		return nil, err
	}
	if sig != syscall.SIGTERM && sig != syscall.SIGKILL {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("signal %d: want SIGNAL_SIGTERM or SIGNAL_SIGKILL", sig))
	}
	if err := signal(ctx, p, sig, true); err != nil {
		if errors.Is(err, proc.ErrEnded) {
			return nil, notFound(sel)
		}
		return nil, err
	}
	return connect.NewResponse(&process.SendSignalResponse{}), nil
}

// signal sends a signal; after SIGKILL it waits until the process is gone.
func signal(ctx context.Context, p *proc.Process, sig syscall.Signal, group bool) error {
	if err := p.Signal(sig, group); err != nil || sig != syscall.SIGKILL {
		return err
	}
	patience := time.NewTimer(reapFor)
	defer patience.Stop()
	select {
	case <-p.Gone():
	case <-patience.C: // it is held in the kernel; the signal stands
	case <-ctx.Done():
	}
	return nil
}

// CloseStdin ends a process's input.
func (ps *processService) CloseStdin(ctx context.Context, req *connect.Request[process.CloseStdinRequest]) (*connect.Response[process.CloseStdinResponse], error) {
	p, err := ps.find(req.Msg.GetProcess())
	if err != nil {
		return nil, err
	}
	if err := stdinError(req.Msg.GetProcess(), p.CloseStdin(ctx)); err != nil {
		return nil, err
	}
	return connect.NewResponse(&process.CloseStdinResponse{}), nil
}
