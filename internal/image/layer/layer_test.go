package layer_test

import (
	"archive/tar"
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/imagetest"
	"github.com/kernflux/opendsec/internal/image/layer"
)

type entries = []imagetest.Entry

var (
	file    = imagetest.File
	dir     = imagetest.Dir
	link    = imagetest.Link
	symlink = imagetest.Symlink
)

// capNetRaw is a security.capability value, version 2, with CAP_NET_RAW.
const capNetRaw = "\x01\x00\x00\x02\x00\x20\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"

// apply applies layers to a new tree that lies in a directory with a witness
// beside it, and returns the tree's path.
func apply(t *testing.T, layers ...entries) (string, error) {
	t.Helper()
	tree := newTree(t)
	a, err := layer.New(tree, layer.Limits{Bytes: 1 << 20, Entries: 1000}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for _, l := range layers {
		if err := a.Apply(t.Context(), bytes.NewReader(imagetest.Tar(t, l...))); err != nil {
			return tree, err
		}
	}
	return tree, nil
}

func newTree(t testing.TB) string {
	tree := filepath.Join(t.TempDir(), "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(tree, imagetest.Time, imagetest.Time); err != nil {
		t.Fatal(err)
	}
	return tree
}

const (
	plainDir  = "dir 0755 0:0 @1600000000"
	plainLink = "link 0777 0:0 @1600000000 -> "
	plainFile = "file 0644 0:0 @1600000000 "
)

func TestApply(t *testing.T) {
	long := strings.Repeat("n", 120) + "/" + strings.Repeat("m", 200)
	tests := []struct {
		name   string
		layers []entries
		want   map[string]string // without "."
	}{
		{
			"attributes",
			[]entries{{
				file("f", "x").With(func(h *tar.Header) {
					h.Uid, h.Gid, h.Mode, h.ModTime, h.Format = 70000, 80000, 0o6755, time.Unix(1, 5000), tar.FormatPAX
				}),
				dir("d").With(func(h *tar.Header) { h.Mode, h.ModTime = 0o1777, time.Unix(7, 0) }), file("d/in", ""),
				file("cap", "").Xattr("security.capability", capNetRaw).Xattr("user.note", "\x00\xff").With(func(h *tar.Header) { h.Uid = 3 }),
				symlink("l", "/etc/none").With(func(h *tar.Header) { h.Uid, h.Gid = 5, 6 }),
				imagetest.Device(tar.TypeChar, "null", 1, 3), imagetest.Device(tar.TypeBlock, "disk", 300, 70000), imagetest.Device(tar.TypeFifo, "pipe", 0, 0),
				file("old", "").With(func(h *tar.Header) { h.ModTime = time.Unix(-5, 0) }),
				file(long, "long"),
				file("überall/ça", "utf8"),
			}},
			map[string]string{
				"f": `file 6755 70000:80000 @1.000005000 "x"`, "d": "dir 1777 0:0 @7", "d/in": plainFile + `""`,
				"cap":  "file 0644 3:0 @1600000000 \"\"" + " security.capability=" + `"\x01\x00\x00\x02\x00 \x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"` + ` user.note="\x00\xff"`,
				"l":    "link 0777 5:6 @1600000000 -> /etc/none",
				"null": "char 0600 0:0 @1600000000 1:3", "disk": "block 0600 0:0 @1600000000 300:70000", "pipe": "fifo 0600 0:0 @1600000000",
				"old":                       `file 0644 0:0 @0 ""`,
				strings.Split(long, "/")[0]: "dir 0755 0:0 @0", long: plainFile + `"long"`,
				"überall": "dir 0755 0:0 @0", "überall/ça": plainFile + `"utf8"`,
			},
		},
		{
			"a whiteout hides a file and a tree",
			[]entries{{file("a", ""), file("b", ""), dir("d"), dir("d/e"), file("d/e/f", "")}, {file(".wh.a", ""), file(".wh.d", ""), file(".wh.none", "")}},
			map[string]string{"b": plainFile + `""`},
		},
		{
			"an opaque mark hides what earlier layers put, wherever it stands",
			[]entries{
				{dir("d"), file("d/old", ""), dir("d/sub"), file("d/sub/old", ""), file("d/both", "old")},
				{dir("d"), file("d/new", ""), file("d/both", "new"), dir("d/sub"), file("d/sub/new", ""), file("d/.wh..wh..opq", ""), file("d/after", "")},
			},
			map[string]string{
				"d": plainDir, "d/new": plainFile + `""`, "d/both": plainFile + `"new"`, "d/sub": plainDir,
				"d/sub/new": plainFile + `""`, "d/after": plainFile + `""`,
			},
		},
		{
			"a whiteout does not hide its own layer's file, before or after it",
			[]entries{{file("a", "old"), file("b", "old")}, {file("a", "new"), file(".wh.a", ""), file(".wh.b", ""), file("b", "new")}},
			map[string]string{"a": plainFile + `"new"`, "b": plainFile + `"new"`},
		},
		{
			"a whiteout of one name of a file leaves the others",
			[]entries{{file("a", "x"), link("b", "a"), link("c", "b")}, {file(".wh.a", "")}},
			map[string]string{"b": plainFile + `"x" = b, c`, "c": plainFile + `"x" = b, c`},
		},
		{
			"hard links across layers, and a new file instead of one name",
			[]entries{{file("a", "x"), link("b", "/a")}, {link("c", "a"), file("b", "y")}},
			map[string]string{"a": plainFile + `"x" = a, c`, "c": plainFile + `"x" = a, c`, "b": plainFile + `"y"`},
		},
		{
			"a hard link to a symbolic link, and one to itself",
			[]entries{{symlink("s", "a"), link("t", "s"), file("a", ""), link("a", "a")}},
			map[string]string{"s": plainLink + "a = s, t", "t": plainLink + "a = s, t", "a": plainFile + `""`},
		},
		{
			"directory to file to directory, link to directory",
			[]entries{
				{dir("x"), file("x/1", ""), symlink("y", "x"), dir("z"), file("z/1", "")},
				{file("x", "file"), dir("y"), symlink("z", "y")},
				{dir("x"), file("x/2", ""), file("y/3", ""), file("z/4", "")},
			},
			map[string]string{
				"x": plainDir, "x/2": plainFile + `""`, "y": "dir 0755 0:0 @1600000000", "y/3": plainFile + `""`, "y/4": plainFile + `""`, "z": plainLink + "y",
			},
		},
		{
			"links on the way are followed inside the tree",
			[]entries{
				{dir("usr"), dir("usr/lib"), symlink("lib", "usr/lib"), symlink("abs", "/usr/lib"), symlink("up", "../../../../usr"), symlink("loop", "nothing/there")},
				{file("lib/a", ""), file("abs/b", ""), file("up/c", ""), file("loop/d", ""), file("lib/.wh.a", ""), file("abs/.wh.gone", "")},
				{file("abs/.wh.a", "")},
			},
			map[string]string{
				"usr": plainDir, "usr/lib": plainDir, "lib": plainLink + "usr/lib", "abs": plainLink + "/usr/lib", "up": plainLink + "../../../../usr",
				"usr/lib/b": plainFile + `""`, "usr/c": plainFile + `""`, "loop": plainLink + "nothing/there",
				"nothing": "dir 0755 0:0 @0", "nothing/there": "dir 0755 0:0 @0", "nothing/there/d": plainFile + `""`,
			},
		},
		{
			"a later directory entry replaces all attributes and keeps the content",
			[]entries{
				{dir("d").Xattr("user.a", "1").Xattr("user.b", "1"), file("d/f", "")},
				{dir("d").Xattr("user.b", "2").With(func(h *tar.Header) { h.Mode, h.Uid, h.ModTime = 0o700, 9, time.Unix(5, 0) })},
			},
			map[string]string{"d": `dir 0700 9:0 @5 user.b="2"`, "d/f": plainFile + `""`},
		},
		{
			"a directory that a layer does not name keeps its time",
			[]entries{{dir("d"), file("d/f", ""), dir("e"), file("e/f", "")}, {file("d/g", ""), file("e/.wh.f", "")}},
			map[string]string{"d": plainDir, "d/f": plainFile + `""`, "d/g": plainFile + `""`, "e": plainDir},
		},
		{
			"the same name twice: the last counts",
			[]entries{{file("a", "1"), file("a", "2"), dir("d"), file("d/x", ""), file("d", "3"), symlink("s", "a"), file("s", "4")}},
			map[string]string{"a": plainFile + `"2"`, "d": plainFile + `"3"`, "s": plainFile + `"4"`},
		},
		{
			"absolute and dotted names are in the tree",
			[]entries{{file("/a", ""), file("./b", ""), file("x/../c", ""), file("//d", "")}},
			map[string]string{"a": plainFile + `""`, "b": plainFile + `""`, "c": plainFile + `""`, "d": plainFile + `""`},
		},
		{
			"marks of AUFS and of overlayfs are no part of the tree",
			[]entries{{file(".wh..wh.aufs", ""), file(".wh..wh.plnk", ""), file("f", "").Xattr("trusted.overlay.redirect", "/etc").Xattr("security.selinux", "x")}},
			map[string]string{"f": plainFile + `""`},
		},
	}
	for _, test := range tests {
		t.Run(test.name, func(t *testing.T) {
			tree, err := apply(t, test.layers...)
			if err != nil {
				t.Fatal(err)
			}
			got := imagetest.Tree(t, tree)
			if got["."] != plainDir {
				t.Errorf("the root is %q, want %q", got["."], plainDir)
			}
			delete(got, ".")
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("tree (-want +got):\n%s", diff)
			}
		})
	}
}

