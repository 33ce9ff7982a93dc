package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/program/install"
)

// The process that runs an installation holds a lock on the file with its
// number. The kernel lets go of it when the process ends, however it ends, so
// a number that is left over, or is another process's by now, misleads nobody.
// The file stays: one that is removed could be locked by two.

func pidFile(in *install.Installation) string { return filepath.Join(in.StateDir(), "opendsec.pid") }
func logFile(in *install.Installation) string { return filepath.Join(in.StateDir(), "opendsec.log") }

// errRunning says that another process runs the installation.
type errRunning struct {
	pid int
	ops string
}

func (e errRunning) Error() string {
	return fmt.Sprintf("it is running already, as process %d; stop it with: opendsec down --ops %s", e.pid, e.ops)
}

// lock makes this process the one that runs the installation, until unlock.
// The error is errRunning when another does.
func lock(in *install.Installation) (unlock func(), err error) {
	f, err := os.OpenFile(pidFile(in), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the pid file: %w", err)
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	for {
		err = unix.FcntlFlock(f.Fd(), unix.F_OFD_SETLK, &unix.Flock_t{Type: unix.F_WRLCK})
		if !errors.Is(err, unix.EAGAIN) && !errors.Is(err, unix.EACCES) {
			break
		}
		if err := busy(in); err != nil {
			return nil, err
		}
	}
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	// In one write over the old number, so that nobody reads a part of it.
	if _, err := fmt.Fprintf(f, "%-10d\n", os.Getpid()); err != nil {
		return nil, fmt.Errorf("write the pid file: %w", err)
	}
	return func() {
		_ = f.Truncate(0) // the lock is what counts
		f.Close()
	}, nil
}

// busy returns the error that another process runs the installation; nil when
// none does. One that was killed holds its lock for a moment longer, until the
// kernel has ended its threads; that moment is waited for.
func busy(in *install.Installation) error {
	for {
		pid, err := running(in)
		if err != nil || pid == 0 {
			return err
		}
		if !dying(pid) {
			return errRunning{pid, in.Ops}
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// dying reports whether a process has been sent SIGKILL, is on its way out, or
// is gone.
func dying(pid int) bool {
	status, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		set, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if err == nil && set&(1<<(unix.SIGKILL-1)) != 0 {
			return true
		}
	}
	stat, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "stat"))
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	// After the name in parentheses, which may hold anything, the seventh field
	// has the kernel's flags; 4 is PF_EXITING.
	_, rest, _ := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')'):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 7 {
		return false
	}
	flags, err := strconv.ParseUint(fields[6], 10, 64)
	return err == nil && flags&4 != 0
}

// running returns the process that runs the installation, 0 if none does.
func running(in *install.Installation) (int, error) {
	f, err := os.Open(pidFile(in))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("open the pid file: %w", err)
	}
	defer f.Close()
	held := unix.Flock_t{Type: unix.F_RDLCK}
	if err := unix.FcntlFlock(f.Fd(), unix.F_OFD_GETLK, &held); err != nil {
		return 0, fmt.Errorf("look who holds %s: %w", f.Name(), err)
	}
	if held.Type == unix.F_UNLCK {
		return 0, nil
	}
	b, err := io.ReadAll(f)
	if err != nil {
		return 0, fmt.Errorf("read the pid file: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("it is just starting or ending; try again")
	}
	return pid, nil
}
