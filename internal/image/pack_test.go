package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/imagetest"
)

// packBase is the lowest layer of the images that are packed in tests.
func packBase(t testing.TB) []byte {
	f, d := imagetest.File, imagetest.Dir
	return imagetest.Tar(t,
		d("./").With(func(h *tar.Header) { h.Mode, h.ModTime = 0o751, time.Unix(1_400_000_000, 0) }).Xattr("user.root", "r"),
		d("etc/"), f("etc/passwd", "app:x:1:1::/:/bin/sh\n"), f("etc/hosts", "h"), d("etc/deep/"), f("etc/deep/a", "a"), f("etc/deep/b", "b"),
		d("usr/"), d("usr/bin/"), f("usr/bin/tool", strings.Repeat("binary", 5000)).With(func(h *tar.Header) { h.Mode, h.Uid, h.Gid = 0o4755, 7, 8 }),
		imagetest.Link("usr/bin/same", "usr/bin/tool"), imagetest.Link("usr/bin/third", "usr/bin/tool"),
		imagetest.Symlink("bin", "usr/bin"), imagetest.Symlink("abs", "/etc"), imagetest.Symlink("out", "../../../../../.."),
		f("capable", "").Xattr("security.capability", "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00").Xattr("user.note", "n"),
		imagetest.Device(tar.TypeFifo, "pipe", 0, 0), imagetest.Device(tar.TypeChar, "null", 1, 3), f("dir-to-be", ""), d("file-to-be/"), f("file-to-be/x", ""),
		d("keyed/").Xattr("user.old", "o"), f("keyed/k", ""),
	)
}

// packLayers are layers over packBase, by what is in them.
func packLayers(t testing.TB) map[string][]byte {
	f, d := imagetest.File, imagetest.Dir
	later := func(h *tar.Header) { h.ModTime = time.Unix(1_700_000_000, 123456789) }
	return map[string][]byte{
		"nothing": imagetest.Tar(t),
		"adds":    imagetest.Tar(t, d("new/").With(later), f("new/f", "f").With(later), f("etc/added", "x"), f("no/parents/named", "x"), f("empty", "")),
		"changes": imagetest.Tar(t, f("etc/passwd", "changed").With(later), d("usr/bin/").With(func(h *tar.Header) { h.Mode, h.Uid = 0o1700, 3 }), f("capable", "now")),
		"deletes": imagetest.Tar(t, f("etc/.wh.hosts", ""), f(".wh.file-to-be", ""), f(".wh.bin", ""), f(".wh.null", ""), f("usr/bin/.wh.same", ""), f(".wh.never", "")),
		"replaced directories": imagetest.Tar(t, d("dir-to-be/"), f("dir-to-be/y", ""), f("file-to-be", "now"), imagetest.Symlink("keyed", "etc"),
			f(".wh.usr", ""), d("usr/"), f("usr/only", "")),
		"opaque":      imagetest.Tar(t, d("etc/"), f("etc/.wh..wh..opq", ""), f("etc/b", "b"), d("etc/deep/"), f("etc/deep/c", "c"), d("usr/"), f("usr/.wh..wh..opq", "")),
		"late opaque": imagetest.Tar(t, d("etc/"), f("etc/deep/c", "c"), f("etc/hosts", "mine"), f("etc/.wh..wh..opq", "")),
		"hard links": imagetest.Tar(t, imagetest.Link("other", "usr/bin/same"), imagetest.Link("usr/bin/tool", "usr/bin/third"), f("a", "a"), imagetest.Link("b", "a"),
			f("etc/hosts", "new"), imagetest.Link("hosts", "etc/hosts")),
		"a link out of three": imagetest.Tar(t, f("usr/bin/same", "of its own"), imagetest.Link("pipe2", "pipe"), imagetest.Link("abs2", "abs")),
		"extended attributes": imagetest.Tar(t, d("keyed/").Xattr("user.new", "n"), f("x", "").Xattr("user.b", "b").Xattr("user.a", "a").Xattr("trusted.t", "t"), d("./").Xattr("user.top", "t"),
			f("marked", "").Xattr("trusted.overlay.opaque", "y").Xattr("user.overlay.opaque", "y")),
		"setuid": imagetest.Tar(t, f("s", "s").With(func(h *tar.Header) { h.Mode, h.Uid, h.Gid = 0o6711, 4, 5 }), d("sticky").With(func(h *tar.Header) { h.Mode = 0o1777 })),
		"devices": imagetest.Tar(t, imagetest.Device(tar.TypeChar, "zero", 1, 5), imagetest.Device(tar.TypeBlock, "disk", 8, 300), imagetest.Device(tar.TypeFifo, "etc/pipe", 0, 0),
			f("pipe", "now a file")),
		"through links": imagetest.Tar(t, f("bin/added", "in usr/bin"), f("abs/added", "in etc"), f("out/etc/inside", "x"), f("abs/.wh.hosts", "")),
	}
}

