// Package patch holds what this project changes in gVisor, as diffs against
// the pinned module, and builds the sentry with them. The module itself is
// never part of the project: a build takes it from the module cache, applies
// the diffs to a copy below build/, and lets go.mod's replacement of a second
// module file point there. go.mod stays plain, so everything else, editors and
// vet among it, sees the module as it is.
//
// README.md says what each diff is for. Whether a sentry has them is part of
// its version: see Version.
package patch

import (
	"bytes"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"
)

// Module is the module that the diffs are for, and Pinned its version. Another
// version needs other diffs: the package's tests fail until both are changed.
const (
	Module = "gvisor.dev/gvisor"
	Pinned = "v0.0.0-20260905035102-160fafc42237"
)

//go:embed *.patch
var diffs embed.FS

// names lists the diffs in the order in which they are applied.
func names() []string {
	all, err := fs.Glob(diffs, "*.patch") // sorted
	if err != nil {
		panic("list the embedded diffs: " + err.Error()) // the pattern is right
	}
	return all
}

// Version is what a sentry with the diffs calls gVisor: the module's version
// and a hash of the diffs. gVisor writes it into a snapshot and refuses one
// with another.
func Version() string { return Pinned + "+" + hash() }

// Has reports whether a sentry of this version has the diffs.
func Has(version string) bool { return strings.HasPrefix(version, Version()) }

// hash names the module's version with the diffs, in twelve hexadecimal digits. Each
// fork asks for it several times.
var hash = sync.OnceValue(func() string {
	h := sha256.New()
	fmt.Fprintln(h, Module, Pinned)
	for _, name := range names() {
		text, err := diffs.ReadFile(name)
		if err != nil {
			panic("read an embedded diff: " + err.Error())
		}
		fmt.Fprintln(h, name, len(text))
		h.Write(text)
	}
	return hex.EncodeToString(h.Sum(nil))[:12]
})

// Build builds the sentry with the diffs into the file out. It is called below
// the project's directory and needs Go's command; what it made before of the
// module is used again. ldflags are further flags of the linker, "" for none.
func Build(out, ldflags string) error {
	out, err := filepath.Abs(out)
	if err != nil {
		return fmt.Errorf("build the sentry: %w", err)
	}
	top, err := project()
	if err != nil {
		return fmt.Errorf("build the sentry: %w", err)
	}
	modfile, err := prepare(top)
	if err != nil {
		return fmt.Errorf("build the sentry: patch %s@%s: %w", Module, Pinned, err)
	}
	cmd := exec.Command("go", "build", "-trimpath", "-modfile="+modfile,
		"-ldflags="+strings.TrimSpace(ldflags+" -X "+Module+"/runsc/version.version="+Version()),
		"-o", out, "./cmd/opendsec-sentry")
	cmd.Dir = top
	// A dynamically linked sentry dies in its chroot.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off")
	if said, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("build the sentry: %w\n%s", err, said)
	}
	return nil
}

// project returns the project's top directory.
func project() (string, error) {
	gomod, err := ask(".", "env", "GOMOD")
	if err != nil {
		return "", err
	}
	if gomod == "" || gomod == os.DevNull {
		return "", errors.New("not in the project's directory: there is no go.mod")
	}
	return filepath.Dir(gomod), nil
}

// ask returns what Go's command prints.
func ask(dir string, args ...string) (string, error) {
	cmd := exec.Command("go", args...)
	cmd.Dir = dir
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			err = fmt.Errorf("%w: %s", err, bytes.TrimSpace(exit.Stderr))
		}
		return "", fmt.Errorf("go %s: %w", strings.Join(args, " "), err)
	}
	return strings.TrimSpace(string(out)), nil
}

// source returns where the module cache has the module.
func source(top string) (string, error) {
	line, err := ask(top, "list", "-m", "-f", "{{.Version}} {{.Dir}}", Module)
	if err != nil {
		return "", err
	}
	version, dir, _ := strings.Cut(line, " ")
	if version != Pinned {
		return "", fmt.Errorf("go.mod wants version %s, and the diffs are for %s: change both together", version, Pinned)
	}
	if dir == "" {
		return "", errors.New("the module cache does not have it: run go mod download")
	}
	return dir, nil
}

// prepare makes the patched copy of the module, unless it is there, and a
// module file that uses it. It returns the file's path.
func prepare(top string) (modfile string, err error) {
	from, err := source(top)
	if err != nil {
		return "", err
	}
	dir := filepath.Join(top, "build", "gvisor-"+hash())
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		return "", err
	}
	unlock, err := lock(dir + ".lock")
	if err != nil {
		return "", err
	}
	defer unlock()
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		if err := makeCopy(from, dir); err != nil {
			return "", err
		}
	} else if err != nil {
		return "", err
	}
	return writeModfile(top, dir)
}

// lock waits until no other process prepares the same.
func lock(path string) (unlock func(), err error) {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	return func() { f.Close() }, nil
}

// makeCopy copies the module and applies the diffs to the copy, all or nothing.
func makeCopy(from, to string) error {
	changed, err := apply(os.DirFS(from))
	if err != nil {
		return err
	}
	temp := to + ".new"
	if err := os.RemoveAll(temp); err != nil {
		return err
	}
	if err := os.CopyFS(temp, os.DirFS(from)); err != nil {
		return err
	}
	for name, text := range changed {
		path := filepath.Join(temp, filepath.FromSlash(name))
		// The cache's files are read-only, and so are their copies.
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return err
		}
	}
	return os.Rename(temp, to)
}

// writeModfile writes the project's module file with the module replaced by the
// copy, and its sums.
func writeModfile(top, dir string) (string, error) {
	text, err := os.ReadFile(filepath.Join(top, "go.mod"))
	if err != nil {
		return "", err
	}
	sums, err := os.ReadFile(filepath.Join(top, "go.sum"))
	if err != nil {
		return "", err
	}
	text = fmt.Appendf(text, "\nreplace %s => %s\n", Module, dir)
	for path, text := range map[string][]byte{dir + ".mod": text, dir + ".sum": sums} {
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, text) {
			continue
		}
		if err := os.WriteFile(path, text, 0o644); err != nil {
			return "", err
		}
	}
	return dir + ".mod", nil
}

// apply returns the files that the diffs change or add, as they are then.
func apply(module fs.FS) (map[string][]byte, error) {
	changed := map[string][]byte{}
	for _, name := range names() {
		text, err := diffs.ReadFile(name)
		if err != nil {
			return nil, err
		}
		if err := applyDiff(module, changed, string(text)); err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
	}
	return changed, nil
}
