package image

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/imagetest"
)

// openStore opens a store that is closed at the end of the test, when nothing
// may be left: no staging, no mount, no loop device.
func openStore(t testing.TB, dir string) *Store {
	t.Helper()
	s, err := Open(slog.New(slog.DiscardHandler), dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeStore(t, s) })
	return s
}

func closeStore(t testing.TB, s *Store) {
	t.Helper()
	if err := s.Close(true); err != nil && !errors.Is(err, os.ErrClosed) {
		t.Errorf("Close = %v", err)
	}
	noStaging(t, s)
	if left, err := mountsBelow(s.dir); err != nil || len(left) > 0 {
		t.Errorf("mounts left: %v, %v", left, err)
	}
	noLoops(t, s.dir)
}

func noStaging(t testing.TB, s *Store) {
	t.Helper()
	left, err := os.ReadDir(filepath.Join(s.dir, stagingName))
	if err != nil || len(left) > 0 {
		t.Errorf("staging has %v, %v", left, err)
	}
}

// noLoops fails when a loop device has a file below dir. Another program that
// copied the mounts while they were there, as any that makes a mount namespace
// does, keeps them for a moment, so a while is allowed for that.
func noLoops(t testing.TB, dir string) {
	t.Helper()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	late := time.After(time.Minute)
	for {
		left := loopsOf(t, dir)
		if len(left) == 0 {
			return
		}
		select {
		case <-tick.C:
		case <-late:
			t.Errorf("loop devices are left: %q", left)
			return
		}
	}
}

func loopsOf(t testing.TB, dir string) (left []string) {
	t.Helper()
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), dir) {
			left = append(left, f+": "+string(b))
		}
	}
	return left
}

// simpleImage is an image of one file.
func simpleImage(t testing.TB, content string) v1.Image {
	return imagetest.Image(t, [][]byte{imagetest.Tar(t, imagetest.File("f", content))})
}

