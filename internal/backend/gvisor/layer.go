package gvisor

import (
	"archive/tar"
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path"
	"strings"

	"google.golang.org/protobuf/proto"
	"gvisor.dev/gvisor/pkg/sentry/fscheckpoint"
	fspb "gvisor.dev/gvisor/pkg/sentry/fscheckpoint/fscheckpoint_proto_go_proto"
	pagespb "gvisor.dev/gvisor/pkg/sentry/pgalloc/pgalloc_metadata_go_proto"
)

// What the sentry writes of a layer is a tar in which a file's data is a list
// of places in the layer's memory, and the pages of that memory. Deleted files
// are there as in the kernel's overlayfs.
const (
	xattr     = "SCHILY.xattr."
	overlayfs = xattr + "trusted.overlay."
	acl       = xattr + "system.posix_acl_"
)

// Whiteouts of an OCI layer.
const (
	whiteout = ".wh."
	opaque   = ".wh..wh..opq"
)

// writeLayer writes a layer in files, as saveLayer fills them, to w as an OCI
// layer.
func writeLayer(ctx context.Context, log *slog.Logger, w *os.File, files []*os.File) error {
	tree, pages, err := openLayer(files)
	if err != nil {
		return err
	}
	out := newLayerWriter(w)
	from := tar.NewReader(tree)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := from.Next()
		if errors.Is(err, io.EOF) {
			return out.end()
		}
		if err != nil {
			return fmt.Errorf("read the sentry's tree of files: %w", err)
		}
		if err := out.entry(log, h, from, pages); err != nil {
			return fmt.Errorf("write %s: %w", h.Name, err)
		}
	}
}

// openLayer returns the tree of the root's layer and its pages.
func openLayer(files []*os.File) (io.Reader, *pageFile, error) {
	text, err := readAll(files[0])
	if err != nil {
		return nil, nil, err
	}
	var pb fspb.Manifest
	if err := proto.Unmarshal(text, &pb); err != nil {
		return nil, nil, fmt.Errorf("read the sentry's list of layers: %w", err)
	}
	m := fscheckpoint.FromProto(&pb)
	if m.Version != 1 || len(m.Tmpfs) != 1 || len(m.MemoryFiles) != 1 || m.Tmpfs[0].ResourceID.Path != "/" {
		return nil, nil, fmt.Errorf("the sentry's list of layers is not of one, the root's: %+v", m)
	}
	pages, err := openPages(files[2], files[3], m.MemoryFiles[0])
	if err != nil {
		return nil, nil, err
	}
	t := m.Tmpfs[0]
	return bufio.NewReaderSize(io.NewSectionReader(files[1], int64(t.TarStart), int64(t.TarEnd-t.TarStart)), 1<<20), pages, nil
}

func readAll(f *os.File) ([]byte, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	text := make([]byte, info.Size())
	if _, err := f.ReadAt(text, 0); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	return text, nil
}

// pageFile is the pages of a layer's memory. Those that are zero are left out.
type pageFile struct {
	file   *os.File
	ranges []pageRange // sorted
}

// pageRange is where a range of the memory is in the file.
type pageRange struct{ start, end, at uint64 }

func openPages(meta, pages *os.File, m fscheckpoint.MemoryFile) (*pageFile, error) {
	text, err := readAll(meta)
	if err != nil {
		return nil, err
	}
	if m.PagesMetadataEnd > uint64(len(text)) || m.PagesMetadataEnd < m.PagesMetadataStart+8 {
		return nil, errors.New("the sentry's list of pages is cut off")
	}
	text = text[m.PagesMetadataStart:m.PagesMetadataEnd]
	n := binary.LittleEndian.Uint64(text)
	if n > uint64(len(text)-8) {
		return nil, errors.New("the sentry's list of pages is cut off")
	}
	var pb pagespb.MemoryFileMetadataProto
	if err := proto.Unmarshal(text[8:8+n], &pb); err != nil {
		return nil, fmt.Errorf("read the sentry's list of pages: %w", err)
	}
	if pb.Version != 1 {
		return nil, fmt.Errorf("the sentry's list of pages has version %d; want 1", pb.Version)
	}
	p := &pageFile{file: pages}
	at := m.PagesStart
	for _, r := range pb.MemAcct {
		if !r.KnownCommitted {
			continue
		}
		p.ranges = append(p.ranges, pageRange{r.Start, r.End, at})
		at += r.End - r.Start
	}
	return p, nil
}

