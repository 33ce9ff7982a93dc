package container

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// identity names a process of this host beyond the reuse of its number.
type identity struct {
	PID   int    `json:"pid"`
	Start uint64 `json:"start"` // clock ticks since boot
	Boot  string `json:"boot"`  // which boot
}

// identify returns the identity of the process that has a number now.
func identify(pid int) (identity, error) {
	start, err := startOf(pid)
	if err != nil {
		return identity{}, err
	}
	boot, err := bootID()
	return identity{PID: pid, Start: start, Boot: boot}, err
}

func bootID() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot's id: %w", err)
	}
	return strings.TrimSpace(string(b)), nil
}

// startOf returns when a process started. A zombie has ended.
func startOf(pid int) (uint64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0, backend.ErrGone
	}
	if err != nil {
		return 0, fmt.Errorf("look at process %d: %w", pid, err)
	}
	// The name, in parentheses, may have any characters in it.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const state, start = 0, 19
	if len(fields) <= start {
		return 0, fmt.Errorf("look at process %d: unknown form %q", pid, b)
	}
	if fields[state] == "Z" || fields[state] == "X" {
		return 0, backend.ErrGone
	}
	return strconv.ParseUint(fields[start], 10, 64)
}

// process is a handle on a process that need not be our child.
type process struct {
	identity
	fd *os.File
}

// openProcess returns the process of an identity, or backend.ErrGone.
func openProcess(want identity) (*process, error) {
	fd, err := unix.PidfdOpen(want.PID, unix.PIDFD_NONBLOCK)
	if err == unix.ESRCH {
		return nil, backend.ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", want.PID, err)
	}
	p := &process{identity: want, fd: os.NewFile(uintptr(fd), "pidfd")}
	// What the descriptor holds cannot be reused any more, so this tells.
	have, err := identify(want.PID)
	if err == nil && have != want {
		err = backend.ErrGone
	}
	if err != nil {
		p.fd.Close()
		return nil, err
	}
	return p, nil
}

// wait returns when the process has ended, and an error when the descriptor is
// closed before that.
func (p *process) wait() error {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(func(fd uintptr) bool { return over(int32(fd)) })
}

// ended reports whether the process has ended.
func (p *process) ended() (done bool, err error) {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return false, err
	}
	err = conn.Control(func(fd uintptr) { done = over(int32(fd)) })
	return done, err
}

// over reports whether the process of a descriptor has ended.
func over(pidfd int32) bool {
	n, err := unix.Poll([]unix.PollFd{{Fd: pidfd, Events: unix.POLLIN}}, 0)
	return err == nil && n > 0
}

// kill ends the process, which may have ended.
func (p *process) kill() error {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	var kerr error
	err = conn.Control(func(fd uintptr) {
		kerr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0)
	})
	if err != nil || kerr == unix.ESRCH {
		return nil // it has ended, and the descriptor may be closed for that
	}
	return kerr
}

// signal returns the signal that ended the process, 0 for none, and false when
// the kernel (before 6.15) does not tell those who are not the parent.
func (p *process) signal() (unix.Signal, bool) {
	conn, err := p.fd.SyscallConn()
	if err != nil {
		return 0, false
	}
	info := unix.PidfdInfo{Mask: unix.PIDFD_INFO_EXIT}
	var ierr error
	if err := conn.Control(func(fd uintptr) { ierr = unix.IoctlPidfdInfo(int(fd), &info) }); err != nil || ierr != nil {
		return 0, false
	}
	return unix.WaitStatus(info.Exit_code).Signal(), info.Mask&unix.PIDFD_INFO_EXIT != 0
}
