package agent

import (
	"compress/gzip"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// written is a file in the answer to POST /files.
type written struct {
	Path     string            `json:"path"`
	Name     string            `json:"name"`
	Type     string            `json:"type"` // "file"
	Metadata map[string]string `json:"metadata,omitempty"`
}

// upload answers POST /files: multipart/form-data with any number of parts
// named "file", or application/octet-stream with one file.
func (s *Server) upload(w http.ResponseWriter, r *http.Request) {
	u, ok := s.newUpload(w, r)
	if !ok {
		return
	}
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	switch {
	case err == nil && kind == "multipart/form-data" && params["boundary"] != "":
		err = u.parts(multipart.NewReader(u.body, params["boundary"]))
	case err == nil && kind == "application/octet-stream":
		err = u.stream(r.Header.Get("Content-Encoding"))
	default:
		err = badUpload("the content type must be multipart/form-data with a boundary, or application/octet-stream; it is %q", r.Header.Get("Content-Type"))
	}
	u.keepOpen()
	var bad *uploadError
	switch {
	case errors.As(err, &bad):
		httpError(w, http.StatusBadRequest, bad.message)
	case err != nil:
		fileHTTPError(w, u.current, err)
	default:
		httpJSON(w, u.done)
	}
}

// uploadError is an upload that is not formed as it must be.
type uploadError struct{ message string }

func (e *uploadError) Error() string { return e.message }

func badUpload(format string, args ...any) error {
	return &uploadError{fmt.Sprintf(format, args...)}
}

// upload is one POST /files.
type upload struct {
	c        caller
	query    url.Values
	body     io.Reader
	keepOpen func() // takes the time limit off the connection again
	options  writeOptions
	current  string // the path being written
	done     []written
}

// writeOptions says how a file is written.
type writeOptions struct {
	atomic   bool
	mode     fs.FileMode
	setMode  bool
	metadata map[string]string
}

// newUpload reads what the request says beside its body, or answers it itself.
func (s *Server) newUpload(w http.ResponseWriter, r *http.Request) (*upload, bool) {
	c, ok := s.httpCaller(w, r)
	if !ok {
		return nil, false
	}
	u := &upload{c: c, query: r.URL.Query(), done: []written{}}
	u.body, u.keepOpen = limitIdle(w, r.Body)
	var err error
	if u.options.metadata, err = metadataOf(r.Header); err != nil {
		httpError(w, http.StatusBadRequest, err.Error())
		return nil, false
	}
	if text := u.query.Get("atomic"); text != "" {
		if u.options.atomic, err = strconv.ParseBool(text); err != nil {
			httpError(w, http.StatusBadRequest, fmt.Sprintf("atomic=%q: want true or false", text))
			return nil, false
		}
	}
	if text := u.query.Get("mode"); text != "" {
		mode, err := strconv.ParseUint(text, 8, 32)
		if err != nil || mode > 0o777 {
			httpError(w, http.StatusBadRequest, fmt.Sprintf("mode=%q: want octal permissions such as 0644", text))
			return nil, false
		}
		u.options.mode, u.options.setMode = fs.FileMode(mode), true
	}
	return u, true
}

// limitIdle ends a body that brings nothing for a long time. A deadline is
// set anew at most every second.
func limitIdle(w http.ResponseWriter, body io.Reader) (io.Reader, func()) {
	r := &idleReader{body: body, control: http.NewResponseController(w)}
	return r, func() {
		_ = r.control.SetReadDeadline(time.Time{}) // not every response has deadlines
	}
}

type idleReader struct {
	body    io.Reader
	control *http.ResponseController
	last    time.Time
}

// Read reads with the deadline moved on.
func (r *idleReader) Read(p []byte) (int, error) {
	if now := time.Now(); now.Sub(r.last) > time.Second {
		r.last = now
		_ = r.control.SetReadDeadline(now.Add(uploadIdle)) // not every response has deadlines
	}
	return r.body.Read(p)
}

// stream writes the body as one file.
func (u *upload) stream(encoding string) error {
	if !u.query.Has("path") {
		return badUpload("path: an octet-stream needs one in the query")
	}
	switch encoding {
	case "", "identity":
		return u.file(u.query.Get("path"), u.body)
	case "gzip":
		z, err := gzip.NewReader(u.body)
		if err != nil {
			return badUpload("the body is not gzip: %v", err)
		}
		return u.file(u.query.Get("path"), z)
	}
	return badUpload("content encoding %q: want gzip or none", encoding)
}

// parts writes the files of a multipart body.
func (u *upload) parts(m *multipart.Reader) error {
	seen := map[string]bool{}
	for {
		part, err := m.NextRawPart()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return multipartError(err)
		}
		name, file, hasFile, err := partNames(part.Header.Get("Content-Disposition"))
		if err != nil {
			return badUpload("a part's Content-Disposition: %v", err)
		}
		if name != "file" {
			continue
		}
		if u.query.Has("path") {
			file, hasFile = u.query.Get("path"), true
		}
		if !hasFile || file == "" {
			return badUpload("a part named \"file\" has no filename, and the query no path")
		}
		abs, err := u.c.path(file)
		if err != nil {
			return badUpload("%v", err)
		}
		if seen[abs] {
			return badUpload("path '%s' comes twice; with path in the query only one file is allowed", abs)
		}
		seen[abs] = true
		if err := u.file(file, part); err != nil {
			return err
		}
	}
}

