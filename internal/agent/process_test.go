package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/api/gen/agent/v1/agentv1connect"
	"github.com/kernflux/opendsec/api/gen/process"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/fault"
)

func (r *running) process() processconnect.ProcessClient {
	return processconnect.NewProcessClient(&httpClient{r.Transport()}, "http://agent")
}

func (r *running) agent() agentv1connect.AgentClient {
	return agentv1connect.NewAgentClient(&httpClient{r.Transport()}, "http://agent")
}

func byPID(pid int) *process.ProcessSelector {
	return &process.ProcessSelector{Selector: &process.ProcessSelector_Pid{Pid: uint32(pid)}}
}

func TestHowCommandsEnd(t *testing.T) {
	r := start(t)
	tests := map[string]struct {
		cmd  agentclient.Command
		want agentclient.Result
	}{
		"well":           {agentclient.Shell("echo out; echo err >&2"), agentclient.Result{Stdout: []byte("out\n"), Stderr: []byte("err\n")}},
		"code":           {agentclient.Shell("exit 42"), agentclient.Result{ExitCode: 42}},
		"code 255":       {agentclient.Shell("exit 255"), agentclient.Result{ExitCode: 255}},
		"own signal":     {agentclient.Shell("kill -KILL $$"), agentclient.Result{ExitCode: -1, Signal: syscall.SIGKILL}},
		"core signal":    {agentclient.Shell("ulimit -c 0; kill -SEGV $$"), agentclient.Result{ExitCode: -1, Signal: syscall.SIGSEGV}},
		"real time":      {agentclient.Shell("kill -40 $$"), agentclient.Result{ExitCode: -1, Signal: 40}},
		"child's signal": {agentclient.Shell("exec 2>/dev/null; sh -c 'kill -TERM $$'; exit $?"), agentclient.Result{ExitCode: 143}},
		"by name":        {agentclient.Command{Path: "printf", Args: []string{"%s|", "a b", "", "ü"}}, agentclient.Result{Stdout: []byte("a b||ü|")}},
		"by path":        {agentclient.Command{Path: "/bin/true"}, agentclient.Result{}},
		"relative":       {agentclient.Command{Path: "./true", Dir: "/bin"}, agentclient.Result{}},
		"command's PATH": {agentclient.Command{Path: "true", Env: map[string]string{"PATH": "/nowhere::/usr/bin"}}, agentclient.Result{}},
		"PATH from cwd":  {agentclient.Command{Path: "true", Env: map[string]string{"PATH": "bin"}, Dir: "/usr"}, agentclient.Result{}},
		"no stdin":       {agentclient.Command{Path: "cat"}, agentclient.Result{}},
		"deadline":       {agentclient.Command{Args: []string{"-c", "echo before; sleep 60"}, Timeout: 100 * time.Millisecond}, agentclient.Result{Stdout: []byte("before\n"), ExitCode: -1, Signal: syscall.SIGKILL, TimedOut: true}},
		"in time":        {agentclient.Command{Args: []string{"-c", "exit 3"}, Timeout: time.Minute}, agentclient.Result{ExitCode: 3}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			got := r.result(tt.cmd)
			if got.PID <= 0 {
				t.Errorf("pid %d", got.PID)
			}
			got.PID = 0
			if diff := cmp.Diff(tt.want, got, cmp.Comparer(bytes.Equal)); diff != "" {
				t.Errorf("result (-want +got):\n%s", diff)
			}
		})
	}
}

