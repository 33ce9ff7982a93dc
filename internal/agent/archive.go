package agent

import (
	"bufio"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"

	"github.com/kernflux/opendsec/internal/agent/tree"
)

// pack answers GET /archive?path=&user= with a tar stream of the tree there.
func (s *Server) pack(w http.ResponseWriter, r *http.Request) {
	c, name, ok := s.archivePath(w, r)
	if !ok {
		return
	}
	if _, err := os.Stat(name); err != nil {
		fileHTTPError(w, name, err)
		return
	}
	w.Header().Set("Content-Type", "application/x-tar")
	sent := &counter{w: w}
	out := bufio.NewWriterSize(sent, 64<<10)
	err := tree.Pack(out, name, c.accounts)
	if err == nil {
		err = out.Flush()
	}
	switch {
	case err == nil:
	case sent.n > 0:
		s.cfg.Log.Info("a tree was not sent whole", "error", err)
		panic(http.ErrAbortHandler) // so that the caller does not take it for the whole
	default:
		fileHTTPError(w, name, err)
	}
}

// counter counts what went out.
type counter struct {
	w io.Writer
	n int64
}

func (c *counter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// unpack answers POST /archive?path=&user=, whose body is a tar stream, also
// in gzip. The directory is made if missing; all belongs to the user.
func (s *Server) unpack(w http.ResponseWriter, r *http.Request) {
	c, name, ok := s.archivePath(w, r)
	if !ok {
		return
	}
	body, keepOpen := limitIdle(w, r.Body)
	defer keepOpen()
	if r.Header.Get("Content-Encoding") == "gzip" {
		z, err := gzip.NewReader(body)
		if err != nil {
			httpError(w, http.StatusBadRequest, fmt.Sprintf("the body is not gzip: %v", err))
			return
		}
		body = z
	}
	err := makeDirs(name, c.User)
	if err == nil {
		err = tree.Unpack(bufio.NewReaderSize(body, copySize), name, tree.Owner{UID: int(c.UID), GID: int(c.GID)})
	}
	if err == nil {
		// What follows the end of the archive, such as padding, is of no use.
		_, err = io.Copy(io.Discard, io.LimitReader(body, copySize))
	}
	var bad *tree.EntryError
	switch {
	case err == nil:
		httpJSON(w, struct{}{})
	case errors.As(err, &bad), errors.Is(err, tree.ErrBadStream):
		httpError(w, http.StatusBadRequest, fmt.Sprintf("unpack into '%s': %v", name, err))
	default:
		fileHTTPError(w, name, err)
	}
}

// archivePath resolves the user and path of a call, or answers it itself.
func (s *Server) archivePath(w http.ResponseWriter, r *http.Request) (caller, string, bool) {
	c, ok := s.httpCaller(w, r)
	if !ok {
		return c, "", false
	}
	name, err := c.path(r.URL.Query().Get("path"))
	if err != nil {
		httpError(w, http.StatusBadRequest, err.Error())
		return c, "", false
	}
	return c, name, true
}
