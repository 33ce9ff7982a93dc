package container

import (
	"encoding/json"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
)

func openAt(t testing.TB, p backendtest.Place) backend.Backend {
	t.Helper()
	b, err := Open(Options{Log: p.Log, StateDir: p.StateDir, Prefix: p.Prefix, Agent: p.Agent})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// crash kills a container's first process.
func crash(t testing.TB, h backend.Handle) {
	t.Helper()
	var r record
	if err := json.Unmarshal(h.Data, &r); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(r.Process.PID, unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

func TestBackend(t *testing.T) {
	backendtest.Run(t, backendtest.Kind{Open: openAt, Crash: crash})
}
