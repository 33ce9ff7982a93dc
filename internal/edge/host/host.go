// Package host reads what the machine has: processors, memory, disk, mounts
// and loop devices. It decides nothing about sandboxes; what it can remove, a
// mount or a loop device, its caller has found to belong to none.
package host

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Cores returns how many processors this process may use.
func Cores() int { return runtime.NumCPU() }

// MemoryMB returns the machine's memory in MiB, or the limit that a container
// around this process sets, whichever is less.
func MemoryMB() (int64, error) {
	total, err := meminfo("MemTotal")
	if err != nil {
		return 0, err
	}
	for _, path := range []string{
		"/sys/fs/cgroup/memory/memory.limit_in_bytes",
		"/sys/fs/cgroup/memory.max",
	} {
		data, err := os.ReadFile(path)
		if err != nil {
			continue // not this version of cgroups
		}
		if v, err := strconv.ParseInt(strings.TrimSpace(string(data)), 10, 64); err == nil && v > 0 && v < total {
			total = v
		}
	}
	return total >> 20, nil
}

// FreeMemoryMB returns how much memory, in MiB, programs can have before others
// must go, as the kernel estimates it.
func FreeMemoryMB() (int64, error) {
	free, err := meminfo("MemAvailable")
	return free >> 20, err
}

// meminfo returns a figure of /proc/meminfo in bytes.
func meminfo(name string) (int64, error) {
	data, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, fmt.Errorf("read the machine's memory: %w", err)
	}
	for line := range strings.Lines(string(data)) {
		if f := strings.Fields(line); len(f) >= 2 && f[0] == name+":" {
			kib, err := strconv.ParseInt(f[1], 10, 64)
			if err != nil {
				return 0, fmt.Errorf("read the machine's memory: %w", err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("read the machine's memory: /proc/meminfo has no %s", name)
}

// Space is what a file system holds, in MiB.
type Space struct{ TotalMB, FreeMB int64 }

// Disk measures the file system of a path.
func Disk(path string) (Space, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return Space{}, fmt.Errorf("measure the file system of %s: %w", path, err)
	}
	size := uint64(st.Bsize)
	return Space{TotalMB: int64(st.Blocks * size >> 20), FreeMB: int64(st.Bavail * size >> 20)}, nil
}

// BootID returns an id that changes with each boot of the machine.
func BootID() (string, error) {
	data, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the boot id: %w", err)
	}
	return strings.TrimSpace(string(data)), nil
}

// Mount is one mount in one mount namespace.
type Mount struct {
	Namespace uint64 // the namespace's inode number
	PID       int    // a process in it
	Point     string // as seen in the namespace
	Source    string // device, or "none"
}

// Mounts lists the mounts of all mount namespaces that have a process, as far
// as keep wants them.
func Mounts(keep func(Mount) bool) ([]Mount, error) {
	procs, err := os.ReadDir("/proc")
	if err != nil {
		return nil, fmt.Errorf("list processes: %w", err)
	}
	var found []Mount
	seen := map[uint64]bool{}
	for _, p := range procs {
		pid, err := strconv.Atoi(p.Name())
		if err != nil {
			continue
		}
		var st unix.Stat_t
		// A process that has gone since has nothing left to look at.
		if unix.Stat(fmt.Sprintf("/proc/%d/ns/mnt", pid), &st) != nil || seen[st.Ino] {
			continue
		}
		mounts, err := mountsOf(pid, st.Ino, keep)
		if err != nil {
			continue
		}
		seen[st.Ino] = true
		found = append(found, mounts...)
	}
	return found, nil
}

func mountsOf(pid int, ns uint64, keep func(Mount) bool) ([]Mount, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/mountinfo", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var found []Mount
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20) // overlays name many directories
	for lines.Scan() {
		m, ok := parseMount(lines.Text())
		m.Namespace, m.PID = ns, pid
		if ok && keep(m) {
			found = append(found, m)
		}
	}
	return found, lines.Err()
}

// parseMount reads a line of mountinfo: six fields, optional ones, a dash, and
// the file system's type, source and options.
func parseMount(line string) (Mount, bool) {
	f := strings.Fields(line)
	for i := 6; i+2 < len(f); i++ {
		if f[i] == "-" {
			return Mount{Point: unescape(f[4]), Source: unescape(f[i+2])}, true
		}
	}
	return Mount{}, false
}

// unescape undoes the octal escapes of mountinfo.
func unescape(s string) string {
	if !strings.Contains(s, `\`) {
		return s
	}
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) {
			if v, err := strconv.ParseUint(s[i+1:i+4], 8, 8); err == nil {
				b.WriteByte(byte(v))
				i += 3
				continue
			}
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

// Unmount takes a mount away in its own namespace. One that is gone is no error.
func Unmount(m Mount) error {
	done := make(chan error, 1)
	go func() {
		// Never unlocked, so the thread ends with the goroutine and nothing
		// else ever runs in that namespace.
		runtime.LockOSThread()
		done <- unmountIn(m)
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("unmount %s in the mount namespace of process %d: %w", m.Point, m.PID, err)
	}
	return nil
}

func unmountIn(m Mount) error {
	ns, err := unix.Open(fmt.Sprintf("/proc/%d/ns/mnt", m.PID), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return err
	}
	defer unix.Close(ns)
	var st unix.Stat_t
	if err := unix.Fstat(ns, &st); err != nil {
		return err
	}
	if st.Ino != m.Namespace {
		return nil // the process id is somebody else's by now
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return err
	}
	if err := unix.Setns(ns, unix.CLONE_NEWNS); err != nil {
		return err
	}
	err = unix.Unmount(m.Point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		return nil
	}
	return err
}

// Loop is a loop device with a file under it.
type Loop struct {
	Device  string // "/dev/loop3"
	Backing string // the file
	Deleted bool   // the file has no name any more
}

// Loops lists the loop devices that have a file.
func Loops() ([]Loop, error) {
	names, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return nil, err
	}
	var found []Loop
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			continue // detached since
		}
		l := Loop{Device: "/dev/" + strings.Split(name, "/")[3]}
		l.Backing, l.Deleted = strings.CutSuffix(strings.TrimSuffix(string(data), "\n"), " (deleted)")
		found = append(found, l)
	}
	return found, nil
}

// DetachLoop takes the file from a loop device; with a mount on it the kernel
// does so when that goes. One without a file is no error.
func DetachLoop(l Loop) error {
	f, err := os.OpenFile(l.Device, os.O_RDONLY, 0)
	if err != nil {
		return fmt.Errorf("detach %s: %w", l.Device, err)
	}
	defer f.Close()
	_, err = unix.IoctlRetInt(int(f.Fd()), unix.LOOP_CLR_FD)
	if err != nil && !errors.Is(err, unix.ENXIO) {
		return fmt.Errorf("detach %s: %w", l.Device, err)
	}
	return nil
}