func TestRootEntry(t *testing.T) {
	tree, err := apply(t, entries{dir("./").With(func(h *tar.Header) { h.Mode, h.Uid, h.ModTime = 0o711, 4, time.Unix(9, 0) }), file("f", "")})
	if err != nil {
		t.Fatal(err)
	}
	if got, want := imagetest.Tree(t, tree)["."], "dir 0711 4:0 @9"; got != want {
		t.Errorf("the root is %q, want %q", got, want)
	}
}

// Nothing that an archive says reaches beyond its tree. Some of these are
// refused, others stay inside; the witness beside the tree tells.
func TestHostile(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "outside")
	if err := os.WriteFile(outside, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	tests := map[string][]entries{
		"dot dot":                    {{file("../witness", "x")}},
		"dot dot inside":             {{file("a/../../witness", "x")}},
		"dot dot absolute":           {{file("/../witness", "x")}},
		"link up, then through it":   {{symlink("l", ".."), file("l/witness", "x")}},
		"absolute link":              {{symlink("l", filepath.Dir(outside)), file("l/outside", "x")}},
		"link of an earlier layer":   {{symlink("l", filepath.Dir(outside))}, {file("l/outside", "x")}},
		"link replaces directory":    {{dir("d"), file("d/a", ""), symlink("d", "../.."), file("d/witness", "x")}},
		"directory over a link":      {{symlink("l", filepath.Dir(outside)), dir("l").With(func(h *tar.Header) { h.Mode = 0o777 })}},
		"file over a link":           {{symlink("l", outside), file("l", "x")}},
		"hard link out":              {{link("h", "../witness"), file("h", "x")}},
		"hard link out, absolute":    {{link("h", outside)}},
		"hard link through a link":   {{symlink("l", ".."), link("h", "l/witness")}},
		"whiteout of dot dot":        {{dir("d"), file("d/.wh...", "")}},
		"whiteout through a link":    {{symlink("l", "..")}, {file("l/.wh.witness", "")}},
		"opaque through a link":      {{symlink("l", "..")}, {file("l/.wh..wh..opq", "")}},
		"link to a magic link":       {{symlink("l", "/proc/self/root"), file("l/etc/opendsec-escape", "x")}},
		"links in a circle":          {{symlink("a", "b"), symlink("b", "a"), file("a/f", "x")}},
		"chain of dangling links":    {{symlink("a", "../../b"), symlink("b", "/../c"), file("a/witness", "x")}},
		"owner of minus one":         {{file("f", "").With(func(h *tar.Header) { h.Uid = 1<<32 - 1 })}},
		"impossible device":          {{imagetest.Device(tar.TypeBlock, "d", 1<<20, 0)}},
		"root as a file":             {{file(".", "x")}},
		"file as a directory":        {{file("f", ""), file("f/g", "")}},
		"hard link to a directory":   {{dir("d"), link("h", "d")}},
		"hard link to nothing":       {{link("h", "nothing")}},
		"name too long":              {{file(strings.Repeat("n", 300), "")}},
		"path too long":              {{file(strings.Repeat("n/", 2500)+"f", "")}},
		"content beyond the limit":   {{file("f", strings.Repeat("x", 1<<20+1))}},
		"entries beyond the limit":   {make(entries, 0)},
		"whiteout of nothing":        {{file(".wh.", "")}},
		"deeper by links than paths": {deep()},
	}
	for i := range 1001 {
		tests["entries beyond the limit"][0] = append(tests["entries beyond the limit"][0], file("f"+strings.Repeat("i", i%9), ""))
	}
	for name, layers := range tests {
		t.Run(name, func(t *testing.T) {
			tree, err := apply(t, layers...)
			if err != nil && !fault.Is(err, fault.InvalidArgument) {
				t.Errorf("the error is no InvalidArgument: %v", err)
			}
			if err != nil && fault.Of(err).Field != "source" {
				t.Errorf("the error names the field %q", fault.Of(err).Field)
			}
			if b, err := os.ReadFile(outside); err != nil || string(b) != "secret" {
				t.Errorf("a file outside changed: %q, %v", b, err)
			}
			around, err := os.ReadDir(filepath.Dir(tree))
			if err != nil || len(around) != 1 {
				t.Errorf("beside the tree there is %v, %v", around, err)
			}
			if _, err := os.Stat("/etc/opendsec-escape"); err == nil {
				t.Errorf("a file was written to /etc")
			}
			if err := os.RemoveAll(tree); err != nil {
				t.Errorf("the tree cannot be removed: %v", err)
			}
		})
	}
}

