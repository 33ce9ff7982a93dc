package layer

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/fault"
)

// paxXattr is what the keys of extended attributes begin with in PAX records.
const paxXattr = "SCHILY.xattr."

// put makes one entry of the archive at base in d; what is there already gives
// way, except that a directory is kept for a directory.
func (a *Applier) put(ctx context.Context, d *dir, base string, hdr *tar.Header, content io.Reader) error {
	if err := checkOwner(hdr); err != nil {
		return err
	}
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeGNUSparse, tar.TypeCont:
		return a.putFile(ctx, d, base, hdr, content)
	case tar.TypeDir:
		return a.putDir(d, base, hdr)
	case tar.TypeLink:
		return a.putLink(d, base, hdr)
	case tar.TypeSymlink:
		return a.putNode(d, base, hdr, func() error { return unix.Symlinkat(hdr.Linkname, d.fd, base) })
	case tar.TypeFifo, tar.TypeChar, tar.TypeBlock:
		return a.putDevice(d, base, hdr)
	}
	return badArchive("entries of type %q are unknown", hdr.Typeflag)
}

// replacing runs create, and once more after the removal of what is in its way.
func (a *Applier) replacing(d *dir, base string, create func() error) error {
	err := create()
	if !errors.Is(err, unix.EEXIST) {
		return err
	}
	if err := a.remove(d.fd, base); err != nil {
		return err
	}
	return create()
}

