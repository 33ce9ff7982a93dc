package backendtest

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/image"
)

// material is what all machines of a run are made of.
type material struct {
	rootfs backend.Rootfs
	agent  backend.Agent
}

// newMaterial builds the agent and an image.
func newMaterial(t testing.TB, k Kind) material {
	t.Helper()
	dir := t.TempDir()
	if k.Simulated {
		return material{}
	}
	return material{rootfs: buildRootfs(t, dir), agent: buildAgent(t, dir)}
}

// buildAgent builds the agent from its source and packs it in both forms.
func buildAgent(t testing.TB, dir string) backend.Agent {
	t.Helper()
	binary := filepath.Join(dir, "opendsec-agent")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", binary, "github.com/kernflux/opendsec/cmd/opendsec-agent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	run(t, cmd)
	agent, err := image.PackAgent(context.Background(), binary, filepath.Join(dir, "agent"))
	if err != nil {
		t.Fatal(err)
	}
	return agent
}

// buildRootfs packs a small tree of busybox and mounts it.
func buildRootfs(t testing.TB, dir string) backend.Rootfs {
	t.Helper()
	tree := filepath.Join(dir, "tree")
	fillTree(t, tree)
	r := backend.Rootfs{
		Digest: "sha256:" + strings.Repeat("0", 64),
		EROFS:  filepath.Join(dir, "rootfs.erofs"),
		Tree:   filepath.Join(dir, "rootfs"),
	}
	run(t, exec.Command("mkfs.erofs", "--quiet", "-E", "noinline_data", r.EROFS, tree))
	if err := os.Mkdir(r.Tree, 0o755); err != nil {
		t.Fatal(err)
	}
	run(t, exec.Command("mount", "-t", "erofs", "-o", "ro,loop", r.EROFS, r.Tree))
	t.Cleanup(func() {
		if err := unix.Unmount(r.Tree, unix.MNT_DETACH); err != nil {
			t.Errorf("unmount %s: %v", r.Tree, err)
		}
	})
	return r
}

// fillTree makes a file tree that is enough of a Linux for the tests.
func fillTree(t testing.TB, tree string) {
	t.Helper()
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Fatal("the test image needs busybox: apt-get install busybox-static")
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatal(err)
	}
	for path, mode := range map[string]os.FileMode{
		"bin": 0o755, "dev": 0o755, "etc": 0o755, "home/user": 0o755, "proc": 0o755,
		"root": 0o700, "sys": 0o755, "tmp": 0o777 | os.ModeSticky, "usr/bin": 0o755, "var": 0o755,
		"usr/share/kept": 0o755, "usr/share/gone/deep": 0o755, "usr/share/replaced": 0o755, "usr/share/dir": 0o755,
	} {
		full := filepath.Join(tree, path)
		if err := os.MkdirAll(full, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(full, mode); err != nil {
			t.Fatal(err)
		}
	}
	for path, content := range map[string]string{
		"etc/passwd": "root:x:0:0:root:/root:/bin/sh\nuser:x:1000:1000::/home/user:/bin/sh\n",
		"etc/group":  "root:x:0:\nuser:x:1000:\n",
		"etc/motd":   "of the image\n",

		"usr/share/kept/a": "a of the image\n", "usr/share/kept/b": "b of the image\n",
		"usr/share/gone/deep/a": "a of the image\n", "usr/share/replaced/a": "a of the image\n",
		"usr/share/replaced/b": "b of the image\n", "usr/share/dir/a": "a of the image\n",
		"usr/share/file": "of the image\n", "usr/share/chmod": "of the image\n",
	} {
		if err := os.WriteFile(filepath.Join(tree, path), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Chown(filepath.Join(tree, "home/user"), 1000, 1000); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(tree, "bin/busybox"), program, 0o755); err != nil {
		t.Fatal(err)
	}
	list, err := exec.Command(busybox, "--list").Output()
	if err != nil {
		t.Fatalf("list the applets of busybox: %v", err)
	}
	for _, applet := range strings.Fields(string(list)) {
		if applet == "busybox" {
			continue
		}
		if err := os.Symlink("busybox", filepath.Join(tree, "bin", applet)); err != nil {
			t.Fatal(err)
		}
	}
}

func run(t testing.TB, cmd *exec.Cmd) {
	t.Helper()
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, out)
	}
}
