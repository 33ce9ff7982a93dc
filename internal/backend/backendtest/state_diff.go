package backendtest

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/image/layer"
)

// changeFiles changes the image's files in all ways, and makes new ones of all
// kinds.
const changeFiles = `set -e
rm /etc/motd
rm -r /usr/share/gone
rm -r /usr/share/replaced; mkdir /usr/share/replaced; echo replaced >/usr/share/replaced/a
rm /usr/share/file; mkdir /usr/share/file; echo inside >/usr/share/file/now-a-directory
rm -r /usr/share/dir; echo now-a-file >/usr/share/dir
chmod 4711 /usr/share/chmod
chown 1000:1000 /usr/share/kept/b
touch -d '2001-02-03 04:05:06' /usr/share/kept/a
ln /etc/group /etc/group-linked
mv /home/user /home/moved
mkdir -p /made/sticky /made/empty /made/deep/er/est
chmod 3777 /made/sticky
echo linked >/made/one; ln /made/one /made/two; ln /made/one /made/deep/er/est/three
echo setuid >/made/setuid; chown 1000:7 /made/setuid; chmod 6755 /made/setuid
ln -s /etc/passwd /made/absolute; ln -s ../made/one /made/relative; ln -s nowhere /made/dangling
ln -s .. /made/deep/up
mkfifo -m 620 /made/fifo
echo spaces >'/made/with  spaces and ü'
echo long >/made/$(printf '%0200d' 0)
echo gone >/made/gone; rm /made/gone
truncate -s 16M /made/sparse; echo end >>/made/sparse
echo 'twice' >/made/rewritten; echo 'written' >>/made/rewritten
touch -d '1999-12-31 23:59:59' /made/old
`

// listTree lists a file tree after changeFiles, with all that a layer keeps but
// extended attributes. Its arguments are the directories to leave out.
const listTree = `list() {
  set -- $* ; skip=
  for d in $*; do skip="$skip -path $d -prune -o"; done
  find / $skip -type f -print0 | xargs -0 stat -c '%f %u %g %s %h %y %n'
  find / $skip -type f -print0 | xargs -0 sha1sum
  find / $skip -type f -o -print0 | xargs -0 stat -c '%f %u %g %t:%T %N'
}; list`

// times returns when some files were changed, to the nanosecond.
func (m *machine) times() string {
	m.Helper()
	return string(m.shell("stat -c '%y %n' /made/old /made/one /made/rewritten /made/sparse /usr/share/kept/a /etc/group-linked").Stdout)
}

// mounts returns the places in the machine that are mounts of their own, and
// so no part of its file tree. The list is what its own tools say.
func (m *machine) mounts() string {
	m.Helper()
	res := m.shell("awk '$2 != \"/\" {print $2}' /proc/mounts")
	all := strings.Fields(string(res.Stdout))
	if !slices.Contains(all, "/proc") {
		m.Fatalf("the machine's mounts: %q, %q", res.Stdout, res.Stderr)
	}
	return strings.Join(all, " ")
}

// diffTrees compares two lists of files.
func diffTrees(want, got []byte) string {
	return cmp.Diff(sorted(want), sorted(got))
}

func sorted(list []byte) []string {
	return slices.Sorted(strings.Lines(string(list)))
}

// diff writes a machine's changes to a file.
func (m *machine) diff(w *os.File) error {
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	return m.instance.(backend.Differ).Diff(ctx, w)
}

// layer returns a machine's changes as a file to be read.
func (m *machine) layer() *os.File {
	m.Helper()
	f, err := os.CreateTemp(m.TempDir(), "layer")
	if err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() { f.Close() })
	if err := m.diff(f); err != nil {
		m.Fatalf("diff: %v", err)
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		m.Fatalf("the file that the diff was written to: %v", err)
	}
	return f
}

// applied lays a machine's changes over a copy of its image, and returns the
// directory.
func (m *machine) applied() string {
	m.Helper()
	tree := filepath.Join(m.TempDir(), "applied")
	if err := os.Mkdir(tree, 0o755); err != nil {
		m.Fatal(err)
	}
	if m.cfg.Rootfs.Tree != "" {
		run(m.TB, exec.Command("cp", "-a", m.cfg.Rootfs.Tree+"/.", tree))
	}
	a, err := layer.New(tree, layer.Limits{}, nil)
	if err != nil {
		m.Fatal(err)
	}
	defer a.Close()
	if err := a.Apply(m.ctx, m.layer()); err != nil {
		m.Fatalf("apply the diff to the image: %v", err)
	}
	return tree
}

// testDiff reads the changes of a machine that runs, of one that is paused, and
// of one that was made of a snapshot: none of them is harmed.
func testDiff(e *env) {
	m := e.create(usual)
	c := m.startCounter()
	m.write("/root/new/file", "new")
	data := m.writeMany("/data", 3<<20)
	check := func(m *machine) {
		m.Helper()
		tree := m.applied()
		for name, want := range map[string]string{"root/new/file": "new", "data": string(data)} {
			if got, err := os.ReadFile(filepath.Join(tree, name)); err != nil || string(got) != want {
				m.Errorf("%s is %q in the diff, %v; want %q", name, cut(got), err, cut([]byte(want)))
			}
		}
	}
	check(m)
	c.goesOn()
	m.answers()
	if e.can.Pause {
		m.pause()
		check(m)
		c.stands()
		m.silent()
		m.resume()
		m.answers()
		c.goesOn()
	}
	c.stop()
	for _, memory := range e.kinds() {
		r := e.restore(m.take(memory))
		r.write("/root/new/later", "later")
		check(r)
		r.answers()
		r.destroy()
	}
	m.destroy()
	if err := m.diff(e.scratch()); err == nil || errors.Is(err, context.DeadlineExceeded) {
		e.Errorf("diff of a machine that was destroyed: %v", err)
	}
	e.noLeftovers()
}

