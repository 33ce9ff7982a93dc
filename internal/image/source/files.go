package source

import (
	"archive/tar"
	"bufio"
	"compress/bzip2"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/kernflux/opendsec/internal/fault"
)

// files is a set of files: a directory or a tar.
type files interface {
	// open returns a file and its size. A missing one is fs.ErrNotExist.
	open(name string) (io.ReadCloser, int64, error)
	Close() error
}

// dirFiles is a directory. Links in it cannot lead out of it.
type dirFiles struct{ root *os.Root }

func openDir(dir string) (files, error) {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return nil, fault.Invalid("source", "open the OCI layout: %w", err)
	}
	return dirFiles{root}, nil
}

func (d dirFiles) open(name string) (io.ReadCloser, int64, error) {
	st, err := d.root.Stat(name)
	if err != nil {
		return nil, 0, err
	}
	if !st.Mode().IsRegular() {
		return nil, 0, fault.Invalid("source", "%s of the OCI layout is no regular file", name)
	}
	f, err := d.root.Open(name)
	if err != nil {
		return nil, 0, err
	}
	return f, st.Size(), nil
}

func (d dirFiles) Close() error { return d.root.Close() }

// tarFiles is a tar file of which the places of its members are known.
type tarFiles struct {
	f       *os.File
	members map[string]member
}

type member struct {
	offset, size int64
	link         string // for a link: the member that it stands for
}

// maxMembers bounds an image archive's members: a few per layer.
const maxMembers = 1 << 16

// openTar reads the directory of a tar file. A compressed one is uncompressed
// into an unnamed temporary file first, as its members are read out of order.
func openTar(file, tempDir string) (*tarFiles, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, fault.Invalid("source", "open the archive: %w", err)
	}
	t := &tarFiles{f: f, members: map[string]member{}}
	if err := t.uncompress(tempDir); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	if err := t.index(); err != nil {
		return nil, errors.Join(err, t.Close())
	}
	return t, nil
}

func (t *tarFiles) uncompress(tempDir string) error {
	st, err := t.f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fault.Invalid("source", "%s is no regular file", t.f.Name())
	}
	r, err := Decompress(t.f)
	if err != nil {
		return err
	}
	defer r.Close()
	if !r.Compressed {
		return nil
	}
	tmp, err := os.CreateTemp(tempDir, "opendsec-archive-")
	if err != nil {
		return fmt.Errorf("make a temporary file: %w", err)
	}
	if err := errors.Join(os.Remove(tmp.Name()), t.copyTo(tmp, r)); err != nil {
		return errors.Join(err, tmp.Close())
	}
	old := t.f
	t.f = tmp
	return old.Close()
}

func (t *tarFiles) copyTo(tmp *os.File, r io.Reader) error {
	if _, err := io.Copy(tmp, r); err != nil {
		return archiveFault(t.f.Name(), err)
	}
	return nil
}

func (t *tarFiles) index() error {
	if _, err := t.f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	tr := tar.NewReader(t.f)
	for {
		hdr, err := tr.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return archiveFault(t.f.Name(), err)
		}
		if len(t.members) >= maxMembers {
			return fault.Invalid("source", "the archive has more than %d members; it is no image", maxMembers)
		}
		name := path.Clean(strings.TrimLeft(hdr.Name, "/"))
		switch hdr.Typeflag {
		case tar.TypeReg:
			at, err := t.f.Seek(0, io.SeekCurrent)
			if err != nil {
				return err
			}
			t.members[name] = member{offset: at, size: hdr.Size}
		case tar.TypeSymlink: // "docker save" stands equal layers for each other
			t.members[name] = member{link: path.Join(path.Dir(name), hdr.Linkname)}
		case tar.TypeLink:
			t.members[name] = member{link: path.Clean(hdr.Linkname)}
		}
	}
}

func (t *tarFiles) open(name string) (io.ReadCloser, int64, error) {
	name = path.Clean(name)
	for range 8 {
		m, ok := t.members[name]
		if !ok {
			return nil, 0, fmt.Errorf("%s: %w", name, fs.ErrNotExist)
		}
		if m.link == "" {
			return io.NopCloser(io.NewSectionReader(t.f, m.offset, m.size)), m.size, nil
		}
		name = m.link
	}
	return nil, 0, fault.Invalid("source", "member %s of the archive is a link in a circle", name)
}

func (t *tarFiles) Close() error { return t.f.Close() }

func archiveFault(name string, err error) error {
	var f *fault.Error
	var perr *fs.PathError
	switch {
	case errors.As(err, &f):
		return err
	case fault.DiskFull(err):
		return fault.New(fault.Capacity, "the disk is full while uncompressing the archive: %w", err)
	case errors.As(err, &perr):
		return fmt.Errorf("read the archive: %w", err)
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fault.Invalid("source", "the archive %s is truncated: %w", name, err)
	}
	return fault.Invalid("source", "%s is not a sound archive: %w", name, err)
}

// Reader is a stream with its compression taken off.
type Reader struct {
	io.Reader
	Compressed bool
	close      func()
}

// Close ends the decompressor; it does not close the stream under it.
func (r *Reader) Close() {
	if r.close != nil {
		r.close()
	}
}

// maxWindow is the memory that a zstd stream may ask for, in bytes.
const maxWindow = 128 << 20

// Decompress takes off the compression that the content shows: gzip, zstd,
// bzip2 or none. Media types are not asked, as they are often wrong.
func Decompress(stream io.Reader) (*Reader, error) {
	b := bufio.NewReaderSize(stream, 1<<20)
	magic, err := b.Peek(6)
	if err != nil && err != io.EOF {
		return nil, err
	}
	has := func(prefix string) bool { return strings.HasPrefix(string(magic), prefix) }
	switch {
	case has("\x1f\x8b"):
		z, err := gzip.NewReader(b)
		if err != nil {
			return nil, fault.Invalid("source", "the gzip stream is damaged: %w", err)
		}
		return &Reader{Reader: z, Compressed: true}, nil
	case has("\x28\xb5\x2f\xfd"), len(magic) >= 4 && magic[0]&0xf0 == 0x50 && string(magic[1:4]) == "\x2a\x4d\x18":
		z, err := zstd.NewReader(b, zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderConcurrency(1))
		if err != nil {
			return nil, fault.Invalid("source", "the zstd stream is damaged: %w", err)
		}
		return &Reader{Reader: z, Compressed: true, close: z.Close}, nil
	case has("BZh"):
		return &Reader{Reader: bzip2.NewReader(b), Compressed: true}, nil
	case has("\xfd7zXZ\x00"):
		return nil, fault.Invalid("source", "the archive or layer is compressed with xz, which is not supported; use gzip or zstd")
	}
	return &Reader{Reader: b}, nil
}