// imported brings layers in as one image.
func imported(t testing.TB, s *Store, layers ...[]byte) Artifact {
	t.Helper()
	a, err := s.Import(t.Context(), ImportOptions{Source: "oci:" + writeLayout(t, imagetest.Image(t, layers))}, nil)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func pack(t *testing.T, s *Store, base string, layer []byte) Artifact {
	t.Helper()
	a, err := s.Pack(t.Context(), PackOptions{Base: base, Layer: bytes.NewReader(layer), Config: Config{User: "u"}, Source: "sandbox:sb-a"})
	if err != nil {
		t.Fatal(err)
	}
	noStaging(t, s)
	return a
}

// treeOf describes an image's tree.
func treeOf(t *testing.T, s *Store, digest string) map[string]string {
	t.Helper()
	root, _, err := s.Acquire(t.Context(), digest)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release(digest)
	return imagetest.Tree(t, root.Tree)
}

func fileOf(t *testing.T, s *Store, digest string) string {
	t.Helper()
	dir, err := s.path(digest)
	if err != nil {
		t.Fatal(err)
	}
	sum, err := fileDigest(filepath.Join(dir, rootfsName))
	if err != nil {
		t.Fatal(err)
	}
	return sum
}

// gVisor cannot read a file of an EROFS that has an extended attribute, so an
// image with some has its tree a second time without.
func TestFileForGVisor(t *testing.T) {
	s := openStore(t, t.TempDir())
	marked := imagetest.File("f", "content").Xattr("user.a", "v")
	for _, c := range []struct {
		name   string
		layers [][]byte
		plain  bool
	}{
		{"without attributes", [][]byte{imagetest.Tar(t, imagetest.File("f", "content"))}, false},
		{"with attributes", [][]byte{imagetest.Tar(t, marked)}, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := imported(t, s, c.layers...)
			root, _, err := s.Acquire(t.Context(), a.Digest)
			if err != nil {
				t.Fatal(err)
			}
			defer s.Release(a.Digest)
			if dir, err := s.Dir(a.Digest); err != nil || filepath.Dir(root.EROFS) != dir || (filepath.Base(root.EROFS) == plainName) != c.plain {
				t.Errorf("the directory is %s, %v; backends get %s", dir, err, root.EROFS)
			}
			at := t.TempDir()
			if err := mountLoop(root.EROFS, at); err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := unix.Unmount(at, 0); err != nil {
					t.Error(err)
				}
			}()
			if b, err := os.ReadFile(filepath.Join(at, "f")); err != nil || string(b) != "content" {
				t.Errorf("its file reads %q, %v", b, err)
			}
			if has, err := hasAttributes(at); err != nil || has {
				t.Errorf("it has attributes: %v, %v", has, err)
			}
			if has, err := hasAttributes(root.Tree); err != nil || has != c.plain {
				t.Errorf("the mounted tree has attributes: %v, %v", has, err)
			}
		})
	}
}

