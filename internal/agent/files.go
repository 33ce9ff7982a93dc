package agent

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"net/http"
	"os"
	"path"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
)

const (
	copySize   = 256 << 10       // bytes moved at once
	smallFile  = 64 << 10        // up to here a file's real length is found by reading it
	uploadIdle = 5 * time.Minute // after which an upload that brings nothing is ended
)

// buffers are for moving contents.
var buffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// download answers GET /files?path=&username=.
func (s *Server) download(w http.ResponseWriter, r *http.Request) {
	c, ok := s.httpCaller(w, r)
	if !ok {
		return
	}
	if refusesIdentity(r.Header.Get("Accept-Encoding")) {
		httpError(w, http.StatusNotAcceptable, "files are sent as they are; accept the encoding \"identity\"")
		return
	}
	name, err := c.path(r.URL.Query().Get("path"))
	if err != nil {
		httpError(w, http.StatusBadRequest, err.Error())
		return
	}
	f, info, err := openFile(name)
	if err != nil {
		fileHTTPError(w, name, err)
		return
	}
	defer f.Close()
	h := w.Header()
	h.Set("Content-Disposition", mime.FormatMediaType("inline", map[string]string{"filename": path.Base(name)}))
	content, rest, err := measure(f, info)
	if err != nil {
		fileHTTPError(w, name, err)
		return
	}
	if rest {
		h.Set("Content-Type", "application/octet-stream")
		s.sendUnmeasured(w, r, content, f)
		return
	}
	// An empty name has the type told from the content: the table of types by
	// name would have to be read from the image.
	http.ServeContent(&bigCopies{w}, r, "", info.ModTime(), content)
}

// openFile opens a regular file for reading.
func openFile(name string) (*os.File, fs.FileInfo, error) {
	// A named pipe would wait for its other end.
	f, err := os.OpenFile(name, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = errNotRegular
		if info.IsDir() {
			err = syscall.EISDIR
		}
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

var errNotRegular = errors.New("is not a regular file")

// measure returns the content of a file in a form that knows its length. The
// kernel's own files give a wrong one, 0 or a page, so a small file is read.
// When such a file turns out to be long, rest says that f goes on after
// content.
func measure(f *os.File, info fs.FileInfo) (content io.ReadSeeker, rest bool, err error) {
	if info.Size() > 4096 {
		return f, false, nil
	}
	data, err := io.ReadAll(io.LimitReader(f, smallFile))
	if err != nil {
		return nil, false, err
	}
	return bytes.NewReader(data), len(data) == smallFile, nil
}

// sendUnmeasured sends a file whose length only its end tells.
func (s *Server) sendUnmeasured(w http.ResponseWriter, r *http.Request, head io.Reader, f *os.File) {
	if r.Method == http.MethodHead {
		return
	}
	if _, err := (&bigCopies{w}).ReadFrom(io.MultiReader(head, f)); err != nil {
		panic(http.ErrAbortHandler) // or the caller would take it for the whole
	}
}

// bigCopies is a response that copies in large pieces: each is two calls into
// the kernel, which are dear in some machines.
type bigCopies struct{ http.ResponseWriter }

// ReadFrom copies r into the response.
func (b *bigCopies) ReadFrom(r io.Reader) (int64, error) {
	buf := buffers.Get().(*[copySize]byte)
	defer buffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{b.ResponseWriter}, struct{ io.Reader }{r}, buf[:])
}

// refusesIdentity reports whether an Accept-Encoding header rules out sending
// a file as it is.
func refusesIdentity(accept string) bool {
	refused, named := false, false
	for item := range strings.SplitSeq(accept, ",") {
		coding, params, _ := strings.Cut(item, ";")
		q, ok := strings.CutPrefix(strings.TrimSpace(params), "q=")
		weight, err := strconv.ParseFloat(q, 64)
		zero := ok && err == nil && weight == 0
		switch strings.ToLower(strings.TrimSpace(coding)) {
		case "identity":
			named, refused = true, zero
		case "*":
			if !named {
				refused = zero
			}
		}
	}
	return refused
}

// fileHTTPError answers with what went wrong with a file.
func fileHTTPError(w http.ResponseWriter, name string, err error) {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		httpError(w, http.StatusNotFound, fmt.Sprintf("path '%s' does not exist", name))
	case errors.Is(err, syscall.EISDIR):
		httpError(w, http.StatusBadRequest, fmt.Sprintf("path '%s' is a directory", name))
	case errors.Is(err, errNotRegular), errors.Is(err, syscall.ENXIO):
		httpError(w, http.StatusBadRequest, fmt.Sprintf("path '%s' is not a regular file", name))
	case fault.DiskFull(err):
		httpError(w, http.StatusInsufficientStorage, fmt.Sprintf("no room to write '%s': the sandbox's disk limit is reached", name))
	case errors.Is(err, os.ErrDeadlineExceeded):
		httpError(w, http.StatusRequestTimeout, fmt.Sprintf("nothing of '%s' came for %v", name, uploadIdle))
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, gzip.ErrHeader), errors.Is(err, gzip.ErrChecksum):
		httpError(w, http.StatusBadRequest, fmt.Sprintf("the content of '%s' broke off or is damaged: %v", name, err))
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.ELOOP), errors.Is(err, syscall.EINVAL):
		httpError(w, http.StatusBadRequest, fmt.Sprintf("path '%s' cannot be used: %v", name, err))
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		httpError(w, http.StatusForbidden, fmt.Sprintf("path '%s': %v", name, err))
	default:
		httpError(w, http.StatusInternalServerError, fmt.Sprintf("path '%s': %v", name, err))
	}
}
