package upper_test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend/container/upper"
	"github.com/kernflux/opendsec/internal/image/layer"
)

// overlay is a mounted overlay file system.
type overlay struct {
	t                  testing.TB
	lower, upper, root string
}

// newOverlay mounts an overlay over a lower directory that fill has filled.
func newOverlay(t testing.TB, fill func(lower string)) *overlay {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("file systems are mounted, which needs root")
	}
	top := t.TempDir()
	o := &overlay{t: t, lower: filepath.Join(top, "lower"), upper: filepath.Join(top, "upper"), root: filepath.Join(top, "root")}
	for _, dir := range []string{o.lower, o.upper, o.root, filepath.Join(top, "work")} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	fill(o.lower)
	options := fmt.Sprintf("lowerdir=%s,upperdir=%s,workdir=%s/work,index=off,metacopy=off,redirect_dir=off", o.lower, o.upper, top)
	if err := unix.Mount("overlay", o.root, "overlay", 0, options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(o.root, 0); err != nil {
			t.Error(err)
		}
	})
	return o
}

// sh runs a shell script in a directory.
func sh(t testing.TB, dir, script string) string {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-ec", script)
	cmd.Dir = dir
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return string(out)
}

func pack(t testing.TB, dir string, omit ...string) []byte {
	t.Helper()
	var out bytes.Buffer
	if err := upper.Pack(t.Context(), &out, dir, omit); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// names lists the entries of an archive.
func names(t testing.TB, archive []byte) []string {
	t.Helper()
	var all []string
	for in := tar.NewReader(bytes.NewReader(archive)); ; {
		h, err := in.Next()
		if err == io.EOF {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h.Name)
	}
}

// listing describes a tree: kinds, modes, owners, links, times and content.
const listing = `find . ! -name . -printf '%P %y %m %U %G %l %n %T@ ' \( -type d -printf '\n' -o -exec stat -c '%s %t:%T' {} \; \) | sed 's/ d \([^ ]* [^ ]* [^ ]*\)  [0-9]* / d \1 /' | sort
find . -type f -exec sha256sum {} + | sort`

// A layer laid over a copy of the lower tree makes the tree that the overlay
// shows.
func TestPack(t *testing.T) {
	o := newOverlay(t, func(lower string) {
		sh(t, lower, `mkdir -p a/b/c gone replaced file-to-dir
			echo 1 >a/one; echo 2 >a/b/two; echo 3 >a/b/c/three; echo 4 >gone/four; echo 5 >replaced/five
			echo 6 >six; echo 7 >seven; echo 8 >dir-to-be`)
	})
	sh(t, o.root, `
		rm six; rm -r gone; rm -r replaced; mkdir replaced; echo new >replaced/new
		rm dir-to-be; mkdir dir-to-be; echo x >dir-to-be/x
		rm -r file-to-dir; echo f >file-to-dir
		chmod 4755 seven; chown 5:6 a/one; touch -d '2001-01-01 01:01:01.123456789' a/b/two
		mkdir new; echo 1 >new/a; ln new/a new/b; ln new/a c; ln -s /nowhere new/link; ln new/link new/link-too
		mkfifo new/fifo; mknod new/char c 1 3; mknod new/block b 7 9; ln new/char new/char-too
		echo '' >"new/with
newline"; echo '' >"new/ü"
		truncate -s 100M new/hole; truncate -s 5M new/end; echo x >>new/end; echo x >new/begin; truncate -s 3M new/begin
		: >new/empty; truncate -s 1 new/one-zero
		mkdir 'new/GNU_sparse.name='; echo x >'new/GNU_sparse.name=/GNU_sparse.realsize=9'; truncate -s 9M 'new/GNU_sparse.name=/GNU_sparse.realsize=9'
		chmod 1777 .`)
	attrs := map[string]string{
		"new/a user.plain": "value", "new/a user.zero": "a\x00b", "new/begin user.GNU_sparse.x": "GNU_sparse.y", "new user.dir": "x",
		"new/a security.capability": "\x01\x00\x00\x02\x00\x20" + strings.Repeat("\x00", 14), "new/a user.a=b": "no archive has it",
	}
	for at, value := range attrs {
		file, key, _ := strings.Cut(at, " ")
		if err := unix.Setxattr(filepath.Join(o.root, file), key, []byte(value), 0); err != nil {
			t.Fatal(at, err)
		}
	}
	l, err := net.Listen("unix", filepath.Join(o.root, "new/socket"))
	if err != nil {
		t.Fatal(err)
	}
	sh(t, o.root, "touch -d '2002-02-02' new")
	archive := pack(t, o.upper)
	if err := l.Close(); err != nil { // and so removes its file
		t.Fatal(err)
	}
	if len(archive) > 1<<20 {
		t.Errorf("holes are written: the archive has %d bytes", len(archive))
	}
	sh(t, o.root, "touch -d '2002-02-02' new")
	tree := filepath.Join(t.TempDir(), "tree")
	sh(t, o.lower, "cp -a . "+tree)
	a, err := layer.New(tree, layer.Limits{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if err := a.Apply(t.Context(), bytes.NewReader(archive)); err != nil {
		t.Fatal(err)
	}
	want, got := sh(t, o.root, listing), sh(t, tree, listing)
	if diff := cmp.Diff(strings.Split(want, "\n"), strings.Split(got, "\n")); diff != "" {
		t.Errorf("the image with the layer (-overlay +image):\n%s", diff)
	}
	delete(attrs, "new/a user.a=b")
	value := make([]byte, 100)
	for at, want := range attrs {
		file, key, _ := strings.Cut(at, " ")
		if n, err := unix.Lgetxattr(filepath.Join(tree, file), key, value); err != nil || string(value[:n]) != want {
			t.Errorf("attribute %s: %q, %v; want %q", at, value[:max(n, 0)], err, want)
		}
	}
	if info, err := os.Stat(tree); err != nil || info.Mode().Perm() != 0o777 || info.Mode()&os.ModeSticky == 0 {
		t.Errorf("the root: %v, %v", info.Mode(), err)
	}
	if again := pack(t, o.upper); !bytes.Equal(archive, again) {
		t.Error("a second archive is another")
	}
}

// GNU tar reads what is written in its form for files with holes.
func TestSparse(t *testing.T) {
	dir := t.TempDir()
	sh(t, dir, `mkdir d; truncate -s 20M d/a; printf x | dd of=d/a bs=1 seek=7000000 conv=notrunc 2>/dev/null
		truncate -s 1G d/nothing; seq 100000 >d/plain
		for i in $(seq 0 99); do printf $i | dd of=d/many bs=1 seek=$((i*20000)) conv=notrunc 2>/dev/null; done`)
	archive := pack(t, filepath.Join(dir, "d"))
	if len(archive) > 2<<20 {
		t.Errorf("holes are written: the archive has %d bytes", len(archive))
	}
	if err := os.WriteFile(filepath.Join(dir, "tar"), archive, 0o600); err != nil {
		t.Fatal(err)
	}
	sh(t, dir, "mkdir out; tar -C out -xf tar; diff -r d out; test $(du -k out/nothing | cut -f1) -lt 100")
}

func TestOmit(t *testing.T) {
	dir := t.TempDir()
	sh(t, dir, "mkdir -p proc/x dev a/proc; echo >dev/y; echo >a/proc/z; echo >.wh.a; echo >a/.wh..wh..opq; echo >device; mknod a/w c 0 0")
	want := []string{"a/", "a/proc/", "a/proc/z", "a/.wh.w", "device"}
	if diff := cmp.Diff(want, names(t, pack(t, dir, "proc", "dev"))); diff != "" {
		t.Error(diff)
	}
}

// Marks of overlayfs that a layer cannot say are not passed over.
func TestRefuses(t *testing.T) {
	for _, attr := range []string{"redirect", "metacopy"} {
		dir := t.TempDir()
		sh(t, dir, "mkdir d")
		if err := unix.Setxattr(filepath.Join(dir, "d"), "trusted.overlay."+attr, []byte("/x"), 0); err != nil {
			t.Fatal(err)
		}
		if err := upper.Pack(t.Context(), io.Discard, dir, nil); err == nil || !strings.Contains(err.Error(), attr) {
			t.Errorf("%s: %v", attr, err)
		}
	}
	if err := upper.Pack(t.Context(), io.Discard, filepath.Join(t.TempDir(), "missing"), nil); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a directory that is missing: %v", err)
	}
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func TestErrors(t *testing.T) {
	dir := t.TempDir()
	sh(t, dir, "head -c 5000000 /dev/urandom >a; truncate -s 5M b; echo x >>b")
	if err := upper.Pack(t.Context(), failing{unix.ENOSPC}, dir, nil); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("a full disk: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := upper.Pack(ctx, io.Discard, dir, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
}
