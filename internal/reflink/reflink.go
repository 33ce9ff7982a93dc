// Package reflink copies files, such as disks of sandboxes, in the cheapest way
// that the file system has: as a clone, which shares its blocks with the
// original until one of them is written to, else by reading and writing the
// data and leaving the holes. It says which way it was.
//
// It copies one regular file's content. Owners, times and extended attributes
// are not carried, and trees are not walked.
package reflink

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// Method is how a copy was made.
type Method int

const (
	// Copied means that the data was read and written.
	Copied Method = iota
	// Cloned means that the copy shares its blocks with the original.
	Cloned
)

// Copy makes the file to, which must not exist, a copy of the file from; only
// its owner may read it. It does not wait for the disk. The original must not be
// written to meanwhile. On an error nothing is left of the copy; one that wraps
// unix.ENOSPC says that the disk is full.
func Copy(ctx context.Context, to, from string) (Method, error) {
	src, err := os.Open(from)
	if err != nil {
		return Copied, fmt.Errorf("copy a file: %w", err)
	}
	defer src.Close()
	dst, err := os.OpenFile(to, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return Copied, fmt.Errorf("copy %s: %w", from, err)
	}
	how, err := CopyFile(ctx, dst, src)
	if err = errors.Join(err, dst.Close()); err != nil {
		return how, errors.Join(fmt.Errorf("copy %s to %s: %w", from, to, err), os.Remove(to))
	}
	return how, nil
}

// CopyFile is Copy for open files. The file to must be empty; after an error it
// has a part of the content, or none.
func CopyFile(ctx context.Context, to, from *os.File) (Method, error) {
	if err := ctx.Err(); err != nil {
		return Copied, err
	}
	// What cannot be cloned says so in many ways (EOPNOTSUPP, EXDEV, EINVAL,
	// ENOTTY); one that fails for another reason fails below again.
	if err := unix.IoctlFileClone(int(to.Fd()), int(from.Fd())); err == nil {
		return Cloned, nil
	}
	return Copied, copyData(ctx, to, from)
}

// Supported reports whether files in a directory can be clones of each other.
// It tries with two small files that have no name.
func Supported(dir string) (bool, error) {
	var files [2]*os.File
	for i := range files {
		fd, err := unix.Open(dir, unix.O_TMPFILE|unix.O_RDWR|unix.O_CLOEXEC, 0o600)
		if errors.Is(err, unix.EOPNOTSUPP) {
			return false, nil // a file system that can clone has those files
		}
		if err != nil {
			return false, fmt.Errorf("try a clone in %s: %w", dir, err)
		}
		files[i] = os.NewFile(uintptr(fd), dir)
		defer files[i].Close()
	}
	if _, err := files[0].Write(make([]byte, 4096)); err != nil {
		return false, fmt.Errorf("try a clone in %s: %w", dir, err)
	}
	return unix.IoctlFileClone(int(files[1].Fd()), int(files[0].Fd())) == nil, nil
}

// copyData copies all data of a file and leaves the holes.
func copyData(ctx context.Context, to, from *os.File) error {
	var st unix.Stat_t
	if err := unix.Fstat(int(from.Fd()), &st); err != nil {
		return fmt.Errorf("look at the original: %w", err)
	}
	if err := hasRoom(to, st.Blocks*512); err != nil {
		return err
	}
	if err := to.Truncate(st.Size); err != nil {
		return err
	}
	for end := int64(0); ; {
		start, err := unix.Seek(int(from.Fd()), end, unix.SEEK_DATA)
		if err == unix.ENXIO {
			return nil // no data after this
		}
		if err != nil {
			return fmt.Errorf("find data: %w", err)
		}
		end, err = unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("find the end of data: %w", err)
		}
		if err := copyRange(ctx, to, from, start, end); err != nil {
			return err
		}
	}
}

// hasRoom returns an error when so many bytes do not fit on a file's disk. It
// is said before they are written, because others write to the disk as well.
func hasRoom(f *os.File, bytes int64) error {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("look for room: %w", err)
	}
	if free := int64(st.Bavail) * st.Bsize; st.Blocks > 0 && free < bytes {
		return fmt.Errorf("%d bytes are free and %d are needed: %w", free, bytes, unix.ENOSPC)
	}
	return nil
}

// chunk is how much is copied between two looks at the context.
const chunk = 8 << 20

// copyRange copies the bytes from start to end, in the kernel if it can.
func copyRange(ctx context.Context, to, from *os.File, start, end int64) error {
	for start < end {
		if err := ctx.Err(); err != nil {
			return err
		}
		in, out := start, start
		n, err := unix.CopyFileRange(int(from.Fd()), &in, int(to.Fd()), &out, int(min(end-start, chunk)), 0)
		switch err {
		case nil, unix.EXDEV, unix.ENOSYS, unix.EOPNOTSUPP, unix.EINVAL:
		case unix.EINTR:
			continue
		default:
			return fmt.Errorf("write: %w", err)
		}
		if n <= 0 {
			// Between these file systems the kernel does not copy by itself.
			if n, err = copyChunk(to, from, start, min(end-start, chunk)); err != nil {
				return err
			}
		}
		start += int64(n)
	}
	return nil
}

// copyChunk reads and writes up to n bytes and returns how many it was.
func copyChunk(to, from *os.File, at, n int64) (int, error) {
	done, err := io.Copy(io.NewOffsetWriter(to, at), io.NewSectionReader(from, at, n))
	if err == nil && done == 0 {
		err = fmt.Errorf("the original became shorter than %d bytes while it was copied", at+n)
	}
	return int(done), err
}
