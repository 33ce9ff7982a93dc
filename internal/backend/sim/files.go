package sim

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"mime"
	"mime/multipart"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
)

// fileTree is a machine's file system: a directory that nothing in it leads out of.
type fileTree struct {
	root  *os.Root
	gate  *gate
	limit int64 // bytes that may be written; 0 for no limit
	temp  atomic.Uint64
}

func openTree(r record, g *gate) (*fileTree, error) {
	root, err := os.OpenRoot(filepath.Join(r.StateDir, filesDir))
	if err != nil {
		return nil, err
	}
	return &fileTree{root: root, gate: g, limit: r.Limits.DiskMB << 20}, nil
}

func (t *fileTree) close() { t.root.Close() }

// local makes a path of the machine one of the tree.
func local(name string) string {
	if name = strings.TrimPrefix(path.Clean("/"+name), "/"); name == "" {
		return "."
	}
	return name
}

// used returns the bytes of all files.
func (t *fileTree) used() (int64, error) {
	var sum int64
	err := fs.WalkDir(t.root.FS(), ".", func(_ string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err == nil && info.Mode().IsRegular() {
			sum += info.Size()
		}
		if errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		return err
	})
	return sum, err
}

// errFull says that a machine's disk limit is reached.
var errFull = errors.New("no space left on the simulated disk")

// write writes a file and the directories above it. Readers see the old or the
// new content.
func (t *fileTree) write(name string, mode fs.FileMode, r io.Reader) error {
	name = local(name)
	if info, err := t.root.Stat(name); err == nil && info.IsDir() {
		return fmt.Errorf("path '/%s' is a directory", name)
	}
	if err := t.makeDirs(path.Dir(name)); err != nil {
		return err
	}
	room := int64(1) << 62
	if t.limit > 0 {
		used, err := t.used()
		if err != nil {
			return err
		}
		room = max(t.limit-used, 0)
	}
	temp := path.Join(path.Dir(name), fmt.Sprintf(tempPrefix+"%d", t.temp.Add(1)))
	f, err := t.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, mode)
	if err != nil {
		return err
	}
	n, err := io.Copy(f, io.LimitReader(r, room+1))
	if err == nil && n > room {
		err = errFull
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = t.gate.pass(func() error { return t.root.Rename(temp, name) })
	}
	if err != nil {
		return errors.Join(err, t.root.Remove(temp))
	}
	return nil
}

// tempPrefix begins the names of files that are being written, which are not
// part of the machine yet.
const tempPrefix = ".sim-"

// makeDirs makes a directory and those above it.
func (t *fileTree) makeDirs(name string) error {
	return t.gate.pass(func() error { return t.root.MkdirAll(local(name), 0o755) })
}

// move renames an entry, and makes the directories above its new name.
func (t *fileTree) move(from, to string) error {
	return t.gate.pass(func() error {
		if err := t.root.MkdirAll(local(path.Dir(to)), 0o755); err != nil {
			return err
		}
		return t.root.Rename(local(from), local(to))
	})
}

// remove removes an entry with all below it.
func (t *fileTree) remove(name string) error {
	return t.gate.pass(func() error { return t.root.RemoveAll(local(name)) })
}

// userOf returns whom a plain request is for.
func userOf(r *http.Request) string {
	if u := r.Header.Get("Opendsec-User"); u != "" {
		return u
	}
	if u, _, ok := r.BasicAuth(); ok {
		return u
	}
	return r.URL.Query().Get("username")
}

func fileError(w http.ResponseWriter, name string, err error) {
	status, message := http.StatusBadRequest, err.Error()
	switch {
	case errors.Is(err, fs.ErrNotExist):
		status, message = http.StatusNotFound, fmt.Sprintf("path '%s' does not exist", name)
	case errors.Is(err, errFull):
		status = http.StatusInsufficientStorage
	}
	httpError(w, status, message)
}

