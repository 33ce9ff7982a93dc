package gvisor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

// A packed memory file has all private memory of a machine, each page where the
// saved state says. Pages of zeros are left out: the file is sparse.

const (
	memoryPage  = 4 << 10
	packedChunk = 1 << 20 // bytes that are copied at a time
)

// packMemory writes a packed memory file and returns how many bytes it has of
// the disk.
func packMemory(to *os.File, saved *layerSaved) (written int64, err error) {
	buf := make([]byte, packedChunk)
	end := int64(memoryPage) // a layer is never empty
	for _, p := range saved.Pieces {
		if p.File < 0 || p.File >= len(saved.files) || p.Source < 0 || p.Place < 0 || p.Length < 0 {
			return 0, fmt.Errorf("the sentry describes memory wrongly: %+v", p)
		}
		n, err := packPiece(to, saved.files[p.File], p, buf)
		written += n
		if err != nil {
			return written, fmt.Errorf("write memory: %w", err)
		}
		end = max(end, p.Place+p.Length)
	}
	return written, to.Truncate(end)
}

// packPiece copies what a piece has data of.
func packPiece(to, from *os.File, p piece, buf []byte) (written int64, err error) {
	for at, end := p.Source, p.Source+p.Length; at < end; {
		start, err := unix.Seek(int(from.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) || err == nil && start >= end {
			return written, nil
		}
		if err != nil {
			return written, err
		}
		hole, err := unix.Seek(int(from.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return written, err
		}
		start = max(start&^(memoryPage-1), at)
		for at = start; at < min(hole, end); {
			part := buf[:min(int64(len(buf)), min(hole, end)-at)]
			if _, err := from.ReadAt(part, at); err != nil && !errors.Is(err, io.EOF) {
				return written, err
			}
			n, err := writeSparse(to, part, at-p.Source+p.Place)
			written += n
			if err != nil {
				return written, err
			}
			at += int64(len(part))
		}
	}
	return written, nil
}

// writeSparse writes runs of pages that are not zero.
func writeSparse(to *os.File, data []byte, at int64) (written int64, err error) {
	for from := 0; from < len(data); {
		if isZero(data[from:min(from+memoryPage, len(data))]) {
			from += memoryPage
			continue
		}
		end := from
		for end < len(data) && !isZero(data[end:min(end+memoryPage, len(data))]) {
			end += memoryPage
		}
		n, err := to.WriteAt(data[from:min(end, len(data))], at+int64(from))
		written += int64(n)
		if err != nil {
			return written, err
		}
		from = end
	}
	return written, nil
}

// isZero reports whether a page has zeros only.
func isZero(page []byte) bool {
	for ; len(page) >= 32; page = page[32:] {
		if binary.NativeEndian.Uint64(page)|binary.NativeEndian.Uint64(page[8:])|
			binary.NativeEndian.Uint64(page[16:])|binary.NativeEndian.Uint64(page[24:]) != 0 {
			return false
		}
	}
	for _, b := range page {
		if b != 0 {
			return false
		}
	}
	return true
}