func TestCommandsThatCannotStart(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	for name, content := range map[string]string{"noshebang": "echo hi\n", "badshebang": "#!/no/such/interpreter\n", "plain": "x"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chmod(filepath.Join(dir, "plain"), 0o644); err != nil {
		t.Fatal(err)
	}
	tests := map[string]struct {
		cmd  agentclient.Command
		kind fault.Kind
		says string
	}{
		"name":          {agentclient.Command{Path: "no-such-program"}, fault.InvalidArgument, "'no-such-program'"},
		"name, own":     {agentclient.Command{Path: "true", Env: map[string]string{"PATH": "/nowhere"}}, fault.InvalidArgument, "/nowhere"},
		"path":          {agentclient.Command{Path: "/no/such/program"}, fault.InvalidArgument, "'/no/such/program' does not exist"},
		"cwd":           {agentclient.Command{Path: "true", Dir: "/no/such/dir"}, fault.InvalidArgument, "cwd '/no/such/dir' does not exist"},
		"cwd is a file": {agentclient.Command{Path: "true", Dir: dir + "/plain"}, fault.InvalidArgument, "is not a directory"},
		"no program":    {agentclient.Command{Path: dir + "/noshebang"}, fault.InvalidArgument, "not a program"},
		"interpreter":   {agentclient.Command{Path: dir + "/badshebang"}, fault.InvalidArgument, "interpreter"},
		"permission":    {agentclient.Command{Path: dir + "/plain"}, fault.InvalidArgument, "permission denied"},
		"zero byte":     {agentclient.Command{Path: "true", Args: []string{"a\x00b"}}, fault.InvalidArgument, "cannot be used"},
		"too long":      {agentclient.Command{Path: "true", Args: []string{strings.Repeat("x", 1<<20)}}, fault.InvalidArgument, "too long"},
		"user":          {agentclient.Command{Path: "true", User: "nosuchuser"}, fault.Unauthenticated, "invalid username: 'nosuchuser'"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			_, err := r.Run(t.Context(), tt.cmd)
			if !fault.Is(err, tt.kind) || !strings.Contains(err.Error(), tt.says) {
				t.Errorf("Run = %v, want %s with %q", err, tt.kind, tt.says)
			}
		})
	}
}

func TestOutputIsExact(t *testing.T) {
	r := start(t)
	binary := make([]byte, 10<<20)
	state := uint32(1)
	for i := range binary {
		state = state*1664525 + 1013904223
		binary[i] = byte(state >> 24)
	}
	text := bytes.Repeat([]byte("aä漢🙂"), 300<<10/10)
	for name, want := range map[string][]byte{"10 MB of bytes": binary, "300 KB of text": text} {
		t.Run(name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "data")
			if err := os.WriteFile(file, want, 0o644); err != nil {
				t.Fatal(err)
			}
			res := r.result(agentclient.Command{Path: "cat", Args: []string{file}})
			if !bytes.Equal(res.Stdout, want) || len(res.Stderr) > 0 || res.ExitCode != 0 {
				t.Errorf("%d of %d bytes came back, sha256 %x, want %x", len(res.Stdout), len(want), sha256.Sum256(res.Stdout), sha256.Sum256(want))
			}
			res = r.result(agentclient.Command{Path: "cat", Stdin: bytes.NewReader(want)})
			if !bytes.Equal(res.Stdout, want) {
				t.Errorf("through standard input %d of %d bytes came back", len(res.Stdout), len(want))
			}
		})
	}
}

func TestStreamsStayApart(t *testing.T) {
	r := start(t)
	const lines = 20000
	res := r.result(agentclient.Shell(fmt.Sprintf("i=0; while [ $i -lt %d ]; do echo out $i; echo err $i >&2; i=$((i+1)); done", lines)))
	for stream, got := range map[string][]byte{"out": res.Stdout, "err": res.Stderr} {
		var want bytes.Buffer
		for i := range lines {
			fmt.Fprintln(&want, stream, i)
		}
		if !bytes.Equal(got, want.Bytes()) {
			t.Errorf("std%s differs: %d bytes, want %d", stream, len(got), want.Len())
		}
	}
}

func TestOutputOfGrandchildrenComesBeforeTheEnd(t *testing.T) {
	r := start(t)
	res := r.result(agentclient.Shell("(sleep 0.2; echo late) & echo early"))
	if string(res.Stdout) != "early\nlate\n" {
		t.Errorf("stdout %q", res.Stdout)
	}
}

