package agent_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"mime/multipart"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"connectrpc.com/connect"
	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/api/gen/filesystem"
	"github.com/kernflux/opendsec/api/gen/filesystem/filesystemconnect"
	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/fault"
)

func (r *running) files() filesystemconnect.FilesystemClient {
	return filesystemconnect.NewFilesystemClient(&httpClient{r.Transport()}, "http://agent")
}

func at(path string) string { return "?path=" + url.QueryEscape(path) }

func TestWriteAndReadFiles(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	ctx := t.Context()
	for _, size := range []int{0, 1, 4096, 4097, 64 << 10, 1 << 20} {
		file := filepath.Join(dir, "new", fmt.Sprint(size), "größe")
		want := bytes.Repeat([]byte{0, 255, 'x'}, size/3+1)[:size]
		if err := r.WriteBytes(ctx, agentclient.File{Path: file, User: "nobody"}, want); err != nil {
			t.Fatal(err)
		}
		got, err := r.ReadFile(ctx, file, "")
		if err != nil || !bytes.Equal(got, want) {
			t.Errorf("%d bytes came back as %d, %v", size, len(got), err)
		}
		for _, name := range []string{file, filepath.Dir(file)} {
			if st := stat(t, name); st.Uid != 65534 {
				t.Errorf("%s belongs to %d, want nobody", name, st.Uid)
			}
		}
		status, body, h := r.call("GET", "/files"+at(file), map[string]string{"Range": "bytes=1-2"}, nil)
		switch {
		case size > 2 && (status != 206 || body != string(want[1:3])):
			t.Errorf("a range of %d bytes is %d %q", size, status, body)
		case size == 0 && h.Get("Content-Length") != "0":
			t.Errorf("an empty file has Content-Length %q", h.Get("Content-Length"))
		}
	}
}

func stat(t *testing.T, name string) *syscall.Stat_t {
	t.Helper()
	var st syscall.Stat_t
	if err := syscall.Lstat(name, &st); err != nil {
		t.Fatal(name, err)
	}
	return &st
}

func TestHowFilesAreWritten(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	file, link := filepath.Join(dir, "file"), filepath.Join(dir, "link")
	write := func(f agentclient.File) *syscall.Stat_t {
		t.Helper()
		if err := r.WriteBytes(t.Context(), f, []byte("new")); err != nil {
			t.Fatal(err)
		}
		if data, err := os.ReadFile(file); err != nil || string(data) != "new" {
			t.Errorf("it holds %q, %v", data, err)
		}
		return stat(t, file)
	}
	if st := write(agentclient.File{Path: file}); st.Mode&0o777 != 0o644 {
		t.Errorf("a new file has mode %o", st.Mode)
	}
	if err := errors.Join(os.Symlink("file", link), os.WriteFile(file, []byte("old and longer"), 0), os.Chmod(file, 0o751)); err != nil {
		t.Fatal(err)
	}
	before := stat(t, file)
	if st := write(agentclient.File{Path: file}); st.Ino != before.Ino || st.Mode != before.Mode {
		t.Errorf("in place the file became inode %d mode %o, was %d %o", st.Ino, st.Mode, before.Ino, before.Mode)
	}
	if st := write(agentclient.File{Path: link, Atomic: true, User: "1234"}); st.Ino == before.Ino || st.Mode != before.Mode || st.Uid != 1234 {
		t.Errorf("atomically the file became inode %d mode %o owner %d, was %d %o", st.Ino, st.Mode, st.Uid, before.Ino, before.Mode)
	}
	if st := stat(t, link); st.Mode&syscall.S_IFMT != syscall.S_IFLNK {
		t.Error("the link was replaced instead of what it leads to")
	}
	if st := write(agentclient.File{Path: file, Mode: 0o700}); st.Mode&0o777 != 0o700 {
		t.Errorf("mode %o, want 700", st.Mode&0o777)
	}
	if st := write(agentclient.File{Path: file, Atomic: true, Mode: 0o640}); st.Mode&0o777 != 0o640 {
		t.Errorf("mode %o, want 640", st.Mode&0o777)
	}
}

