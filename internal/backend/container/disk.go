package container

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/reflink"
)

// A disk holds a sandbox's writable layer: an ext4 file system in a sparse
// file, so that its size is a limit on every host, whatever file system the
// state is on. It has no journal: what a sandbox wrote does not outlive a crash
// of the host.
type disk struct {
	path string
	room int64    // MiB that may be written
	file *os.File // the image, locked
	loop string   // its device
	// mount is the file system, mounted and in no mount namespace. When the last
	// holder of the mount is gone the kernel unmounts it and frees the loop
	// device, so nothing is left on the host even if we are killed.
	mount int
}

// close drops the disk's mount and removes its file.
func (d *disk) close() error {
	err := errors.Join(d.release(), d.file.Close())
	return errors.Join(err, os.Remove(d.path))
}

// release lets go of the mount, which lives on where it was attached.
func (d *disk) release() error {
	if d.mount < 0 {
		return nil
	}
	fd := d.mount
	d.mount = -1
	return unix.Close(fd)
}

// place moves the disk's file to path. EXDEV says that it is on another file
// system.
func (d *disk) place(path string) error {
	if err := os.Rename(d.path, path); err != nil {
		return err
	}
	d.path = path
	return nil
}

// templates makes disks by copying: formatting takes milliseconds, and the
// data of an empty file system is some hundred kilobytes.
type templates struct {
	dir  string
	mkfs string

	mu   sync.Mutex // guards made, and one formatting at a time
	made map[int64]string
}

// newDisk makes a disk with room for mb MiB at path.
func (t *templates) newDisk(ctx context.Context, mb int64, path string) (*disk, error) {
	if mb < 1 {
		return nil, fmt.Errorf("a disk limit of %d MiB: want at least 1", mb)
	}
	template, err := t.template(ctx, mb)
	if err != nil {
		return nil, err
	}
	return diskOf(ctx, template, mb, path)
}

// diskOf makes a disk at path that is a copy of a disk's file with room for mb
// MiB, which is in no use.
func diskOf(ctx context.Context, from string, mb int64, path string) (_ *disk, err error) {
	source, err := os.Open(from)
	if err != nil {
		return nil, fmt.Errorf("make a disk: %w", err)
	}
	defer source.Close()
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a disk: %w", err)
	}
	d := &disk{path: path, room: mb, file: f, mount: -1}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	// A later process finds by the lock whether this one lives.
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, fmt.Errorf("lock the disk %s: %w", path, err)
	}
	if _, err := reflink.CopyFile(ctx, f, source); err != nil {
		return nil, fmt.Errorf("copy the disk %s to %s: %w", from, path, err)
	}
	dev, err := attachLoop(f)
	if err != nil {
		return nil, err
	}
	defer dev.Close()
	d.loop = dev.Name()
	d.mount, err = mountExt4(d.loop)
	return d, err
}

// template returns an empty disk's file, made when it is wanted first.
func (t *templates) template(ctx context.Context, mb int64) (string, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if path, ok := t.made[mb]; ok {
		return path, nil
	}
	path := filepath.Join(t.dir, fmt.Sprintf("empty-%d.ext4", mb))
	temp := path + ".new"
	f, err := os.OpenFile(temp, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return "", fmt.Errorf("make an empty disk: %w", err)
	}
	err = errors.Join(f.Truncate(imageSize(mb)), f.Close())
	if err == nil {
		err = t.format(ctx, temp)
	}
	if err == nil {
		err = os.Rename(temp, path)
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("make an empty disk of %d MiB: %w", mb, err), os.Remove(temp))
	}
	t.made[mb] = path
	return path, nil
}

// Numbers of the file system's layout: a file per 16 KiB, as mkfs has it for
// ordinary sizes, so that small disks do not give half their room to inodes.
const (
	bytesPerInode = 16 << 10
	inodeSize     = 256
)

// imageSize returns how large a file must be for mb MiB of room. On top come
// the tables of inodes and the maps, and what the kernel keeps for itself, a
// fiftieth up to 16 MiB. In a file of several groups of 128 MiB each, begun or
// full, has whole tables, and a last one that is nearly empty is not used.
func imageSize(mb int64) int64 {
	const (
		group    = 128 << 20
		perGroup = group/bytesPerInode*inodeSize + 16<<10
		few      = 256 << 10
	)
	room := mb << 20
	size := room
	for range 3 { // each time the size counts for itself, less and less
		tables := size*inodeSize/bytesPerInode + few
		if groups := (size + group - 1) / group; groups > 1 {
			tables = (groups+1)*perGroup + few
		}
		size = room + tables + min(size/50, 16<<20)
	}
	return (size + 4095) &^ 4095
}

func (t *templates) format(ctx context.Context, path string) error {
	cmd := exec.CommandContext(ctx, t.mkfs, "-q", "-F", "-m", "0", "-b", "4096",
		"-i", fmt.Sprint(bytesPerInode), "-I", fmt.Sprint(inodeSize),
		"-O", "^has_journal,^resize_inode,sparse_super2",
		"-E", "lazy_itable_init=1,nodiscard,num_backup_sb=0,packed_meta_blocks=1", path)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%s: %w: %s", t.mkfs, err, strings.TrimSpace(string(out)))
	}
	return nil
}

