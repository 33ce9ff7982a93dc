package sim

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
)

// command is a command that seems to run.
type command struct {
	pid    uint32
	tag    *string
	config *process.ProcessConfig
	table  *table
	timer  *time.Timer

	once   sync.Once
	done   chan struct{}
	signal int       // what ended it, 0 for itself; set before done is closed
	ended  time.Time // set before done is closed
}

// kill ends the command by a signal, if it has not ended.
func (c *command) kill(signal int) { c.finish(signal) }

func (c *command) finish(signal int) {
	c.once.Do(func() {
		c.timer.Stop()
		c.signal, c.ended = signal, time.Now()
		c.table.note(c)
		close(c.done)
	})
}

func (c *command) over() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
}

func (c *command) wait(ctx context.Context) error {
	select {
	case <-c.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// end describes how the command ended.
func (c *command) end() *process.ProcessEvent {
	e := &process.ProcessEvent_EndEvent{Exited: true, Status: "exit status 0"}
	if c.signal != 0 {
		status := "signal: " + syscall.Signal(c.signal).String()
		e = &process.ProcessEvent_EndEvent{ExitCode: -1, Status: status, Error: &status}
	}
	return &process.ProcessEvent{Event: &process.ProcessEvent_End{End: e}}
}

// How many commands that have ended are remembered, and for how long.
const (
	keepEnded    = 1000
	keepEndedFor = 30 * time.Minute
)

// table has the commands of one machine.
type table struct {
	duration time.Duration // of each command

	mu       sync.Mutex // guards what is below
	next     uint32
	commands map[uint32]*command
	order    []uint32 // of those that have ended, oldest first
	running  int
	last     time.Time // when one ended
}

func newTable(duration time.Duration) *table {
	return &table{duration: duration, next: 2, commands: map[uint32]*command{}}
}

// start begins a command.
func (t *table) start(config *process.ProcessConfig, tag *string) *command {
	c := &command{config: config, tag: tag, table: t, done: make(chan struct{})}
	t.mu.Lock()
	c.pid = t.next
	t.next++
	t.commands[c.pid] = c
	t.running++
	// With the lock held, so that the timer is there before finish looks for it.
	c.timer = time.AfterFunc(t.duration, func() {
		t.mu.Lock()
		//lint:ignore SA2001 it waits for the start to be complete
		t.mu.Unlock()
		c.finish(0)
	})
	t.mu.Unlock()
	return c
}

// note counts a command's end and forgets old ones.
func (t *table) note(c *command) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.running--
	t.last = c.ended
	t.order = append(t.order, c.pid)
	for len(t.order) > keepEnded || c.ended.Sub(t.commands[t.order[0]].ended) > keepEndedFor {
		delete(t.commands, t.order[0])
		t.order = t.order[1:]
	}
}

func (t *table) activity() (running int, last time.Time) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.running, t.last
}

// find returns a command by tag, or by pid when there is no tag.
func (t *table) find(pid uint32, tag string) (*command, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if tag == "" {
		if c, ok := t.commands[pid]; ok {
			return c, nil
		}
		return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", pid))
	}
	for _, c := range t.commands {
		if c.tag != nil && *c.tag == tag {
			return c, nil
		}
	}
	return nil, connect.NewError(connect.CodeNotFound, fmt.Errorf("process with tag %q not found", tag))
}

func (t *table) all() []*command {
	t.mu.Lock()
	defer t.mu.Unlock()
	all := slices.Collect(maps.Values(t.commands))
	slices.SortFunc(all, func(a, b *command) int { return int(a.pid) - int(b.pid) })
	return all
}

func (t *table) close() {
	for _, c := range t.all() {
		c.kill(int(syscall.SIGKILL))
	}
}

// processes answers process.Process.
type processes struct {
	processconnect.UnimplementedProcessHandler
	table *table
}

func (p *processes) find(s *process.ProcessSelector) (*command, error) {
	return p.table.find(s.GetPid(), s.GetTag())
}