func TestDeadlineKillsTheWholeGroup(t *testing.T) {
	r := start(t)
	pids := filepath.Join(t.TempDir(), "pids")
	res := r.result(agentclient.Command{
		Args:    []string{"-c", fmt.Sprintf("sh -c 'trap \"\" TERM; sh -c \"echo \\$\\$ >>%s; sleep 60; true\"; true' & echo $! >>%s; echo $$ >>%s; wait", pids, pids, pids)},
		Timeout: 300 * time.Millisecond,
	})
	if !res.TimedOut {
		t.Fatalf("result %+v, want it timed out", res)
	}
	data, err := os.ReadFile(pids)
	if err != nil {
		t.Fatal(err)
	}
	list := strings.Fields(string(data))
	if len(list) != 3 {
		t.Fatalf("pids %q, want three", list)
	}
	for _, f := range list {
		pid, err := strconv.Atoi(f)
		if err != nil {
			t.Fatal(err)
		}
		eventually(t, "process "+f+" is gone", func() bool { return !alive(pid) })
	}
}

func TestDisconnectLeavesTheProcessRunning(t *testing.T) {
	r := start(t)
	mark := filepath.Join(t.TempDir(), "mark")
	ctx, cancel := context.WithCancel(t.Context())
	_, err := r.Run(ctx, agentclient.Command{
		Tag: "left", Args: []string{"-c", "while [ ! -e " + mark + " ]; do head -c 300000 /dev/zero; done; echo; echo done"},
		OnStart: func(int) { cancel() },
	})
	if err == nil {
		t.Fatal("Run ended without an error")
	}
	// Nobody reads: it must not block, however much it writes.
	eventually(t, "it wrote more than is kept", func() bool {
		held, _ := attach(t, r, &agentv1.AttachRequest{Process: &agentv1.AttachRequest_Tag{Tag: "left"}, NoFollow: true})
		return held.GetStdoutFrom() > 0
	})
	if a, err := r.Activity(t.Context()); err != nil || a.RunningCommands != 1 {
		t.Errorf("Activity = %+v, %v; want one running command", a, err)
	}
	if err := os.WriteFile(mark, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	_, events := attach(t, r, &agentv1.AttachRequest{Process: &agentv1.AttachRequest_Tag{Tag: "left"}})
	last := events[len(events)-1].GetEnd()
	if last == nil || last.GetExitCode() != 0 {
		t.Errorf("the last event is %v, want the end with code 0", events[len(events)-1])
	}
	if !strings.HasSuffix(string(output(events)), "\ndone\n") {
		t.Error("the output does not end with \"done\"")
	}
	a, err := r.Activity(t.Context())
	if err != nil || a.RunningCommands != 0 || !a.AnyEnded || a.SinceLastEnd <= 0 {
		t.Errorf("Activity = %+v, %v; want none running and an end", a, err)
	}
}

// attach follows a process and returns what was said first and then.
func attach(t *testing.T, r *running, req *agentv1.AttachRequest) (*agentv1.AttachResponse_Started, []*agentv1.AttachResponse) {
	t.Helper()
	stream, err := r.agent().Attach(t.Context(), connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	var events []*agentv1.AttachResponse
	for stream.Receive() {
		events = append(events, stream.Msg())
	}
	if err := stream.Err(); err != nil {
		t.Fatalf("Attach: %v", err)
	}
	if len(events) == 0 || events[0].GetStarted() == nil {
		t.Fatalf("Attach began with %v", events)
	}
	return events[0].GetStarted(), events[1:]
}

func output(events []*agentv1.AttachResponse) []byte {
	var out []byte
	for _, e := range events {
		out = append(out, e.GetStdout().GetData()...)
	}
	return out
}

func TestAttachFromAnyPosition(t *testing.T) {
	r := start(t)
	res := r.result(agentclient.Command{Tag: "job", Args: []string{"-c", "printf 0123456789; printf abcdef >&2; exit 7"}})
	for name, tt := range map[string]struct {
		req      *agentv1.AttachRequest
		out, err string
	}{
		"all by tag":   {&agentv1.AttachRequest{Process: &agentv1.AttachRequest_Tag{Tag: "job"}}, "0123456789", "abcdef"},
		"part by pid":  {&agentv1.AttachRequest{Process: &agentv1.AttachRequest_Pid{Pid: uint32(res.PID)}, StdoutOffset: 4, StderrOffset: 6}, "456789", ""},
		"beyond":       {&agentv1.AttachRequest{Process: &agentv1.AttachRequest_Tag{Tag: "job"}, StdoutOffset: 1 << 62, StderrOffset: ^uint64(0)}, "", ""},
		"without wait": {&agentv1.AttachRequest{Process: &agentv1.AttachRequest_Tag{Tag: "job"}, NoFollow: true, StdoutOffset: 9}, "9", "abcdef"},
	} {
		t.Run(name, func(t *testing.T) {
			started, events := attach(t, r, tt.req)
			var stderr []byte
			for _, e := range events {
				stderr = append(stderr, e.GetStderr().GetData()...)
			}
			if got := string(output(events)); got != tt.out || string(stderr) != tt.err {
				t.Errorf("stdout %q, stderr %q; want %q, %q", got, stderr, tt.out, tt.err)
			}
			if started.GetPid() != uint32(res.PID) || started.GetStdoutFrom() != 0 {
				t.Errorf("started %v", started)
			}
			if end := events[len(events)-1].GetEnd(); end.GetExitCode() != 7 {
				t.Errorf("end %v, want code 7", end)
			}
		})
	}
	_, err := r.agent().Signal(t.Context(), connect.NewRequest(&agentv1.SignalRequest{Process: &agentv1.SignalRequest_Tag{Tag: "job"}, Signal: 15}))
	if connect.CodeOf(err) != connect.CodeNotFound {
		t.Errorf("Signal of an ended process = %v, want not_found", err)
	}
}

// background starts a command and returns its events and pid.
func background(t *testing.T, r *running, req *process.StartRequest) (*connect.ServerStreamForClient[process.StartResponse], int) {
	t.Helper()
	stream, err := r.process().Start(t.Context(), connect.NewRequest(req))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { stream.Close() })
	if !stream.Receive() {
		t.Fatalf("Start: %v", stream.Err())
	}
	pid := stream.Msg().GetEvent().GetStart().GetPid()
	if pid == 0 {
		t.Fatalf("the first event is %v", stream.Msg())
	}
	return stream, int(pid)
}

func shell(line string) *process.StartRequest {
	return &process.StartRequest{Process: &process.ProcessConfig{Args: []string{"-c", line}}}
}

func rest(t *testing.T, stream *connect.ServerStreamForClient[process.StartResponse]) (stdout string, end *process.ProcessEvent_EndEvent) {
	t.Helper()
	for stream.Receive() {
		e := stream.Msg().GetEvent()
		stdout += string(e.GetData().GetStdout())
		if e.GetEnd() != nil {
			end = e.GetEnd()
		}
	}
	if err := stream.Err(); err != nil {
		t.Fatal(err)
	}
	return stdout, end
}

func TestSignals(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	p := r.process()

	stream, pid := background(t, r, shell("sleep 60; echo not reached"))
	if _, err := p.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: byPID(pid), Signal: process.Signal_SIGNAL_SIGKILL})); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(pid, 0); err != syscall.ESRCH {
		t.Errorf("kill -0 right after the kill: %v, want that there is no such process", err)
	}
	out, end := rest(t, stream)
	want := "signal: killed"
	if out != "" || end.GetExitCode() != -1 || end.GetExited() || end.GetStatus() != want || end.GetError() != want {
		t.Errorf("output %q, end %v", out, end)
	}

	stream, pid = background(t, r, shell("trap 'echo caught; exit 5' USR1; echo ready; while :; do sleep 0.01; done"))
	if !stream.Receive() || string(stream.Msg().GetEvent().GetData().GetStdout()) != "ready\n" {
		t.Fatalf("got %v, want ready", stream.Msg())
	}
	if _, err := r.agent().Signal(ctx, connect.NewRequest(&agentv1.SignalRequest{Process: &agentv1.SignalRequest_Pid{Pid: uint32(pid)}, Signal: uint32(syscall.SIGUSR1)})); err != nil {
		t.Fatal(err)
	}
	if out, end := rest(t, stream); out != "caught\n" || end.GetExitCode() != 5 || end.GetError() != "exit status 5" || !end.GetExited() {
		t.Errorf("output %q, end %v", out, end)
	}

	for name, err := range map[string]error{
		"unknown pid": second(p.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: byPID(1 << 30), Signal: process.Signal_SIGNAL_SIGKILL}))),
		"ended":       second(p.SendSignal(ctx, connect.NewRequest(&process.SendSignalRequest{Process: byPID(pid), Signal: process.Signal_SIGNAL_SIGKILL}))),
		"its input":   second(p.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: stdin("x")}))),
	} {
		if connect.CodeOf(err) != connect.CodeNotFound {
			t.Errorf("%s: %v, want not_found", name, err)
		}
	}
}