// A reader must never see a part of an atomic write, and one that breaks off
// must leave the old content and nothing else.
func TestAtomicWriteThatBreaksOff(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("old"), 0o644); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	pr, pw := io.Pipe()
	done := make(chan error)
	go func() { done <- r.WriteFile(ctx, agentclient.File{Path: file, Atomic: true}, pr) }()
	if _, err := pw.Write(make([]byte, 1<<20)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the temporary file is there", func() bool {
		entries, _ := os.ReadDir(dir)
		return len(entries) == 2
	})
	cancel()
	if err := <-done; err == nil {
		t.Error("the broken write ended without an error")
	}
	pw.Close()
	eventually(t, "the temporary file is gone", func() bool {
		entries, _ := os.ReadDir(dir)
		return len(entries) == 1
	})
	if data, err := os.ReadFile(file); err != nil || string(data) != "old" {
		t.Errorf("it holds %q, %v; want the old content", data, err)
	}
}

func TestFileErrors(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	if err := errors.Join(os.WriteFile(dir+"/file", nil, 0o644), syscall.Mkfifo(dir+"/fifo", 0o644)); err != nil {
		t.Fatal(err)
	}
	octets := map[string]string{"Content-Type": "application/octet-stream"}
	tests := map[string]struct {
		method, target string
		header         map[string]string
		status         int
		says           string
	}{
		"missing":         {"GET", "/files" + at(dir+"/none"), nil, 404, "path '" + dir + "/none' does not exist"},
		"directory":       {"GET", "/files" + at(dir), nil, 400, "path '" + dir + "' is a directory"},
		"pipe":            {"GET", "/files" + at(dir+"/fifo"), nil, 400, "not a regular file"},
		"zero byte":       {"GET", "/files?path=%00", nil, 400, "zero byte"},
		"user":            {"GET", "/files?username=nosuch", nil, 401, "error looking up user 'nosuch'"},
		"encoding":        {"GET", "/files" + at(dir+"/file"), map[string]string{"Accept-Encoding": "br, identity;q=0"}, 406, "identity"},
		"no path":         {"POST", "/files", octets, 400, "path"},
		"over a dir":      {"POST", "/files" + at(dir), octets, 400, "is a directory"},
		"over a pipe":     {"POST", "/files" + at(dir+"/fifo"), octets, 400, "not a regular file"},
		"below a file":    {"POST", "/files" + at(dir+"/file/x"), octets, 400, "not a directory"},
		"long name":       {"POST", "/files" + at(dir+"/"+strings.Repeat("x", 300)), octets, 400, "too long"},
		"type":            {"POST", "/files" + at(dir+"/x"), map[string]string{"Content-Type": "text/plain"}, 400, "content type"},
		"mode":            {"POST", "/files" + at(dir+"/x") + "&mode=999", octets, 400, "mode"},
		"atomic":          {"POST", "/files" + at(dir+"/x") + "&atomic=maybe", octets, 400, "atomic"},
		"not gzip":        {"POST", "/files" + at(dir+"/x"), map[string]string{"Content-Type": "application/octet-stream", "Content-Encoding": "gzip"}, 400, "gzip"},
		"archive missing": {"GET", "/archive" + at(dir+"/none"), nil, 404, "does not exist"},
		"archive garbage": {"POST", "/archive" + at(dir+"/x"), octets, 400, "tar"},
		"unknown":         {"GET", "/nothing", nil, 404, "/nothing"},
		"method":          {"DELETE", "/files", nil, 404, "DELETE"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			status, body, _ := r.call(tt.method, tt.target, tt.header, strings.NewReader(strings.Repeat("garbage", 100)))
			var e struct {
				Code    int
				Message string
			}
			if err := json.Unmarshal([]byte(body), &e); err != nil {
				t.Fatalf("%d %q: %v", status, body, err)
			}
			if status != tt.status || e.Code != status || !strings.Contains(e.Message, tt.says) {
				t.Errorf("%d %q, want %d with %q", status, body, tt.status, tt.says)
			}
		})
	}
}