// A layer that is packed over an image gives the same file as one import of
// both, and so does one packed over what was packed.
func TestPack(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := imported(t, s, packBase(t))
	last := imagetest.Tar(t, imagetest.File("last", "l"), imagetest.File(".wh.abs", ""))
	for name, layer := range packLayers(t) {
		t.Run(name, func(t *testing.T) {
			want, got := imported(t, s, packBase(t), layer), pack(t, s, base.Digest, layer)
			equalTrees(t, "packed", treeOf(t, s, want.Digest), treeOf(t, s, got.Digest))
			if fileOf(t, s, want.Digest) != fileOf(t, s, got.Digest) {
				t.Errorf("an import of the same layers gives another file")
			}
			if again := pack(t, s, base.Digest, layer); again.Digest != got.Digest {
				t.Errorf("packed again it is %s, and was %s", again.Digest, got.Digest)
			}
			want, got = imported(t, s, packBase(t), layer, last), pack(t, s, got.Digest, last)
			equalTrees(t, "packed over what was packed", treeOf(t, s, want.Digest), treeOf(t, s, got.Digest))
			if fileOf(t, s, want.Digest) != fileOf(t, s, got.Digest) {
				t.Errorf("an import of the same three layers gives another file")
			}
		})
	}
}

func TestPackDescribes(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := importSimple(t, s, "a")
	a := pack(t, s, base.Digest, imagetest.Tar(t, imagetest.File("g", "g")))
	want := Artifact{Digest: a.Digest, Kind: KindFiles, Size: a.Size, Architecture: "amd64", Source: "sandbox:sb-a", Config: Config{User: "u"}}
	if diff := cmp.Diff(want, a); diff != "" || a.Size == 0 {
		t.Error(diff)
	}
	got, err := s.Get(a.Digest)
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(err, diff)
	}
	// It needs its base no more.
	if err := s.Delete(base.Digest); err != nil {
		t.Fatal(err)
	}
	if tree := treeOf(t, s, a.Digest); tree["f"] == "" || tree["g"] == "" {
		t.Errorf("the tree is %v", tree)
	}
	// Over a memory image it is packed over what that runs on.
	m := commit(t, s, a.Digest)
	got = pack(t, s, m.Digest, imagetest.Tar(t, imagetest.File("h", "h")))
	if tree := treeOf(t, s, got.Digest); tree["g"] == "" || tree["h"] == "" {
		t.Errorf("the tree is %v", tree)
	}
}

func TestPackRefuses(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := imported(t, s, packBase(t))
	whole := imagetest.Tar(t, imagetest.File("x", strings.Repeat("x", 10000)))
	none := "sha256:" + strings.Repeat("0", 64)
	for name, test := range map[string]struct {
		base  string
		layer []byte
		kind  fault.Kind
	}{
		"no base":        {none, whole, fault.NotFound},
		"no digest":      {"x", whole, fault.InvalidArgument},
		"cut off":        {base.Digest, whole[:5000], fault.InvalidArgument},
		"no tar":         {base.Digest, bytes.Repeat([]byte("no tar "), 1000), fault.InvalidArgument},
		"out of it":      {base.Digest, imagetest.Tar(t, imagetest.File("../../x", "")), fault.InvalidArgument},
		"link out of it": {base.Digest, imagetest.Tar(t, imagetest.Link("x", "../../../etc/passwd")), fault.InvalidArgument},
		"overlay's mark": {base.Digest, imagetest.Tar(t, imagetest.Device(tar.TypeChar, "x", 0, 0)), fault.InvalidArgument},
		"too much":       {base.Digest, imagetest.Tar(t, imagetest.File("x", strings.Repeat("x", 30000))), fault.InvalidArgument},
	} {
		t.Run(name, func(t *testing.T) {
			s.limits.Bytes = 20000
			_, err := s.Pack(t.Context(), PackOptions{Base: test.base, Layer: bytes.NewReader(test.layer)})
			if !fault.Is(err, test.kind) {
				t.Errorf("Pack = %v, want %s", err, test.kind)
			}
			noStaging(t, s)
			if mounts, err := mountsBelow(filepath.Join(s.dir, stagingName)); err != nil || len(mounts) > 0 {
				t.Errorf("mounts left: %v, %v", mounts, err)
			}
			if n := s.usersOf(base.Digest); n != 0 {
				t.Errorf("the base has %d users", n)
			}
		})
	}
}