// A process that left the group keeps the output open; a kill must not wait
// for it, nor lose what was written before.
func TestKillDoesNotWaitForOutputHeldElsewhere(t *testing.T) {
	r := start(t)
	stream, pid := background(t, r, shell("setsid sh -c 'echo held $$; exec sleep 60' & exec sleep 60"))
	var held int
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	if _, err := fmt.Sscanf(string(stream.Msg().GetEvent().GetData().GetStdout()), "held %d", &held); err != nil {
		t.Fatal(err)
	}
	if _, err := r.process().SendSignal(t.Context(), connect.NewRequest(&process.SendSignalRequest{Process: byPID(pid), Signal: process.Signal_SIGNAL_SIGTERM})); err != nil {
		t.Fatal(err)
	}
	if _, end := rest(t, stream); end.GetStatus() != "signal: terminated" {
		t.Errorf("end %v", end)
	}
	if !alive(held) {
		t.Error("the process that left the group is gone; the test showed nothing")
	}
}

func second[T any](_ T, err error) error { return err }

func stdin(s string) *process.ProcessInput {
	return &process.ProcessInput{Input: &process.ProcessInput_Stdin{Stdin: []byte(s)}}
}

func TestStreamInput(t *testing.T) {
	r := start(t)
	stream, pid := background(t, r, shell("cat"))
	in := r.process().StreamInput(t.Context())
	messages := []*process.StreamInputRequest{
		{Event: &process.StreamInputRequest_Start{Start: &process.StreamInputRequest_StartEvent{Process: byPID(pid)}}},
		{Event: &process.StreamInputRequest_Data{Data: &process.StreamInputRequest_DataEvent{Input: stdin("one ")}}},
		{Event: &process.StreamInputRequest_Keepalive{Keepalive: &process.StreamInputRequest_KeepAlive{}}},
		{Event: &process.StreamInputRequest_Data{Data: &process.StreamInputRequest_DataEvent{Input: stdin("")}}},
		{Event: &process.StreamInputRequest_Data{Data: &process.StreamInputRequest_DataEvent{Input: stdin("two")}}},
	}
	for _, m := range messages {
		if err := in.Send(m); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := in.CloseAndReceive(); err != nil {
		t.Fatal(err)
	}
	// The end of the stream is not the end of the input.
	if _, err := r.process().SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: stdin(" three")})); err != nil {
		t.Fatal(err)
	}
	if _, err := r.process().CloseStdin(t.Context(), connect.NewRequest(&process.CloseStdinRequest{Process: byPID(pid)})); err != nil {
		t.Fatal(err)
	}
	if out, _ := rest(t, stream); out != "one two three" {
		t.Errorf("output %q", out)
	}
}