// copy writes the memory from start on, n bytes of it.
func (p *pageFile) copy(w *layerWriter, start, n uint64) error {
	// The first range that ends behind start.
	lo, hi := 0, len(p.ranges)
	for lo < hi {
		if mid := (lo + hi) / 2; p.ranges[mid].end <= start {
			lo = mid + 1
		} else {
			hi = mid
		}
	}
	end := start + n
	for ; start < end; lo++ {
		if lo == len(p.ranges) || p.ranges[lo].start >= end {
			return w.zeros(end - start)
		}
		r := p.ranges[lo]
		if r.start > start {
			if err := w.zeros(r.start - start); err != nil {
				return err
			}
			start = r.start
		}
		n := min(r.end, end) - start
		if err := w.copy(p.file, r.at+start-r.start, n); err != nil {
			return err
		}
		start += n
	}
	return nil
}

// layerWriter writes a tar. Where it can, it leaves zeros out of the file, so
// that a sparse file is sparse there too.
type layerWriter struct {
	file *os.File
	buf  *bufio.Writer
	skip bool // the file can be moved in
	// gone names a whiteout: the sentry links all of a machine to one.
	gone map[string]bool
}

// buffered is how much of a file is copied with what is around it; more is
// copied by the kernel.
const buffered = 64 << 10

func newLayerWriter(w *os.File) *layerWriter {
	l := &layerWriter{file: w, buf: bufio.NewWriterSize(w, 4*buffered), gone: map[string]bool{}}
	if info, err := w.Stat(); err == nil && info.Mode().IsRegular() {
		_, err := w.Seek(0, io.SeekCurrent)
		l.skip = err == nil
	}
	return l
}

// header writes an entry's header.
func (w *layerWriter) header(h *tar.Header) error {
	h.Format = tar.FormatPAX // others have times in whole seconds
	var b bytes.Buffer
	if err := tar.NewWriter(&b).WriteHeader(h); err != nil {
		return err
	}
	_, err := w.buf.Write(b.Bytes())
	return err
}

// zeros writes n of them.
func (w *layerWriter) zeros(n uint64) error {
	if n >= buffered && w.skip {
		if err := w.buf.Flush(); err != nil {
			return err
		}
		_, err := w.file.Seek(int64(n), io.SeekCurrent)
		return err
	}
	_, err := io.CopyN(w.buf, nothing{}, int64(n))
	return err
}

// nothing reads as zeros.
type nothing struct{}

func (nothing) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// copy writes n bytes of a file.
func (w *layerWriter) copy(from *os.File, at, n uint64) error {
	var err error
	if n <= buffered {
		_, err = io.CopyN(w.buf, io.NewSectionReader(from, int64(at), int64(n)), int64(n))
	} else if err = w.buf.Flush(); err == nil {
		if _, err = from.Seek(int64(at), io.SeekStart); err == nil {
			_, err = io.CopyN(w.file, from, int64(n))
		}
	}
	if errors.Is(err, io.EOF) {
		return errors.New("the sentry's pages are cut off")
	}
	return err
}

// tarBlock is what parts of a tar are rounded up to.
const tarBlock = 512

// end writes a tar's end.
func (w *layerWriter) end() error {
	if _, err := io.CopyN(w.buf, nothing{}, 2*tarBlock); err != nil {
		return err
	}
	return w.buf.Flush()
}