func TestKernelFiles(t *testing.T) {
	r := start(t)
	for _, file := range []string{"/proc/sys/kernel/random/boot_id", "/sys/kernel/mm/transparent_hugepage/enabled", "/proc/cpuinfo"} {
		want, err := os.ReadFile(file)
		if err != nil {
			continue // not every kernel has it
		}
		got, err := r.ReadFile(t.Context(), file, "")
		if err != nil || len(got) == 0 || file != "/proc/cpuinfo" && !bytes.Equal(got, want) {
			t.Errorf("%s is %q, %v; want %q", file, got, err, want)
		}
	}
	if got, err := r.ReadFile(t.Context(), "/proc/kallsyms", ""); err != nil || len(got) < 64<<10 {
		t.Errorf("a long file without a size has %d bytes, %v", len(got), err)
	}
}

func form(t *testing.T, parts ...[2]string) (map[string]string, io.Reader) {
	t.Helper()
	var buf bytes.Buffer
	m := multipart.NewWriter(&buf)
	for _, p := range parts {
		w, err := m.CreatePart(map[string][]string{"Content-Disposition": {p[0]}})
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(w, p[1])
	}
	m.Close()
	return map[string]string{"Content-Type": m.FormDataContentType()}, &buf
}

func TestMultipart(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	part := func(name string) string { return `form-data; name="file"; filename="` + name + `"` }
	tests := map[string]struct {
		query  string
		parts  [][2]string
		status int
		want   map[string]string // below dir
	}{
		"directories and UTF-8": {"", [][2]string{{part("DIR/a/b/größe 🙂.txt"), "1"}, {part("DIR/a/two"), ""}}, 200, map[string]string{"a/b/größe 🙂.txt": "1", "a/two": ""}},
		"path wins":             {at("DIR/p"), [][2]string{{part("undefined"), "x"}}, 200, map[string]string{"p": "x"}},
		"path without filename": {at("DIR/q"), [][2]string{{`form-data; name="file"`, "x"}}, 200, map[string]string{"q": "x"}},
		"other parts ignored":   {"", [][2]string{{`form-data; name="other"; filename="DIR/no"`, "x"}, {part("DIR/yes"), "y"}}, 200, map[string]string{"yes": "y"}},
		"quotes":                {"", [][2]string{{part(`DIR/%22q%22 \"r\" 100%25`), "x"}}, 200, map[string]string{`"q" "r" 100%25`: "x"}},
		"none":                  {"", nil, 200, map[string]string{}},
		"no filename, no path":  {"", [][2]string{{`form-data; name="file"`, "x"}}, 400, nil},
		"twice":                 {"", [][2]string{{part("DIR/t"), "1"}, {part("DIR/./t"), "2"}}, 400, map[string]string{"t": "1"}},
		"path with two":         {at("DIR/t"), [][2]string{{part("a"), "1"}, {part("b"), "2"}}, 400, map[string]string{"t": "1"}},
		"no form data":          {"", [][2]string{{"attachment", "x"}}, 400, nil},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			sub := filepath.Join(dir, strings.ReplaceAll(name, " ", "_"))
			for i := range tt.parts {
				tt.parts[i][0] = strings.ReplaceAll(tt.parts[i][0], "DIR", sub)
			}
			header, body := form(t, tt.parts...)
			status, answer, _ := r.call("POST", "/files"+strings.ReplaceAll(tt.query, "DIR", url.QueryEscape(sub)), header, body)
			if status != tt.status {
				t.Fatalf("%d %s, want %d", status, answer, tt.status)
			}
			for file, want := range tt.want {
				if got, err := os.ReadFile(filepath.Join(sub, file)); err != nil || string(got) != want {
					t.Errorf("%s is %q, %v; want %q", file, got, err, want)
				}
			}
			var files []map[string]string
			if status == 200 {
				if err := json.Unmarshal([]byte(answer), &files); err != nil || len(files) != len(tt.want) {
					t.Errorf("answer %s, %v", answer, err)
				}
			}
			for _, f := range files {
				if f["type"] != "file" || f["name"] != filepath.Base(f["path"]) || len(f) != 3 {
					t.Errorf("answer %v", f)
				}
			}
		})
	}
}

func TestCutOffMultipart(t *testing.T) {
	r := start(t)
	header, body := form(t, [2]string{`form-data; name="file"; filename="` + t.TempDir() + `/x"`, strings.Repeat("x", 1000)})
	status, answer, _ := r.call("POST", "/files", header, io.LimitReader(body, 500))
	if status != 400 {
		t.Errorf("%d %s, want 400", status, answer)
	}
}

