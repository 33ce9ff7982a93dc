// Package tree writes a file tree as a tar stream and reads one back. Reading
// never leaves the directory it was given, whatever the stream or the tree
// holds: every path is resolved by os.Root. Regular files, directories,
// symbolic and hard links are carried, with modes, times and owners; devices,
// sockets and named pipes are not.
package tree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"
)

// Namer gives owners' names for a stream.
type Namer interface {
	UserName(uid uint32) string
	GroupName(gid uint32) string
}

// copySize is the size of the buffer for file contents.
const copySize = 256 << 10

// packer is one tree being written.
type packer struct {
	w     *tar.Writer
	names Namer
	links map[[2]uint64]string // first name of each file with several
	buf   []byte
}

// Pack writes the tree at dir to w: its entries by their paths below dir, in
// lexical order, dir itself as ".". When dir is no directory it is the only
// entry, under its own name. A file that grows meanwhile is cut to the size
// it had, one that shrinks is an error, and one that vanishes is left out.
func Pack(w io.Writer, dir string, names Namer) error {
	p := &packer{w: tar.NewWriter(w), names: names, links: map[[2]uint64]string{}, buf: make([]byte, copySize)}
	info, err := os.Stat(dir)
	if err != nil {
		return err
	}
	if info.IsDir() {
		dir, err = filepath.EvalSymlinks(dir)
		if err == nil {
			err = filepath.WalkDir(dir, func(file string, d fs.DirEntry, err error) error {
				return p.visit(dir, file, d, err)
			})
		}
	} else {
		err = p.add(dir, path.Base(dir), info)
	}
	if err != nil {
		return err
	}
	return p.w.Close()
}

func (p *packer) visit(dir, file string, d fs.DirEntry, err error) error {
	if errors.Is(err, fs.ErrNotExist) && file != dir {
		return nil
	}
	if err != nil {
		return err
	}
	info, err := d.Info()
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	name, err := filepath.Rel(dir, file)
	if err != nil {
		return err
	}
	return p.add(file, name, info)
}

// add writes one entry.
func (p *packer) add(file, name string, info fs.FileInfo) error {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("pack %s: the system says nothing about it", file)
	}
	h := &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), ModTime: info.ModTime(), Format: tar.FormatPAX,
		Uid: int(st.Uid), Gid: int(st.Gid), Uname: p.names.UserName(st.Uid), Gname: p.names.GroupName(st.Gid),
	}
	switch info.Mode().Type() {
	case fs.ModeDir:
		h.Typeflag, h.Name = tar.TypeDir, name+"/"
	case fs.ModeSymlink:
		target, err := os.Readlink(file)
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if err != nil {
			return err
		}
		h.Typeflag, h.Linkname = tar.TypeSymlink, target
	case 0:
		return p.addFile(h, file, st)
	default:
		return nil
	}
	return p.w.WriteHeader(h)
}

func (p *packer) addFile(h *tar.Header, file string, st *syscall.Stat_t) error {
	if st.Nlink > 1 {
		key := [2]uint64{uint64(st.Dev), st.Ino}
		if first, seen := p.links[key]; seen {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return p.w.WriteHeader(h)
		}
		p.links[key] = h.Name
	}
	f, err := os.OpenFile(file, os.O_RDONLY|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return nil // replaced meanwhile
	}
	h.Typeflag, h.Size = tar.TypeReg, info.Size()
	if err := p.w.WriteHeader(h); err != nil {
		return err
	}
	n, err := io.CopyBuffer(onlyWriter{p.w}, io.LimitReader(f, h.Size), p.buf)
	if err == nil && n < h.Size {
		err = fmt.Errorf("pack %s: it shrank from %d to %d bytes while it was read; try again", file, h.Size, n)
	}
	return err
}

// onlyWriter hides ReadFrom, so that a copy uses its own buffer.
type onlyWriter struct{ io.Writer }
