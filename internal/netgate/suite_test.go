package netgate

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/kernflux/opendsec/internal/netgate/gatetest"
)

// prober builds the program that tries to get around the rules.
func prober(t testing.TB) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), "prober")
	cmd := exec.Command("go", "build", "-o", bin, "./gatetest/prober")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the prober: %v\n%s", err, out)
	}
	return bin
}

// run runs a program as root with all rights in the guest's namespace.
func (gu *guest) run(args ...string) (string, error) {
	out, err := exec.Command("ip", append([]string{"netns", "exec", gu.ns.Name}, args...)...).CombinedOutput()
	return string(out), err
}

// Each way around the rules that somebody has thought of, from a guest that has
// all rights over its own end of the link.
func TestNoWayAround(t *testing.T) {
	w := gatetest.New(t)
	bin := prober(t)
	gu := newGuest(t, newGate(t, Config{}))
	gu.open(gatetest.Rules())
	out, err := gu.run(bin)
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
	for _, b := range w.Bypasses() {
		t.Errorf("got through: %s", b)
	}
	for range 2 {
		if out, err := gu.run(bin, "allowed"); err != nil {
			t.Errorf("what is allowed does not work: %v\n%s", err, out)
		}
	}
	if b := w.Bypasses(); len(b) > 0 {
		t.Errorf("got through: %s", b)
	}
}
