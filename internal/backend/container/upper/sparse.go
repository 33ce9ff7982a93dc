package upper

import (
	"archive/tar"
	"bytes"
	"fmt"
	"os"
	"path"
	"strconv"

	"golang.org/x/sys/unix"
)

// extent is a part of a file that holds data.
type extent struct{ start, size int64 }

func (e extent) end() int64 { return e.start + e.size }

// Bounds for the list of a file's data: readers of archives refuse a long one,
// and a small hole costs more than it saves.
const (
	maxExtents = 1 << 16
	minHole    = 4 << 10
)

// dataOf returns the parts of a file that hold data, in order. A file with very
// many holes has its small ones counted as data. One that is empty, or has no
// holes, is one part.
func dataOf(f *os.File, size int64) ([]extent, error) {
	var all []extent
	hole := int64(minHole)
	for at := int64(0); at < size; {
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if err == unix.ENXIO {
			break // no data after this
		}
		if err != nil {
			return nil, err
		}
		end, err := unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return nil, err
		}
		at = min(end, size)
		all = joined(all, extent{start, at - start}, hole)
		for len(all) >= 2*maxExtents {
			hole *= 2
			var fewer []extent
			for _, e := range all {
				fewer = joined(fewer, e, hole)
			}
			all = fewer
		}
	}
	if size == 0 {
		return []extent{{}}, nil
	}
	return all, nil
}

// joined adds an extent, as a part of the last one when there is less than a
// hole between them.
func joined(all []extent, e extent, hole int64) []extent {
	if n := len(all); n > 0 && e.start-all[n-1].end() < hole {
		all[n-1].size = e.end() - all[n-1].start
		return all
	}
	return append(all, e)
}

// block is what all in an archive is a multiple of.
const block = 512

// Keys of records for a file with holes, and what stands for their beginning
// until the header is written: the library reads such files, and does not
// write them.
const (
	sparseKeys  = "GNU.sparse."
	sparseStand = "GNU_sparse."
)

// sparse writes a file with holes in the form 1.0 of GNU tar: the list of its
// data comes first, then the data.
func (p *packer) sparse(h *tar.Header, f *os.File, data []extent) error {
	list := fmt.Appendf(nil, "%d\n", len(data)+1)
	stored := int64(0)
	for _, e := range data {
		list = fmt.Appendf(list, "%d\n%d\n", e.start, e.size)
		stored += e.size
	}
	list = fmt.Appendf(list, "%d\n0\n", h.Size) // the end of the last hole
	list = append(list, make([]byte, padding(int64(len(list))))...)
	name := h.Name
	records := map[string]string{
		sparseStand + "major": "1", sparseStand + "minor": "0",
		sparseStand + "name": name, sparseStand + "realsize": strconv.FormatInt(h.Size, 10),
	}
	for key, value := range h.PAXRecords {
		records[key] = value
	}
	h.PAXRecords = records
	h.Name = path.Join(path.Dir(name), "GNUSparseFile.0", path.Base(name))
	h.Size = int64(len(list)) + stored
	header, err := sparseHeader(h, 4)
	if err == nil {
		err = p.tar.Flush() // what follows goes past it
	}
	for _, part := range [][]byte{header, list} {
		if err == nil {
			_, err = p.out.Write(part)
		}
	}
	for _, e := range data {
		if err == nil {
			err = p.content(p.out, f, e, name)
		}
	}
	if err == nil {
		_, err = p.out.Write(make([]byte, padding(stored)))
	}
	return err
}

// sparseHeader returns a header's blocks with the n keys as they must be. The
// records follow the first block, in the order of their keys, so that these are
// before all others. A record is "length key=value\n".
func sparseHeader(h *tar.Header, n int) ([]byte, error) {
	var out bytes.Buffer
	if err := tar.NewWriter(&out).WriteHeader(h); err != nil {
		return nil, fmt.Errorf("describe %q: %w", h.Name, err)
	}
	b := out.Bytes()
	for at := block; n > 0; n-- {
		digits, rest, _ := bytes.Cut(b[at:], []byte(" "))
		length, err := strconv.Atoi(string(digits))
		if err != nil || !bytes.HasPrefix(rest, []byte(sparseStand)) {
			return nil, fmt.Errorf("describe %q: its records come in an unknown form", h.Name)
		}
		copy(rest, sparseKeys)
		at += length
	}
	return b, nil
}

// padding returns how many bytes n lacks to whole blocks.
func padding(n int64) int64 { return (block - n%block) % block }