// writeLayout writes images as an OCI layout and returns its directory.
func writeLayout(t testing.TB, images ...v1.Image) string {
	t.Helper()
	dir := t.TempDir()
	l, err := layout.FromPath(dir)
	if err != nil {
		l, err = layout.Write(dir, emptyIndex)
	}
	if err != nil {
		t.Fatal(err)
	}
	for _, img := range images {
		if err := l.AppendImage(img); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// importSimple imports an image of one file.
func importSimple(t testing.TB, s *Store, content string) Artifact {
	t.Helper()
	a, err := s.Import(t.Context(), ImportOptions{Source: "oci:" + writeLayout(t, simpleImage(t, content))}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func TestStore(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	a, b := importSimple(t, s, "a"), importSimple(t, s, "b")
	if got, err := s.Get(a.Digest); err != nil || got.Digest != a.Digest {
		t.Errorf("Get = %v, %v", got, err)
	}
	if all, err := s.List(); err != nil || len(all) != 2 {
		t.Errorf("List = %v, %v; want two", all, err)
	}

	root, _, err := s.Acquire(t.Context(), a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	again, _, err := s.Acquire(t.Context(), a.Digest)
	if err != nil || again != root {
		t.Errorf("Acquire = %v, %v; want the same as before, %v", again, err, root)
	}
	if got, err := os.ReadFile(filepath.Join(root.Tree, "f")); err != nil || string(got) != "a" {
		t.Errorf("f in the tree is %q, %v", got, err)
	}
	if err := os.WriteFile(filepath.Join(root.Tree, "f"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("a write to the tree gives %v", err)
	}
	mounts, err := s.Mounts()
	if err != nil || len(mounts) != 1 || mounts[0].Digest != a.Digest || mounts[0].Users != 2 || mounts[0].Tree != root.Tree {
		t.Errorf("Mounts = %+v, %v", mounts, err)
	}
	s.Release(a.Digest)
	s.Release(a.Digest)
	for range 2 {
		if err := s.Delete(a.Digest); err != nil {
			t.Errorf("Delete = %v", err)
		}
	}
	if _, err := s.Get(a.Digest); !fault.Is(err, fault.NotFound) {
		t.Errorf("Get of a deleted image = %v", err)
	}
	if _, _, err := s.Acquire(t.Context(), a.Digest); !fault.Is(err, fault.NotFound) {
		t.Errorf("Acquire of a deleted image = %v", err)
	}
	if _, err := s.Get("sha256:../../etc"); !fault.Is(err, fault.InvalidArgument) {
		t.Errorf("Get of no digest = %v", err)
	}
	if all, err := s.List(); err != nil || len(all) != 1 || all[0].Digest != b.Digest {
		t.Errorf("List = %v, %v; want the other", all, err)
	}
}

// A restart of the program finds the mounts that it made before.
func TestReopen(t *testing.T) {
	dir := t.TempDir()
	s := openStore(t, dir)
	a := importSimple(t, s, "a")
	root, _, err := s.Acquire(t.Context(), a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(root.Tree, "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := Open(slog.New(slog.DiscardHandler), dir); err == nil {
		t.Errorf("a store was opened twice")
	}
	if err := s.Close(false); err != nil {
		t.Fatal(err)
	}

	s = openStore(t, dir)
	mounts, err := s.Mounts()
	if err != nil || len(mounts) != 1 || mounts[0].Users != 0 {
		t.Errorf("Mounts = %+v, %v; want one without users", mounts, err)
	}
	if _, _, err := s.Acquire(t.Context(), a.Digest); err != nil {
		t.Fatal(err)
	}
	if mounts, err = s.Mounts(); err != nil || len(mounts) != 1 || mounts[0].Users != 1 {
		t.Errorf("Mounts = %+v, %v; want one with a user", mounts, err)
	}
	s.Release(a.Digest)
	if err := s.Delete(a.Digest); !fault.Is(err, fault.WrongState) {
		t.Errorf("Delete of an image with an open file = %v", err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(a.Digest); err != nil {
		t.Errorf("Delete = %v", err)
	}
}

// Kernels that cannot mount a file get a loop device, which goes by itself.
func TestLoop(t *testing.T) {
	s := openStore(t, t.TempDir())
	a := importSimple(t, s, "a")
	dir, err := s.path(a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if err := mountLoop(filepath.Join(dir, rootfsName), filepath.Join(dir, treeName)); err != nil {
		t.Fatal(err)
	}
	root, _, err := s.Acquire(t.Context(), a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(filepath.Join(root.Tree, "f")); err != nil || string(got) != "a" {
		t.Errorf("f in the tree is %q, %v", got, err)
	}
	if m, err := s.Mounts(); err != nil || len(m) != 1 || !strings.HasPrefix(m[0].Device, "/dev/loop") {
		t.Errorf("Mounts = %+v, %v; want one on a loop device", m, err)
	}
	s.Release(a.Digest)
}

func TestPackAgent(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "binary")
	if err := os.WriteFile(binary, []byte("#!agent"), 0o600); err != nil {
		t.Fatal(err)
	}
	agents := filepath.Join(dir, "agents")
	a, err := PackAgent(t.Context(), binary, agents)
	if err != nil {
		t.Fatal(err)
	}
	again, err := PackAgent(t.Context(), binary, agents)
	if err != nil || again != a {
		t.Errorf("PackAgent = %v, %v; want %v again", again, err, a)
	}
	tree := filepath.Join(dir, "tree")
	if err := os.Mkdir(tree, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := mount(a.EROFS, tree); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(tree, 0); err != nil {
			t.Error(err)
		}
	}()
	want := map[string]string{".": "dir 0755 0:0 @0", "agent": `file 0755 0:0 @0 "#!agent"`}
	for _, at := range []string{tree, a.Dir} {
		equalTrees(t, at, want, imagetest.Tree(t, at))
	}
	if err := os.WriteFile(binary, []byte("#!another"), 0o600); err != nil {
		t.Fatal(err)
	}
	newer, err := PackAgent(t.Context(), binary, agents)
	if err != nil || newer == a {
		t.Fatalf("PackAgent of another binary = %v, %v", newer, err)
	}
	if err := PruneAgents(agents, newer.ID); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(agents)
	if err != nil || len(left) != 1 || left[0].Name() != filepath.Base(filepath.Dir(newer.Dir)) {
		t.Errorf("after PruneAgents there is %v, %v", left, err)
	}
	if err := os.WriteFile(binary, []byte("#!newer"), 0o600); err != nil {
		t.Fatal(err)
	}
	if newer, err := PackAgent(t.Context(), binary, agents); err != nil || newer == a {
		t.Errorf("PackAgent of another binary = %v, %v", newer, err)
	}
	if left, err := filepath.Glob(filepath.Join(agents, ".agent-*")); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}
