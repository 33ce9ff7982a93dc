// Package layer lays the tar layers of an image over each other in a
// directory, as Docker does: later layers replace, whiteouts hide what earlier
// layers put there, and owner, mode, times, extended attributes, hard links
// and devices are those of the archive.
//
// Layers come from strangers and are applied as root. Every path is resolved
// by the kernel with the directory as its root (openat2, RESOLVE_IN_ROOT), so
// neither a name nor a symbolic link in a layer reaches anything outside.
// The package does not fetch layers and does not check their digests.
package layer

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/fault"
)

// Marks of the layer format.
const (
	whiteout     = ".wh."         // a file ".wh.x" hides x of earlier layers
	whiteoutMeta = ".wh..wh."     // AUFS' own files; not part of the tree
	opaque       = ".wh..wh..opq" // hides all that earlier layers put in its directory
)

// Limits bounds what the layers of one image may unpack to.
type Limits struct {
	Bytes   int64 // of file content; 0 means 256 GiB
	Entries int64 // in all layers; 0 means 16 million
}

// minHole is how many zeros in a row are worth a hole, where they come in one
// read.
const minHole = 4 << 10

// roomEvery is after how many written bytes the free space is looked at again.
const roomEvery = 64 << 20

// An Applier applies layers to one directory, the lowest first. It is not for
// use by several goroutines at once.
type Applier struct {
	root    int    // the directory
	prefix  string // its path, as the kernel prints it
	limits  Limits
	room    func() error
	buf     []byte
	zeros   []byte // as many as buf has
	bytes   int64  // of content so far
	entries int64
	unasked int64 // bytes since room was asked

	// Of the layer that is being applied:
	made  map[place]struct{}       // what it put into the tree
	times map[string]unix.Timespec // by path: directories whose time is set at its end
	last  *dir                     // the directory used last
	stale bool                     // something was removed, perhaps on the way to last
}

// place is a name in a directory. Directories are known by their paths without
// links, as the inode numbers of an overlay may change under our hands. No
// directory is ever moved.
type place struct{ dir, base string }

// New returns an Applier for an existing directory. room, if not nil, is
// called now and then and stops the work with its error when the disk is too
// full.
func New(directory string, limits Limits, room func() error) (*Applier, error) {
	if limits.Bytes == 0 {
		limits.Bytes = 256 << 30
	}
	if limits.Entries == 0 {
		limits.Entries = 16 << 20
	}
	if room == nil {
		room = func() error { return nil }
	}
	fd, err := unix.Open(directory, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open %s: %w", directory, err)
	}
	a := &Applier{root: fd, limits: limits, room: room, buf: make([]byte, 1<<20), zeros: make([]byte, 1<<20)}
	if a.prefix, err = kernelPath(fd); err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	return a, nil
}

// Bytes returns how much file content has been unpacked.
func (a *Applier) Bytes() int64 { return a.bytes }

// Close lets go of the directory.
func (a *Applier) Close() error {
	a.forget()
	return unix.Close(a.root)
}

// Apply lays one uncompressed tar over the tree. A fault of the archive is a
// fault.InvalidArgument for the field "source"; a full disk is a
// fault.Capacity. After an error the tree is of no use.
func (a *Applier) Apply(ctx context.Context, r io.Reader) error {
	a.made, a.times = map[place]struct{}{}, map[string]unix.Timespec{}
	defer func() {
		a.forget()
		a.made, a.times = nil, nil
	}()
	tr := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		hdr, err := tr.Next()
		if err == io.EOF {
			return a.setTimes()
		}
		if err != nil {
			return readFault(err)
		}
		if a.entries++; a.entries > a.limits.Entries {
			return fault.Invalid("source", "the image has more than %d entries", a.limits.Entries)
		}
		if err := a.entry(ctx, hdr, tr); err != nil {
			return entryFault(hdr.Name, err)
		}
	}
}

// entry applies one entry of the archive.
func (a *Applier) entry(ctx context.Context, hdr *tar.Header, content io.Reader) error {
	if hdr.Typeflag == tar.TypeXGlobalHeader {
		return nil
	}
	if a.entries%4096 == 0 {
		if err := a.room(); err != nil {
			return err
		}
	}
	name, err := clean(hdr.Name)
	if err != nil {
		return err
	}
	if name == "." {
		if hdr.Typeflag != tar.TypeDir {
			return badArchive("the root is no directory")
		}
		return a.setRoot(hdr)
	}
	parent, base := path.Split(name)
	d, err := a.parent(path.Clean("/" + parent))
	if err != nil {
		return err
	}
	switch {
	case base == opaque:
		return a.hideAll(d)
	case strings.HasPrefix(base, whiteoutMeta):
		return nil
	case strings.HasPrefix(base, whiteout):
		hidden := strings.TrimPrefix(base, whiteout)
		if hidden == "" || hidden == "." || hidden == ".." {
			return badArchive("it is a whiteout of nothing")
		}
		_, err := a.hide(d, hidden)
		return err
	}
	if err := a.put(ctx, d, base, hdr, content); err != nil {
		return err
	}
	a.made[place{d.path, base}] = struct{}{}
	return nil
}

// clean returns a name of the archive as a path relative to the root, "." for
// the root itself. One that climbs out is refused, as Docker does.
func clean(name string) (string, error) {
	c := path.Clean(strings.TrimLeft(name, "/"))
	if c == ".." || strings.HasPrefix(c, "../") {
		return "", badArchive("the path %q leads out of the image", name)
	}
	if strings.ContainsRune(c, 0) {
		return "", badArchive("the path %q has a zero byte", name)
	}
	return c, nil
}

// archiveError is a fault of the archive's content.
type archiveError struct{ text string }

func (e archiveError) Error() string { return e.text }

func badArchive(format string, args ...any) error {
	return archiveError{fmt.Sprintf(format, args...)}
}

// readFault gives an error from reading the archive its kind.
func readFault(err error) error {
	var f *fault.Error
	switch {
	case errors.As(err, &f), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.Is(err, io.ErrUnexpectedEOF):
		return fault.Invalid("source", "the layer is truncated: %w", err)
	}
	return fault.Invalid("source", "the layer is not a sound tar archive: %w", err)
}

// entryFault gives an error from applying an entry its kind and the entry's name.
func entryFault(name string, err error) error {
	var f *fault.Error
	var bad archiveError
	var errno unix.Errno
	switch {
	case errors.As(err, &f), errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	case errors.As(err, &bad):
		return fault.Invalid("source", "entry %q of the layer: %w", name, err)
	case fault.DiskFull(err):
		return fault.New(fault.Capacity, "the disk is full while unpacking %q: %w", name, err)
	case errors.As(err, &errno):
		switch errno {
		case unix.ENOENT, unix.ENOTDIR, unix.EISDIR, unix.ELOOP, unix.ENAMETOOLONG, unix.EINVAL, unix.EMLINK:
			return fault.Invalid("source", "entry %q of the layer cannot be unpacked: %w", name, err)
		}
		return fmt.Errorf("unpack %q: %w", name, err)
	}
	return readFault(err)
}

// Drain reads what follows the end of a layer's tar, so that its digest can be
// told. More padding than the layers may have content is refused.
func (a *Applier) Drain(ctx context.Context, r io.Reader) error {
	for n := int64(0); n <= a.limits.Bytes; {
		m, err := r.Read(a.buf)
		n += int64(m)
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return readFault(err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return fault.Invalid("source", "the layer goes on for more than %d bytes after its end", a.limits.Bytes)
}
