package layer

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// hideAll removes what earlier layers put into a directory.
func (a *Applier) hideAll(d *dir) error {
	names, err := list(d.fd)
	if err != nil {
		return err
	}
	for _, name := range names {
		if _, err := a.hide(d, name); err != nil {
			return err
		}
	}
	return nil
}

// hide removes what earlier layers put at base in d and keeps what this layer
// made, in whatever order the archive has them. It reports whether nothing is
// left.
func (a *Applier) hide(d *dir, base string) (gone bool, err error) {
	_, keep := a.made[place{d.path, base}]
	sub, err := unix.Openat(d.fd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	switch {
	case errors.Is(err, unix.ENOENT):
		return true, nil
	case errors.Is(err, unix.ENOTDIR), errors.Is(err, unix.ELOOP):
		if keep {
			return false, nil
		}
		return true, a.unlink(d, base, 0)
	case err != nil:
		return false, err
	}
	defer unix.Close(sub)
	var st unix.Stat_t
	if err := unix.Fstat(sub, &st); err != nil {
		return false, err
	}
	in := &dir{fd: sub, path: d.path + "/" + base}
	if _, known := a.times[in.path]; !known {
		a.times[in.path] = st.Mtim
	}
	names, err := list(sub)
	if err != nil {
		return false, err
	}
	for _, name := range names {
		g, err := a.hide(in, name)
		if err != nil {
			return false, err
		}
		keep = keep || !g
	}
	if keep {
		return false, nil
	}
	return true, a.unlink(d, base, unix.AT_REMOVEDIR)
}

func (a *Applier) unlink(d *dir, base string, flags int) error {
	if err := unix.Unlinkat(d.fd, base, flags); err != nil && err != unix.ENOENT {
		return fmt.Errorf("remove %q: %w", base, err)
	}
	a.stale = true
	return nil
}

// remove removes base in a directory with all that is below it.
func (a *Applier) remove(fd int, base string) error {
	a.stale = true
	err := unix.Unlinkat(fd, base, 0)
	if err == nil || err == unix.ENOENT {
		return nil
	}
	if err != unix.EISDIR {
		return fmt.Errorf("remove %q: %w", base, err)
	}
	sub, err := unix.Openat(fd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(sub)
	names, err := list(sub)
	if err != nil {
		return err
	}
	for _, name := range names {
		if err := a.remove(sub, name); err != nil {
			return err
		}
	}
	return unix.Unlinkat(fd, base, unix.AT_REMOVEDIR)
}

// list returns the names in an open directory.
func list(fd int) ([]string, error) {
	again, err := unix.Openat(fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(again), "directory")
	defer f.Close()
	return f.Readdirnames(-1)
}
