//go:build !race

// The race detector changes the sentry's rules: it needs system calls of its own.

package filters

import (
	"bytes"
	"os"
	"runtime"
	"testing"

	"gvisor.dev/gvisor/runsc/boot/filter"
)

// The generated file is what the pinned gVisor gives.
func TestProgramsAreFresh(t *testing.T) {
	p, err := Compile()
	if err != nil {
		t.Fatal(err)
	}
	want, err := Source(p)
	if err != nil {
		t.Fatal(err)
	}
	file := "programs_" + runtime.GOARCH + ".go"
	got, err := os.ReadFile(file)
	if os.IsNotExist(err) {
		t.Logf("there is no %s: on this architecture the sentry compiles at its start", file)
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got, want) {
		t.Errorf("%s is not what gVisor's rules give: run go generate here", file)
	}
}

// The sentry finds the program by the options it runs with, and can use it.
func TestSentryFindsItsProgram(t *testing.T) {
	Register()
	opt := Options()
	opt.ControllerFD = 17
	p, ok := filter.GetPrecompiled(opt.ConfigKey())
	if !ok {
		t.Fatalf("no program for %s; there are: %q", opt.ConfigKey(), filter.ListPrecompiled())
	}
	insns, err := p.RenderInstructions(opt.Vars())
	if err != nil {
		t.Fatal(err)
	}
	if len(insns) < 100 {
		t.Errorf("a program of %d instructions", len(insns))
	}
}