func (a *Applier) putFile(ctx context.Context, d *dir, base string, hdr *tar.Header, content io.Reader) error {
	fd := -1
	err := a.replacing(d, base, func() (err error) {
		fd, err = unix.Openat(d.fd, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
		return err
	})
	if err != nil {
		return err
	}
	err = a.write(ctx, fd, content, hdr.Size)
	if err == nil {
		err = setFile(fd, hdr, mtimeOf(hdr.ModTime))
	}
	return errors.Join(err, unix.Close(fd))
}

// write copies a file's content of so many bytes. Zeros become holes, and count
// as if they were written: what is made of the tree may have them in full.
func (a *Applier) write(ctx context.Context, fd int, content io.Reader, size int64) error {
	for {
		n, err := content.Read(a.buf)
		if err := a.writeBlock(fd, a.buf[:n]); err != nil {
			return err
		}
		if err == io.EOF {
			return unix.Ftruncate(fd, size) // it may end with a hole
		}
		if err != nil {
			return readFault(err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
}

func (a *Applier) writeBlock(fd int, p []byte) error {
	a.bytes += int64(len(p))
	a.unasked += int64(len(p))
	if a.bytes > a.limits.Bytes {
		return fault.Invalid("source", "the image unpacks to more than %d bytes", a.limits.Bytes)
	}
	if a.unasked >= roomEvery {
		a.unasked = 0
		if err := a.room(); err != nil {
			return err
		}
	}
	if len(p) >= minHole && bytes.Equal(p, a.zeros[:len(p)]) {
		_, err := unix.Seek(fd, int64(len(p)), unix.SEEK_CUR)
		return err
	}
	for len(p) > 0 {
		n, err := unix.Write(fd, p)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		p = p[n:]
	}
	return nil
}

func (a *Applier) putDir(d *dir, base string, hdr *tar.Header) error {
	err := unix.Mkdirat(d.fd, base, 0o700)
	kept := false
	if errors.Is(err, unix.EEXIST) {
		var st unix.Stat_t
		if err := unix.Fstatat(d.fd, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
			return err
		}
		kept = st.Mode&unix.S_IFMT == unix.S_IFDIR
		if !kept {
			err = a.replacing(d, base, func() error { return unix.Mkdirat(d.fd, base, 0o700) })
		}
	}
	if err != nil && !kept {
		return err
	}
	fd, err := unix.Openat(d.fd, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return a.setDir(fd, d.path+"/"+base, hdr, kept)
}

// setRoot gives the root directory what the archive says of it.
func (a *Applier) setRoot(hdr *tar.Header) error {
	if err := checkOwner(hdr); err != nil {
		return err
	}
	return a.setDir(a.root, "", hdr, true)
}

// setDir sets what the archive says of a directory; its time is set at the end
// of the layer, as entries in it change it.
func (a *Applier) setDir(fd int, name string, hdr *tar.Header, kept bool) error {
	a.times[name] = mtimeOf(hdr.ModTime)
	if kept {
		if err := dropXattrs(fd); err != nil {
			return err
		}
	}
	return setFile(fd, hdr, mtimeOf(hdr.ModTime))
}

// dropXattrs removes a directory's extended attributes: a later layer's entry
// replaces all of them.
func dropXattrs(fd int) error {
	buf := make([]byte, 64<<10)
	n, err := unix.Flistxattr(fd, buf)
	if err == unix.ENOTSUP {
		return nil
	}
	if err != nil {
		return fmt.Errorf("list extended attributes: %w", err)
	}
	for key := range strings.SplitSeq(strings.Trim(string(buf[:n]), "\x00"), "\x00") {
		if key == "" || ignoredXattr(key) {
			continue
		}
		if err := unix.Fremovexattr(fd, key); err != nil && err != unix.ENODATA {
			return fmt.Errorf("remove extended attribute %s: %w", key, err)
		}
	}
	return nil
}

// putLink makes a hard link to a file of this layer or an earlier one. Owner,
// mode and times belong to the file and are left alone.
func (a *Applier) putLink(d *dir, base string, hdr *tar.Header) error {
	target, err := clean(hdr.Linkname)
	if err != nil || target == "." {
		return badArchive("it is a hard link to %q, which is no file of the image", hdr.Linkname)
	}
	parent, name := path.Split(target)
	up, err := a.open("/"+parent, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return fmt.Errorf("hard link to %q: %w", hdr.Linkname, err)
	}
	defer unix.Close(up)
	var st, there unix.Stat_t
	if err := unix.Fstatat(up, name, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("hard link to %q: %w", hdr.Linkname, err)
	}
	if st.Mode&unix.S_IFMT == unix.S_IFDIR {
		return badArchive("it is a hard link to the directory %q", hdr.Linkname)
	}
	if unix.Fstatat(d.fd, base, &there, unix.AT_SYMLINK_NOFOLLOW) == nil && there.Dev == st.Dev && there.Ino == st.Ino {
		return nil // the same file already
	}
	return a.replacing(d, base, func() error { return unix.Linkat(up, name, d.fd, base, 0) })
}

func (a *Applier) putDevice(d *dir, base string, hdr *tar.Header) error {
	kind := map[byte]uint32{tar.TypeFifo: unix.S_IFIFO, tar.TypeChar: unix.S_IFCHR, tar.TypeBlock: unix.S_IFBLK}[hdr.Typeflag]
	dev := 0
	if hdr.Typeflag != tar.TypeFifo {
		// The kernel's 32 bits hold 12 of the major and 20 of the minor number.
		if hdr.Devmajor < 0 || hdr.Devmajor >= 1<<12 || hdr.Devminor < 0 || hdr.Devminor >= 1<<20 {
			return badArchive("it is device %d:%d, which cannot exist", hdr.Devmajor, hdr.Devminor)
		}
		dev = int(unix.Mkdev(uint32(hdr.Devmajor), uint32(hdr.Devminor)))
	}
	return a.putNode(d, base, hdr, func() error {
		err := unix.Mknodat(d.fd, base, kind|0o600, dev)
		if err == unix.EPERM && hdr.Typeflag == tar.TypeChar && dev == 0 {
			return badArchive("it is character device 0:0, which an overlay takes for something removed")
		}
		return err
	})
}

// putNode makes what cannot be opened to set its attributes.
func (a *Applier) putNode(d *dir, base string, hdr *tar.Header, create func() error) error {
	if err := a.replacing(d, base, create); err != nil {
		return err
	}
	if err := unix.Fchownat(d.fd, base, hdr.Uid, hdr.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return fmt.Errorf("set the owner: %w", err)
	}
	if hdr.Typeflag != tar.TypeSymlink {
		// Made a moment ago and no link: nothing is followed.
		if err := unix.Fchmodat(d.fd, base, modeOf(hdr), 0); err != nil {
			return fmt.Errorf("set the mode: %w", err)
		}
	}
	at := fmt.Sprintf("/proc/self/fd/%d/%s", d.fd, base)
	err := eachXattr(hdr, func(key string, value []byte) error {
		err := unix.Lsetxattr(at, key, value, 0)
		if err == unix.EPERM && strings.HasPrefix(key, "user.") {
			return nil // Linux has these on files and directories only
		}
		return err
	})
	if err != nil {
		return err
	}
	t := mtimeOf(hdr.ModTime)
	return unix.UtimesNanoAt(d.fd, base, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
}

// setFile sets owner, mode, extended attributes and time of an open file. The
// order matters: a change of owner clears setuid and capabilities.
func setFile(fd int, hdr *tar.Header, mtime unix.Timespec) error {
	if err := unix.Fchown(fd, hdr.Uid, hdr.Gid); err != nil {
		return fmt.Errorf("set the owner: %w", err)
	}
	err := eachXattr(hdr, func(key string, value []byte) error { return unix.Fsetxattr(fd, key, value, 0) })
	if err != nil {
		return err
	}
	if err := unix.Fchmod(fd, modeOf(hdr)); err != nil {
		return fmt.Errorf("set the mode: %w", err)
	}
	// Needs Linux 5.8, which is not much more than openat2 does.
	if err := unix.UtimesNanoAt(fd, "", []unix.Timespec{mtime, mtime}, unix.AT_EMPTY_PATH); err != nil {
		return fmt.Errorf("set the time: %w", err)
	}
	return nil
}

// eachXattr calls set for each extended attribute of an entry, in the order of
// their names: the file system keeps the order in which they come, and equal
// layers are to give equal images.
func eachXattr(hdr *tar.Header, set func(key string, value []byte) error) error {
	for _, record := range slices.Sorted(maps.Keys(hdr.PAXRecords)) {
		value := hdr.PAXRecords[record]
		key, ok := strings.CutPrefix(record, paxXattr)
		if !ok || ignoredXattr(key) {
			continue
		}
		if err := set(key, []byte(value)); err != nil {
			return fmt.Errorf("set extended attribute %s: %w", key, err)
		}
	}
	return nil
}

// ignoredXattr reports attributes that say something about the machine on
// which an archive was made: labels, and overlayfs' own marks, which would
// change how an overlay over this tree reads it.
func ignoredXattr(key string) bool {
	return key == "security.selinux" || key == "security.ima" || key == "security.evm" || key == "system.nfs4_acl" ||
		strings.HasPrefix(key, "trusted.overlay.") || strings.HasPrefix(key, "user.overlay.")
}

func modeOf(hdr *tar.Header) uint32 { return uint32(hdr.Mode) & 0o7777 }

// checkOwner refuses owners that the kernel would read as "leave it".
func checkOwner(hdr *tar.Header) error {
	if hdr.Uid < 0 || hdr.Gid < 0 || int64(hdr.Uid) >= math.MaxUint32 || int64(hdr.Gid) >= math.MaxUint32 {
		return badArchive("its owner is %d:%d, which cannot exist", hdr.Uid, hdr.Gid)
	}
	return nil
}

// mtimeOf returns a time that every file system here can hold: from 1970 to
// the end of 32 bits in 2106.
func mtimeOf(t time.Time) unix.Timespec {
	sec := t.Unix()
	switch {
	case sec < 0:
		return unix.Timespec{}
	case sec > math.MaxUint32:
		return unix.Timespec{Sec: math.MaxUint32}
	}
	return unix.Timespec{Sec: sec, Nsec: int64(t.Nanosecond())}
}