func multipartError(err error) error {
	if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, io.ErrUnexpectedEOF) {
		return err
	}
	return badUpload("the multipart body: %v", err)
}

// partNames reads a part's own name and its file name. multipart's own reader
// would drop the directories of the latter.
func partNames(disposition string) (name, file string, hasFile bool, err error) {
	kind, params, err := mime.ParseMediaType(disposition)
	if err != nil {
		return "", "", false, err
	}
	if kind != "form-data" {
		return "", "", false, fmt.Errorf("%q is not form-data", kind)
	}
	file, hasFile = params["filename"]
	return params["name"], unescapeName(file), hasFile, nil
}

// unescapeName undoes what HTML has form data do to three characters.
var unescapeName = strings.NewReplacer("%22", `"`, "%0D", "\r", "%0A", "\n").Replace

// file writes one file.
func (u *upload) file(name string, r io.Reader) error {
	abs, err := u.c.path(name)
	if err != nil {
		return badUpload("%v", err)
	}
	u.current = abs
	if err := writeFile(abs, r, u.c, u.options); err != nil {
		return err
	}
	u.done = append(u.done, written{Path: abs, Name: path.Base(abs), Type: "file", Metadata: u.options.metadata})
	return nil
}

// writeFile writes a file and makes its parents. It goes into the file that is
// there, so that watchers and open descriptors see it; or, if it is to be
// atomic, it takes that file's place when it is complete.
func writeFile(name string, r io.Reader, c caller, o writeOptions) error {
	if err := makeDirs(path.Dir(name), c.User); err != nil {
		return err
	}
	info, err := os.Stat(name)
	switch {
	case err == nil && info.IsDir():
		return syscall.EISDIR
	case err == nil && info.Mode()&(fs.ModeNamedPipe|fs.ModeSocket) != 0:
		return errNotRegular
	case err == nil && info.Mode().IsRegular() && o.atomic:
		return replaceFile(name, info, r, c, o)
	case errors.Is(err, fs.ErrNotExist) && o.atomic:
		return replaceFile(name, nil, r, c, o)
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o666)
	if err != nil {
		return err
	}
	defer f.Close()
	return fill(f, r, c, o)
}

// replaceFile writes a new file beside the old one and renames it into place.
// old is nil when there is none; else its mode stays.
func replaceFile(name string, old fs.FileInfo, r io.Reader, c caller, o writeOptions) error {
	if old != nil {
		target, err := filepath.EvalSymlinks(name) // a link stays, and what it leads to is replaced
		if err != nil {
			return err
		}
		name = target
	}
	if !o.setMode {
		o.setMode, o.mode = true, 0o644
		if old != nil {
			o.mode = old.Mode().Perm()
		}
	}
	temp := path.Join(path.Dir(name), "."+rand.Text()[:12]+".part")
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	err = fill(f, r, c, o)
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(temp, name)
	}
	if err != nil {
		_ = os.Remove(temp) // the first error says more
	}
	return err
}

// fill gives an open file its owner, mode, metadata and content.
func fill(f *os.File, r io.Reader, c caller, o writeOptions) error {
	if err := f.Chown(int(c.UID), int(c.GID)); err != nil && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	if o.setMode {
		if err := f.Chmod(o.mode); err != nil {
			return err
		}
	}
	if err := writeMetadata(f, o.metadata); err != nil {
		return err
	}
	return copyFull(f, r)
}

// copyFull copies in large pieces: what a connection brings in small ones is
// collected first.
func copyFull(w io.Writer, r io.Reader) error {
	buf := buffers.Get().(*[copySize]byte)
	defer buffers.Put(buf)
	for {
		n, rerr := readFull(r, buf[:])
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return err
			}
		}
		if rerr == io.EOF {
			return nil
		}
		if rerr != nil {
			return rerr
		}
	}
}

// readFull is io.ReadFull, but it does not hide a body that broke off behind
// the same error as one that is merely short.
func readFull(r io.Reader, buf []byte) (n int, err error) {
	for n < len(buf) && err == nil {
		var m int
		m, err = r.Read(buf[n:])
		n += m
	}
	return n, err
}
