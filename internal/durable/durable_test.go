package durable_test

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/durable"
)

func TestPath(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("x"), 0o400); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{file, dir} {
		if err := durable.Path(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := durable.Path(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what is missing: %v", err)
	}
}

// What cannot be synced is not opened: a named pipe would wait for its writer,
// and a link may lead anywhere.
func TestTree(t *testing.T) {
	dir := t.TempDir()
	err := errors.Join(
		os.MkdirAll(filepath.Join(dir, "a", "b"), 0o700),
		os.WriteFile(filepath.Join(dir, "a", "b", "file"), []byte("x"), 0o400),
		os.Symlink("nowhere", filepath.Join(dir, "a", "link")),
		unix.Mkfifo(filepath.Join(dir, "a", "pipe"), 0o600),
	)
	if err != nil {
		t.Fatal(err)
	}
	if err := durable.Tree(dir); err != nil {
		t.Error(err)
	}
	if err := durable.Tree(filepath.Join(dir, "missing")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("what is missing: %v", err)
	}
}