// mountExt4 mounts a device and returns the mount, which is in no namespace.
func mountExt4(dev string) (int, error) {
	fs, err := unix.Fsopen("ext4", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return -1, fmt.Errorf("open ext4: %w", err)
	}
	defer unix.Close(fs)
	err = unix.FsconfigSetString(fs, "source", dev)
	// Freed blocks go back to the host, and the kernel writes no empty tables
	// of inodes into the sparse file. Nothing that is written out has to wait
	// until the host's disk has it, as the file is to outlive no crash.
	for _, flag := range []string{"discard", "noinit_itable", "nobarrier"} {
		if err == nil {
			err = unix.FsconfigSetFlag(fs, flag)
		}
	}
	if err == nil {
		err = unix.FsconfigCreate(fs)
	}
	if err != nil {
		return -1, fmt.Errorf("mount %s: %w%s", dev, err, mountLog(fs))
	}
	mount, err := unix.Fsmount(fs, unix.FSMOUNT_CLOEXEC, unix.MOUNT_ATTR_NOATIME)
	if err != nil {
		return -1, fmt.Errorf("mount %s: %w", dev, err)
	}
	return mount, nil
}

// mountLog returns what the kernel has to say about a mount that failed.
func mountLog(fs int) string {
	buf := make([]byte, 4096)
	n, err := unix.Read(fs, buf)
	if err != nil || n <= 0 {
		return ""
	}
	return ": " + strings.TrimSpace(string(buf[:n]))
}

// openMounted opens the top directory of a disk's file system, which a container
// has mounted, by a mount of our own that no namespace has and that ends when
// the directory is closed. It is an error that is fs.ErrNotExist when the disk
// at path is not on that loop device any more.
func openMounted(loop, path string) (*os.File, error) {
	if file, err := backingFile(loop); err != nil || file != path {
		return nil, fmt.Errorf("the disk %s is not on %s any more: %w", path, loop, errors.Join(err, os.ErrNotExist))
	}
	mount, err := mountExt4(loop) // the same file system once more
	if err != nil {
		return nil, err
	}
	defer unix.Close(mount)
	fd, err := unix.Openat(mount, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open the disk %s: %w", path, err)
	}
	return os.NewFile(uintptr(fd), path), nil
}

// Numbers of the kernel's linux/fs.h.
const (
	fiFreeze = 0xc0045877 // FIFREEZE
	fiThaw   = 0xc0045878 // FITHAW
)

// quiesce brings all of a disk's file system to its file, top being its top
// directory, when nothing writes to it any more: it is stopped, which waits
// for what is under way and writes out all, and goes on at once.
func quiesce(top *os.File) error {
	if err := unix.IoctlSetInt(int(top.Fd()), fiFreeze, 0); err != nil {
		return fmt.Errorf("write out the disk %s: %w", top.Name(), err)
	}
	if err := unix.IoctlSetInt(int(top.Fd()), fiThaw, 0); err != nil {
		return fmt.Errorf("let the disk %s go on: %w", top.Name(), err)
	}
	return nil
}

// thawDisk lets a disk's file system go on that a killed process had stopped.
// One that was not stopped is no error.
func thawDisk(loop, path string) error {
	top, err := openMounted(loop, path)
	if err != nil {
		return err
	}
	defer top.Close()
	if err := unix.IoctlSetInt(int(top.Fd()), fiThaw, 0); err != nil && err != unix.EINVAL {
		return fmt.Errorf("let the disk %s go on: %w", path, err)
	}
	return nil
}

// repair makes a disk's file, copied while it was mounted and stood still, one
// that was unmounted. What it finds is files that were deleted and are still
// open, which without a journal are on no list.
func (b *Backend) repair(ctx context.Context, path string) error {
	const corrected = 1 // exit code: errors were found and none is left
	cmd := exec.CommandContext(ctx, b.fsck, "-p", "-E", "fixes_only", path)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if err == nil || errors.As(err, &exit) && exit.ExitCode() == corrected {
		return nil
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	err = fmt.Errorf("check the disk %s: %w: %s", path, err, strings.TrimSpace(string(out)))
	var st unix.Statfs_t
	if unix.Statfs(path, &st) == nil && st.Bavail == 0 {
		err = fmt.Errorf("%w: %w", err, unix.ENOSPC)
	}
	return err
}

// manyDirty is how many bytes that are not on the host's disk yet are worth a
// shutdown of the file system, which the kernel announces in its log.
const manyDirty = 8 << 20

// Numbers of the kernel's linux/ext4.h.
const (
	ext4Shutdown   = 0x8004587d // EXT4_IOC_SHUTDOWN
	ext4NoLogFlush = 2          // EXT4_GOING_FLAGS_NOLOGFLUSH
)

// discardWrites has the kernel forget what was written to a disk and is not on
// the host's yet, used bytes being written in all. It is for a disk that is to
// be removed: the end of its last user would otherwise wait until all of that
// is written, seconds for a gigabyte, to be deleted a moment later.
func discardWrites(loop, path string, used int64) error {
	image, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("look at the disk: %w", err)
	}
	if used-image.Sys().(*syscall.Stat_t).Blocks*512 < manyDirty {
		return nil
	}
	top, err := openMounted(loop, path)
	if err != nil {
		return err
	}
	defer top.Close()
	if err := unix.IoctlSetPointerInt(int(top.Fd()), ext4Shutdown, ext4NoLogFlush); err != nil {
		return fmt.Errorf("shut the disk %s down: %w", path, err)
	}
	return nil
}