func TestMetadata(t *testing.T) {
	r := start(t)
	file := filepath.Join(t.TempDir(), "f")
	header := map[string]string{"Content-Type": "application/octet-stream", "X-Metadata-Key_A": "one two", "X-Metadata-B": "2"}
	post := func() (int, string) {
		status, answer, _ := r.call("POST", "/files"+at(file), header, strings.NewReader("x"))
		return status, answer
	}
	status, answer := post()
	if status == 500 && strings.Contains(answer, "not supported") {
		t.Skip("this file system keeps no attributes")
	}
	meta := func() map[string]string {
		resp, err := r.files().Stat(t.Context(), connect.NewRequest(&filesystem.StatRequest{Path: file}))
		if err != nil {
			t.Fatal(err)
		}
		return resp.Msg.GetEntry().GetMetadata()
	}
	want := map[string]string{"key_a": "one two", "b": "2"}
	if diff := cmp.Diff(want, meta()); diff != "" || status != 200 || !strings.Contains(answer, `"metadata":{`) {
		t.Errorf("%d %s; metadata (-want +got):\n%s", status, answer, diff)
	}
	delete(header, "X-Metadata-B")
	post()
	if diff := cmp.Diff(map[string]string{"key_a": "one two"}, meta()); diff != "" {
		t.Errorf("the set was not replaced (-want +got):\n%s", diff)
	}
	header["X-Metadata-C"] = strings.Repeat("x", 5000)
	if status, answer := post(); status != 400 {
		t.Errorf("too much metadata: %d %s", status, answer)
	}
}

// fullDisk mounts a small file system for one test.
func fullDisk(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

func TestFullDisk(t *testing.T) {
	dir := fullDisk(t)
	r := start(t)
	for _, f := range []agentclient.File{{Path: dir + "/a"}, {Path: dir + "/b", Atomic: true}} {
		err := r.WriteBytes(t.Context(), f, make([]byte, 4<<20))
		if !fault.Is(err, fault.QuotaExceeded) {
			t.Errorf("write to a full disk = %v, want %s", err, fault.QuotaExceeded)
		}
	}
	if _, err := os.Stat(dir + "/b"); err == nil {
		t.Error("a part of an atomic write stayed")
	}
	status, answer, _ := r.call("POST", "/files"+at(dir+"/c"), map[string]string{"Content-Type": "application/octet-stream"}, bytes.NewReader(make([]byte, 4<<20)))
	if status != 507 {
		t.Errorf("%d %s, want 507", status, answer)
	}
	// What carries a tree says the same.
	src := t.TempDir()
	if err := os.WriteFile(src+"/big", make([]byte, 4<<20), 0o644); err != nil {
		t.Fatal(err)
	}
	stream, err := r.Pack(t.Context(), src, "")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if err := r.Unpack(t.Context(), dir+"/d", "", stream); !fault.Is(err, fault.QuotaExceeded) {
		t.Errorf("unpack to a full disk = %v, want %s", err, fault.QuotaExceeded)
	}
}

// endless gives bytes that can be checked, and counts them.
type endless struct {
	state uint64
	sum   hash.Hash
}

func (e *endless) Read(p []byte) (int, error) {
	for i := 0; i+8 <= len(p); i += 8 {
		e.state = e.state*6364136223846793005 + 1442695040888963407
		for j := range 8 {
			p[i+j] = byte(e.state >> (8 * j))
		}
	}
	n := len(p) &^ 7
	e.sum.Write(p[:n])
	return n, nil
}

func TestOneGigabyteEachWayWithFlatMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("it moves 2 GB")
	}
	r := start(t)
	file := filepath.Join(t.TempDir(), "big")
	src := &endless{sum: sha256.New()}
	const size = 1 << 30
	if err := r.WriteFile(t.Context(), agentclient.File{Path: file, Atomic: true}, io.LimitReader(src, size)); err != nil {
		t.Fatal(err)
	}
	body, err := r.OpenFile(t.Context(), file, "")
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	got := sha256.New()
	n, err := io.Copy(got, body)
	if err != nil || n != size {
		t.Fatalf("%d bytes came back, %v", n, err)
	}
	if !bytes.Equal(got.Sum(nil), src.sum.Sum(nil)) {
		t.Error("the content changed")
	}
	if kb := r.status("VmHWM"); kb > 32<<10 {
		t.Errorf("the agent used %d kB at most, want 32 MB or less", kb)
	}
	t.Logf("the agent used %d kB at most", r.status("VmHWM"))
}

