package container

import (
	"encoding/json"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
)

// kindOf describes the backend with a runtime, "" for the one that it chooses.
func kindOf(runtime string) backendtest.Kind {
	return backendtest.Kind{
		Open: func(t testing.TB, p backendtest.Place) backend.Backend {
			t.Helper()
			b, err := Open(Options{Log: p.Log, StateDir: p.StateDir, Prefix: p.Prefix, Agent: p.Agent, Runtime: runtime})
			if err != nil {
				t.Fatal(err)
			}
			return b
		},
		Crash: crash,
	}
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

func TestBackend(t *testing.T) { backendtest.Run(t, kindOf("")) }

// TestBackendOnRunc runs the suite on the runtime that is there on most
// machines, and that TestBackend may not have chosen.
func TestBackendOnRunc(t *testing.T) { backendtest.Run(t, kindOf("runc")) }
