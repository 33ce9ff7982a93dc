package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// The sentry counts how often it was told to stand still, does not tell, and
// dies when it is told to go on once too often. So it is told only through
// Pause and Resume, which leave a file in its directory for a later run: one of
// these names, before and after each call.
const (
	markPausing  = "pausing"  // it may have been told
	markPaused   = "paused"   // it stands still
	markResuming = "resuming" // it may have been told to go on
)

// Pause stops the machine. The call to the sentry is not cut off when ctx ends
// in the middle, since that would leave nobody to say what became of it.
func (i *instance) Pause(ctx context.Context) error {
	i.still.Lock()
	defer i.still.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if i.paused {
		return i.alive()
	}
	if err := os.WriteFile(i.s.file(markPausing), nil, 0o600); err != nil {
		return fmt.Errorf("pause machine %s: %w", i.id, err)
	}
	if err := i.s.call(boot.ContMgrPause, nil, nil); err != nil {
		return fmt.Errorf("pause machine %s: %w", i.id, err)
	}
	i.paused = true
	i.b.warn(os.Rename(i.s.file(markPausing), i.s.file(markPaused)), i.id)
	return nil
}

// Resume lets the machine go on.
func (i *instance) Resume(ctx context.Context) error {
	i.still.Lock()
	defer i.still.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if !i.paused {
		return i.alive()
	}
	i.b.warn(i.s.leave(markPaused, markResuming), i.id)
	if err := i.s.call(boot.ContMgrResume, nil, nil); err != nil {
		return fmt.Errorf("resume machine %s: %w", i.id, err)
	}
	i.paused = false
	i.s.letMemoryGo()
	i.b.warn(i.s.unmark(), i.id)
	return nil
}

// alive returns an error when the machine has ended.
func (i *instance) alive() error {
	if i.s.exited() {
		return fmt.Errorf("machine %s: %w", i.id, backend.ErrGone)
	}
	return nil
}

// warn logs that a mark could not be changed. What the mark is for has been
// done, and only a later run that finds it could be led astray.
func (b *Backend) warn(err error, id sandbox.ID) {
	if err != nil {
		b.log.Error("cannot note that a machine stands still or goes on", "sandbox", id, "error", err)
	}
}

// file returns the path of one of the sentry's files.
func (s *sentry) file(name string) string { return filepath.Join(s.Dir, name) }

// marked reports whether the sentry has a mark.
func (s *sentry) marked(name string) bool {
	_, err := os.Lstat(s.file(name))
	return err == nil
}

// leave makes one mark of another, which takes no space on the disk.
func (s *sentry) leave(from, to string) error {
	err := os.Rename(s.file(from), s.file(to))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // an uncertain one is there
	}
	return err
}

// unmark removes all marks.
func (s *sentry) unmark() error { return s.drop(markPausing, markPaused, markResuming) }

// drop removes marks.
func (s *sentry) drop(marks ...string) error {
	var errs []error
	for _, m := range marks {
		if err := os.Remove(s.file(m)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// wasPaused tells of a sentry that was found again whether it stands still for
// a Pause. A call that an earlier run was killed in may have come through or
// not; then it is looked at.
func (s *sentry) wasPaused(ctx context.Context) (bool, error) {
	switch {
	case s.marked(markPausing), s.marked(markResuming):
	default:
		return s.marked(markPaused), nil
	}
	still, err := s.standsStill(ctx)
	if err != nil {
		return false, err
	}
	if still {
		err = os.WriteFile(s.file(markPaused), nil, 0o600)
		return true, errors.Join(err, s.drop(markPausing, markResuming))
	}
	return false, s.unmark()
}

// How often and how long a sentry is looked at. The state that a process has
// when all stands still is also that of one that starts a program, for moments.
const (
	looks     = 20
	lookEvery = 25 * time.Millisecond
)

// standsStill looks whether process 1 stands still, half a second long.
func (s *sentry) standsStill(ctx context.Context) (bool, error) {
	tick := time.NewTicker(lookEvery)
	defer tick.Stop()
	for range looks {
		state, err := s.processState()
		if err != nil {
			return false, err
		}
		if !strings.HasPrefix(state, "D") {
			return false, nil
		}
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case <-tick.C:
		}
	}
	return true, nil
}

// processState returns the state of process 1 as /proc inside tells it, which
// also works when all stands still.
func (s *sentry) processState() (string, error) {
	out, err := memoryFile("status")
	if err != nil {
		return "", err
	}
	defer out.Close()
	args := control.ReadOpts{Path: "/proc/1/status", FilePayload: urpc.FilePayload{Files: []*os.File{out}}}
	if err := s.call(boot.FsRead, &args, nil); err != nil {
		return "", fmt.Errorf("read the state of process 1: %w", err)
	}
	text := make([]byte, 4<<10)
	n, err := out.ReadAt(text, 0)
	if n == 0 {
		return "", fmt.Errorf("read the state of process 1: %w", err)
	}
	for line := range strings.Lines(string(text[:n])) {
		if state, ok := strings.CutPrefix(line, "State:"); ok {
			return strings.TrimSpace(state), nil
		}
	}
	return "", fmt.Errorf("read the state of process 1: it is not in %q", text[:n])
}

// call makes one call to the sentry. It ends with the sentry at the latest.
func (s *sentry) call(method string, args, result any) error {
	c, err := s.dial()
	if err != nil {
		return err
	}
	defer c.Close()
	return c.Call(method, args, result)
}