// download answers GET /files.
func (a *agent) download(w http.ResponseWriter, r *http.Request) {
	name := a.resolve(r.URL.Query().Get("path"), userOf(r))
	f, err := a.files.root.Open(local(name))
	if err != nil {
		fileError(w, name, err)
		return
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		err = fmt.Errorf("path '%s' is a directory", name)
	}
	if err != nil {
		fileError(w, name, err)
		return
	}
	w.Header().Set("Content-Disposition", "inline")
	http.ServeContent(w, r, path.Base(name), info.ModTime(), f)
}

// written describes an uploaded file to the caller.
type written struct {
	Path string `json:"path"`
	Name string `json:"name"`
	Type string `json:"type"`
}

// upload answers POST /files: a body that is the file, or a form of files.
func (a *agent) upload(w http.ResponseWriter, r *http.Request) {
	kind, params, err := mime.ParseMediaType(r.Header.Get("Content-Type"))
	if err != nil || kind != "application/octet-stream" && kind != "multipart/form-data" {
		httpError(w, http.StatusBadRequest, "Content-Type: want application/octet-stream or multipart/form-data")
		return
	}
	mode := fs.FileMode(0o644)
	if m := r.URL.Query().Get("mode"); m != "" {
		n, err := strconv.ParseUint(m, 8, 32)
		if err != nil {
			httpError(w, http.StatusBadRequest, "mode: want octal digits")
			return
		}
		mode = fs.FileMode(n).Perm()
	}
	files := []written{}
	one := func(name string, body io.Reader) error {
		name = a.resolve(name, userOf(r))
		files = append(files, written{Path: name, Name: path.Base(name), Type: "file"})
		return a.files.write(name, mode, body)
	}
	to := r.URL.Query().Get("path")
	if kind == "multipart/form-data" {
		err = eachPart(multipart.NewReader(r.Body, params["boundary"]), to, one)
	} else if to == "" {
		err = errors.New("path: must be given")
	} else {
		err = one(to, r.Body)
	}
	if err != nil {
		fileError(w, to, err)
		return
	}
	writeJSON(w, files)
}

// eachPart calls f for the files of a form. A path that is given is that of
// its only file.
func eachPart(form *multipart.Reader, to string, f func(string, io.Reader) error) error {
	for {
		part, err := form.NextPart()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if part.FormName() != "file" {
			continue
		}
		name := to
		if name == "" {
			// FileName would leave the directories out.
			_, params, err := mime.ParseMediaType(part.Header.Get("Content-Disposition"))
			if err != nil {
				return err
			}
			name = params["filename"]
		}
		if err := f(name, part); err != nil {
			return err
		}
	}
}

// pack answers GET /archive.
func (a *agent) pack(w http.ResponseWriter, r *http.Request) {
	name := a.resolve(r.URL.Query().Get("path"), userOf(r))
	sub, err := a.files.root.OpenRoot(local(name))
	if err != nil {
		fileError(w, name, err)
		return
	}
	defer sub.Close()
	w.Header().Set("Content-Type", "application/x-tar")
	out := tar.NewWriter(w)
	if err := errors.Join(out.AddFS(sub.FS()), out.Close()); err != nil {
		panic(http.ErrAbortHandler) // or the caller would take it for the whole
	}
}

// unpack answers POST /archive: directories and files, as far as it matters to
// a simulation.
func (a *agent) unpack(w http.ResponseWriter, r *http.Request) {
	name := a.resolve(r.URL.Query().Get("path"), userOf(r))
	err := a.files.makeDirs(name)
	in := tar.NewReader(r.Body)
	for err == nil {
		var h *tar.Header
		if h, err = in.Next(); err != nil {
			break
		}
		to := path.Join(name, path.Clean("/"+h.Name))
		switch h.Typeflag {
		case tar.TypeDir:
			err = a.files.makeDirs(to)
		case tar.TypeReg:
			err = a.files.write(to, h.FileInfo().Mode().Perm(), in)
		}
	}
	if err != io.EOF {
		fileError(w, name, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
