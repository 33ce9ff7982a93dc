package gvisor

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/cgroup"
)

// processName is argument 0 of every sentry.
const processName = "opendsec-sentry"

// The files of a sentry, in its directory.
const (
	controlSocket = "control.sock"
	crashLog      = "crash.log" // what the sentry says when it dies; else empty
)

// newName returns the name of a new sentry, which its control group has too.
func (b *Backend) newName() string {
	return b.opts.Prefix + "-" + strings.ToLower(rand.Text()[:12])
}

// launch starts a sentry and its process 1. On an error nothing is left but the
// slot. The CPU has no limit yet.
// Its files are those of a snapshot of files, nil for the image's.
func (b *Backend) launch(ctx context.Context, k key, slot backend.Slot, files *backend.Snapshot) (*sentry, error) {
	s, err := b.boot(ctx, k, beginning{saved: files != nil, files: files})
	if err != nil {
		return nil, err
	}
	s.Slot = slot
	err = s.start(ctx, k.pids)
	if err == nil && files != nil {
		err = s.filled(ctx)
	}
	if err != nil {
		return nil, errors.Join(err, s.crash(), b.discard(s))
	}
	return s, nil
}

// beginning says what a sentry is to begin with.
type beginning struct {
	saved bool              // a saved state, for which its memory limit is lifted until settle
	files *backend.Snapshot // files; nil for the image's, or for memory, which is told later
}

// boot starts a sentry: its kernel is up, and its process 1 waits for start. On
// an error nothing is left.
func (b *Backend) boot(ctx context.Context, k key, begin beginning) (_ *sentry, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	name := b.newName()
	s := &sentry{Name: name, Prefix: b.opts.Prefix, Dir: filepath.Join(b.opts.StateDir, name), Version: b.sentryVersion()}
	b.know(name, "")
	defer func() {
		if err != nil {
			err = fmt.Errorf("create gVisor machine: %w", errors.Join(err, s.crash(), b.discard(s)))
		}
	}()
	if err := os.MkdirAll(s.Dir, 0o700); err != nil {
		return nil, err
	}
	limits := k.hostLimits()
	if begin.saved {
		limits.MemoryMB = lifted(limits.MemoryMB)
		s.room.users = 1
	}
	if s.group, err = cgroup.New(s.Prefix, name, limits); err != nil {
		return nil, err
	}
	if err := s.group.KillTogether(); err != nil {
		return nil, err
	}
	var open []*os.File // owned by exec
	if begin.files != nil {
		if open, err = openSnapshot(*begin.files); err != nil {
			return nil, err
		}
	}
	if err := b.exec(ctx, s, k, open); err != nil {
		return nil, err
	}
	return s, nil
}

// exec starts the sentry's process in its control group and waits until its
// kernel is up. It closes files, the layer that the sentry begins with.
func (b *Backend) exec(ctx context.Context, s *sentry, k key, files []*os.File) error {
	cmd := exec.Command(b.opts.SentryPath)
	fds := &descriptors{}
	defer fds.close()
	for _, f := range files {
		fds.add("fs-restore-fds", f, nil)
	}
	ready, up, err := os.Pipe()
	if err != nil {
		return err
	}
	defer ready.Close()
	fds.add("start-sync-fd", up, nil)
	if err := b.openFiles(s, k, fds); err != nil {
		return err
	}
	pidfd := -1
	cmd.Args, cmd.Env = b.arguments(s, k, fds), []string{}
	cmd.ExtraFiles = fds.files
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Setsid: true, // no signal of a terminal reaches it
		// In all of them it sees nothing of the host; it makes itself an empty
		// root. Its control group's namespace stays, for the host counts there.
		Cloneflags:  unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{Size: 1<<32 - 1}},
		GidMappings: []syscall.SysProcIDMap{{Size: 1<<32 - 1}},
		// Capabilities in the new user namespace come with user 0 only.
		Credential: &syscall.Credential{},
		PidFD:      &pidfd,
	}
	err = s.group.Start(func(v2 *os.File) error {
		if v2 != nil {
			cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(v2.Fd())
		}
		return cmd.Start()
	})
	if err != nil {
		return fmt.Errorf("start %s: %w", b.opts.SentryPath, err)
	}
	fds.close() // so that the pipe ends when the sentry does
	err = s.hold(cmd.Process.Pid, pidfd)
	cmd.Process.Release() // its descriptor; we have our own
	if err != nil {
		return err
	}
	// It locks memory for moments, to have many pages at once.
	limit := unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}
	if err := unix.Prlimit(s.PID, unix.RLIMIT_MEMLOCK, &limit, nil); err != nil && err != unix.ESRCH {
		b.log.Debug("cannot raise a sentry's limit of locked memory", "error", err)
	}
	stop := context.AfterFunc(ctx, func() { ready.Close() })
	defer stop()
	if _, err := io.ReadFull(ready, make([]byte, 1)); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		return errors.New("the sentry ended before its kernel was up")
	}
	return nil
}