// The longest name that Linux has makes mkfs.erofs 1.5 fail. That is said of the
// file, where it fails.
func TestPackLongestName(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := imported(t, s, packBase(t))
	for n, works := range map[int]bool{unix.NAME_MAX - 1: true, unix.NAME_MAX: false} {
		name := "etc/" + strings.Repeat("n", n)
		layer := imagetest.Tar(t, imagetest.File(name, "x"))
		a, err := s.Pack(t.Context(), PackOptions{Base: base.Digest, Layer: bytes.NewReader(layer)})
		if err == nil {
			if _, ok := treeOf(t, s, a.Digest)[name]; !ok {
				t.Errorf("the file whose name has %d bytes is not there", n)
			}
			continue
		}
		if works || !fault.Is(err, fault.InvalidArgument) || !strings.Contains(err.Error(), name) {
			t.Errorf("a name of %d bytes: %v", n, err)
		}
		noStaging(t, s)
	}
}

// A program that was killed while it packed leaves a mount and what was written
// through it; the next one removes both.
func TestPackKilled(t *testing.T) {
	l := newLife(t)
	l.step("import base")
	l.step("acquire base")
	root, _, err := l.s.Acquire(t.Context(), l.digest["base"])
	if err != nil {
		t.Fatal(err)
	}
	st, err := l.s.stage()
	if err != nil {
		t.Fatal(err)
	}
	if err := overlay(root.Tree, st); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(st.tree, "f"), []byte("changed"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.step("restart")
	noStaging(t, l.s)
	if mounts, err := mountsBelow(filepath.Join(l.s.dir, stagingName)); err != nil || len(mounts) > 0 {
		t.Errorf("mounts left: %v, %v", mounts, err)
	}
	l.check([]string{"base"}, []string{"base"})
	l.step("delete base")
	l.check([]string{}, []string{})
}

// An error of the stream, such as that of a pipe whose writer failed, comes out
// as it is.
func TestPackBrokenStream(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := importSimple(t, s, "a")
	broken := fault.New(fault.Unavailable, "the machine is gone")
	r, w := io.Pipe()
	w.CloseWithError(broken)
	if _, err := s.Pack(t.Context(), PackOptions{Base: base.Digest, Layer: r}); !errors.Is(err, broken) {
		t.Errorf("Pack = %v, want %v", err, broken)
	}
}

// Names of the store's directories mean nothing to the mounts.
func TestPackInOddDirectory(t *testing.T) {
	s := openStore(t, filepath.Join(t.TempDir(), `a:b,c\d e`))
	base := importSimple(t, s, "a")
	a := pack(t, s, base.Digest, imagetest.Tar(t, imagetest.File("g", "g")))
	if tree := treeOf(t, s, a.Digest); tree["f"] == "" || tree["g"] == "" {
		t.Errorf("the tree is %v", tree)
	}
}

// smallStore is a store on a file system of its own of the given size.
func smallStore(t *testing.T, size string) *Store {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Error(err)
		}
	})
	s := openStore(t, filepath.Join(dir, "store"))
	s.reserve = 0
	return s
}

func TestPackFillsTheDisk(t *testing.T) {
	s := smallStore(t, "8m")
	base := importSimple(t, s, "a")
	for name, megabytes := range map[string]int{"while it is unpacked": 16, "while it is built": 5} {
		t.Run(name, func(t *testing.T) {
			layer := imagetest.Tar(t, imagetest.File("x", strings.Repeat("x", megabytes<<20)))
			_, err := s.Pack(t.Context(), PackOptions{Base: base.Digest, Layer: bytes.NewReader(layer)})
			if !fault.Is(err, fault.Capacity) {
				t.Errorf("Pack = %v, want a Capacity fault", err)
			}
			noStaging(t, s)
		})
	}
	pack(t, s, base.Digest, imagetest.Tar(t, imagetest.File("x", "small")))
}

