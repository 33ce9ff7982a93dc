package agent_test

import (
	"context"
	"fmt"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"connectrpc.com/connect"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// client returns another client of the agent.
func (r *running) client(token string) *agentclient.Client {
	c := agentclient.New(r.dial, token)
	r.t.Cleanup(c.Close)
	return c
}

func TestWhatALifeIsGiven(t *testing.T) {
	r := machineOf(t, debian+`
mkdir -p $ROOT/var/lib/dbus; rm -f $ROOT/var/lib/dbus/machine-id $ROOT/etc/machine-id; rm -rf $ROOT/run/opendsec
echo old >$ROOT/var/lib/dbus/machine-id; echo old >$ROOT/etc/machine-id; chmod 640 $ROOT/etc/machine-id`)
	look := func() string {
		return r.sh("cat /etc/machine-id /var/lib/dbus/machine-id /run/opendsec/generation")
	}
	files := func() string {
		return r.sh("stat -c '%n %i %a' /etc/machine-id /var/lib/dbus/machine-id /run/opendsec /run/opendsec/generation /etc/hosts; ls -A /run/opendsec; ls -A /etc | grep opendsec; true")
	}
	r.sandbox("", "sb-source", "life one")
	first := look()
	if !regexp.MustCompile(`^([0-9a-f]{32})\n[0-9a-f]{32}\nlife one$`).MatchString(first) || first[:32] != first[33:65] {
		t.Errorf("ids and generation:\n%s", first)
	}
	before := files()
	for _, want := range []string{" 640\n/var", "\ngeneration", " 755\n/run/opendsec/generation", " 644\n/etc/hosts"} {
		if !strings.Contains(before, want) {
			t.Errorf("the files are\n%s\nwant %q", before, want)
		}
	}
	r.sandbox("", "sb-source", "life one")
	if after := files(); after != before {
		t.Errorf("the same identity again changed files:\n%s\nbefore:\n%s", after, before)
	}
	r.sandbox("", "sb-source", "life two")
	if resumed := look(); resumed[:65] != first[:65] || !strings.HasSuffix(resumed, "\nlife two") {
		t.Errorf("after a resume:\n%s", resumed)
	}
	r.sandbox("its own", "sb-fork", "life three")
	forked := look()
	if forked[:32] == first[:32] || forked[:32] != forked[33:65] || !strings.HasSuffix(forked, "\nlife three") {
		t.Errorf("after a fork:\n%s", forked)
	}
	if got := r.sh("hostname; cat /etc/hostname; grep sb- /etc/hosts"); got != "sb-fork\nsb-fork\n127.0.1.1\tsb-fork" {
		t.Errorf("names of the fork:\n%s", got)
	}
	if _, err := r.client(token).Activity(t.Context()); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("a call with the source's token = %v", err)
	}
}

// sandbox gives the machine an identity as an edge does.
func (r *running) sandbox(token, name, generation string) {
	r.t.Helper()
	r.hello(agentclient.Identity{Token: token, SandboxID: sandbox.ID(name), Hostname: name, Generation: generation,
		Now: time.Now(), Entropy: []byte("some chance")})
}

// The last Hello is repeated by who did not hear its answer, and by nobody else.
func TestHelloAgain(t *testing.T) {
	r := start(t)
	r.hello(agentclient.Identity{Token: "second", Generation: "2"})
	if _, err := r.client(token).Hello(t.Context(), agentclient.Identity{Token: "second", Generation: "2"}); err != nil {
		t.Errorf("the same Hello again: %v", err)
	}
	if _, err := r.client(token).Hello(t.Context(), agentclient.Identity{Token: "third", Generation: "2"}); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("Hello with the old token = %v", err)
	}
}

// follows has a client run a command that says "ready" and goes on, and
// returns what comes of it.
func follows(t *testing.T, c *agentclient.Client, tag string) <-chan error {
	t.Helper()
	ready, done := make(chan struct{}, 1), make(chan error, 1)
	go func() {
		_, err := c.Run(context.WithoutCancel(t.Context()), agentclient.Command{
			Tag: tag, Args: []string{"-c", "echo ready; exec sleep 60"}, Stdout: writerFunc(func(p []byte) (int, error) {
				ready <- struct{}{}
				return len(p), nil
			})})
		done <- err
	}()
	<-ready
	return done
}

func TestTokensOfTheSourceEnd(t *testing.T) {
	r := start(t)
	r.hello(agentclient.Identity{Generation: "1"})
	other := r.client(token)
	same, apart := follows(t, r.Client, "same"), follows(t, other, "apart")

	r.hello(agentclient.Identity{Token: "second", Generation: "2"})
	for name, done := range map[string]<-chan error{"by the connection of Hello": same, "by another": apart} {
		if err := <-done; err == nil {
			t.Errorf("a call %s ended well", name)
		}
	}
	if _, err := other.Activity(t.Context()); !fault.Is(err, fault.Unauthenticated) {
		t.Errorf("a call with the old token = %v", err)
	}
	if a, err := r.Activity(t.Context()); err != nil || a.RunningCommands != 2 {
		t.Errorf("Activity = %+v, %v; want both commands to go on", a, err)
	}
}

