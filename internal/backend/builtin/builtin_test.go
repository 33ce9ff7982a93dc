package builtin

import (
	"errors"
	"log/slog"
	"testing"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Every kind of machine that has a name has a backend, in the order of
// strength.
func TestOpenHasEveryBackend(t *testing.T) {
	dir := t.TempDir()
	all, err := Open(Options{Log: slog.New(slog.DiscardHandler), StateDir: dir, Prefix: backend.Prefix(dir), SentryPath: "/nowhere/opendsec-sentry"})
	if err != nil {
		t.Fatal(err)
	}
	if len(all) != len(sandbox.Backends) {
		t.Fatalf("%d backends for the names %v", len(all), sandbox.Backends)
	}
	for n, b := range all {
		if b.Name() != sandbox.Backends[n] {
			t.Errorf("backend %d is %s, want %s", n, b.Name(), sandbox.Backends[n])
		}
		if err := b.Close(); err != nil {
			t.Errorf("close %s: %v", b.Name(), err)
		}
	}
}

// A backend that cannot be opened says so when it is asked, and does not take
// its machines for gone.
func TestUnable(t *testing.T) {
	reason := errors.New("no such program")
	u := unable{sandbox.Container, reason}
	if _, err := u.Probe(t.Context()); !errors.Is(err, reason) {
		t.Errorf("probe: %v", err)
	}
	if _, err := u.Recover(t.Context(), backend.Handle{Backend: sandbox.Container}); !errors.Is(err, reason) || errors.Is(err, backend.ErrGone) {
		t.Errorf("recover: %v", err)
	}
}