func TestListAndConnect(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	tag, dir := "server", "/"
	req := shell("echo before; read x; echo after $x")
	req.Tag, req.Process.Cwd, req.Process.Envs = &tag, &dir, map[string]string{"A": "b"}
	stream, pid := background(t, r, req)
	if !stream.Receive() {
		t.Fatal(stream.Err())
	}
	list, err := r.process().List(ctx, connect.NewRequest(&process.ListRequest{}))
	if err != nil {
		t.Fatal(err)
	}
	if n := len(list.Msg.GetProcesses()); n != 1 {
		t.Fatalf("%d processes, want one", n)
	}
	info := list.Msg.GetProcesses()[0]
	if int(info.GetPid()) != pid || info.GetTag() != tag || info.GetConfig().GetCwd() != dir || info.GetConfig().GetEnvs()["A"] != "b" || len(info.GetConfig().GetArgs()) != 2 {
		t.Errorf("listed %v", info)
	}
	other, err := r.process().Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: &process.ProcessSelector{Selector: &process.ProcessSelector_Tag{Tag: tag}}}))
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if !other.Receive() || int(other.Msg().GetEvent().GetStart().GetPid()) != pid {
		t.Fatalf("Connect began with %v, %v", other.Msg(), other.Err())
	}
	if _, err := r.process().SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: stdin("x\n")})); err != nil {
		t.Fatal(err)
	}
	var got string
	var ended bool
	for other.Receive() {
		got += string(other.Msg().GetEvent().GetData().GetStdout())
		ended = ended || other.Msg().GetEvent().GetEnd() != nil
	}
	if got != "after x\n" || !ended || other.Err() != nil {
		t.Errorf("connected: %q, ended %v, %v; want only what came later, and the end", got, ended, other.Err())
	}
	if out, _ := rest(t, stream); out != "after x\n" {
		t.Errorf("the first caller got %q", out)
	}
	late, err := r.process().Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byPID(pid)}))
	if err != nil {
		t.Fatal(err)
	}
	defer late.Close()
	for ended = false; late.Receive(); {
		ended = ended || late.Msg().GetEvent().GetEnd() != nil
	}
	if !ended || late.Err() != nil {
		t.Errorf("connect after the end: ended %v, %v", ended, late.Err())
	}
	none, err := r.process().Connect(ctx, connect.NewRequest(&process.ConnectRequest{Process: byPID(1 << 30)}))
	if err == nil {
		none.Receive()
		err = none.Err()
		none.Close()
	}
	if connect.CodeOf(err) != connect.CodeNotFound || !strings.Contains(err.Error(), "process with pid 1073741824 not found") {
		t.Errorf("Connect to none: %v", err)
	}
}

