package sim

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// opened has the backends that a suite opened, to find machines in them.
type opened struct {
	mu  sync.Mutex
	all []*Backend
}

func (o *opened) open(_ testing.TB, p backendtest.Place) backend.Backend {
	o.mu.Lock()
	defer o.mu.Unlock()
	b := Open(p.Log, Behavior{})
	o.all = append(o.all, b)
	return b
}

func (o *opened) crash(t testing.TB, h backend.Handle) {
	t.Helper()
	var r record
	if err := json.Unmarshal(h.Data, &r); err != nil {
		t.Fatal(err)
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, b := range o.all {
		b.mu.Lock()
		m := b.live[r.ID]
		b.mu.Unlock()
		if m != nil {
			m.die(false)
		}
	}
}

func TestBackend(t *testing.T) {
	o := &opened{}
	backendtest.Run(t, backendtest.Kind{Open: o.open, Crash: o.crash, Simulated: true})
}

func testConfig(t *testing.T) backend.Config {
	return backend.Config{ID: sandbox.NewID(), StateDir: t.TempDir(), Limits: sandbox.Limits{DiskMB: 1}}
}

func TestBehavior(t *testing.T) {
	ctx := context.Background()
	log := slog.New(slog.DiscardHandler)
	t.Run("create fails", func(t *testing.T) {
		if _, err := Open(log, Behavior{CreateFails: 1}).Create(ctx, testConfig(t)); err == nil {
			t.Error("a create that always fails did not")
		}
	})
	t.Run("lost", func(t *testing.T) {
		b := Open(log, Behavior{Lost: 1})
		i, err := b.Create(ctx, testConfig(t))
		if err != nil {
			t.Fatal(err)
		}
		b.Close()
		if _, err := b.Recover(ctx, i.Handle()); !errors.Is(err, backend.ErrGone) {
			t.Errorf("recover: %v", err)
		}
	})
	t.Run("dies", func(t *testing.T) {
		cfg := testConfig(t)
		synctest.Test(t, func(t *testing.T) {
			begin := time.Now()
			b := Open(log, Behavior{Dies: 1, DiesWithin: time.Hour, OutOfMemory: 1, CreateTime: time.Second})
			i, err := b.Create(ctx, cfg)
			if err != nil {
				t.Fatal(err)
			}
			exit, err := i.Wait(ctx)
			if err != nil || !exit.OutOfMemory || time.Since(begin) > time.Hour+time.Second || time.Since(begin) < time.Second {
				t.Errorf("after %v: %+v, %v", time.Since(begin), exit, err)
			}
		})
	})
	t.Run("repeats", func(t *testing.T) {
		for range 10 {
			id := sandbox.NewID()
			x := Behavior{Seed: 7}.chance(id, "fate").Uint64()
			if y := (Behavior{Seed: 7}).chance(id, "fate").Uint64(); x != y {
				t.Errorf("the same seed gave %d and %d", x, y)
			}
			if y := (Behavior{Seed: 8}).chance(id, "fate").Uint64(); x == y {
				t.Error("another seed gave the same")
			}
		}
	})
}
