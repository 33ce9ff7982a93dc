package daemon

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestKeepFiles(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	leaky, err := unix.Dup(int(w.Fd())) // without CLOEXEC, as inherited ones are
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(leaky)
	if err := KeepFiles(); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("sh", "-c", "for f in /proc/self/fd/*; do readlink $f || true; done").Output()
	if err != nil {
		t.Fatal(err)
	}
	name, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(leaky))
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(out), name) {
		t.Errorf("a child got %s: %s", name, out)
	}
}