// deep makes a tree deeper than any path may name, by way of links.
func deep() entries {
	var all entries
	at := strings.Repeat("d/", 400)
	for range 20 {
		all = append(all, dir(at), symlink("l", at))
		at = "l/" + strings.Repeat("d/", 400)
	}
	return all
}

func TestRefused(t *testing.T) {
	for name, content := range map[string][]byte{
		"truncated":      imagetest.Tar(t, file("f", strings.Repeat("x", 5000)))[:2000],
		"no tar":         []byte(strings.Repeat("no tar ", 300)),
		"dot dot":        imagetest.Tar(t, file("../f", "")),
		"hard link up":   imagetest.Tar(t, link("f", "../g")),
		"unknown type":   imagetest.Tar(t, file("f", "").With(func(h *tar.Header) { h.Typeflag = 'Z' })),
		"holes too many": sparse(t),
	} {
		t.Run(name, func(t *testing.T) {
			a, err := layer.New(newTree(t), layer.Limits{Bytes: 1 << 20}, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer a.Close()
			err = a.Apply(t.Context(), bytes.NewReader(content))
			if !fault.Is(err, fault.InvalidArgument) || fault.Of(err).Field != "source" {
				t.Errorf("Apply = %v, want an InvalidArgument for source", err)
			}
		})
	}
}

// sparse returns an archive of a few kilobytes with a file of 8 GiB of holes,
// in GNU's format 1.0.
func sparse(t *testing.T) []byte {
	content := "1\n8589934592\n0\n"
	content += strings.Repeat("\x00", 512-len(content))
	// The writer does not make such archives, so the keys are put in later.
	archive := imagetest.Tar(t, file("f", content).With(func(h *tar.Header) {
		for key, value := range map[string]string{"major": "1", "minor": "0", "name": "f", "realsize": "8589934592"} {
			h.PAXRecords["XXX.sparse."+key] = value
		}
	}))
	return bytes.ReplaceAll(archive, []byte("XXX.sparse."), []byte("GNU.sparse."))
}

func TestStopped(t *testing.T) {
	a, err := layer.New(newTree(t), layer.Limits{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := a.Apply(ctx, bytes.NewReader(imagetest.Tar(t, file("f", "")))); err != context.Canceled {
		t.Errorf("Apply = %v, want %v", err, context.Canceled)
	}
}
