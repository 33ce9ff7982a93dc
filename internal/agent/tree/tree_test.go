package tree

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

type numbers struct{}

func (numbers) UserName(uid uint32) string  { return fmt.Sprint(uid) }
func (numbers) GroupName(gid uint32) string { return fmt.Sprint(gid) }

// describe lists a tree with everything that a round trip keeps.
func describe(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	inodes := map[uint64]string{}
	err := filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
		if err != nil || file == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		name, _ := filepath.Rel(dir, file)
		line := fmt.Sprintf("%v %d:%d", info.Mode(), st.Uid, st.Gid)
		switch {
		case info.Mode().IsRegular():
			data, err := os.ReadFile(file)
			if err != nil {
				return err
			}
			if first, seen := inodes[st.Ino]; seen {
				line += " =" + first
			}
			inodes[st.Ino] = name
			line += fmt.Sprintf(" %q %d", data, info.ModTime().UnixNano())
		case info.Mode()&fs.ModeSymlink != 0:
			target, _ := os.Readlink(file)
			line += " -> " + target
		default:
			line += fmt.Sprint(" ", info.ModTime().UnixNano())
		}
		out[name] = line
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestRoundTrip(t *testing.T) {
	src := t.TempDir()
	at := func(name string) string { return filepath.Join(src, name) }
	old := time.Unix(1_000_000_000, 123456789)
	must(t, os.MkdirAll(at("a/b/"+strings.Repeat("long", 30)+"/"+strings.Repeat("name", 30)), 0o755))
	must(t, os.WriteFile(at("a/file"), []byte("content\x00\xff"), 0o640))
	must(t, os.WriteFile(at("a/empty"), nil, 0o600))
	must(t, os.WriteFile(at("a/größe \n"), []byte("utf-8"), 0o600))
	must(t, os.WriteFile(at("run"), []byte("#!/bin/sh\n"), 0o755))
	must(t, os.Chmod(at("run"), 0o755|fs.ModeSetuid))
	must(t, os.Link(at("a/file"), at("twin")))
	must(t, os.Symlink("/etc/passwd", at("abs")))
	must(t, os.Symlink("a/file", at("rel")))
	must(t, os.Symlink("nowhere", at("broken")))
	must(t, os.Mkdir(at("sealed"), 0o500))
	must(t, syscall.Mkfifo(at("fifo"), 0o600))
	must(t, os.Lchown(at("a/file"), 12, 34))
	must(t, os.Chtimes(at("a/file"), old, old))
	must(t, os.Chtimes(at("a/b"), old, old))

	var stream bytes.Buffer
	must(t, Pack(&stream, src, numbers{}))
	dst := t.TempDir()
	must(t, Unpack(&stream, dst, Owner{Keep: true}))

	want := describe(t, src)
	delete(want, "fifo") // not carried
	if diff := cmp.Diff(want, describe(t, dst)); diff != "" {
		t.Errorf("the tree came back changed (-packed +unpacked):\n%s", diff)
	}
}

func TestPackOneFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "one")
	must(t, os.WriteFile(file, []byte("1"), 0o644))
	var stream bytes.Buffer
	must(t, Pack(&stream, file, numbers{}))
	dst := t.TempDir()
	must(t, Unpack(&stream, dst, Owner{UID: 7, GID: 8}))
	got := describe(t, dst)
	if !strings.HasPrefix(got["one"], "-rw-r--r-- 7:8 \"1\"") || len(got) != 1 {
		t.Errorf("unpacked %v", got)
	}
}

func stream(t *testing.T, headers ...tar.Header) *bytes.Buffer {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, h := range headers {
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len("hostile"))
		}
		if h.Mode == 0 {
			h.Mode = 0o644
		}
		must(t, w.WriteHeader(&h))
		if h.Typeflag == tar.TypeReg {
			_, err := w.Write([]byte("hostile"))
			must(t, err)
		}
	}
	must(t, w.Close())
	return &buf
}

