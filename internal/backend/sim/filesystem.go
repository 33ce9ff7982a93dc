package sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"path"
	"strings"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	pb "github.com/kernflux/opendsec/api/gen/filesystem"
	"github.com/kernflux/opendsec/api/gen/filesystem/filesystemconnect"
)

// filesystem answers filesystem.Filesystem. All entries are root's.
type filesystem struct {
	filesystemconnect.UnimplementedFilesystemHandler
	a *agent
}

func writeJSON(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(v) // the caller went away
}

// where returns the absolute path that a request means.
func (f *filesystem) where(name string, h http.Header) string {
	r := &http.Request{Header: h}
	user := h.Get("Opendsec-User")
	if u, _, ok := r.BasicAuth(); ok && user == "" {
		user = u
	}
	return f.a.resolve(name, user)
}

func wireError(name string, err error) error {
	code := connect.CodeInternal
	switch {
	case errors.Is(err, fs.ErrNotExist):
		code, err = connect.CodeNotFound, fmt.Errorf("path '%s' does not exist", name)
	case errors.Is(err, fs.ErrExist):
		code = connect.CodeAlreadyExists
	}
	return connect.NewError(code, err)
}

func (f *filesystem) entry(name string) (*pb.EntryInfo, error) {
	info, err := f.a.files.root.Stat(local(name))
	if err != nil {
		return nil, wireError(name, err)
	}
	return describe(name, info), nil
}

func describe(name string, info fs.FileInfo) *pb.EntryInfo {
	e := &pb.EntryInfo{
		Name: path.Base(name), Path: name, Type: pb.FileType_FILE_TYPE_FILE, Size: info.Size(),
		Mode: uint32(info.Mode().Perm()), Permissions: info.Mode().String(), Owner: "root", Group: "root",
		ModifiedTime: timestamppb.New(info.ModTime()),
	}
	if info.IsDir() {
		e.Type = pb.FileType_FILE_TYPE_DIRECTORY
	}
	return e
}

// Stat describes an entry.
func (f *filesystem) Stat(_ context.Context, req *connect.Request[pb.StatRequest]) (*connect.Response[pb.StatResponse], error) {
	e, err := f.entry(f.where(req.Msg.GetPath(), req.Header()))
	return connect.NewResponse(&pb.StatResponse{Entry: e}), err
}

// MakeDir makes a directory and those above it.
func (f *filesystem) MakeDir(_ context.Context, req *connect.Request[pb.MakeDirRequest]) (*connect.Response[pb.MakeDirResponse], error) {
	name := f.where(req.Msg.GetPath(), req.Header())
	if info, err := f.a.files.root.Stat(local(name)); err == nil {
		if info.IsDir() {
			return nil, connect.NewError(connect.CodeAlreadyExists, fmt.Errorf("directory '%s' exists", name))
		}
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path '%s' is a file", name))
	}
	if err := f.a.files.makeDirs(name); err != nil {
		return nil, wireError(name, err)
	}
	e, err := f.entry(name)
	return connect.NewResponse(&pb.MakeDirResponse{Entry: e}), err
}

// Move renames an entry.
func (f *filesystem) Move(_ context.Context, req *connect.Request[pb.MoveRequest]) (*connect.Response[pb.MoveResponse], error) {
	from, to := f.where(req.Msg.GetSource(), req.Header()), f.where(req.Msg.GetDestination(), req.Header())
	if err := f.a.files.move(from, to); err != nil {
		return nil, wireError(from, err)
	}
	e, err := f.entry(to)
	return connect.NewResponse(&pb.MoveResponse{Entry: e}), err
}

// ListDir lists a directory.
func (f *filesystem) ListDir(_ context.Context, req *connect.Request[pb.ListDirRequest]) (*connect.Response[pb.ListDirResponse], error) {
	top := f.where(req.Msg.GetPath(), req.Header())
	info, err := f.a.files.root.Stat(local(top))
	if err != nil {
		return nil, wireError(top, err)
	}
	if !info.IsDir() {
		return nil, connect.NewError(connect.CodeInvalidArgument, fmt.Errorf("path '%s' is not a directory", top))
	}
	depth := int(max(req.Msg.GetDepth(), 1))
	resp := &pb.ListDirResponse{}
	base := local(top)
	err = fs.WalkDir(f.a.files.root.FS(), base, func(name string, d fs.DirEntry, err error) error {
		if err != nil || name == base {
			return err
		}
		below := name
		if base != "." {
			below = strings.TrimPrefix(name, base+"/")
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		resp.Entries = append(resp.Entries, describe(path.Join(top, below), info))
		if d.IsDir() && strings.Count(below, "/")+1 >= depth {
			return fs.SkipDir
		}
		return nil
	})
	if err != nil {
		return nil, wireError(top, err)
	}
	return connect.NewResponse(resp), nil
}

// Remove removes an entry with all below it.
func (f *filesystem) Remove(_ context.Context, req *connect.Request[pb.RemoveRequest]) (*connect.Response[pb.RemoveResponse], error) {
	name := f.where(req.Msg.GetPath(), req.Header())
	if local(name) == "." {
		return nil, connect.NewError(connect.CodeInvalidArgument, errors.New("path: the root cannot be removed"))
	}
	if err := f.a.files.remove(name); err != nil {
		return nil, wireError(name, err)
	}
	return connect.NewResponse(&pb.RemoveResponse{}), nil
}
