// Package upper writes the upper directory of an overlay file system as a layer
// of an OCI image: what overlayfs says by devices 0:0 and by its own extended
// attributes, a layer says by names that begin with ".wh.".
//
// Nothing may change in the directory meanwhile. Redirected directories and
// files with their data elsewhere (the redirect_dir and metacopy options of
// overlayfs) are refused. Sockets are left out, as layers have none.
package upper

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Marks of the layer format.
const (
	whiteout = ".wh."         // a file ".wh.x" hides x of the layers below
	opaque   = ".wh..wh..opq" // hides all of the layers below in its directory
)

// Extended attributes of overlayfs.
const (
	overlayAttrs  = "trusted.overlay."
	opaqueAttr    = overlayAttrs + "opaque"
	redirectAttr  = overlayAttrs + "redirect"
	metacopyAttr  = overlayAttrs + "metacopy"
	paxAttrPrefix = "SCHILY.xattr."
)

// copySize is how much content is copied between two looks at the context.
const copySize = 256 << 10

// packer is one directory being written.
type packer struct {
	ctx   context.Context
	out   *bufio.Writer
	tar   *tar.Writer
	omit  []string
	links map[inode]string // the first name of each file with several
	buf   []byte
}

type inode struct{ dev, ino uint64 }

// Pack writes the upper directory dir to w as an uncompressed layer, in the
// order of names. Entries whose path below dir is in omit are left out with all
// that is below them, and so are files whose names mean something in a layer.
func Pack(ctx context.Context, w io.Writer, dir string, omit []string) error {
	out := bufio.NewWriterSize(w, 1<<20)
	p := &packer{
		ctx: ctx, out: out, tar: tar.NewWriter(out), omit: omit,
		links: map[inode]string{}, buf: make([]byte, copySize),
	}
	err := p.root(dir)
	if err == nil {
		err = p.below(dir, "")
	}
	if err == nil {
		err = p.tar.Close()
	}
	if err == nil {
		err = out.Flush()
	}
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// usualRoot is the mode that the upper directory is made with.
const usualRoot = 0o755

// root writes an entry for the root itself, if it was changed.
func (p *packer) root(dir string) error {
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		return fmt.Errorf("read %s: %w", dir, err)
	}
	if st.Mode&0o7777 == usualRoot && st.Uid == 0 && st.Gid == 0 {
		return nil
	}
	h, err := p.header(dir, "./", &st)
	if err != nil {
		return err
	}
	h.Typeflag = tar.TypeDir
	return p.tar.WriteHeader(h)
}

// below writes what is in a directory, whose path below the top is name.
func (p *packer) below(dir, name string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return fmt.Errorf("read directory %q: %w", name, err)
	}
	for _, e := range entries {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		below := path.Join(name, e.Name())
		if strings.HasPrefix(e.Name(), whiteout) || slices.Contains(p.omit, below) {
			continue
		}
		if err := p.entry(filepath.Join(dir, e.Name()), below); err != nil {
			return err
		}
	}
	return nil
}

// entry writes one file of any kind.
func (p *packer) entry(file, name string) error {
	var st unix.Stat_t
	if err := unix.Lstat(file, &st); err != nil {
		return fmt.Errorf("look at %q: %w", name, err)
	}
	kind := st.Mode & unix.S_IFMT
	if kind == unix.S_IFSOCK {
		return nil
	}
	if kind == unix.S_IFCHR && st.Rdev == 0 {
		return p.mark(path.Join(path.Dir(name), whiteout+path.Base(name)), &st)
	}
	h, err := p.header(file, name, &st)
	if err != nil {
		return err
	}
	if kind == unix.S_IFDIR {
		return p.directory(h, file, name, &st)
	}
	if st.Nlink > 1 {
		key := inode{st.Dev, st.Ino}
		if first, seen := p.links[key]; seen {
			h.Typeflag, h.Linkname, h.PAXRecords = tar.TypeLink, first, nil
			return p.tar.WriteHeader(h)
		}
		p.links[key] = name
	}
	switch kind {
	case unix.S_IFREG:
		return p.file(h, file)
	case unix.S_IFLNK:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = os.Readlink(file); err != nil {
			return fmt.Errorf("read link %q: %w", name, err)
		}
	case unix.S_IFCHR:
		h.Typeflag = tar.TypeChar
	case unix.S_IFBLK:
		h.Typeflag = tar.TypeBlock
	case unix.S_IFIFO:
		h.Typeflag = tar.TypeFifo
	default:
		return fmt.Errorf("%q is a file of unknown mode %o", name, st.Mode)
	}
	if kind == unix.S_IFCHR || kind == unix.S_IFBLK {
		h.Devmajor, h.Devminor = int64(unix.Major(st.Rdev)), int64(unix.Minor(st.Rdev))
	}
	return p.tar.WriteHeader(h)
}