// entry writes an entry of the sentry's tree as an OCI layer has it.
func (w *layerWriter) entry(log *slog.Logger, h *tar.Header, data io.Reader, pages *pageFile) error {
	name := path.Clean(h.Name)
	if mounted(name) {
		return nil
	}
	if strings.HasPrefix(path.Base(name), whiteout) {
		log.Warn("a file is left out of a layer, where its name would mean that another is deleted", "file", name)
		return nil
	}
	if w.whiteout(h) {
		dir, base := path.Split(name)
		return w.header(&tar.Header{Typeflag: tar.TypeReg, Name: dir + whiteout + base, Mode: 0o600, ModTime: h.ModTime})
	}
	out := &tar.Header{
		Typeflag: h.Typeflag, Name: name, Mode: h.Mode, Uid: h.Uid, Gid: h.Gid,
		ModTime: h.ModTime, Devmajor: h.Devmajor, Devminor: h.Devminor,
	}
	hides, err := attributes(out, h.PAXRecords)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		out.Name += "/"
		if err := w.header(out); err != nil || !hides {
			return err
		}
		return w.header(&tar.Header{Typeflag: tar.TypeReg, Name: path.Join(name, opaque), Mode: 0o600, ModTime: h.ModTime})
	case tar.TypeLink:
		out.Linkname = path.Clean(h.Linkname)
		return w.header(out)
	case tar.TypeSymlink:
		out.Linkname = h.Linkname
		return w.header(out)
	case tar.TypeReg:
		return w.regular(out, data, pages)
	default: // a FIFO or a device
		return w.header(out)
	}
}

// whiteout reports whether an entry says that a file is deleted.
func (w *layerWriter) whiteout(h *tar.Header) bool {
	is := h.Typeflag == tar.TypeChar && h.Devmajor == 0 && h.Devminor == 0
	if is {
		w.gone[h.Name] = true
	}
	return is || h.Typeflag == tar.TypeLink && w.gone[h.Linkname]
}

// attributes sets extended attributes, but for overlayfs' own, and reports
// whether the directory hides all that the image has in it.
func attributes(out *tar.Header, records map[string]string) (hides bool, err error) {
	for k, v := range records {
		switch {
		case k == overlayfs+"opaque":
			hides = v == "y"
			continue
		case !strings.HasPrefix(k, xattr), strings.HasPrefix(k, overlayfs):
			continue
		case strings.HasPrefix(k, acl):
			raw, err := base64.RawStdEncoding.DecodeString(v)
			if err != nil {
				return false, fmt.Errorf("read its access list: %w", err)
			}
			v = string(raw)
		}
		if out.PAXRecords == nil {
			out.PAXRecords = map[string]string{}
		}
		out.PAXRecords[k] = v
	}
	return hides, nil
}

// segment is a range of a file and where it begins in the layer's memory.
type segment struct{ Start, End, Value uint64 }

// regular writes a file. Its data in the sentry's tree is its size and its
// segments.
func (w *layerWriter) regular(h *tar.Header, data io.Reader, pages *pageFile) error {
	var size uint64
	if err := binary.Read(data, binary.LittleEndian, &size); err != nil {
		return fmt.Errorf("read its size: %w", err)
	}
	h.Size = int64(size)
	if err := w.header(h); err != nil {
		return err
	}
	at := uint64(0)
	for at < size {
		var s segment
		err := binary.Read(data, binary.LittleEndian, &s)
		if errors.Is(err, io.EOF) {
			s, err = segment{Start: size, End: size}, nil // the rest is a hole
		}
		if err != nil {
			return fmt.Errorf("read where its data is: %w", err)
		}
		s.Start, s.End = min(s.Start, size), min(s.End, size)
		if err := w.zeros(s.Start - at); err != nil {
			return err
		}
		if err := pages.copy(w, s.Value, s.End-s.Start); err != nil {
			return err
		}
		at = s.End
	}
	if over := size % tarBlock; over > 0 {
		return w.zeros(tarBlock - over)
	}
	return nil
}

// mounted reports whether a path, without a slash before it, is below a mount
// of the backend's own. Such a directory is made where an image has none.
func mounted(name string) bool {
	for _, m := range (key{}).spec().Mounts {
		if m.Type == unmounted {
			continue
		}
		if rest, ok := strings.CutPrefix("/"+name, m.Destination); ok && (rest == "" || rest[0] == '/') {
			return true
		}
	}
	return false
}