// running finds a command that has not ended.
func (p *processes) runningOne(s *process.ProcessSelector) (*command, error) {
	c, err := p.find(s)
	if err == nil && c.over() {
		err = connect.NewError(connect.CodeNotFound, fmt.Errorf("process with pid %d not found", c.pid))
	}
	return c, err
}

// List returns what seems to run.
func (p *processes) List(context.Context, *connect.Request[process.ListRequest]) (*connect.Response[process.ListResponse], error) {
	resp := &process.ListResponse{}
	for _, c := range p.table.all() {
		if !c.over() {
			resp.Processes = append(resp.Processes, &process.ProcessInfo{Config: c.config, Pid: c.pid, Tag: c.tag})
		}
	}
	return connect.NewResponse(resp), nil
}

// Start lets any command end well, after the time that commands take.
func (p *processes) Start(ctx context.Context, req *connect.Request[process.StartRequest], out *connect.ServerStream[process.StartResponse]) error {
	if req.Msg.GetPty() != nil {
		return connect.NewError(connect.CodeUnimplemented, errors.New("a simulated machine has no terminals"))
	}
	c := p.table.start(req.Msg.GetProcess(), req.Msg.Tag)
	err := follow(ctx, c, func(e *process.ProcessEvent) error { return out.Send(&process.StartResponse{Event: e}) })
	if errors.Is(err, context.DeadlineExceeded) {
		c.kill(int(syscall.SIGKILL))
		return connect.NewError(connect.CodeDeadlineExceeded, errors.New("the command's time is up"))
	}
	return err
}

// Connect follows a command.
func (p *processes) Connect(ctx context.Context, req *connect.Request[process.ConnectRequest], out *connect.ServerStream[process.ConnectResponse]) error {
	c, err := p.find(req.Msg.GetProcess())
	if err != nil {
		return err
	}
	return follow(ctx, c, func(e *process.ProcessEvent) error { return out.Send(&process.ConnectResponse{Event: e}) })
}

func follow(ctx context.Context, c *command, send func(*process.ProcessEvent) error) error {
	err := send(&process.ProcessEvent{Event: &process.ProcessEvent_Start{Start: &process.ProcessEvent_StartEvent{Pid: c.pid}}})
	if err == nil {
		err = c.wait(ctx)
	}
	if err != nil {
		return err
	}
	return send(c.end())
}

// StreamInput takes input and does nothing with it.
func (p *processes) StreamInput(_ context.Context, in *connect.ClientStream[process.StreamInputRequest]) (*connect.Response[process.StreamInputResponse], error) {
	for in.Receive() {
		if s := in.Msg().GetStart(); s != nil {
			if _, err := p.find(s.GetProcess()); err != nil {
				return nil, err
			}
		}
	}
	return connect.NewResponse(&process.StreamInputResponse{}), in.Err()
}

// SendInput takes input and does nothing with it.
func (p *processes) SendInput(_ context.Context, req *connect.Request[process.SendInputRequest]) (*connect.Response[process.SendInputResponse], error) {
	_, err := p.runningOne(req.Msg.GetProcess())
	return connect.NewResponse(&process.SendInputResponse{}), err
}

// CloseStdin changes nothing.
func (p *processes) CloseStdin(_ context.Context, req *connect.Request[process.CloseStdinRequest]) (*connect.Response[process.CloseStdinResponse], error) {
	_, err := p.find(req.Msg.GetProcess())
	return connect.NewResponse(&process.CloseStdinResponse{}), err
}

// SendSignal ends a command.
func (p *processes) SendSignal(_ context.Context, req *connect.Request[process.SendSignalRequest]) (*connect.Response[process.SendSignalResponse], error) {
	c, err := p.runningOne(req.Msg.GetProcess())
	if err == nil {
		c.kill(int(req.Msg.GetSignal()))
	}
	return connect.NewResponse(&process.SendSignalResponse{}), err
}