// openFiles opens what the sentry gets besides the start pipe.
func (b *Backend) openFiles(s *sentry, k key, fds *descriptors) error {
	crash, err := os.OpenFile(filepath.Join(s.Dir, crashLog), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	fds.add("panic-log-fd", crash, err)
	// Order matters: the image is first, then the mounts as in the spec.
	rootfs, err := os.Open(k.rootfs)
	fds.add("io-fds", rootfs, err)
	agent, err := os.Open(k.agent)
	fds.add("io-fds", agent, err)
	// On the state file system, without a name: it goes with the sentry.
	upper, err := os.OpenFile(s.Dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
	s.UpperFD = fds.add("gofer-filestore-fds", upper, err)
	spec, err := k.specFile()
	fds.add("spec-fd", spec, err)
	control, err := listenControl(filepath.Join(s.Dir, controlSocket))
	if err == nil {
		fds.add("controller-fd", os.NewFile(uintptr(control), controlSocket), nil)
	} else {
		fds.add("controller-fd", nil, err)
	}
	for range 3 { // the agent's own standard input, output and error
		null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
		fds.add("stdio-fds", null, err)
	}
	if b.opts.DebugDir != "" {
		debug, err := os.OpenFile(filepath.Join(b.opts.DebugDir, s.Name+".log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
		fds.add("debug-log-fd", debug, err)
	}
	return errors.Join(fds.errs...)
}

// arguments returns the sentry's command line: the general flags, "boot", its
// flags, and the name.
func (b *Backend) arguments(s *sentry, k key, fds *descriptors) []string {
	args := append([]string{processName}, b.conf.ToFlags()...)
	args = append(args, fds.flags("panic-log-fd", "debug-log-fd")...)
	args = append(args, "boot", "--bundle="+s.Dir)
	args = append(args, fds.flags("start-sync-fd", "io-fds", "gofer-filestore-fds", "spec-fd", "controller-fd", "stdio-fds", "fs-restore-fds")...)
	total := uint64(k.memoryMB) << 20
	host := total
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err == nil {
		host = info.Totalram * uint64(info.Unit)
	}
	return append(args,
		"--gofer-mount-confs="+k.mountConfs(),
		"--apply-caps=true",
		"--setup-root",
		"--cpu-num="+strconv.Itoa(k.cpus),
		"--total-memory="+strconv.FormatUint(total, 10),
		"--total-host-memory="+strconv.FormatUint(host, 10),
		s.Name)
}

// firstFD is the number of a child's first descriptor after standard error.
const firstFD = 3

// descriptors are the files that a child inherits, each under a flag's name.
type descriptors struct {
	files []*os.File
	names []string
	errs  []error
}

// add takes over a file, or the error of its opening, and returns the number
// that it has in the child.
func (d *descriptors) add(flag string, f *os.File, err error) int {
	if err != nil {
		d.errs = append(d.errs, err)
		return -1
	}
	d.files = append(d.files, f)
	d.names = append(d.names, flag)
	return firstFD + len(d.files) - 1
}

// flags returns the flags of these names, in the order in which they were added.
func (d *descriptors) flags(names ...string) []string {
	var out []string
	for _, name := range names {
		for i, n := range d.names {
			if n == name {
				out = append(out, fmt.Sprintf("--%s=%d", name, firstFD+i))
			}
		}
	}
	return out
}

// close closes the files. It may be repeated.
func (d *descriptors) close() {
	for _, f := range d.files {
		f.Close()
	}
}
