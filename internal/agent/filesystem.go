package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"syscall"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/api/gen/filesystem"
	"github.com/kernflux/opendsec/api/gen/filesystem/filesystemconnect"
	"github.com/kernflux/opendsec/internal/agent/tree"
	"github.com/kernflux/opendsec/internal/fault"
)

// filesystemService answers filesystem.Filesystem. It acts as the agent, not
// as the caller's user, who only becomes the owner of what is made.
type filesystemService struct{ s *Server }

var _ filesystemconnect.FilesystemHandler = (*filesystemService)(nil)

var errNoWatch = connect.NewError(connect.CodeUnimplemented, errors.New("this version does not watch directories"))

// resolve returns a call's user and the path that it means. field names the
// path in an error.
func (f *filesystemService) resolve(req connect.AnyRequest, field, p string) (caller, string, error) {
	c, err := f.s.rpcCaller(req.Header())
	if err != nil {
		return c, "", err
	}
	abs, err := c.path(p)
	if err != nil {
		return c, "", connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("%s: %w", field, err))
	}
	return c, abs, nil
}

// fileError gives a file system's error its code.
func fileError(name string, err error) error {
	code := connect.CodeInternal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return connect.NewError(connect.CodeNotFound, fmt.Errorf("path '%s' does not exist", name))
	case errors.Is(err, syscall.ELOOP):
		code = connect.CodeFailedPrecondition
	case errors.Is(err, syscall.ENOTDIR), errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL),
		errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTEMPTY), errors.Is(err, syscall.EBUSY):
		code = connect.CodeInvalidArgument
	case errors.Is(err, fs.ErrExist):
		code = connect.CodeAlreadyExists
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		code = connect.CodePermissionDenied
	case fault.DiskFull(err):
		code = connect.CodeResourceExhausted
	}
	return connect.NewError(code, err)
}

// Stat describes one entry.
func (f *filesystemService) Stat(_ context.Context, req *connect.Request[filesystem.StatRequest]) (*connect.Response[filesystem.StatResponse], error) {
	c, name, err := f.resolve(req, "path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	e, err := describe(name, c.accounts)
	if err != nil {
		return nil, fileError(name, err)
	}
	return connect.NewResponse(&filesystem.StatResponse{Entry: e}), nil
}

// MakeDir makes a directory with its parents.
func (f *filesystemService) MakeDir(_ context.Context, req *connect.Request[filesystem.MakeDirRequest]) (*connect.Response[filesystem.MakeDirResponse], error) {
	c, name, err := f.resolve(req, "path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(name); err == nil {
		if info.IsDir() {
			return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory already exists: %s", name))
		}
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path '%s' exists and is not a directory", name))
	}
	if err := makeDirs(name, c.User); err != nil {
		return nil, fileError(name, err)
	}
	e, err := describe(name, c.accounts)
	if err != nil {
		return nil, fileError(name, err)
	}
	return connect.NewResponse(&filesystem.MakeDirResponse{Entry: e}), nil
}

// Move renames an entry, and carries it where a rename cannot reach.
func (f *filesystemService) Move(_ context.Context, req *connect.Request[filesystem.MoveRequest]) (*connect.Response[filesystem.MoveResponse], error) {
	c, from, err := f.resolve(req, "source", req.Msg.GetSource())
	if err != nil {
		return nil, err
	}
	to, err := c.path(req.Msg.GetDestination())
	if err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("destination: %w", err))
	}
	if _, err := os.Lstat(from); err != nil {
		return nil, fileError(from, err)
	}
	if err := makeDirs(path.Dir(to), c.User); err != nil {
		return nil, fileError(path.Dir(to), err)
	}
	err = os.Rename(from, to)
	if errors.Is(err, syscall.EXDEV) {
		err = carry(from, to, c)
	}
	if err != nil {
		return nil, fileError(to, err)
	}
	e, err := describe(to, c.accounts)
	if err != nil {
		return nil, fileError(to, err)
	}
	return connect.NewResponse(&filesystem.MoveResponse{Entry: e}), nil
}

// carry moves an entry to another file system: it is copied beside its
// destination, renamed into place, and only then removed at its source.
func carry(from, to string, c caller) error {
	staging, err := os.MkdirTemp(path.Dir(to), ".move-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(staging)
	info, err := os.Lstat(from)
	if err != nil {
		return err
	}
	copied := path.Join(staging, path.Base(from))
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		err = copyLink(from, copied, info)
	case info.IsDir():
		if err = os.Mkdir(copied, 0o700); err == nil {
			err = copyTree(from, copied, c)
		}
		if err == nil {
			err = sameAs(copied, info)
		}
	case info.Mode().IsRegular():
		err = copyTree(from, staging, c)
	default:
		err = fmt.Errorf("'%s' is neither a file nor a directory, so it cannot be moved to another file system: %w", from, syscall.EINVAL)
	}
	if err != nil {
		return err
	}
	if err := os.Rename(copied, to); err != nil {
		return err
	}
	return os.RemoveAll(from)
}

