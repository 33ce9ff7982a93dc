package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Freezer stops the processes of a group and lets them go on. It is for a
// group that was made in all hierarchies, as OCI runtimes do: on v1, stopping is
// a controller of its own, which a Group of this package does not use.
type Freezer struct {
	path string // of the group's directory
	v2   bool
}

// freezeWait bounds how long Freeze tries, when its context does not. A process
// that waits for a disk stops when the disk has answered.
const freezeWait = 30 * time.Second

// OpenFreezer returns the freezer of a group. An error that is fs.ErrNotExist
// says that there is no such group where this host can stop processes.
func OpenFreezer(parent, name string) (*Freezer, error) {
	if err := checkNames(parent, name); err != nil {
		return nil, err
	}
	places, err := freezers()
	if err != nil {
		return nil, err
	}
	for _, h := range places {
		f := &Freezer{path: filepath.Join(h.mount, parent, name), v2: h.v2}
		if _, err := os.Stat(f.path); err == nil {
			return f, nil
		}
	}
	return nil, fmt.Errorf("freezer of control group %s/%s: %w", parent, name, fs.ErrNotExist)
}

// freezers returns the hierarchies in which processes can be stopped, v1 first:
// on a hybrid host not every process has a group of its own in v2.
var freezers = sync.OnceValues(func() ([]hierarchy, error) {
	info, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("find control groups: %w", err)
	}
	return chooseFreezers(string(info)), nil
})

func chooseFreezers(mountinfo string) []hierarchy {
	var v1, v2 []hierarchy
	for line := range strings.Lines(mountinfo) {
		before, after, ok := strings.Cut(line, " - ")
		place, kind := strings.Fields(before), strings.Fields(after)
		if !ok || len(place) < 5 || len(kind) < 3 {
			continue
		}
		h := hierarchy{root: unescape(place[3]), mount: unescape(place[4])}
		switch {
		case kind[0] == "cgroup" && slices.Contains(strings.Split(kind[2], ","), "freezer"):
			v1 = append(v1, h)
		case kind[0] == "cgroup2":
			h.v2 = true
			v2 = append(v2, h)
		}
	}
	return append(v1, v2...)
}

// Freeze stops all processes of the group and returns when all stand still. It
// may be repeated. After an error they run. On v2 a process that was killed
// before it stopped may die afterwards.
func (f *Freezer) Freeze(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, freezeWait)
	defer cancel()
	var err error
	if f.v2 {
		err = f.freezeV2(ctx)
	} else {
		err = f.freezeV1(ctx)
	}
	if err == nil {
		return nil
	}
	waits := f.waiting()
	return errors.Join(fmt.Errorf("stop control group %s: %w%s", f.path, err, waits), f.Thaw())
}

// Thaw lets the group's processes go on. It may be repeated.
func (f *Freezer) Thaw() error {
	file, value := "freezer.state", "THAWED"
	if f.v2 {
		file, value = "cgroup.freeze", "0"
	}
	if err := write(f.path, file, value); err != nil {
		return fmt.Errorf("let control group %s go on: %w", f.path, err)
	}
	if f.v2 {
		ctx, cancel := context.WithTimeout(context.Background(), freezeWait)
		defer cancel()
		if err := f.waitV2(ctx, 0); err != nil {
			return fmt.Errorf("let control group %s go on: %w", f.path, err)
		}
		return nil
	}
	state, err := f.state()
	if err == nil && state != "THAWED" {
		err = fmt.Errorf("it is %s; is a group above it frozen?", state)
	}
	if err != nil {
		return fmt.Errorf("let control group %s go on: %w", f.path, err)
	}
	return nil
}

// Kill kills the group's processes, whether they stand still or not. It does
// not wait for their end. None that stood still runs again before it dies.
func (f *Freezer) Kill() error {
	if f.v2 && write(f.path, "cgroup.kill", "1") == nil {
		return nil
	}
	g := Group{dirs: []dir{{path: f.path}}}
	if err := g.Kill(); err != nil {
		return err
	}
	// A stopped process of v1 dies when it goes on. The signal is there first.
	if err := f.Thaw(); err != nil && !gone(err) {
		return err
	}
	return nil
}

// state returns the state of a v1 group. To read it is what makes the kernel
// look whether all have stopped.
func (f *Freezer) state() (string, error) {
	b, err := os.ReadFile(filepath.Join(f.path, "freezer.state"))
	return strings.TrimSpace(string(b)), err
}

// freezeV1 freezes and looks, as v1 announces nothing. A group can hang between
// the two states: when a process that dies waits for one that was stopped
// already, or a new process escaped. So after a while all go on for a moment,
// and it begins again.
func (f *Freezer) freezeV1(ctx context.Context) error {
	for patience := 250 * time.Millisecond; ; patience *= 2 {
		try, cancel := context.WithTimeout(ctx, patience)
		err := f.tryV1(try)
		cancel()
		if err == nil || ctx.Err() != nil || !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		if err := f.Thaw(); err != nil {
			return err
		}
	}
}

func (f *Freezer) tryV1(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	for pause := 20 * time.Microsecond; ; pause = min(2*pause, 5*time.Millisecond) {
		if err := write(f.path, "freezer.state", "FROZEN"); err != nil {
			return err
		}
		state, err := f.state()
		if err != nil || state == "FROZEN" {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(pause):
		}
	}
}

func (f *Freezer) freezeV2(ctx context.Context) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := write(f.path, "cgroup.freeze", "1"); err != nil {
		return err
	}
	return f.waitV2(ctx, 1)
}

// waitV2 waits until a v2 group says that it is frozen (1) or not (0).
func (f *Freezer) waitV2(ctx context.Context, want int64) error {
	events, err := os.Open(filepath.Join(f.path, "cgroup.events"))
	if err != nil {
		return err
	}
	defer events.Close()
	// The kernel tells of changes since the descriptor was read last, but holds
	// that back for up to 10 ms, and most groups stop sooner. And the context
	// wants to be looked at.
	for pause := 20 * time.Microsecond; ; pause = min(2*pause, 20*time.Millisecond) {
		buf := make([]byte, 256)
		n, err := events.ReadAt(buf, 0)
		if n == 0 {
			return fmt.Errorf("read cgroup.events: %w", err)
		}
		now, err := fieldOf(string(buf[:n]), "cgroup.events", "frozen")
		if err != nil || now == want {
			return err
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		timeout := unix.NsecToTimespec(pause.Nanoseconds())
		_, err = unix.Ppoll([]unix.PollFd{{Fd: int32(events.Fd()), Events: unix.POLLPRI}}, &timeout, nil)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("wait for cgroup.events: %w", err)
		}
	}
}

// waiting names processes of the group that wait for the kernel, which are
// those that cannot be stopped. It is ready to be appended to a message.
func (f *Freezer) waiting() string {
	g := Group{dirs: []dir{{path: f.path}}}
	pids, err := g.Processes()
	if err != nil {
		return ""
	}
	var names []string
	for _, pid := range pids {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
		begin, end := strings.IndexByte(string(stat), '('), strings.LastIndex(string(stat), ") D ")
		if err != nil || begin < 0 || end < begin {
			continue
		}
		names = append(names, fmt.Sprintf("%d (%s)", pid, stat[begin+1:end]))
	}
	if len(names) == 0 {
		return ""
	}
	return "; these wait for the kernel: " + strings.Join(names[:min(len(names), 5)], ", ")
}
