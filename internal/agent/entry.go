package agent

import (
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"syscall"

	"google.golang.org/protobuf/types/known/timestamppb"

	"github.com/kernflux/opendsec/api/gen/filesystem"
	"github.com/kernflux/opendsec/internal/agent/account"
)

// describe returns what there is to say about the entry at name.
func describe(name string, names *account.Accounts) (*filesystem.EntryInfo, error) {
	info, err := os.Lstat(name)
	if err != nil {
		return nil, err
	}
	return entry(name, info, names), nil
}

// entry describes an entry from what lstat said. A symbolic link has the
// kind, size and mode of what it leads to, and its own owner, time and
// permission text; that is how E2B's clients expect it.
func entry(name string, info fs.FileInfo, names *account.Accounts) *filesystem.EntryInfo {
	e := &filesystem.EntryInfo{
		Name: path.Base(name), Path: name, Size: info.Size(), Mode: uint32(info.Mode().Perm()),
		Type: kind(info.Mode()), Permissions: info.Mode().String(), ModifiedTime: timestamppb.New(info.ModTime()),
		Metadata: readMetadata(name),
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		e.Owner, e.Group = names.UserName(st.Uid), names.GroupName(st.Gid)
	}
	if info.Mode()&fs.ModeSymlink == 0 {
		return e
	}
	e.IsSymlink = true
	target, err := filepath.EvalSymlinks(name)
	if err != nil { // it leads nowhere, or in a circle
		if text, err := os.Readlink(name); err == nil {
			e.SymlinkTarget = &text
		}
		return e
	}
	e.SymlinkTarget = &target
	if there, err := os.Lstat(target); err == nil {
		e.Type, e.Size, e.Mode = kind(there.Mode()), there.Size(), uint32(there.Mode().Perm())
	}
	return e
}

func kind(m fs.FileMode) filesystem.FileType {
	switch {
	case m.IsRegular():
		return filesystem.FileType_FILE_TYPE_FILE
	case m.IsDir():
		return filesystem.FileType_FILE_TYPE_DIRECTORY
	case m&fs.ModeSymlink != 0:
		return filesystem.FileType_FILE_TYPE_SYMLINK
	}
	return filesystem.FileType_FILE_TYPE_UNSPECIFIED
}