func TestUsersAndEnvironment(t *testing.T) {
	r := start(t)
	r.hello(agentclient.Identity{Env: map[string]string{"A": "sandbox", "B": "sandbox", "HOME": "/own"}})
	res := r.result(agentclient.Command{Path: "env", Env: map[string]string{"B": "request"}})
	for _, want := range []string{"A=sandbox", "B=request", "HOME=/own", "USER=root", "LOGNAME=root", "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"} {
		if !strings.Contains("\n"+string(res.Stdout), "\n"+want+"\n") {
			t.Errorf("no %s in %q", want, res.Stdout)
		}
	}
	if n := strings.Count(string(res.Stdout), "\n"); n != 6 {
		t.Errorf("%d variables, want 6; the agent's own must not come through:\n%s", n, res.Stdout)
	}
	r.hello(agentclient.Identity{})
	for user, want := range map[string]string{
		"nobody":      "65534 65534 65534 nobody",
		"65534":       "65534 65534 65534 nobody",
		"4711":        "4711 0 0 4711",
		"daemon:mail": "1 8 8 daemon",
	} {
		got := r.result(agentclient.Command{Args: []string{"-c", "echo $(id -u) $(id -g) $(id -G) $USER"}, User: user, Dir: "/"})
		if strings.TrimSpace(string(got.Stdout)) != want {
			t.Errorf("user %s is %q (%q), want %q", user, got.Stdout, got.Stderr, want)
		}
	}
	got := r.result(agentclient.Command{Args: []string{"-c", "echo to the device >/dev/stdout; pwd"}, User: "nobody"})
	if string(got.Stdout) != "to the device\n/\n" {
		t.Errorf("nobody, who has no home, got %q and %q", got.Stdout, got.Stderr)
	}
}

