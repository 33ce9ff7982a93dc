package sim

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
)

func dialler(i backend.Instance) agentclient.Dial {
	return func(ctx context.Context) (net.Conn, error) { return i.Dial(ctx, backend.AgentPort) }
}

// TestCommandsStandStill has a command of an hour run over a pause of a day, and
// in a machine that is made of a snapshot: it takes an hour of running time in
// both.
func TestCommandsStandStill(t *testing.T) {
	first, second, dir := testConfig(t), testConfig(t), t.TempDir()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		b := Open(slog.New(slog.DiscardHandler), Behavior{CommandTime: time.Hour})
		defer b.Close()
		i, err := b.Create(ctx, first)
		if err != nil {
			t.Fatal(err)
		}
		c := agentclient.New(dialler(i), "token")
		defer c.Close()
		if _, err := c.Hello(ctx, agentclient.Identity{Token: "token"}); err != nil {
			t.Fatal(err)
		}
		begin := time.Now()
		took := make(chan time.Duration)
		go func() {
			if res, err := c.Run(ctx, agentclient.Command{Path: "long", Tag: "long"}); err != nil || res.ExitCode != 0 {
				t.Errorf("the command ended with %+v, %v", res, err)
			}
			took <- time.Since(begin)
		}()
		time.Sleep(40 * time.Minute)
		m := i.(*machine)
		if err := m.Pause(ctx); err != nil {
			t.Fatal(err)
		}
		s, err := m.Snapshot(ctx, backend.SnapshotOptions{Dir: dir, Memory: true})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(24 * time.Hour)
		if err := m.Resume(ctx); err != nil {
			t.Fatal(err)
		}
		if d := <-took; d != 25*time.Hour {
			t.Errorf("a command of an hour, with a pause of a day, took %v", d)
		}
		second.From, second.Limits = &s, s.Limits
		copied, err := b.Create(ctx, second)
		if err != nil {
			t.Fatal(err)
		}
		restored := time.Now()
		copyOf := copied.(*machine).agent.table.all()
		if len(copyOf) != 1 || *copyOf[0].tag != "long" || copyOf[0].config.GetCmd() != "long" {
			t.Fatalf("the copy has the commands %v", copyOf)
		}
		if err := copyOf[0].wait(ctx); err != nil || time.Since(restored) != 20*time.Minute {
			t.Errorf("a command that had 20 minutes to run ran for %v, %v", time.Since(restored), err)
		}
	})
}

func TestSnapshotFails(t *testing.T) {
	b := Open(slog.New(slog.DiscardHandler), Behavior{SnapshotFails: 1})
	defer b.Close()
	i, err := b.Create(t.Context(), testConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := i.(*machine).Snapshot(t.Context(), backend.SnapshotOptions{Dir: t.TempDir()}); err == nil {
		t.Error("a snapshot that always fails did not")
	}
	if err := i.(*machine).Pause(t.Context()); err != nil {
		t.Error(err)
	}
}

// TestEndOfStandstill ends a paused machine: who waits in it is sent away.
func TestEndOfStandstill(t *testing.T) {
	b := Open(slog.New(slog.DiscardHandler), Behavior{})
	i, err := b.Create(t.Context(), testConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	m := i.(*machine)
	if err := m.Pause(t.Context()); err != nil {
		t.Fatal(err)
	}
	c := agentclient.New(dialler(i), "")
	defer c.Close()
	answered := make(chan error)
	go func() { answered <- c.Health(t.Context()) }()
	if err := m.Destroy(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-answered; err == nil {
		t.Error("a paused machine answered")
	}
	if err := m.Pause(t.Context()); !errors.Is(err, backend.ErrGone) {
		t.Errorf("pause a machine that was destroyed: %v", err)
	}
}