// scratch returns a file to be written.
func (e *env) scratch() *os.File {
	e.Helper()
	f, err := os.CreateTemp(e.TempDir(), "scratch")
	if err != nil {
		e.Fatal(err)
	}
	e.Cleanup(func() { f.Close() })
	return f
}

// testDiffTree changes files in all ways: with its changes laid over it the
// image's file tree is the machine's.
func testDiffTree(e *env) {
	m := e.create(usual)
	if res := m.shell(changeFiles); res.ExitCode != 0 {
		e.Fatalf("change files: %s", res.Stderr)
	}
	m.writeWithProperty("/made/property")
	m.sameTree()
	times := m.times()
	for _, memory := range e.kinds() {
		r := e.restore(m.take(memory))
		r.sameTree()
		if got := r.times(); got != times {
			e.Errorf("files were changed at these times, with memory: %t (-in the machine +in the one of its snapshot):\n%s", memory, cmp.Diff(times, got))
		}
		r.destroy()
	}
	e.onlyOwnEntries(m)
}

// propertyAttr is the extended attribute that writeWithProperty gives a file.
const (
	propertyAttr  = "user.e2b.color"
	propertyValue = "blue"
)

// writeWithProperty writes a file that has an extended attribute.
func (m *machine) writeWithProperty(name string) {
	m.Helper()
	to := "http://agent/files?" + url.Values{"path": {name}}.Encode()
	req, err := http.NewRequestWithContext(m.ctx, http.MethodPost, to, strings.NewReader("blue\n"))
	if err != nil {
		m.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/octet-stream")
	req.Header.Set("X-Metadata-Color", propertyValue)
	resp, err := m.client.Transport().RoundTrip(req)
	if err != nil {
		m.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(resp.Body) // for the message
		m.Fatalf("write a file with a property: %s: %s", resp.Status, text)
	}
}

// sameTree checks that the image with the machine's changes has the file tree
// that the machine has.
func (m *machine) sameTree() {
	m.Helper()
	mounts := m.mounts()
	tree := m.applied()
	inside := m.shell(listTree + " " + mounts)
	cmd := exec.Command("/bin/sh", "-c", listTree+" "+mounts)
	cmd.Env = []string{"PATH=/bin"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Chroot: tree}
	cmd.Dir = "/"
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	outside, err := cmd.Output()
	if err != nil || stderr.Len() > 0 || len(inside.Stderr) > 0 {
		m.Fatalf("list files: %v, %s, %s", err, &stderr, inside.Stderr)
	}
	if diff := diffTrees(inside.Stdout, outside); diff != "" {
		m.Errorf("the image with the machine's changes (-in the machine +image with the diff):\n%s", diff)
	}
	value := make([]byte, 100)
	n, err := unix.Lgetxattr(filepath.Join(tree, "made/property"), propertyAttr, value)
	if err != nil || string(value[:n]) != propertyValue {
		m.Errorf("extended attribute %s: %q, %v; want %q", propertyAttr, value[:max(n, 0)], err, propertyValue)
	}
}

// onlyOwnEntries checks that a machine's changes have clean names, nothing of
// other mounts, nothing that did not change, and no secret marks of a backend.
func (e *env) onlyOwnEntries(m *machine) {
	e.Helper()
	mounts := strings.Fields(m.mounts())
	in := tar.NewReader(m.layer())
	for {
		h, err := in.Next()
		if err == io.EOF {
			return
		}
		if err != nil {
			e.Fatalf("read the diff: %v", err)
		}
		name := "/" + strings.Trim(strings.TrimPrefix(h.Name, "./"), "/")
		if filepath.Clean(name) != name || strings.HasPrefix(h.Name, "/") {
			e.Errorf("the diff has the name %q", h.Name)
		}
		for _, d := range mounts {
			if strings.HasPrefix(name, d+"/") {
				e.Errorf("the diff has %q, which lies below the mount %s", h.Name, d)
			}
		}
		if name == "/bin/busybox" || name == "/etc/passwd" {
			e.Errorf("the diff has %q, which was not changed", h.Name)
		}
		for key := range h.PAXRecords {
			if attr, is := strings.CutPrefix(key, "SCHILY.xattr."); is && attr != propertyAttr {
				e.Errorf("the diff has the extended attribute %s on %q", attr, h.Name)
			}
		}
	}
}

// testDiffFullDisk has no room for the changes: the machine is unharmed.
func testDiffFullDisk(e *env) {
	m := e.create(usual)
	m.writeMany("/data", 4<<20)
	c := m.startCounter()
	for _, size := range []string{"4k", "256k", "2m"} {
		e.onFullDisk(size, func(dir string) {
			f, err := os.Create(filepath.Join(dir, "layer"))
			if err != nil {
				e.Fatal(err)
			}
			defer f.Close()
			if err := m.diff(f); !errors.Is(err, unix.ENOSPC) {
				e.Errorf("a diff on a disk of %s: %v", size, err)
			}
		})
	}
	m.answers()
	c.goesOn()
	c.stop()
	m.applied()
}
