// Package imagetest makes layers and images for tests, and describes file
// trees so that they can be compared. It is for tests only.
package imagetest

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
)

// Time is what entries have as their time unless they say otherwise.
var Time = time.Unix(1_600_000_000, 0)

// An Entry is one entry of a layer.
type Entry struct {
	tar.Header
	Content string
}

// With returns the entry changed by f.
func (e Entry) With(f func(*tar.Header)) Entry {
	if e.PAXRecords == nil {
		e.PAXRecords = map[string]string{}
	}
	f(&e.Header)
	return e
}

// Xattr returns the entry with an extended attribute.
func (e Entry) Xattr(key, value string) Entry {
	return e.With(func(h *tar.Header) { h.PAXRecords["SCHILY.xattr."+key] = value })
}

func entry(kind byte, name string, mode int64) Entry {
	return Entry{Header: tar.Header{Typeflag: kind, Name: name, Mode: mode, ModTime: Time}}
}

// File returns a regular file with mode 0644.
func File(name, content string) Entry {
	e := entry(tar.TypeReg, name, 0o644)
	e.Content = content
	return e
}

// Dir returns a directory with mode 0755.
func Dir(name string) Entry { return entry(tar.TypeDir, name, 0o755) }

// Link returns a hard link to a name of the image.
func Link(name, target string) Entry {
	return entry(tar.TypeLink, name, 0o644).With(func(h *tar.Header) { h.Linkname = target })
}

// Symlink returns a symbolic link.
func Symlink(name, target string) Entry {
	return entry(tar.TypeSymlink, name, 0o777).With(func(h *tar.Header) { h.Linkname = target })
}

// Device returns a device or, with tar.TypeFifo, a pipe.
func Device(kind byte, name string, major, minor int64) Entry {
	return entry(kind, name, 0o600).With(func(h *tar.Header) { h.Devmajor, h.Devminor = major, minor })
}

// Tar returns the entries as an uncompressed archive.
func Tar(t testing.TB, entries ...Entry) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		e.Size = int64(len(e.Content))
		if err := w.WriteHeader(&e.Header); err != nil {
			t.Fatalf("write %s: %v", e.Name, err)
		}
		if _, err := io.WriteString(w, e.Content); err != nil {
			t.Fatalf("write %s: %v", e.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Image returns an image for linux/amd64 of uncompressed layers, which it
// compresses as opts say, by default with gzip.
func Image(t testing.TB, layers [][]byte, opts ...tarball.LayerOption) v1.Image {
	t.Helper()
	opts = append([]tarball.LayerOption{tarball.WithMediaType(types.OCILayer)}, opts...)
	var all []v1.Layer
	for _, content := range layers {
		l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil }, opts...)
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, l)
	}
	return image(t, all)
}

// Plain returns the image with its layers stored as they are.
func Plain(t testing.TB, layers [][]byte) v1.Image {
	t.Helper()
	var all []v1.Layer
	for _, content := range layers {
		all = append(all, static.NewLayer(content, types.OCIUncompressedLayer))
	}
	return image(t, all)
}

func image(t testing.TB, layers []v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		Architecture: "amd64", OS: "linux", RootFS: v1.RootFS{Type: "layers"},
		Config: v1.Config{Env: []string{"A=1"}, User: "app", WorkingDir: "/srv", Cmd: []string{"run"}, Labels: map[string]string{"l": "v"}},
	})
	if err != nil {
		t.Fatal(err)
	}
	img = mutate.MediaType(mutate.ConfigMediaType(img, types.OCIConfigJSON), types.OCIManifestSchema1)
	if img, err = mutate.AppendLayers(img, layers...); err != nil {
		t.Fatal(err)
	}
	return img
}

// Tree describes every file below dir, and dir itself as ".": type, mode,
// owner, time, content, link target, device, extended attributes, and the
// other names of the same file.
func Tree(t testing.TB, dir string) map[string]string {
	t.Helper()
	all := map[string]string{}
	names := map[uint64][]string{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			return err
		}
		if st.Mode&unix.S_IFMT != unix.S_IFDIR {
			names[st.Ino] = append(names[st.Ino], rel)
		}
		all[rel], err = describe(name, &st)
		return err
	})
	if err != nil {
		t.Fatalf("walk %s: %v", dir, err)
	}
	for _, same := range names {
		for _, name := range same {
			if len(same) > 1 {
				all[name] += " = " + strings.Join(same, ", ")
			}
		}
	}
	return all
}

func describe(name string, st *unix.Stat_t) (string, error) {
	s := fmt.Sprintf("%04o %d:%d @%d", st.Mode&0o7777, st.Uid, st.Gid, st.Mtim.Sec)
	if st.Mtim.Nsec != 0 {
		s += fmt.Sprintf(".%09d", st.Mtim.Nsec)
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		b, err := os.ReadFile(name)
		if err != nil {
			return "", err
		}
		content := fmt.Sprintf("%q", b)
		if len(b) > 64 {
			content = fmt.Sprintf("%d bytes %x", len(b), sha256.Sum256(b))
		}
		s = "file " + s + " " + content
	case unix.S_IFDIR:
		s = "dir " + s
	case unix.S_IFLNK:
		target, err := os.Readlink(name)
		if err != nil {
			return "", err
		}
		s = "link " + s + " -> " + target
	case unix.S_IFIFO:
		s = "fifo " + s
	case unix.S_IFCHR:
		s = fmt.Sprintf("char %s %d:%d", s, unix.Major(st.Rdev), unix.Minor(st.Rdev))
	case unix.S_IFBLK:
		s = fmt.Sprintf("block %s %d:%d", s, unix.Major(st.Rdev), unix.Minor(st.Rdev))
	default:
		s = "unknown " + s
	}
	x, err := xattrs(name)
	return s + x, err
}

func xattrs(name string) (string, error) {
	buf := make([]byte, 64<<10)
	n, err := unix.Llistxattr(name, buf)
	if err == unix.ENOTSUP || n == 0 {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	keys := strings.Split(strings.TrimSuffix(string(buf[:n]), "\x00"), "\x00")
	sort.Strings(keys)
	s := ""
	for _, key := range keys {
		value := make([]byte, 64<<10)
		n, err := unix.Lgetxattr(name, key, value)
		if err != nil {
			return "", err
		}
		s += fmt.Sprintf(" %s=%q", key, value[:n])
	}
	return s, nil
}