func TestCommandHasItsOwnSession(t *testing.T) {
	r := start(t)
	got := strings.Fields(r.sh("ps -o sid=,pgid= -p $$; echo $$"))
	if len(got) != 3 || got[0] != got[2] || got[1] != got[2] {
		t.Errorf("session, group and pid are %v, want all the same", got)
	}
}

// A caller that reads slowly slows the process down, and loses nothing.
func TestSlowReaderIsWaitedFor(t *testing.T) {
	r := start(t)
	mark := filepath.Join(t.TempDir(), "mark")
	pr, pw := io.Pipe()
	done := make(chan error, 1)
	go func() {
		_, err := r.Run(t.Context(), agentclient.Command{Args: []string{"-c", "head -c 20000000 /dev/zero; touch " + mark}, Stdout: pw})
		pw.Close()
		done <- err
	}()
	if _, err := io.ReadFull(pr, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	if a, err := r.Activity(t.Context()); err != nil || a.RunningCommands != 1 {
		t.Errorf("Activity = %+v, %v", a, err)
	}
	if _, err := os.Stat(mark); err == nil {
		t.Error("it wrote 20 MB although nobody reads them")
	}
	n, err := io.Copy(io.Discard, pr)
	if n != 20000000-1000 || err != nil {
		t.Errorf("the rest is %d bytes, %v", n, err)
	}
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// After many commands nothing is left: no zombie, descriptor or goroutine.
func TestNothingLeaks(t *testing.T) {
	r := start(t)
	fds := func() int {
		entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", r.pid))
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	use := func(n int) {
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for range n / 8 {
					res, err := r.Run(t.Context(), agentclient.Command{Args: []string{"-c", "(true &) ; cat >/dev/null; echo x"}, Stdin: strings.NewReader("in")})
					if err != nil || string(res.Stdout) != "x\n" {
						t.Errorf("Run = %+v, %v", res, err)
						return
					}
				}
			})
		}
		wg.Wait()
	}
	use(40)
	before := fds()
	use(200)
	eventually(t, fmt.Sprintf("descriptors are back at %d", before), func() bool { return fds() <= before })
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", r.pid, r.pid))
	if err == nil && len(children) > 0 {
		t.Errorf("children are left: %s", children)
	}
	if n := r.status("Threads"); n > 20 {
		t.Errorf("%d threads", n)
	}
	if kb := r.status("VmHWM"); kb > 48<<10 {
		t.Errorf("it used %d kB", kb)
	}
}

// What is wrong with an identity is said of its field.
func TestHelloNamesTheField(t *testing.T) {
	r := start(t)
	for field, id := range map[string]agentclient.Identity{
		"default_user": {User: "nosuch"}, "default_workdir": {Workdir: "/a\x00b"},
	} {
		_, err := r.Hello(t.Context(), id)
		if f := fault.Of(err); f == nil || f.Kind != fault.InvalidArgument || f.Field != field {
			t.Errorf("Hello with %+v = %+v, want an error of %s", id, f, field)
		}
	}
}
