package gvisor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// sentry is a sentry's process and what belongs to it. Its exported fields are
// what finds it again.
type sentry struct {
	Name    string `json:"name"`     // also its control group's, below Prefix
	Prefix  string `json:"prefix"`   // of the edge
	Dir     string `json:"dir"`      // its files
	PID     int    `json:"pid"`      // 0 before it runs
	Started string `json:"started"`  // start time of PID, which tells it from a later process of that number
	UpperFD int    `json:"upper_fd"` // its descriptor of the writable layer

	Limits sandbox.Limits `json:"limits"` // those that it was made for
	Agent  string         `json:"agent"`  // the agent's ID
	// Features are those of the CPU that its memory was made on, when that came
	// from a snapshot; nil for this host's.
	Features []string `json:"features,omitempty"`

	// Version is what its binary called itself when it was started.
	Version string `json:"version,omitempty"`

	// freezing is held while its memory is frozen, until somebody uses it, and
	// when it is thawed. frozen are the names of frozen memory, under freezing,
	// and held is how many bytes it is.
	freezing sync.Mutex
	frozen   []string
	held     atomic.Int64
	ending   atomic.Bool // it has been killed
	overused atomic.Bool // for its use of memory
	making   atomic.Bool // it is being restored: it does not know yet what it maps

	// memory has descriptors of its memory, for as long as its removal takes,
	// nil for most.
	memory atomic.Pointer[[]*os.File]

	// unstarted says that it has the memory of a snapshot and runs none of it yet.
	unstarted bool

	Slot backend.Slot `json:"slot"` // its network
	lent bool         // the slot is not a sandbox's yet

	group *cgroup.Group
	room  headroom
	pidfd *os.File
	gone  chan struct{} // closed when the process has ended
	// status is of our child, nil when the process is not ours. It is set
	// before gone is closed.
	status *unix.WaitStatus
}

// hold takes over a process that was just started or found again.
func (s *sentry) hold(pid, pidfd int) error {
	s.PID = pid
	if pidfd < 0 {
		var err error
		if pidfd, err = unix.PidfdOpen(pid, 0); err != nil {
			return fmt.Errorf("hold process %d: %w", pid, err)
		}
	}
	if err := unix.SetNonblock(pidfd, true); err != nil {
		unix.Close(pidfd)
		return fmt.Errorf("hold process %d: %w", pid, err)
	}
	s.pidfd = os.NewFile(uintptr(pidfd), "process "+strconv.Itoa(pid))
	started, err := startTime(pid)
	if err != nil {
		return fmt.Errorf("hold process %d: %w", pid, err)
	}
	s.Started = started
	s.gone = make(chan struct{})
	go s.watch()
	return nil
}

// watch waits for the process's end, reaps it if it is our child, and says so.
// The runtime's poller does the waiting, so there is no thread for each sentry.
func (s *sentry) watch() {
	raw, err := s.pidfd.SyscallConn()
	if err == nil {
		err = raw.Read(func(fd uintptr) bool { return ended(int(fd)) })
	}
	if err != nil {
		return // released: nobody asks any more
	}
	var ws unix.WaitStatus
	pid, err := unix.Wait4(s.PID, &ws, unix.WNOHANG, nil)
	for err == unix.EINTR {
		pid, err = unix.Wait4(s.PID, &ws, unix.WNOHANG, nil)
	}
	if err == nil && pid == s.PID {
		s.status = &ws
	}
	close(s.gone)
}

// startTime returns when a process started, in the kernel's own count.
func startTime(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	// The second field, in parentheses, may hold anything.
	_, rest, _ := strings.Cut(string(stat[bytes.LastIndexByte(stat, ')'):]), " ")
	fields := strings.Fields(rest)
	if len(fields) < 20 {
		return "", fmt.Errorf("/proc/%d/stat has too few fields", pid)
	}
	return fields[19], nil
}

