package gvisor

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kernflux/opendsec/internal/agentclient"
)

// Where the tests have their trees: on the writable layer, and on two more file
// systems in memory.
var trees = []string{"/tree", "/dev/shm/tree", "/dev/tree"}

// TestFilesOfForks compares all that is to be seen of files in a machine, a
// fork, a fork of that, and a start of its snapshot, before and after changes.
func TestFilesOfForks(t *testing.T) {
	w := newWorld(t, 2)
	w.limits = limitsOf(2, 512)
	m := w.guest()
	for n, dir := range trees {
		m.ask("files %s %d 2000", dir, 1000/(1+9*n))
	}
	m.run("rm /bin/vi; mv /etc/passwd /etc/other; ln /etc/other /etc/again") // whiteouts, and files of the image
	m.ask("readon /tree/d3 30")
	used := m.run("df / /dev/shm; df -i /dev/shm; ls -lR /etc")
	all := []*being{m, m.fork()}
	all = append(all, all[1].fork())
	all = append(all, w.create(all[2].snapshot(true)))
	on := m.ask("readon /tree/d3 1000")
	for _, dir := range trees {
		// The first look at files tells when somebody last looked.
		want := m.ask("filesum %s", dir)
		for n, x := range all[1:] {
			if got := x.ask("filesum %s", dir); got != want {
				t.Errorf("generation %d has other files in %s", n+1, dir)
			}
		}
	}
	sums := m.sums()
	for n, x := range all {
		x.same(fmt.Sprintf("generation %d", n), sums)
		for _, dir := range trees {
			if said := x.ask("locked %s", dir); said != "ok" {
				t.Errorf("generation %d can lock a locked file in %s", n, dir)
			}
		}
		if got := x.run("df / /dev/shm; df -i /dev/shm; ls -lR /etc"); got != used {
			t.Errorf("generation %d has\n%s\nwant\n%s", n, got, used)
		}
		if n > 0 && x.ask("readon /tree/d3 1000") != on {
			t.Errorf("generation %d reads on in a directory with other names", n)
		}
	}
	for n, x := range all {
		for _, dir := range trees {
			x.ask("mess %s %d 3000", dir, n)
		}
		changed := x.sums()
		child := x.fork()
		child.same(fmt.Sprintf("a fork of the changed generation %d", n), changed)
		for _, dir := range trees {
			child.run("rm -r " + dir) // as far as nobody has it open
			child.run("mkdir " + dir + " && echo new >" + dir + "/f0")
		}
		child.destroy()
		x.same(fmt.Sprintf("generation %d after its fork's changes", n), changed)
		if n+1 < len(all) {
			all[n+1].same(fmt.Sprintf("generation %d after changes to another", n+1), sums)
		}
	}
}

// TestGitOfForks looks that git finds nothing changed in forks, which it tells
// by inode numbers and times.
func TestGitOfForks(t *testing.T) {
	w := newWorld(t, 2)
	m := w.guest()
	m.upload(programWithLibraries(t, "git"))
	m.ask("files /tree 500 3000")
	git := "cd /tree && export HOME=/tmp GIT_OPTIONAL_LOCKS=0 && git -c safe.directory=* "
	m.run("cd /tree && rm fifo socket && export HOME=/tmp && git init -q && git add . && git -c user.name=a -c user.email=a commit -q -m all")
	child := m.fork()
	for n, x := range []*being{m, child, child.fork()} {
		// Not "status", which looks into files whose times or numbers have changed.
		if got := x.run(git + "diff-files"); got != "" {
			t.Errorf("generation %d: git finds changed\n%s", n, got)
		}
		if got := x.run(git + "status --porcelain"); got != "" {
			t.Errorf("generation %d: git says\n%s", n, got)
		}
	}
}

// programWithLibraries returns the files of a program of this host.
func programWithLibraries(t *testing.T, name string) []string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ldd", path).Output()
	if err != nil {
		t.Fatal(err)
	}
	files := []string{path}
	for _, word := range strings.Fields(string(out)) {
		if strings.HasPrefix(word, "/") {
			files = append(files, word)
		}
	}
	return files
}

// upload copies files of this host to the same places, and programs to /bin.
func (m *being) upload(files []string) {
	m.Helper()
	for n, path := range files {
		f, err := os.Open(path)
		if err != nil {
			m.Fatal(err)
		}
		if n == 0 {
			path = filepath.Join("/bin", filepath.Base(path))
		}
		err = m.c.WriteFile(m.Context(), agentclient.File{Path: path, Mode: 0o755}, f)
		f.Close()
		if err != nil {
			m.Fatal(err)
		}
	}
}
