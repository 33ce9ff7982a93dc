package imagetest

import (
	"os"
	"os/exec"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Busybox writes a docker-archive with a small image: the machine's static
// busybox under the names of the given commands, /srv, and the users root and
// app. A machine without busybox fails the test.
func Busybox(t testing.TB, archive string, commands ...string) {
	t.Helper()
	path, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal("busybox is missing: apt-get install busybox-static")
	}
	busybox, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	program := File("bin/busybox", string(busybox))
	program.Mode = 0o755
	entries := []Entry{Dir("bin"), Dir("srv"), Dir("etc"),
		File("etc/passwd", "root:x:0:0:root:/:/bin/sh\napp:x:1000:1000::/srv:/bin/sh\n"),
		File("etc/group", "root:x:0:\napp:x:1000:\n"), program}
	for _, c := range commands {
		entries = append(entries, Symlink("bin/"+c, "busybox"))
	}
	tag, err := name.NewTag("small:latest")
	if err != nil {
		t.Fatal(err)
	}
	if err := tarball.WriteToFile(archive, tag, Image(t, [][]byte{Tar(t, entries...)})); err != nil {
		t.Fatal(err)
	}
}