func TestArchive(t *testing.T) {
	r := start(t)
	src, dst := t.TempDir(), filepath.Join(t.TempDir(), "made/for it")
	if err := errors.Join(
		os.MkdirAll(src+"/a/b", 0o750), os.WriteFile(src+"/a/f", []byte("content"), 0o640),
		os.Symlink("../a/f", src+"/a/link"), os.Symlink("/etc", src+"/abs"), os.WriteFile(src+"/run", nil, 0o755),
	); err != nil {
		t.Fatal(err)
	}
	stream, err := r.Pack(t.Context(), src, "")
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	if err := r.Unpack(t.Context(), dst, "nobody", stream); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"a": "drwxr-x---", "a/b": "drwxr-x---", "a/f": "-rw-r-----", "a/link": "Lrwxrwxrwx", "abs": "Lrwxrwxrwx", "run": "-rwxr-xr-x"} {
		info, err := os.Lstat(filepath.Join(dst, name))
		if err != nil {
			t.Error(err)
			continue
		}
		old, _ := os.Lstat(filepath.Join(src, name))
		if info.Mode().String() != want || info.Sys().(*syscall.Stat_t).Uid != 65534 {
			t.Errorf("%s is %v of %d, want %s of nobody", name, info.Mode(), info.Sys().(*syscall.Stat_t).Uid, want)
		}
		if info.Mode()&fs.ModeSymlink == 0 && !info.ModTime().Equal(old.ModTime()) {
			t.Errorf("%s has the time %v, want %v", name, info.ModTime(), old.ModTime())
		}
	}
	var hostile bytes.Buffer
	w := tar.NewWriter(&hostile)
	w.WriteHeader(&tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/"})
	w.WriteHeader(&tar.Header{Name: "l/opendsec-was-here", Typeflag: tar.TypeReg})
	w.Close()
	if err := r.Unpack(t.Context(), dst, "", &hostile); !fault.Is(err, fault.InvalidArgument) || !strings.Contains(err.Error(), "l/opendsec-was-here") {
		t.Errorf("a hostile stream = %v", err)
	}
	if _, err := os.Lstat("/opendsec-was-here"); err == nil {
		t.Error("it was written outside")
		os.Remove("/opendsec-was-here")
	}
	var zipped bytes.Buffer
	z := gzip.NewWriter(&zipped)
	w = tar.NewWriter(z)
	w.WriteHeader(&tar.Header{Name: "zipped", Typeflag: tar.TypeReg, Mode: 0o600})
	w.Close()
	z.Close()
	if status, answer, _ := r.call("POST", "/archive"+at(dst), map[string]string{"Content-Encoding": "gzip"}, &zipped); status != 200 {
		t.Errorf("gzip: %d %s", status, answer)
	}
	if _, err := os.Lstat(dst + "/zipped"); err != nil {
		t.Error(err)
	}
}

