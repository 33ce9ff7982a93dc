package layer

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// maxPath is how long a path below the root may get. mkfs and the removal of
// the tree walk by path and stop at PATH_MAX.
const maxPath = 3072

// maxLinks is how many dangling links are followed to make a directory.
const maxLinks = 40

// dir is an open directory of the tree.
type dir struct {
	fd   int
	name string // the path it was asked by
	path string // its path below the root, without links; "" for the root
}

// parent returns the directory in which an entry goes, and makes it if need
// be. The directory stays open until another is asked for.
func (a *Applier) parent(name string) (*dir, error) {
	if a.last != nil && a.last.name == name && !a.stale {
		return a.last, nil
	}
	a.forget()
	fd, err := a.open(name, unix.O_RDONLY|unix.O_DIRECTORY)
	if errors.Is(err, unix.ENOENT) {
		fd, err = a.makeDirs(name, 0)
	}
	if err != nil {
		return nil, fmt.Errorf("open directory %q: %w", name, err)
	}
	d, err := a.dirOf(fd, name)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	a.last = d
	return d, nil
}

// dirOf describes an open directory and takes note of its time.
func (a *Applier) dirOf(fd int, name string) (*dir, error) {
	p, err := kernelPath(fd)
	if err != nil {
		return nil, err
	}
	p = strings.TrimPrefix(p, a.prefix)
	if len(p) > maxPath {
		return nil, fmt.Errorf("directory %.60q…: %w", p, unix.ENAMETOOLONG)
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return nil, err
	}
	if _, known := a.times[p]; !known {
		a.times[p] = st.Mtim
	}
	return &dir{fd: fd, name: name, path: p}, nil
}

// forget closes the directory used last.
func (a *Applier) forget() {
	if a.last != nil {
		_ = unix.Close(a.last.fd)
		a.last = nil
	}
	a.stale = false
}

// open opens a path with the tree as its root. Links on the way, and the last
// one, are resolved inside it.
func (a *Applier) open(name string, flags int) (int, error) { return a.openHow(name, flags, 0) }

// openHow is open with more that the kernel is to refuse on the way.
func (a *Applier) openHow(name string, flags int, refuse uint64) (int, error) {
	how := unix.OpenHow{
		Flags:   uint64(flags | unix.O_CLOEXEC),
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV | refuse,
	}
	for try := 0; ; try++ {
		fd, err := unix.Openat2(a.root, name, &how)
		// EAGAIN: something on the machine was renamed while ".." was resolved.
		if (err == unix.EAGAIN || err == unix.EINTR) && try < 1000 {
			continue
		}
		if err == unix.ENOSYS {
			return -1, errors.New("this kernel has no openat2; Linux 5.6 or newer is needed")
		}
		return fd, err
	}
}

// makeDirs makes the missing directories of a path, owned by root and 0755,
// and opens the last. A link to nothing has its target made.
func (a *Applier) makeDirs(name string, links int) (int, error) {
	if links > maxLinks {
		return -1, unix.ELOOP
	}
	up, err := a.open("/", unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return -1, err
	}
	at := ""
	for _, comp := range strings.Split(strings.Trim(name, "/"), "/") {
		at += "/" + comp
		fd, err := a.open(at, unix.O_RDONLY|unix.O_DIRECTORY)
		if errors.Is(err, unix.ENOENT) {
			fd, err = a.makeDir(up, comp, links)
		}
		_ = unix.Close(up)
		if err != nil {
			return -1, err
		}
		up = fd
	}
	return up, nil
}

// makeDir makes and opens one directory that does not exist in up.
func (a *Applier) makeDir(up int, base string, links int) (int, error) {
	in, err := a.dirOf(up, "")
	if err != nil {
		return -1, err
	}
	err = unix.Mkdirat(up, base, 0o755)
	if errors.Is(err, unix.EEXIST) {
		buf := make([]byte, unix.PathMax)
		n, err := unix.Readlinkat(up, base, buf)
		if err != nil {
			return -1, err
		}
		target := string(buf[:n])
		if !path.IsAbs(target) {
			target = path.Join("/", in.path, target)
		}
		return a.makeDirs(path.Clean(target), links+1)
	}
	if err != nil {
		return -1, err
	}
	fd, err := unix.Openat(up, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	// The archive says nothing about it: a fixed time, so that equal layers
	// give equal trees. The process' umask must not show either.
	a.times[in.path+"/"+base] = unix.Timespec{}
	a.made[place{in.path, base}] = struct{}{}
	if err := unix.Fchmod(fd, 0o755); err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// setTimes sets the times of the directories that the layer touched: that of
// the archive, or the one from before.
func (a *Applier) setTimes() error {
	a.forget()
	for name, mtime := range a.times {
		if err := a.setTime(name, mtime); err != nil {
			return fmt.Errorf("set the time of %q: %w", name, err)
		}
	}
	return nil
}

func (a *Applier) setTime(name string, mtime unix.Timespec) error {
	// The path had no links: one on the way took the place of a directory.
	fd, err := a.openHow("/"+name, unix.O_RDONLY|unix.O_DIRECTORY, unix.RESOLVE_NO_SYMLINKS)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		return nil // removed later in the layer
	case err != nil:
		return err
	}
	defer unix.Close(fd)
	return unix.UtimesNanoAt(fd, ".", []unix.Timespec{mtime, mtime}, 0)
}

// kernelPath returns the path of an open directory.
func kernelPath(fd int) (string, error) {
	p, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return "", fmt.Errorf("find the path of an open directory: %w", err)
	}
	return p, nil
}