// exited reports whether the process has ended.
func (s *sentry) exited() bool {
	if s.pidfd == nil {
		return true
	}
	raw, err := s.pidfd.SyscallConn()
	if err != nil {
		return true
	}
	done := true
	raw.Control(func(fd uintptr) { done = ended(int(fd)) })
	return done
}

// ended reports whether the process behind a pidfd has ended.
func ended(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// wait returns when the process has ended.
func (s *sentry) wait(ctx context.Context) error {
	if s.pidfd == nil {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-s.gone:
		return nil
	}
}

// kill ends the process with SIGKILL; the sandbox's processes go with it.
func (s *sentry) kill() error {
	s.ending.Store(true)
	if s.pidfd == nil {
		return nil
	}
	raw, err := s.pidfd.SyscallConn()
	if err != nil {
		return nil
	}
	var kerr error
	raw.Control(func(fd uintptr) { kerr = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
	if kerr != nil && kerr != unix.ESRCH {
		return fmt.Errorf("kill process %d: %w", s.PID, kerr)
	}
	return nil
}

// stop kills the process and waits for its end.
func (s *sentry) stop() error {
	if err := s.kill(); err != nil {
		return err
	}
	return s.wait(context.Background())
}

// destroy ends the process and removes its control group and its files. It may
// be repeated, also when an earlier try failed half-way.
func (s *sentry) destroy() error {
	if err := s.stop(); err != nil {
		return err
	}
	var errs []error
	if s.group != nil {
		errs = append(errs, s.group.Remove())
	}
	errs = append(errs, os.RemoveAll(s.Dir))
	return errors.Join(errs...)
}

// keepMemory keeps descriptors of the sentry's memory and layers, which it takes
// over, until letMemoryGo. So the process's end does not wait for the host to
// free them, which takes longer than the rest of a removal.
func (s *sentry) keepMemory(files []*os.File) {
	if former := s.memory.Swap(&files); former != nil {
		closeAll(*former)
	}
}

// letMemoryGo ends that. It takes as long as the host frees it.
func (s *sentry) letMemoryGo() {
	if files := s.memory.Swap(nil); files != nil {
		closeAll(*files)
	}
}

// release lets go of the process's descriptor.
func (s *sentry) release() {
	if s.pidfd != nil {
		s.pidfd.Close()
	}
}

// find holds the sentry again after a restart. backend.ErrGone says that its
// process has ended.
func (s *sentry) find() error {
	group, err := cgroup.Open(s.Prefix, s.Name)
	switch {
	case err == nil:
		s.group = group
	case !errors.Is(err, fs.ErrNotExist):
		return err
	}
	if s.PID <= 0 {
		return backend.ErrGone
	}
	want := s.Started
	if err := s.hold(s.PID, -1); err != nil {
		if errors.Is(err, unix.ESRCH) || errors.Is(err, fs.ErrNotExist) {
			return backend.ErrGone
		}
		return err
	}
	if s.Started != want || s.exited() {
		s.release()
		s.pidfd = nil // somebody else's
		return backend.ErrGone
	}
	return nil
}

// maxCrash is how much of a crash log goes into an error or an Exit, in bytes.
const maxCrash = 4 << 10

// crash returns what the sentry said when it died, nil when it said nothing.
func (s *sentry) crash() error {
	b, err := os.ReadFile(filepath.Join(s.Dir, crashLog))
	if err != nil {
		return nil
	}
	text := strings.TrimSpace(string(b[:min(len(b), maxCrash)]))
	if text == "" {
		return nil
	}
	return errors.New("the sentry said: " + text)
}

// usage returns what the writable layer takes of the disk, in bytes.
func (s *sentry) usage() (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/fd/%d", s.PID, s.UpperFD), &st); err != nil {
		return 0, fmt.Errorf("size of the writable layer: %w", err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG || st.Nlink != 0 {
		return 0, fmt.Errorf("size of the writable layer: descriptor %d of process %d is something else", s.UpperFD, s.PID)
	}
	return st.Blocks * 512, nil
}