func TestHostileEntries(t *testing.T) {
	reg := func(name string) tar.Header { return tar.Header{Typeflag: tar.TypeReg, Name: name} }
	sym := func(name, to string) tar.Header {
		return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
	}
	hard := func(name, to string) tar.Header {
		return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}
	}
	tests := map[string]struct {
		headers []tar.Header
		refused bool
		made    string // below the target, "" for nothing to look at
	}{
		"dotdot":                    {[]tar.Header{reg("../outside/x")}, true, ""},
		"dotdot inside":             {[]tar.Header{reg("a/../../outside/x")}, true, ""},
		"absolute":                  {[]tar.Header{reg("/outside/x")}, false, "outside/x"},
		"symlink up":                {[]tar.Header{sym("l", "../outside"), reg("l/x")}, true, ""},
		"symlink absolute":          {[]tar.Header{sym("l", "OUTSIDE"), reg("l/x")}, true, ""},
		"symlink chain":             {[]tar.Header{sym("a", "b"), sym("b", ".."), reg("a/outside/x")}, true, ""},
		"symlink to file, replaced": {[]tar.Header{sym("x", "OUTSIDE/x"), reg("x")}, false, "x"},
		"dir over symlink":          {[]tar.Header{sym("l", "OUTSIDE"), {Typeflag: tar.TypeDir, Name: "l/"}, reg("l/x")}, false, "l/x"},
		"hard link out":             {[]tar.Header{hard("h", "../outside/secret")}, true, ""},
		"hard link absolute":        {[]tar.Header{hard("h", "OUTSIDE/secret")}, true, ""},
		"hard link through symlink": {[]tar.Header{sym("l", "../outside"), hard("h", "l/secret"), reg("h")}, true, ""},
		"device":                    {[]tar.Header{{Typeflag: tar.TypeChar, Name: "null"}}, true, ""},
		"the root as a file":        {[]tar.Header{reg(".")}, true, ""},
		"the root as a symlink":     {[]tar.Header{sym("/", "x")}, true, ""},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			base := t.TempDir()
			outside, target := filepath.Join(base, "outside"), filepath.Join(base, "target")
			must(t, os.Mkdir(outside, 0o755))
			must(t, os.Mkdir(target, 0o755))
			must(t, os.WriteFile(filepath.Join(outside, "secret"), []byte("secret"), 0o600))
			for i := range tt.headers {
				tt.headers[i].Linkname = strings.ReplaceAll(tt.headers[i].Linkname, "OUTSIDE", outside)
			}
			before := describe(t, outside)
			err := Unpack(stream(t, tt.headers...), target, Owner{})
			if (err != nil) != tt.refused {
				t.Errorf("Unpack = %v, want refused = %v", err, tt.refused)
			}
			if diff := cmp.Diff(before, describe(t, outside)); diff != "" {
				t.Errorf("something outside changed:\n%s", diff)
			}
			if got := describe(t, target)[tt.made]; tt.made != "" && !strings.Contains(got, "hostile") {
				t.Errorf("%s is %q, want a file that holds \"hostile\"", tt.made, got)
			}
		})
	}
}

func TestEscapeIsAnEntryError(t *testing.T) {
	err := Unpack(stream(t, tar.Header{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "/"}, tar.Header{Typeflag: tar.TypeReg, Name: "l/x"}), t.TempDir(), Owner{})
	var ee *EntryError
	if !errors.As(err, &ee) || ee.Name != "l/x" {
		t.Errorf("Unpack = %v, want an EntryError for l/x", err)
	}
}

func TestTruncatedStream(t *testing.T) {
	whole := stream(t, tar.Header{Typeflag: tar.TypeReg, Name: "a"}).Bytes()
	for _, n := range []int{100, 515} {
		if err := Unpack(bytes.NewReader(whole[:n]), t.TempDir(), Owner{}); !errors.Is(err, ErrBadStream) {
			t.Errorf("Unpack of %d of %d bytes = %v, want ErrBadStream", n, len(whole), err)
		}
	}
}

func TestReplaces(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(filepath.Join(dir, "f"), []byte("old and longer"), 0o600))
	must(t, os.MkdirAll(filepath.Join(dir, "full/x"), 0o755))
	must(t, Unpack(stream(t, tar.Header{Typeflag: tar.TypeReg, Name: "f"}), dir, Owner{}))
	if data, err := os.ReadFile(filepath.Join(dir, "f")); err != nil || string(data) != "hostile" {
		t.Errorf("f holds %q, %v", data, err)
	}
	if err := Unpack(stream(t, tar.Header{Typeflag: tar.TypeReg, Name: "full"}), dir, Owner{}); err == nil {
		t.Error("a directory with something in it was replaced by a file")
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add("a/b", "../x", byte(tar.TypeSymlink), "a/b/c", byte(tar.TypeReg))
	f.Add("/x", "y", byte(tar.TypeLink), "..", byte(tar.TypeDir))
	f.Fuzz(func(t *testing.T, name1, link string, type1 byte, name2 string, type2 byte) {
		base := t.TempDir()
		target := filepath.Join(base, "t")
		must(t, os.Mkdir(target, 0o755))
		must(t, os.WriteFile(filepath.Join(base, "x"), []byte("x"), 0o600))
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		for _, h := range []tar.Header{{Name: name1, Linkname: link, Typeflag: type1, Mode: 0o755}, {Name: name2, Linkname: link, Typeflag: type2, Mode: 0o644}} {
			if w.WriteHeader(&h) != nil {
				return
			}
		}
		w.Close()
		Unpack(&buf, target, Owner{UID: os.Getuid(), GID: os.Getgid()})
		rest, err := os.ReadDir(base)
		must(t, err)
		data, err := os.ReadFile(filepath.Join(base, "x"))
		if err != nil || string(data) != "x" || len(rest) != 2 {
			t.Errorf("something outside the target changed: %q %v %v", data, err, rest)
		}
	})
}