func TestFilesystem(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	ctx := t.Context()
	f := r.files()
	if err := errors.Join(
		os.MkdirAll(dir+"/a/b/c", 0o755), os.WriteFile(dir+"/a/f", []byte("12345"), 0o640), os.Symlink("f", dir+"/a/l"),
		os.Symlink("nowhere", dir+"/a/x"), os.Symlink("loop", dir+"/loop"), os.Symlink(dir+"/a", dir+"/alias"), os.Chown(dir+"/a/f", 65534, 8),
	); err != nil {
		t.Fatal(err)
	}
	stat := func(p string) (*filesystem.EntryInfo, error) {
		resp, err := f.Stat(ctx, connect.NewRequest(&filesystem.StatRequest{Path: p}))
		if err != nil {
			return nil, err
		}
		return resp.Msg.GetEntry(), nil
	}
	e, err := stat(dir + "/a/f")
	if err != nil || e.GetType() != filesystem.FileType_FILE_TYPE_FILE || e.GetSize() != 5 || e.GetMode() != 0o640 || e.GetPermissions() != "-rw-r-----" || e.GetOwner() != "nobody" || e.GetGroup() != "mail" || e.GetName() != "f" || e.GetPath() != dir+"/a/f" || e.SymlinkTarget != nil || e.GetIsSymlink() || e.GetModifiedTime().AsTime().IsZero() {
		t.Errorf("file: %v, %v", e, err)
	}
	e, err = stat(dir + "/a/l")
	if err != nil || e.GetType() != filesystem.FileType_FILE_TYPE_FILE || e.GetSize() != 5 || e.GetPermissions() != "Lrwxrwxrwx" || e.GetSymlinkTarget() != dir+"/a/f" || !e.GetIsSymlink() {
		t.Errorf("link: %v, %v", e, err)
	}
	e, err = stat(dir + "/a/x")
	if err != nil || e.GetType() != filesystem.FileType_FILE_TYPE_SYMLINK || e.GetSymlinkTarget() != "nowhere" || !e.GetIsSymlink() {
		t.Errorf("broken link: %v, %v", e, err)
	}
	paths := func(p string, depth uint32) ([]string, error) {
		resp, err := f.ListDir(ctx, connect.NewRequest(&filesystem.ListDirRequest{Path: p, Depth: depth}))
		if err != nil {
			return nil, err
		}
		var out []string
		for _, e := range resp.Msg.GetEntries() {
			out = append(out, strings.TrimPrefix(e.GetPath(), p+"/"))
		}
		return out, nil
	}
	for _, tt := range []struct {
		path  string
		depth uint32
		want  []string
	}{
		{dir, 0, []string{"a", "alias", "loop"}},
		{dir + "/a", 1, []string{"b", "f", "l", "x"}},
		{dir + "/alias", 9, []string{"b", "b/c", "f", "l", "x"}},
	} {
		got, err := paths(tt.path, tt.depth)
		if err != nil || !slices.Equal(got, tt.want) {
			t.Errorf("ListDir(%s, %d) = %v, %v; want %v", tt.path, tt.depth, got, err, tt.want)
		}
	}
	moved, err := f.Move(ctx, connect.NewRequest(&filesystem.MoveRequest{Source: dir + "/a/f", Destination: dir + "/new/place/f2"}))
	if err != nil || moved.Msg.GetEntry().GetPath() != dir+"/new/place/f2" || moved.Msg.GetEntry().GetOwner() != "nobody" {
		t.Errorf("Move: %v, %v", moved, err)
	}
	made, err := f.MakeDir(ctx, connect.NewRequest(&filesystem.MakeDirRequest{Path: dir + "/made/deep"}))
	if err != nil || made.Msg.GetEntry().GetType() != filesystem.FileType_FILE_TYPE_DIRECTORY || made.Msg.GetEntry().GetMode() != 0o755 {
		t.Errorf("MakeDir: %v, %v", made, err)
	}
	for range 2 {
		if _, err := f.Remove(ctx, connect.NewRequest(&filesystem.RemoveRequest{Path: dir + "/made"})); err != nil {
			t.Errorf("Remove: %v", err)
		}
	}
	for name, tt := range map[string]struct {
		err  error
		code connect.Code
	}{
		"stat missing":    {second(stat(dir + "/none")), connect.CodeNotFound},
		"list missing":    {second(paths(dir+"/none", 1)), connect.CodeNotFound},
		"list a file":     {second(paths(dir+"/new/place/f2", 1)), connect.CodeInvalidArgument},
		"list a circle":   {second(paths(dir+"/loop", 1)), connect.CodeFailedPrecondition},
		"make again":      {second(f.MakeDir(ctx, connect.NewRequest(&filesystem.MakeDirRequest{Path: dir}))), connect.CodeAlreadyExists},
		"make over file":  {second(f.MakeDir(ctx, connect.NewRequest(&filesystem.MakeDirRequest{Path: dir + "/new/place/f2"}))), connect.CodeInvalidArgument},
		"make below file": {second(f.MakeDir(ctx, connect.NewRequest(&filesystem.MakeDirRequest{Path: dir + "/new/place/f2/x"}))), connect.CodeInvalidArgument},
		"move missing":    {second(f.Move(ctx, connect.NewRequest(&filesystem.MoveRequest{Source: dir + "/none", Destination: dir + "/y"}))), connect.CodeNotFound},
		"remove all":      {second(f.Remove(ctx, connect.NewRequest(&filesystem.RemoveRequest{Path: "/"}))), connect.CodeInvalidArgument},
		"remove all, too": {second(f.Remove(ctx, connect.NewRequest(&filesystem.RemoveRequest{Path: "/tmp/../"}))), connect.CodeInvalidArgument},
		"watch":           {second(f.CreateWatcher(ctx, connect.NewRequest(&filesystem.CreateWatcherRequest{Path: dir}))), connect.CodeUnimplemented},
	} {
		if connect.CodeOf(tt.err) != tt.code {
			t.Errorf("%s: %v, want %v", name, tt.err, tt.code)
		}
	}
}

