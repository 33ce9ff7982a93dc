package sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"

	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
)

// command is a command that seems to run.
type command struct {
	pid    uint32
	tag    *string
	config *process.ProcessConfig
	table  *table

	timer *time.Timer   // ends it; the table's mu guards it and what follows
	since time.Time     // when the timer was started
	left  time.Duration // that it had to run then

	once   sync.Once
	done   chan struct{}
	signal int       // what ended it, 0 for itself; set before done is closed
	ended  time.Time // set before done is closed
}

// kill ends the command by a signal, if it has not ended.
func (c *command) kill(signal int) { c.finish(signal) }

func (c *command) finish(signal int) {
	c.once.Do(func() {
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
	still    bool
	last     time.Time // when one ended
}

func newTable(duration time.Duration) *table {
	return &table{duration: duration, next: 2, commands: map[uint32]*command{}}
}

// start begins a command.
func (t *table) start(config *process.ProcessConfig, tag *string) *command {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := &command{pid: t.next, config: config, tag: tag, table: t, left: t.duration, done: make(chan struct{})}
	t.next++
	t.add(c)
	return c
}

// add takes a command that seems to run. The caller holds mu.
func (t *table) add(c *command) {
	t.commands[c.pid] = c
	t.running++
	t.run(c)
}

// run starts a command's timer, unless all stand still. The caller holds mu.
func (t *table) run(c *command) {
	if t.still {
		return
	}
	c.since = time.Now()
	c.timer = time.AfterFunc(c.left, func() {
		t.mu.Lock()
		still := t.still
		t.mu.Unlock()
		if !still { // or it was stopped too late, and is started again with no time left
			c.finish(0)
		}
	})
}

// halt has all commands stand still.
func (t *table) halt() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.still {
		return
	}
	t.still = true
	for _, c := range t.commands {
		if !c.over() {
			c.timer.Stop()
			c.left = max(c.left-time.Since(c.since), 0)
		}
	}
}

// goOn lets them go on.
func (t *table) goOn() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.still {
		return
	}
	t.still = false
	for _, c := range t.commands {
		if !c.over() {
			t.run(c)
		}
	}
}

// savedCommand is a command in a snapshot.
type savedCommand struct {
	PID    uint32          `json:"pid"`
	Tag    *string         `json:"tag,omitempty"`
	Config json.RawMessage `json:"config"`
	Left   time.Duration   `json:"left"` // that it has to run
	Over   bool            `json:"over,omitempty"`
	Signal int             `json:"signal,omitempty"` // what ended it
	Ended  time.Time       `json:"ended,omitzero"`
}

// save returns the commands, which stand still.
func (t *table) save() ([]savedCommand, error) {
	all := []savedCommand{}
	for _, c := range t.all() {
		config, err := protojson.Marshal(c.config)
		if err != nil {
			return nil, err
		}
		s := savedCommand{PID: c.pid, Tag: c.tag, Config: config, Left: c.left, Over: c.over()}
		if s.Over {
			s.Signal, s.Ended = c.signal, c.ended
		}
		all = append(all, s)
	}
	return all, nil
}

// load takes the commands of a snapshot.
func (t *table) load(all []savedCommand) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	slices.SortStableFunc(all, func(a, b savedCommand) int { return a.Ended.Compare(b.Ended) })
	for _, s := range all {
		c := &command{
			pid: s.PID, tag: s.Tag, config: &process.ProcessConfig{}, table: t, left: s.Left,
			done: make(chan struct{}), signal: s.Signal, ended: s.Ended,
		}
		if err := protojson.Unmarshal(s.Config, c.config); err != nil {
			return fmt.Errorf("read command %d: %w", s.PID, err)
		}
		t.next = max(t.next, c.pid+1)
		if !s.Over {
			t.add(c)
			continue
		}
		c.once.Do(func() { close(c.done) })
		t.commands[c.pid] = c
		t.order = append(t.order, c.pid)
		t.last = c.ended
	}
	return nil
}

// forget drops the commands that have ended.
func (t *table) forget() {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, pid := range t.order {
		delete(t.commands, pid)
	}
	t.order, t.last = nil, time.Time{}
}

// note counts a command's end and forgets old ones.
func (t *table) note(c *command) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
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
	gate  *gate
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
	var c *command
	err := p.gate.pass(func() error { c = p.table.start(req.Msg.GetProcess(), req.Msg.Tag); return nil })
	if err != nil {
		return err
	}
	err = follow(ctx, c, func(e *process.ProcessEvent) error { return out.Send(&process.StartResponse{Event: e}) })
	if errors.Is(err, context.DeadlineExceeded) {
		if err := p.gate.pass(func() error { c.kill(int(syscall.SIGKILL)); return nil }); err != nil {
			return err
		}
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
		err = p.gate.pass(func() error { c.kill(int(req.Msg.GetSignal())); return nil })
	}
	return connect.NewResponse(&process.SendSignalResponse{}), err
}
