package agent_test

import (
	"context"
	"crypto/sha256"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/api/gen/process"
)

func TestInput(t *testing.T) {
	r := start(t)
	ctx := t.Context()
	p := r.process()
	stream, pid := background(t, r, shell("cat; echo; echo end"))
	big := strings.Repeat("ü\n", 100<<10)
	for _, s := range []string{"", "a\n", big} {
		if _, err := p.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: stdin(s)})); err != nil {
			t.Fatal(err)
		}
		for got := 0; got < len(s); got += len(stream.Msg().GetEvent().GetData().GetStdout()) {
			if !stream.Receive() {
				t.Fatal(stream.Err())
			}
		}
	}
	pty := &process.ProcessInput{Input: &process.ProcessInput_Pty{Pty: []byte("x")}}
	if err := second(p.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: pty}))); connect.CodeOf(err) != connect.CodeInvalidArgument {
		t.Errorf("terminal input = %v, want invalid_argument", err)
	}
	for range 2 {
		if _, err := p.CloseStdin(ctx, connect.NewRequest(&process.CloseStdinRequest{Process: byPID(pid)})); err != nil {
			t.Errorf("CloseStdin: %v", err)
		}
	}
	if out, end := rest(t, stream); out != "\nend\n" || end.GetExitCode() != 0 {
		t.Errorf("after the input's end: %q, %v", out, end)
	}

	no := false
	req := shell("sleep 60")
	req.Stdin = &no
	_, pid = background(t, r, req)
	if err := second(p.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: stdin("x")}))); connect.CodeOf(err) != connect.CodeFailedPrecondition {
		t.Errorf("input without stdin = %v, want failed_precondition", err)
	}
}

// A piece that was broken off in the middle and is sent again arrives once.
func TestInputSentAgain(t *testing.T) {
	r := start(t)
	reads := filepath.Join(t.TempDir(), "reads")
	stream, pid := background(t, r, shell("until [ -e "+reads+" ]; do sleep 0.01; done; sha256sum"))
	var all, piece strings.Builder
	for i := range 100_000 {
		fmt.Fprintln(&piece, i)
	}
	send := func(ctx context.Context, name, s string) error {
		return second(r.process().SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: stdin(s), Piece: name})))
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := send(ctx, "big", piece.String()); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Fatalf("a piece that nobody reads = %v, want deadline_exceeded", err)
	}
	if err := os.WriteFile(reads, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, again := range []struct{ name, data string }{
		{"big", piece.String()}, {"big", piece.String()}, {"small", "x"}, {"small", "x"}, {"", "y"}, {"", "y"},
	} {
		if err := send(t.Context(), again.name, again.data); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := r.process().CloseStdin(t.Context(), connect.NewRequest(&process.CloseStdinRequest{Process: byPID(pid)})); err != nil {
		t.Fatal(err)
	}
	all.WriteString(piece.String() + "xyy")
	if out, _ := rest(t, stream); !strings.HasPrefix(out, fmt.Sprintf("%x", sha256.Sum256([]byte(all.String())))) {
		t.Errorf("what arrived has the sum %q, which is not that of what was sent", out)
	}
}

// A writer that waits for a process to read must end with its call, and with
// the process, and must not leave the pipe unusable for the next.
func TestInputThatNobodyReads(t *testing.T) {
	r := start(t)
	p := r.process()
	stream, pid := background(t, r, shell("read x; cat >/dev/null; echo end"))
	send := func(ctx context.Context, n int) error {
		return second(p.SendInput(ctx, connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: stdin(strings.Repeat("x", n))})))
	}
	if _, err := r.agent().Signal(t.Context(), connect.NewRequest(&agentv1.SignalRequest{Process: &agentv1.SignalRequest_Pid{Pid: uint32(pid)}, Signal: uint32(syscall.SIGSTOP)})); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	if err := send(ctx, 200<<10); connect.CodeOf(err) != connect.CodeDeadlineExceeded {
		t.Errorf("SendInput to a stopped process = %v, want deadline_exceeded", err)
	}
	done := make(chan error)
	go func() { done <- send(t.Context(), 200<<10) }()
	if _, err := r.agent().Signal(t.Context(), connect.NewRequest(&agentv1.SignalRequest{Process: &agentv1.SignalRequest_Pid{Pid: uint32(pid)}, Signal: uint32(syscall.SIGCONT)})); err != nil {
		t.Fatal(err)
	}
	// It reads a line first, and there is none yet.
	if _, err := p.SendInput(t.Context(), connect.NewRequest(&process.SendInputRequest{Process: byPID(pid), Input: stdin("\n")})); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Errorf("SendInput after it went on: %v", err)
	}
	if _, err := p.CloseStdin(t.Context(), connect.NewRequest(&process.CloseStdinRequest{Process: byPID(pid)})); err != nil {
		t.Fatal(err)
	}
	if out, _ := rest(t, stream); out != "end\n" {
		t.Errorf("output %q", out)
	}
}
