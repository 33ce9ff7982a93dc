package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// holeUnit is what is looked at for zeros. A smaller hole is not worth its
// place in the file system's list.
const holeUnit = 64 << 10

// digHoles gives back to the disk what a file has of it for zeros alone. An
// EROFS that gVisor reads has each file whole, so one with holes costs the disk
// nothing only if the EROFS has the holes. Where the file system cannot have
// any nothing changes.
func digHoles(name string) (err error) {
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	zeros, buf := make([]byte, holeUnit), make([]byte, 16*holeUnit)
	begin := int64(-1) // of zeros
	dig := func(end int64) error {
		if begin < 0 {
			return nil
		}
		err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, begin, end-begin)
		begin = -1
		if err != nil {
			return fmt.Errorf("dig a hole into %s: %w", name, err)
		}
		return nil
	}
	for at := int64(0); ; {
		n, rerr := f.ReadAt(buf, at)
		if rerr != nil && !errors.Is(rerr, io.EOF) {
			return rerr
		}
		for part := buf[:n]; len(part) > 0; {
			unit := part[:min(holeUnit, len(part))]
			if !bytes.Equal(unit, zeros[:len(unit)]) {
				err = dig(at)
			} else if begin < 0 {
				begin = at
			}
			if errors.Is(err, unix.EOPNOTSUPP) {
				return nil
			}
			if err != nil {
				return err
			}
			at, part = at+int64(len(unit)), part[len(unit):]
		}
		if rerr != nil {
			if err := dig(at); !errors.Is(err, unix.EOPNOTSUPP) {
				return err
			}
			return nil
		}
	}
}