// Several at once of one base, which is deleted meanwhile.
func TestPackSideBySide(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := imported(t, s, packBase(t))
	layers := packLayers(t)
	type result struct {
		name string
		a    Artifact
		err  error
	}
	results := make(chan result)
	for name, layer := range layers {
		go func() {
			a, err := s.Pack(t.Context(), PackOptions{Base: base.Digest, Layer: bytes.NewReader(layer)})
			results <- result{name, a, err}
		}()
	}
	for range layers {
		if r := <-results; r.err != nil {
			t.Errorf("Pack of %s = %v", r.name, r.err)
		}
	}
	all, err := s.List()
	if err != nil || len(all) != len(layers)+1 {
		t.Errorf("List has %d images, %v; want %d", len(all), err, len(layers)+1)
	}
}

// FuzzPack packs a stranger's layer over an image whose links lead out, and
// looks at what is beside the tree.
func FuzzPack(f *testing.F) {
	for _, layer := range packLayers(f) {
		f.Add(layer)
	}
	f.Add(imagetest.Tar(f, imagetest.File("out/tmp/x", ""), imagetest.Link("l", "out/etc/passwd"), imagetest.Device(tar.TypeChar, "c", 0, 0)))
	dir := f.TempDir()
	s := openStore(f, filepath.Join(dir, "store"))
	s.limits.Bytes, s.limits.Entries = 1<<16, 100
	base := imported(f, s, packBase(f)).Digest
	root, _, err := s.Acquire(f.Context(), base)
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { s.Release(base) })
	before := imagetest.Tree(f, root.Tree)
	f.Fuzz(func(t *testing.T, layer []byte) {
		a, err := s.Pack(t.Context(), PackOptions{Base: base, Layer: bytes.NewReader(layer)})
		if k := fault.Of(err); err != nil && k.Kind != fault.InvalidArgument {
			t.Errorf("Pack = %v", err)
		}
		noStaging(t, s)
		around, rerr := os.ReadDir(dir)
		names := []string{}
		for _, e := range around {
			names = append(names, e.Name())
		}
		if rerr != nil || !slices.Equal(names, []string{"store"}) {
			t.Errorf("beside the store there is %v, %v", names, rerr)
		}
		if diff := cmp.Diff(before, imagetest.Tree(t, root.Tree)); diff != "" {
			t.Errorf("the base changed: %s", diff)
		}
		if err == nil {
			treeOf(t, s, a.Digest)
			if err := s.Delete(a.Digest); err != nil {
				t.Error(err)
			}
		}
	})
}

// A file of holes takes no more of the disk in an image than its data, nor in
// the image that is packed of that one. While it is built there must be room
// for the whole file.
func TestPackKeepsHoles(t *testing.T) {
	s := smallStore(t, "96m")
	base := importSimple(t, s, "a")
	const size = 64 << 20
	content := "begin" + strings.Repeat("\x00", size-8) + "end"
	first := pack(t, s, base.Digest, imagetest.Tar(t, imagetest.File("holes", content)))
	second := pack(t, s, first.Digest, imagetest.Tar(t, imagetest.File("more", "x")))
	for _, a := range []Artifact{first, second} {
		root, _, err := s.Acquire(t.Context(), a.Digest)
		if err != nil {
			t.Fatal(err)
		}
		defer s.Release(a.Digest)
		if got, err := os.ReadFile(filepath.Join(root.Tree, "holes")); err != nil || string(got) != content {
			t.Errorf("the file has %d bytes, and not those that were packed: %v", len(got), err)
		}
		var st unix.Stat_t
		if err := unix.Stat(root.EROFS, &st); err != nil || st.Size < size || st.Blocks*512 > 1<<20 {
			t.Errorf("the image has %d bytes and takes %d of the disk, %v", st.Size, st.Blocks*512, err)
		}
	}
	large := imagetest.Tar(t, imagetest.File("holes", content+content))
	if _, err := s.Pack(t.Context(), PackOptions{Base: base.Digest, Layer: bytes.NewReader(large)}); !fault.Is(err, fault.Capacity) {
		t.Errorf("Pack of a file that the disk has no room for in full = %v, want a Capacity fault", err)
	}
	noStaging(t, s)
}
