package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"syscall"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/fault"
)

// execRequest asks for a program with its arguments; a single word with
// spaces in it is a line for the sandbox's shell.
func execRequest(args []string) *process.StartRequest {
	stdin := false
	cfg := &process.ProcessConfig{Cmd: args[0], Args: args[1:]}
	if len(args) == 1 && strings.ContainsAny(args[0], " \t\n;|&") {
		cfg.Cmd, cfg.Args = "", []string{"-c", args[0]}
	}
	return &process.StartRequest{Process: cfg, Stdin: &stdin}
}

// exec runs a process with its output as ours; the error is its exit code.
func (a *App) exec(ctx context.Context, api *api, id string, req *connect.Request[process.StartRequest]) error {
	stream, err := api.process(id).Start(ctx, req)
	if err != nil {
		return err
	}
	defer stream.Close()
	return a.follow(stream, id)
}

// follow prints a process's output to its end; the error is its exit code.
func (a *App) follow(stream *connect.ServerStreamForClient[process.StartResponse], id string) error {
	for stream.Receive() {
		switch ev := stream.Msg().GetEvent().GetEvent().(type) {
		case *process.ProcessEvent_Data:
			if err := a.write(ev.Data.GetStdout(), ev.Data.GetStderr()); err != nil {
				return err
			}
		case *process.ProcessEvent_End:
			if !ev.End.GetExited() {
				fmt.Fprintf(a.Stderr, "opendsecctl: the command ended: %s\n", printable(ev.End.GetStatus()))
			}
			return exited(ev.End)
		}
	}
	return lost(stream.Err(), id)
}

// lost explains that a process's output ended before the process.
func lost(err error, id string) error {
	if err != nil {
		return err
	}
	return fault.New(fault.Internal, "the connection to sandbox %s ended before the command did; see whether it runs: opendsecctl sandbox show %s", id, id)
}

// exited returns how a process ended as a shell gives it: its exit code, or 128
// and the number of the signal that ended it. The error is nil for 0.
func exited(end *process.ProcessEvent_EndEvent) error {
	if end.GetExited() {
		if end.GetExitCode() == 0 {
			return nil
		}
		return exitStatus(end.GetExitCode())
	}
	for n := syscall.Signal(1); n <= 64; n++ {
		if strings.Contains(end.GetStatus()+" ", n.String()+" ") {
			return exitStatus(128 + int(n))
		}
	}
	return exitStatus(128)
}

func (a *App) write(stdout, stderr []byte) error {
	if _, err := a.Stdout.Write(stdout); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	if _, err := a.Stderr.Write(stderr); err != nil {
		return fmt.Errorf("write output: %w", err)
	}
	return nil
}

// execFlags are the flags of sandbox exec.
type execFlags struct {
	cwd, user string
	env       []string
	input     bool
}

// request makes the request of a command line, the first word of which may be
// the "--" that ends our own flags.
func (f *execFlags) request(command []string) (*connect.Request[process.StartRequest], error) {
	if command[0] == "--" {
		command = command[1:]
	}
	if len(command) == 0 || command[0] == "" {
		return nil, usage(errors.New("which command? give it after the sandbox's id"))
	}
	vars, err := parsePairs("env", f.env)
	if err != nil {
		return nil, err
	}
	req := connect.NewRequest(execRequest(command))
	req.Msg.Process.Envs = vars
	if f.cwd != "" {
		req.Msg.Process.Cwd = &f.cwd
	}
	if f.user != "" {
		req.Header().Set("Opendsec-User", f.user)
	}
	return req, nil
}

func (a *App) sandboxExecCommand() *cobra.Command {
	var f execFlags
	c := &cobra.Command{
		Use: "exec [FLAGS] ID [--] COMMAND [ARG...]", Short: "Run a command in a sandbox, with its output and exit code as one's own",
		Long: `Run a command in a sandbox. One argument with spaces in it is a line for the
sandbox's shell; several are a program with its arguments. Flags come before the
id. A command that a signal ended gives 128 and the signal's number.`,
		Args: cobra.MinimumNArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			req, err := f.request(args[1:])
			switch {
			case err != nil:
				return err
			case f.input:
				return a.execWithInput(c.Context(), api, args[0], req)
			}
			return a.exec(c.Context(), api, args[0], req)
		}),
	}
	c.Flags().SetInterspersed(false)
	c.Flags().StringVarP(&f.cwd, "workdir", "w", "", "directory to run in; the sandbox's unless given")
	c.Flags().StringVarP(&f.user, "user", "u", "", "user to run as; the sandbox's unless given")
	c.Flags().StringArrayVarP(&f.env, "env", "e", nil, "variable as NAME=VALUE (repeatable)")
	c.Flags().BoolVarP(&f.input, "stdin", "i", false, "pass standard input on")
	return c
}

// execWithInput is exec with our standard input passed on.
func (a *App) execWithInput(ctx context.Context, api *api, id string, req *connect.Request[process.StartRequest]) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stdin, tag := true, "ctl-"+strconv.Itoa(os.Getpid())+"-"+strconv.FormatInt(time.Now().UnixNano(), 36)
	req.Msg.Stdin, req.Msg.Tag = &stdin, &tag
	client := api.process(id)
	stream, err := client.Start(ctx, req)
	if err != nil {
		return err
	}
	defer stream.Close()
	if !stream.Receive() { // the first message says that it runs
		return lost(stream.Err(), id)
	}
	who := &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: tag}}
	go passInput(ctx, client, who, a.Stdin) // a read of a terminal ends with our process only
	return a.follow(stream, id)
}

// passInput passes input on to a process until the input, the process or the
// context ends. How the process fares is told by its output's stream.
func passInput(ctx context.Context, client processconnect.ProcessClient, who *process.ProcessSelector, from io.Reader) {
	buf := make([]byte, 32<<10)
	for {
		n, rerr := from.Read(buf)
		if n > 0 {
			in := &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: buf[:n]}}
			if _, err := client.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: who, Input: in})); err != nil {
				return
			}
		}
		if rerr != nil {
			_, _ = client.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: who})) // it may have ended
			return
		}
	}
}