func TestResumeCutsDeadConnections(t *testing.T) {
	r := start(t)
	r.hello(agentclient.Identity{Generation: "1"})
	other := r.client(token)
	same, apart := follows(t, r.Client, "same"), follows(t, other, "apart")

	r.hello(agentclient.Identity{Generation: "1"}) // nothing happened
	if _, err := other.Activity(t.Context()); err != nil {
		t.Error(err)
	}
	r.hello(agentclient.Identity{Generation: "2"})
	if err := <-apart; !fault.Is(err, fault.Unavailable) {
		t.Errorf("a call by another connection = %v", err)
	}
	select {
	case err := <-same:
		t.Errorf("a call by the same connection ended: %v", err)
	default:
	}
	if a, err := other.Activity(t.Context()); err != nil || a.RunningCommands != 2 { // by a new connection
		t.Errorf("Activity = %+v, %v; want both commands to go on", a, err)
	}
	if _, err := r.agent().Signal(t.Context(), connect.NewRequest(&agentv1.SignalRequest{Process: &agentv1.SignalRequest_Tag{Tag: "same"}, Signal: 9})); err != nil {
		t.Error(err)
	}
	if err := <-same; err != nil {
		t.Error(err)
	}
}

// A command that says much, to somebody who reads slowly, loses nothing when
// its connection breaks with the machine's standstill.
func TestNoByteIsLostOverAResume(t *testing.T) {
	const size = 20_000_000
	r := start(t)
	r.hello(agentclient.Identity{Generation: "1"})
	reader := r.client(token)
	begun, goOn := make(chan struct{}), make(chan struct{})
	var got []byte
	done := make(chan error, 1)
	go func() {
		_, err := reader.Run(context.WithoutCancel(t.Context()), agentclient.Command{
			Tag:  "much",
			Args: []string{"-c", fmt.Sprintf("seq -f %%07.0f 1000000000 | head -c %d", size)},
			Stdout: writerFunc(func(p []byte) (int, error) {
				if len(got) == 0 {
					close(begun)
					<-goOn
				}
				got = append(got, p...)
				return len(p), nil
			})})
		done <- err
	}()
	<-begun
	// The command writes until nothing more is taken.
	attached := &agentv1.AttachRequest{Process: &agentv1.AttachRequest_Tag{Tag: "much"}, NoFollow: true}
	var last int
	eventually(t, "it is at a stand", func() bool {
		started, events := attach(t, r, attached)
		now := int(started.GetStdoutFrom()) + len(output(events))
		at := now == last && now > 256<<10
		last = now
		return at
	})
	r.hello(agentclient.Identity{Generation: "2"})
	close(goOn)
	if err := <-done; !fault.Is(err, fault.Unavailable) {
		t.Fatalf("Run = %v", err)
	}
	if len(got) >= size {
		t.Fatal("all came before; the test showed nothing")
	}
	started, events := attach(t, r, &agentv1.AttachRequest{Process: &agentv1.AttachRequest_Tag{Tag: "much"}, StdoutOffset: uint64(len(got))})
	if int(started.GetStdoutFrom()) > len(got) {
		t.Fatalf("%d bytes came, and what is held begins at %d", len(got), started.GetStdoutFrom())
	}
	got = append(got, output(events)...)
	if len(got) != size {
		t.Fatalf("%d bytes came in all, want %d", len(got), size)
	}
	for i := 0; i+8 <= size; i += 8 {
		if want := fmt.Sprintf("%07d\n", i/8+1); string(got[i:i+8]) != want {
			t.Fatalf("at %d: %q, want %q", i, got[i:i+8], want)
		}
	}
}

// The time in which the machine stands still does not count for a deadline.
func TestDeadlinesCountRunningTime(t *testing.T) {
	r := start(t)
	began := make(chan struct{})
	type ended struct {
		res agentclient.Result
		err error
	}
	done := make(chan ended, 1)
	const deadline, stand = 800 * time.Millisecond, 1500 * time.Millisecond
	go func() {
		res, err := r.Run(context.WithoutCancel(t.Context()), agentclient.Command{
			Args: []string{"-c", "echo x; exec sleep 60"}, Timeout: deadline, Stdout: writerFunc(func(p []byte) (int, error) {
				close(began)
				return len(p), nil
			})})
		done <- ended{res, err}
	}()
	<-began
	stop := time.Now()
	if err := syscall.Kill(r.pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	<-time.After(stand)
	if err := syscall.Kill(r.pid, syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	resumed := time.Now()
	// One slice of the time may be taken for part of the standstill.
	const least = deadline - 400*time.Millisecond
	select {
	case e := <-done:
		if rest := time.Since(resumed); rest < least {
			t.Errorf("it ended %v after it went on, %v after the stop: %+v", rest, time.Since(stop), e)
		}
	case <-time.After(least):
		e := <-done
		if e.err != nil || !e.res.TimedOut || e.res.Signal != syscall.SIGKILL {
			t.Errorf("Run = %+v, %v; want that its deadline ended it", e.res, e.err)
		}
	}
	if a, err := r.Activity(t.Context()); err != nil || a.RunningCommands != 0 {
		t.Errorf("Activity = %+v, %v", a, err)
	}
}
