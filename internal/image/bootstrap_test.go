package image

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
)

// TestBootstrapDebian builds a real image from the machine's package mirror,
// which takes about a minute, and runs programs of it.
func TestBootstrapDebian(t *testing.T) {
	s := openStore(t, t.TempDir())
	start := time.Now()
	var lines []string
	a, err := s.Bootstrap(t.Context(), BootstrapOptions{Distribution: "debian", Packages: []string{"tree"}}, func(p Progress) {
		lines = append(lines, p.Step+": "+p.Detail)
	})
	if err != nil {
		t.Fatalf("Bootstrap = %v after:\n%s", err, strings.Join(lines, "\n"))
	}
	t.Logf("built %d MB in %s", a.Size>>20, time.Since(start).Round(time.Second))
	if len(lines) < 5 || !strings.HasPrefix(lines[len(lines)-1], "done: ") {
		t.Errorf("progress was %q", lines)
	}
	root, _, err := s.Acquire(t.Context(), a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release(a.Digest)
	for _, command := range []string{
		"python --version", "python3 -c 'import ssl, venv, sqlite3'", "pip --version", "curl --version", "test -x /usr/bin/git", "free --version", "tree --version",
		"test ! -s /etc/machine-id", "test -e /etc/machine-id", "test -s /etc/apt/sources.list.d/debian.sources", "test -z \"$(find /var/lib/apt/lists /dev /tmp -mindepth 1)\"",
		"! ls /usr/lib/python3*/EXTERNALLY-MANAGED",
		"! grep -ri proxy /etc/apt",
	} {
		cmd := exec.Command("chroot", root.Tree, "/bin/sh", "-c", command)
		cmd.Env = a.Config.Env
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", command, err, out)
		}
	}
	certificatesArrived(t, root.Tree)
}

// certificatesArrived looks for the machine's own authorities in the image.
func certificatesArrived(t *testing.T, tree string) {
	t.Helper()
	bundle, err := os.ReadFile(filepath.Join(tree, "etc/ssl/certs/ca-certificates.crt"))
	if err != nil {
		t.Fatal(err)
	}
	err = filepath.WalkDir("/usr/local/share/ca-certificates", func(name string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || filepath.Ext(name) != ".crt" {
			return err
		}
		b, err := os.ReadFile(name)
		if !strings.Contains(string(bundle), strings.TrimSpace(string(b))) {
			t.Errorf("the image does not trust %s", name)
		}
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
}

func TestBootstrapRefuses(t *testing.T) {
	s := openStore(t, t.TempDir())
	if _, err := s.Bootstrap(t.Context(), BootstrapOptions{Distribution: "plan9"}, nil); !fault.Is(err, fault.InvalidArgument) || fault.Of(err).Field != "distribution" {
		t.Errorf("Bootstrap of plan9 = %v", err)
	}
}
