package gvisor

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/backendtest"
	"github.com/kernflux/opendsec/internal/backend/gvisor/patch"
)

// sentryVariable has the path of the sentry for this test's processes.
const sentryVariable = "OPENDSEC_TEST_SENTRY"

// TestMain builds the sentry once for all tests and the processes they start.
func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Getenv(sentryVariable) == "" {
			dir, err := os.MkdirTemp("", "sentry")
			if err != nil {
				panic(err)
			}
			defer os.RemoveAll(dir)
			path := filepath.Join(dir, "opendsec-sentry")
			if err := patch.Build(path, "-s -w"); err != nil {
				panic(err)
			}
			os.Setenv(sentryVariable, path)
		}
		return m.Run()
	}())
}

// open opens the backend at a place as the edge does.
func open(t testing.TB, p backendtest.Place, pool int) *Backend {
	t.Helper()
	b, err := New(Options{
		Log: p.Log, StateDir: filepath.Join(p.StateDir, "gvisor"), Prefix: p.Prefix,
		SentryPath: os.Getenv(sentryVariable), Slots: backendtest.Slots(t, p), Pool: pool, DebugDir: os.Getenv("OPENDSEC_TEST_SENTRY_LOGS"),
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// crash kills the sentry of a machine.
func crash(t testing.TB, h backend.Handle) {
	t.Helper()
	var d handleData
	if err := json.Unmarshal(h.Data, &d); err != nil {
		t.Fatal(err)
	}
	if err := unix.Kill(d.Sentry.PID, unix.SIGKILL); err != nil {
		t.Errorf("kill the sentry: %v", err)
	}
}

func kind(pool int) backendtest.Kind {
	return backendtest.Kind{
		Open: func(t testing.TB, p backendtest.Place) backend.Backend {
			return open(t, p, pool)
		},
		Crash:           crash,
		OutOfMemoryEnds: true,
	}
}

func TestContract(t *testing.T) { backendtest.Run(t, kind(0)) }

func TestContractWithPool(t *testing.T) { backendtest.Run(t, kind(2)) }
