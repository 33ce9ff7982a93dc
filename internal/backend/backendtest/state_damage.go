package backendtest

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// damages are ways in which a file can come to harm.
var damages = map[string]func(name string, size int64) error{
	"missing":          func(name string, _ int64) error { return os.Remove(name) },
	"cut by half":      func(name string, size int64) error { return os.Truncate(name, size/2) },
	"a byte too short": func(name string, size int64) error { return os.Truncate(name, size-1) },
	"something else": func(name string, _ int64) error {
		return os.WriteFile(name, bytes.Repeat([]byte("something else "), 1000), 0o600)
	},
}

// testRestoreDamaged makes machines of snapshots that came to harm: each is
// refused, nothing is left, and the snapshot is as it was.
func testRestoreDamaged(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		m.writeMany("/data", 1<<20)
		s := m.take(memory)
		m.destroy()
		for name, size := range e.snapshotFiles(s.Dir) {
			for what, damage := range damages {
				if size == 0 && what != "missing" {
					continue // there is nothing to lose
				}
				harmed := s
				harmed.Dir = e.copied(s.Dir)
				if err := damage(filepath.Join(harmed.Dir, name), size); err != nil {
					e.Fatal(err)
				}
				e.refusedFrom(fmt.Sprintf("a %s whose %s is %s", kindOf(memory), name, what), harmed)
			}
		}
		for what, change := range map[string]func(*taken){
			"no directory":    func(s *taken) { s.Dir = filepath.Join(e.snapshotDir(), "missing") },
			"empty directory": func(s *taken) { s.Dir = e.snapshotDir() },
			"other backend":   func(s *taken) { s.Backend, s.Dir = "other", e.copied(s.Dir) },
		} {
			harmed := s
			change(&harmed)
			e.refusedFrom(fmt.Sprintf("a %s with %s", kindOf(memory), what), harmed)
		}
		before := e.content(s.Dir)
		r := e.restore(s) // the one that came to no harm
		r.write("/data", "changed")
		r.destroy()
		if diff := cmp.Diff(before, e.content(s.Dir)); diff != "" {
			e.Errorf("a machine that was made of a %s changed it:\n%s", kindOf(memory), diff)
		}
	}
}

// refusedFrom wants no machine to be made of a snapshot, and the snapshot to be
// as it was.
func (e *env) refusedFrom(why string, s taken) {
	e.Helper()
	before := e.content(s.Dir)
	e.refused(why, e.configFrom(s))
	if diff := cmp.Diff(before, e.content(s.Dir)); diff != "" {
		e.Errorf("%s was changed by a create that failed:\n%s", why, diff)
	}
	if err := os.RemoveAll(s.Dir); err != nil {
		e.Fatal(err)
	}
}

// snapshotFiles returns the sizes of a snapshot's files by their names.
func (e *env) snapshotFiles(dir string) map[string]int64 {
	e.Helper()
	sizes := map[string]int64{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		below, err := filepath.Rel(dir, name)
		sizes[below] = info.Size()
		return err
	})
	if err != nil {
		e.Fatal(err)
	}
	if len(sizes) == 0 {
		e.Error("a snapshot has no files")
	}
	return sizes
}

// content returns the digests of a snapshot's files by their names, nil for a
// directory that is not there.
func (e *env) content(dir string) map[string]string {
	e.Helper()
	if _, err := os.Stat(dir); err != nil {
		return nil
	}
	sums := map[string]string{}
	err := filepath.WalkDir(dir, func(name string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil {
			return err
		}
		sums[name] = fmt.Sprintf("%x", h.Sum(nil))
		return nil
	})
	if err != nil {
		e.Fatal(err)
	}
	return sums
}

// copied copies a snapshot.
func (e *env) copied(dir string) string {
	e.Helper()
	to := e.snapshotDir()
	run(e.TB, exec.Command("cp", "-a", "--sparse=always", dir+"/.", to))
	return to
}

// testRestoreFullStateDir makes machines of snapshots on a file system that is
// full.
func testRestoreFullStateDir(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		s := m.take(memory)
		m.destroy()
		cfg := e.configFrom(s)
		if err := unix.Mount("tmpfs", cfg.StateDir, "tmpfs", 0, "size=8k"); err != nil {
			e.Fatal(err)
		}
		e.refused("a full state directory", cfg)
		if err := unix.Unmount(cfg.StateDir, 0); err != nil {
			e.Errorf("unmount the full state directory: %v", err)
		}
		e.restore(s).destroy()
	}
}

// testRestoreCancelled cancels creates from snapshots.
func testRestoreCancelled(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		m.writeMany("/data", 1<<20)
		s := m.take(memory)
		m.destroy()
		before := e.content(s.Dir)
		e.cancelCreates(func() backend.Config { return e.configFrom(s) })
		if diff := cmp.Diff(before, e.content(s.Dir)); diff != "" {
			e.Errorf("creates that were cancelled changed a %s:\n%s", kindOf(memory), diff)
		}
		e.restore(s).destroy()
	}
}
