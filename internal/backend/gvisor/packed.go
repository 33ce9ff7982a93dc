package gvisor

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"sync/atomic"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// A packed memory file has all private memory of a machine, each page where the
// saved state says. Pages of zeros are left out: the file is sparse.

const (
	memoryPage  = 4 << 10
	packedChunk = 1 << 20 // bytes that are copied at a time
	packedPart  = 4 << 20 // bytes that are copied before the host writes them out
	packers     = 2       // that copy at once: more only wait for each other in the file system
)

// packMemory writes a packed memory file and returns how many bytes it has of
// the disk. The host begins to write each part out as soon as it is there, so
// that little is left for whoever syncs the file.
func packMemory(to *os.File, saved *layerSaved) (written int64, err error) {
	end := int64(memoryPage) // a layer is never empty
	var total atomic.Int64
	var g errgroup.Group
	g.SetLimit(packers)
	for _, p := range saved.Pieces {
		if p.File < 0 || p.File >= len(saved.files) || p.Source < 0 || p.Place < 0 || p.Length < 0 {
			err = fmt.Errorf("the sentry describes memory wrongly: %+v", p)
			break
		}
		end = max(end, p.Place+p.Length)
		for part := range p.parts() {
			g.Go(func() error {
				n, err := packPart(to, saved.files[part.File], part)
				total.Add(n)
				return err
			})
		}
	}
	if err := errors.Join(err, g.Wait()); err != nil {
		return total.Load(), fmt.Errorf("write memory: %w", err)
	}
	return total.Load(), to.Truncate(end)
}

// parts divides a piece.
func (p piece) parts() iter.Seq[piece] {
	return func(yield func(piece) bool) {
		for p.Length > 0 {
			part := p
			part.Length = min(p.Length, packedPart)
			if !yield(part) {
				return
			}
			p.Source, p.Place, p.Length = p.Source+part.Length, p.Place+part.Length, p.Length-part.Length
		}
	}
}

// packPart copies a part and has the host begin to write it out.
func packPart(to, from *os.File, p piece) (written int64, err error) {
	written, err = packPiece(to, from, p, make([]byte, min(p.Length, packedChunk)))
	if err == nil && written > 0 {
		beginWriting(to, p.Place, p.Length)
	}
	return written, err
}

// beginWriting has the host begin to write a part of a file out, or all of it
// from a place on with a length of 0. One that is refused begins later, with the
// sync.
func beginWriting(f *os.File, at, length int64) {
	_ = unix.SyncFileRange(int(f.Fd()), at, length, unix.SYNC_FILE_RANGE_WRITE)
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