func TestMoveToAnotherFileSystem(t *testing.T) {
	r := start(t)
	src, dst := t.TempDir(), fullDisk(t)
	if err := errors.Join(os.MkdirAll(src+"/d/e", 0o700), os.WriteFile(src+"/d/e/f", []byte("x"), 0o600), os.Symlink("e", src+"/d/l"), os.Symlink("d", src+"/link"),
		os.Chown(src+"/d", 12, 34), os.WriteFile(src+"/big", make([]byte, 4<<20), 0o600)); err != nil {
		t.Fatal(err)
	}
	move := func(from, to string) error {
		return second(r.files().Move(t.Context(), connect.NewRequest(&filesystem.MoveRequest{Source: from, Destination: to})))
	}
	if err := errors.Join(move(src+"/d", dst+"/sub/d2"), move(src+"/link", dst+"/link"), move(dst+"/sub/d2/e/f", src+"/back")); err != nil {
		t.Fatal(err)
	}
	if st := stat(t, dst+"/sub/d2"); st.Uid != 12 || st.Mode&0o777 != 0o700 {
		t.Errorf("the directory became %d %o", st.Uid, st.Mode)
	}
	if target, err := os.Readlink(dst + "/sub/d2/l"); err != nil || target != "e" {
		t.Errorf("the link leads to %q, %v", target, err)
	}
	if data, err := os.ReadFile(src + "/back"); err != nil || string(data) != "x" {
		t.Errorf("the file holds %q, %v", data, err)
	}
	if err := move(src+"/big", dst+"/big"); connect.CodeOf(err) != connect.CodeResourceExhausted {
		t.Errorf("a move that does not fit = %v, want resource_exhausted", err)
	}
	left, err := filepath.Glob(dst + "/*")
	if hidden, _ := filepath.Glob(dst + "/.*"); err != nil || len(left) != 2 || len(hidden) != 0 {
		t.Errorf("at the destination are %v %v, %v", left, hidden, err)
	}
	if st := stat(t, src+"/big"); st.Size != 4<<20 {
		t.Error("the source of a move that failed is not whole")
	}
}

func TestRelativePaths(t *testing.T) {
	r := launch(t, nil)
	dir := t.TempDir()
	r.hello(agentclient.Identity{Workdir: dir, User: "root"})
	for path, want := range map[string]string{"rel": dir + "/rel", "./a/../rel2": dir + "/rel2", "": dir} {
		resp, err := r.files().MakeDir(t.Context(), connect.NewRequest(&filesystem.MakeDirRequest{Path: path}))
		if path == "" {
			if connect.CodeOf(err) != connect.CodeAlreadyExists || !strings.Contains(err.Error(), want) {
				t.Errorf("MakeDir(\"\") = %v", err)
			}
			continue
		}
		if err != nil || resp.Msg.GetEntry().GetPath() != want {
			t.Errorf("MakeDir(%q) made %v, %v; want %s", path, resp, err, want)
		}
	}
	if got := r.sh("pwd"); got != dir {
		t.Errorf("a command runs in %s, want %s", got, dir)
	}
	status, body, _ := r.call("GET", "/files?username=nobody&path=rel", nil, nil)
	if status != 404 || !strings.Contains(body, "'/nonexistent/rel'") {
		t.Errorf("another user's relative path: %d %s; want one below its home", status, body)
	}
	status, body, _ = r.call("GET", "/files?path=~/none-such", nil, nil)
	if status != 404 || !strings.Contains(body, "'/root/none-such'") {
		t.Errorf("the home: %d %s", status, body)
	}
}