// mark writes an empty file that says something about another.
func (p *packer) mark(name string, st *unix.Stat_t) error {
	return p.tar.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: name, ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX,
	})
}

// header describes a file, but for what depends on its kind.
func (p *packer) header(file, name string, st *unix.Stat_t) (*tar.Header, error) {
	attrs, err := attributes(file)
	if err != nil {
		return nil, fmt.Errorf("extended attributes of %q: %w", name, err)
	}
	return &tar.Header{
		Name: name, Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
		ModTime: time.Unix(st.Mtim.Unix()), Format: tar.FormatPAX, PAXRecords: attrs,
	}, nil
}

func (p *packer) directory(h *tar.Header, dir, name string, st *unix.Stat_t) error {
	h.Typeflag, h.Name = tar.TypeDir, name+"/"
	if err := p.tar.WriteHeader(h); err != nil {
		return err
	}
	value := make([]byte, 1)
	n, err := unix.Lgetxattr(dir, opaqueAttr, value)
	switch {
	case err == nil && n == 1 && value[0] == 'y':
		if err := p.mark(path.Join(name, opaque), st); err != nil {
			return err
		}
	case err != nil && err != unix.ENODATA && err != unix.ENOTSUP:
		return fmt.Errorf("look whether %q hides what is below: %w", name, err)
	}
	return p.below(dir, name)
}

// file writes a regular file.
func (p *packer) file(h *tar.Header, file string) error {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NOATIME, 0)
	if err != nil {
		return fmt.Errorf("read %q: %w", h.Name, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return fmt.Errorf("read %q: %w", h.Name, err)
	}
	h.Typeflag, h.Size = tar.TypeReg, info.Size()
	data, err := dataOf(f, h.Size)
	if err != nil {
		return fmt.Errorf("find the holes of %q: %w", h.Name, err)
	}
	if len(data) != 1 || data[0] != (extent{0, h.Size}) {
		return p.sparse(h, f, data)
	}
	if err := p.tar.WriteHeader(h); err != nil {
		return err
	}
	return p.content(p.tar, f, data[0], h.Name)
}

// content copies a part of a file to the archive.
func (p *packer) content(w io.Writer, f *os.File, e extent, name string) error {
	in := io.NewSectionReader(f, e.start, e.size)
	for left := e.size; left > 0; {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		n, err := in.Read(p.buf[:min(left, copySize)])
		if n == 0 {
			return fmt.Errorf("read %q: %w", name, errors.Join(err, io.ErrUnexpectedEOF))
		}
		if _, err := w.Write(p.buf[:n]); err != nil {
			return err
		}
		left -= int64(n)
	}
	return nil
}

// attributes returns a file's extended attributes as records of an archive,
// without those of overlayfs.
func attributes(file string) (map[string]string, error) {
	list, err := readAttr(func(buf []byte) (int, error) { return unix.Llistxattr(file, buf) })
	if errors.Is(err, unix.ENOTSUP) || len(list) == 0 && err == nil {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var records map[string]string
	for key := range strings.SplitSeq(strings.TrimRight(string(list), "\x00"), "\x00") {
		if key == redirectAttr || key == metacopyAttr {
			return nil, fmt.Errorf("%s is not understood", key)
		}
		// An archive's record ends its key with "=".
		if strings.HasPrefix(key, overlayAttrs) || strings.Contains(key, "=") {
			continue
		}
		value, err := readAttr(func(buf []byte) (int, error) { return unix.Lgetxattr(file, key, buf) })
		if errors.Is(err, unix.ENODATA) || errors.Is(err, unix.ENOTSUP) {
			continue // listed and not to be read, as some security modules have it
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %w", key, err)
		}
		if records == nil {
			records = map[string]string{}
		}
		records[paxAttrPrefix+key] = string(value)
	}
	return records, nil
}

// readAttr calls get with a buffer that is large enough.
func readAttr(get func([]byte) (int, error)) ([]byte, error) {
	for size := 256; ; size *= 4 {
		buf := make([]byte, size)
		n, err := get(buf)
		if err == unix.ERANGE && size < 1<<20 {
			continue
		}
		if err != nil {
			return nil, err
		}
		return buf[:n], nil
	}
}
