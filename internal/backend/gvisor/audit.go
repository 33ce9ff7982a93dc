package gvisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Audit lists the processes, control groups and files of sentries that serve
// no sandbox in known and are not held ready.
func (b *Backend) Audit(ctx context.Context, known []sandbox.ID) ([]backend.Leftover, error) {
	var found []backend.Leftover
	add := func(kind backend.LeftoverKind, sentry, name, detail string) {
		id, ours := b.sandboxOf(sentry)
		if ours && id == "" || slices.Contains(known, id) {
			return
		}
		found = append(found, backend.Leftover{Kind: kind, Name: name, ID: id, Detail: detail})
	}
	files, err := b.files()
	if err != nil {
		return nil, fmt.Errorf("audit gVisor's files: %w", err)
	}
	processes, err := sentries(ctx)
	if err != nil {
		return nil, fmt.Errorf("audit gVisor's processes: %w", err)
	}
	for _, p := range processes {
		if b.ours(p.name) {
			add(backend.LeftoverProcess, p.name, strconv.Itoa(p.pid), "sentry "+p.name)
		}
	}
	for _, name := range cgroup.List(b.opts.Prefix) {
		if b.ours(name) {
			add(backend.LeftoverCgroup, name, name, "of sentry "+name)
		}
	}
	for _, file := range files {
		name := strings.TrimSuffix(file, recordSuffix)
		add(backend.LeftoverFile, name, filepath.Join(b.opts.StateDir, file), "of sentry "+name)
	}
	return found, nil
}

// process is a running sentry.
type process struct {
	pid  int
	name string
}

// sentries lists the sentries of all edges on this machine.
func sentries(ctx context.Context) ([]process, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	var all []process
	for _, e := range entries {
		if err := ctx.Err(); err != nil {
			return nil, err
		}
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if name, ok := sentryName(pid); ok {
			all = append(all, process{pid, name})
		}
	}
	return all, nil
}

// sentryName returns the name of the sentry that a process is, if it is one.
func sentryName(pid int) (string, bool) {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	if err != nil {
		return "", false
	}
	args := bytes.Split(bytes.TrimSuffix(line, []byte{0}), []byte{0})
	if len(args) < 3 || string(args[0]) != processName {
		return "", false
	}
	return string(args[len(args)-1]), true
}

// Remove removes what Audit listed.
func (b *Backend) Remove(_ context.Context, l backend.Leftover) error {
	switch l.Kind {
	case backend.LeftoverProcess:
		return b.removeProcess(l.Name)
	case backend.LeftoverCgroup:
		if !b.ours(l.Name) {
			break
		}
		group, err := cgroup.Open(b.opts.Prefix, l.Name)
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		return group.Remove()
	case backend.LeftoverFile:
		if filepath.Dir(l.Name) != filepath.Clean(b.opts.StateDir) || !b.ours(filepath.Base(l.Name)) && !strings.HasPrefix(filepath.Base(l.Name), probePrefix) {
			break
		}
		return os.RemoveAll(l.Name)
	}
	return fmt.Errorf("remove %s %q: it is not the gvisor backend's", l.Kind, l.Name)
}

// removeProcess kills a sentry by its number, if it is still one of ours.
func (b *Backend) removeProcess(number string) error {
	pid, err := strconv.Atoi(number)
	if err != nil {
		return fmt.Errorf("remove process %q: not a number", number)
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err == unix.ESRCH {
		return nil
	}
	if err != nil {
		return fmt.Errorf("remove process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	// Only now, that the number cannot pass to another.
	if name, ok := sentryName(pid); !ok || !b.ours(name) {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil && err != unix.ESRCH {
		return fmt.Errorf("remove process %d: %w", pid, err)
	}
	return nil
}

// sandboxOf returns the sandbox that a sentry serves, "" for none, and whether
// the sentry is of this run. Of others it tells what an earlier run recorded.
func (b *Backend) sandboxOf(name string) (id sandbox.ID, known bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if id, known = b.live[name]; known {
		return id, true
	}
	if target, err := os.Readlink(b.record(name)); err == nil {
		id = sandbox.ID(target)
	}
	return id, false
}

// files lists the sentries' directories and records in StateDir, and the
// directories of probes.
func (b *Backend) files() ([]string, error) {
	entries, err := os.ReadDir(b.opts.StateDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var files []string
	for _, e := range entries {
		if strings.Contains(e.Name(), sharesSuffix) {
			continue // they go with their sentry's end
		}
		if b.ours(e.Name()) || strings.HasPrefix(e.Name(), probePrefix) {
			files = append(files, e.Name())
		}
	}
	return files, nil
}

// sweep ends the sentries that a killed run held ready or had on their way.
// They have a directory here and no record; nobody can want them any more.
func (b *Backend) sweep() {
	files, err := b.files()
	if err != nil {
		b.log.Error("cannot look for what an earlier run left", "error", err)
		return
	}
	if err := b.loadShares(); err != nil {
		b.log.Error("cannot tell what memory machines share", "error", err)
	}
	var left []*sentry
	for _, name := range files {
		if strings.HasPrefix(name, probePrefix) {
			os.RemoveAll(filepath.Join(b.opts.StateDir, name)) // Audit tells if it stays
			continue
		}
		if id, known := b.sandboxOf(name); id == "" && !known && !strings.HasSuffix(name, recordSuffix) {
			left = append(left, &sentry{Name: name, Prefix: b.opts.Prefix, Dir: filepath.Join(b.opts.StateDir, name)})
		}
	}
	if len(left) == 0 {
		return
	}
	processes, err := sentries(context.Background())
	if err != nil {
		b.log.Error("cannot look for what an earlier run left", "error", err)
		return
	}
	for _, s := range left {
		var err error
		for _, p := range processes {
			if p.name == s.Name {
				err = b.removeProcess(strconv.Itoa(p.pid))
			}
		}
		// Its removal waits for the process's end.
		if group, gerr := cgroup.Open(s.Prefix, s.Name); gerr == nil {
			s.group = group
		}
		if err = errors.Join(err, b.discard(s)); err != nil {
			b.log.Error("cannot end what an earlier run held ready", "sentry", s.Name, "error", err)
		}
	}
}

// loadShares learns what sentries of an earlier run share.
func (b *Backend) loadShares() error {
	entries, err := os.ReadDir(b.opts.StateDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var names []string
	for _, e := range entries {
		if b.ours(e.Name()) {
			names = append(names, e.Name())
		}
	}
	return b.shares.load(names)
}

// ours reports whether a name is that of a sentry of this edge.
func (b *Backend) ours(name string) bool {
	return strings.HasPrefix(name, b.opts.Prefix+"-") && !strings.ContainsRune(name, '/')
}
