package agentclient

import (
	"bytes"
	"context"
	"io"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/internal/fault"
)

// Command is a program to run.
type Command struct {
	Path    string            // a path, a name looked up in PATH, or "" for the sandbox's shell
	Args    []string          // without the program's own name
	Env     map[string]string // over the sandbox's own
	Dir     string            // "" for the default
	User    string            // "" for the default
	Stdin   io.Reader         // nil for none
	Timeout time.Duration     // after which the command and its group are killed; 0 means never
	Tag     string            // a name to find it by; "" for none
	Stdout  io.Writer         // gets the output as it comes; nil keeps it for the Result
	Stderr  io.Writer
	OnStart func(pid int) // called once it runs; may be nil
}

// Shell returns the command that has the sandbox's shell run a line.
func Shell(line string) Command { return Command{Args: []string{"-c", line}} }

// Result says how a command ended. A code other than zero, a signal and a
// deadline are results, not errors.
type Result struct {
	PID      int
	Stdout   []byte // what no writer took
	Stderr   []byte
	ExitCode int            // -1 when a signal ended it, or its deadline
	Signal   syscall.Signal // 0 for none
	TimedOut bool
}

// Run runs a command to its end and gives its output exactly. When ctx ends
// first, the command goes on and ctx's error comes back, with what was read so
// far in the Result. An error means that the command could not be started, or
// that nothing is known about its end.
func (c *Client) Run(ctx context.Context, cmd Command) (Result, error) {
	// The call has no deadline of its own: the agent would take it for the
	// command's.
	call, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cancel(nil)
	defer context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })()
	if cmd.Timeout > 0 {
		defer time.AfterFunc(cmd.Timeout+deadlineSlack, func() { cancel(errSilent) }).Stop()
	}
	r := &run{cmd: cmd, client: c}
	err := r.do(call)
	r.result.Stdout, r.result.Stderr = r.stdout.Bytes(), r.stderr.Bytes()
	return r.result, err
}

// deadlineSlack is how much longer than a command's deadline the agent may
// take to say that it was reached.
const deadlineSlack = 10 * time.Second

var errSilent = fault.New(fault.Unavailable, "the agent did not answer in time after the deadline of a command")

// timeoutHeader carries a command's deadline, in milliseconds.
const timeoutHeader = "Connect-Timeout-Ms"

// run is one command being run.
type run struct {
	cmd            Command
	client         *Client
	result         Result
	stdout, stderr bytes.Buffer
}

func (r *run) do(ctx context.Context) error {
	req := connect.NewRequest(r.request())
	if r.cmd.User != "" {
		req.Header().Set(UserHeader, r.cmd.User)
	}
	if r.cmd.Timeout > 0 {
		ms := max(1, (r.cmd.Timeout+time.Millisecond-1)/time.Millisecond)
		req.Header().Set(timeoutHeader, strconv.FormatInt(int64(ms), 10))
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stream, err := r.client.process.Start(ctx, req)
	if err != nil {
		return fromWire(ctx, err)
	}
	defer stream.Close()
	fed := make(chan struct{})
	close(fed)
	for stream.Receive() {
		event := stream.Msg().GetEvent()
		switch e := event.GetEvent().(type) {
		case *process.ProcessEvent_Start:
			r.result.PID = int(e.Start.GetPid())
			if r.cmd.OnStart != nil {
				r.cmd.OnStart(r.result.PID)
			}
			if r.cmd.Stdin != nil {
				fed = r.feed(ctx)
			}
		case *process.ProcessEvent_Data:
			if err := r.output(e.Data); err != nil {
				return err
			}
		case *process.ProcessEvent_End:
			r.ended(e.End)
			cancel() // what is left of the input is not wanted
			<-fed
			return nil
		}
	}
	err = stream.Err()
	if connect.CodeOf(err) == connect.CodeDeadlineExceeded && ctx.Err() == nil {
		r.result.TimedOut, r.result.ExitCode, r.result.Signal = true, -1, syscall.SIGKILL
		return nil
	}
	if err == nil {
		return fault.New(fault.Unavailable, "the agent closed the stream of a command without saying how it ended")
	}
	return fromWire(ctx, err)
}

func (r *run) request() *process.StartRequest {
	stdin := r.cmd.Stdin != nil
	config := &process.ProcessConfig{Cmd: r.cmd.Path, Args: r.cmd.Args, Envs: r.cmd.Env}
	if r.cmd.Dir != "" {
		config.Cwd = &r.cmd.Dir
	}
	req := &process.StartRequest{Process: config, Stdin: &stdin}
	if r.cmd.Tag != "" {
		req.Tag = &r.cmd.Tag
	}
	return req
}

func (r *run) output(data *process.ProcessEvent_DataEvent) error {
	w, keep, p := r.cmd.Stdout, &r.stdout, data.GetStdout()
	if _, isErr := data.GetOutput().(*process.ProcessEvent_DataEvent_Stderr); isErr {
		w, keep, p = r.cmd.Stderr, &r.stderr, data.GetStderr()
	}
	if w == nil {
		w = keep
	}
	_, err := w.Write(p)
	return err
}

func (r *run) ended(end *process.ProcessEvent_EndEvent) {
	r.result.ExitCode = int(end.GetExitCode())
	if !end.GetExited() {
		r.result.ExitCode = -1
		r.result.Signal = signalOf(end.GetStatus())
	}
}

// signalOf reads the signal out of a status such as "signal: killed".
func signalOf(status string) syscall.Signal {
	name, ok := strings.CutPrefix(status, "signal: ")
	if !ok {
		return 0
	}
	for sig := syscall.Signal(1); sig <= 64; sig++ {
		if sig.String() == name {
			return sig
		}
	}
	return 0
}

// feed sends the input over one stream and then closes the command's standard
// input. A command that ends without reading it all is no error.
func (r *run) feed(ctx context.Context) (done chan struct{}) {
	done = make(chan struct{})
	self := &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: uint32(r.result.PID)}}
	go func() {
		defer close(done)
		stream := r.client.process.StreamInput(ctx)
		err := stream.Send(&process.StreamInputRequest{Event: &process.StreamInputRequest_Start{
			Start: &process.StreamInputRequest_StartEvent{Process: self}}})
		buf := make([]byte, 32<<10)
		for err == nil {
			var n int
			n, err = r.cmd.Stdin.Read(buf)
			if n > 0 {
				if serr := stream.Send(inputMessage(buf[:n])); serr != nil {
					err = serr
				}
			}
		}
		if _, cerr := stream.CloseAndReceive(); cerr == nil {
			r.client.process.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: self}))
		}
	}()
	return done
}

func inputMessage(data []byte) *process.StreamInputRequest {
	return &process.StreamInputRequest{Event: &process.StreamInputRequest_Data{Data: &process.StreamInputRequest_DataEvent{
		Input: &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: data}}}}}
}
