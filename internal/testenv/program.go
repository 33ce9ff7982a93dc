package testenv

import (
	"os/exec"
	"testing"
)

// Program returns the path of a program that a test needs. On a machine that
// lacks it the test fails, and says which Debian package has it.
func Program(t testing.TB, name, pkg string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatalf("%s is missing: apt-get install %s", name, pkg)
	}
	return path
}