func copyLink(from, to string, info fs.FileInfo) error {
	target, err := os.Readlink(from)
	if err != nil {
		return err
	}
	if err := os.Symlink(target, to); err != nil {
		return err
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return os.Lchown(to, int(st.Uid), int(st.Gid))
	}
	return nil
}

// copyTree copies a tree through a pipe of tar.
func copyTree(from, into string, c caller) error {
	r, w := io.Pipe()
	packed := make(chan struct{})
	go func() {
		defer close(packed)
		w.CloseWithError(tree.Pack(w, from, c.accounts))
	}()
	err := tree.Unpack(r, into, tree.Owner{Keep: true})
	r.CloseWithError(err)
	<-packed
	return err
}

// sameAs gives a directory the owner, mode and time of another.
func sameAs(dir string, info fs.FileInfo) error {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		if err := os.Lchown(dir, int(st.Uid), int(st.Gid)); err != nil {
			return err
		}
	}
	return errors.Join(os.Chmod(dir, info.Mode()), os.Chtimes(dir, info.ModTime(), info.ModTime()))
}

// ListDir lists a directory.
func (f *filesystemService) ListDir(ctx context.Context, req *connect.Request[filesystem.ListDirRequest]) (*connect.Response[filesystem.ListDirResponse], error) {
	c, name, err := f.resolve(req, "path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	info, err := os.Stat(name)
	if err != nil {
		return nil, fileError(name, err)
	}
	if !info.IsDir() {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path is not a directory: %s", name))
	}
	l := &lister{ctx: ctx, c: c}
	if err := l.list(name, max(1, req.Msg.GetDepth()), true); err != nil {
		return nil, err
	}
	return connect.NewResponse(&filesystem.ListDirResponse{Entries: l.entries}), nil
}

// lister collects the entries below a directory, each directory right before
// what is in it.
type lister struct {
	ctx     context.Context
	c       caller
	entries []*filesystem.EntryInfo
}

func (l *lister) list(dir string, depth uint32, first bool) error {
	if l.ctx.Err() != nil {
		return l.ctx.Err()
	}
	children, err := os.ReadDir(dir)
	if err != nil {
		if !first && errors.Is(err, fs.ErrNotExist) {
			return nil // removed meanwhile
		}
		return fileError(dir, err)
	}
	for _, child := range children {
		name := path.Join(dir, child.Name())
		info, err := child.Info()
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fileError(name, err)
		}
		l.entries = append(l.entries, entry(name, info, l.c.accounts))
		if info.IsDir() && depth > 1 {
			if err := l.list(name, depth-1, false); err != nil {
				return err
			}
		}
	}
	return nil
}

// Remove deletes an entry with all below it.
func (f *filesystemService) Remove(_ context.Context, req *connect.Request[filesystem.RemoveRequest]) (*connect.Response[filesystem.RemoveResponse], error) {
	_, name, err := f.resolve(req, "path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if name == "/" {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("path '/': the root directory cannot be removed"))
	}
	if err := os.RemoveAll(name); err != nil {
		return nil, fileError(name, err)
	}
	return connect.NewResponse(&filesystem.RemoveResponse{}), nil
}

// WatchDir is not there yet.
func (f *filesystemService) WatchDir(context.Context, *connect.Request[filesystem.WatchDirRequest], *connect.ServerStream[filesystem.WatchDirResponse]) error {
	return errNoWatch
}

// CreateWatcher is not there yet.
func (f *filesystemService) CreateWatcher(context.Context, *connect.Request[filesystem.CreateWatcherRequest]) (*connect.Response[filesystem.CreateWatcherResponse], error) {
	return nil, errNoWatch
}

// GetWatcherEvents is not there yet.
func (f *filesystemService) GetWatcherEvents(context.Context, *connect.Request[filesystem.GetWatcherEventsRequest]) (*connect.Response[filesystem.GetWatcherEventsResponse], error) {
	return nil, errNoWatch
}

// RemoveWatcher is not there yet.
func (f *filesystemService) RemoveWatcher(context.Context, *connect.Request[filesystem.RemoveWatcherRequest]) (*connect.Response[filesystem.RemoveWatcherResponse], error) {
	return nil, errNoWatch
}
