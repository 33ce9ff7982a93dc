package gvisor

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/pkg/urpc"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/gvisor/patch"
)

// The calls that our own changes of gVisor add. The module that this package is
// built with does not know them, so their fields are here too; they must agree
// with the diffs in package patch.
const (
	callLayerSave    = "containerManager.LayerSave"
	callLayerRelease = "containerManager.LayerRelease"
	callLayerStat    = "containerManager.LayerStat"
	callLayerFDs     = "containerManager.LayerFDs"
	callLayerDetach  = "containerManager.LayerDetach"
	callRestoreAhead = "containerManager.RestoreAhead"
	callRestoreStart = "containerManager.RestoreStart"
)

// layerSaveArgs are control.SaveOpts with what the diffs add.
type layerSaveArgs struct {
	control.SaveOpts
	Layer layerName `json:"layer"`
}

type layerName struct {
	ID string
	// Packed says that the saved state is to find the memory in one file.
	Packed bool `json:",omitempty"`
}

// layerSaved says where the memory of a saved state is.
type layerSaved struct {
	FDs    []int    // the sentry's descriptors of its own memory and of its layers
	Layers []string // the latter
	Held   int64    // bytes of its own memory that are frozen now
	Pieces []piece

	files []*os.File // the same files as ours, to be read only
	inode uint64     // of the first
}

// piece is a part of a packed memory file.
type piece struct {
	File                  int // of layerSaved.FDs
	Source, Place, Length int64
}

// fileRange is a part of a layer.
type fileRange struct{ Start, End int64 }

// layerStatus says what a sentry shares with others.
type layerStatus struct {
	Layers []layerUse
	Frozen []string // of its own memory, for others to map
	Held   int64    // bytes of that
	Kept   int64    // bytes of that which it has for others only
	Own    int64    // bytes of memory that it has for itself, and not in layers
}

// layerUse is what a sentry maps of a layer.
type layerUse struct {
	ID     string
	Ranges []fileRange // sorted
	Bytes  int64       // of them, without holes
}

// layersOpen are a sentry's layers and its descriptors of their files.
type layersOpen struct {
	FDs    []int
	Layers []string
}

// layerRestoreArgs are boot.RestoreOpts with what the diffs add.
type layerRestoreArgs struct {
	urpc.FilePayload
	HavePagesFile bool
	Layers        []string // whose files are the last
	Held          bool     // until callRestoreStart
}

// layered reports whether the sentry knows these calls.
func (s *sentry) layered() bool { return patch.Has(s.Version) }

// saveLayered makes the sentry write down all but private memory, which it
// freezes under a name. It returns where that is, in files that can be read
// only. A machine that ran goes on.
func (s *sentry) saveLayered(files []*os.File, name layerName) (*layerSaved, error) {
	var saved layerSaved
	err := s.saveState(files, func(payload []*os.File) error {
		return told(s.call(callLayerSave, &layerSaveArgs{
			SaveOpts: control.SaveOpts{
				Metadata:      statefile.CompressionLevelNone.ToMetadata(),
				HavePagesFile: true,
				Resume:        true,
				FilePayload:   urpc.FilePayload{Files: payload},
			},
			Layer: name,
		}, &saved))
	})
	if err == nil {
		err = s.fetchMemory(&saved)
	}
	if err != nil {
		closeAll(saved.files)
		return nil, err
	}
	return &saved, nil
}

// fetchMemory opens the files of a saved state's memory. What a sentry says is
// looked at: one that was taken over must not pass another's memory off as its
// own, nor have written to what it only maps.
func (s *sentry) fetchMemory(saved *layerSaved) error {
	if len(saved.FDs) == 0 || len(saved.Layers) != len(saved.FDs)-1 {
		return fmt.Errorf("the sentry names %d files of memory for %d layers", len(saved.FDs), len(saved.Layers))
	}
	for i, fd := range saved.FDs {
		theirs, err := s.descriptor(fd)
		if err != nil {
			return err
		}
		own, err := isMemory(theirs)
		if err == nil && own != (i == 0) {
			err = fmt.Errorf("the sentry can write to descriptor %d: %t; want %t", fd, own, i == 0)
		}
		if err == nil && i == 0 {
			saved.inode, err = inode(theirs)
		}
		var f *os.File
		if err == nil {
			f, err = readOnly(theirs)
		}
		theirs.Close()
		if err != nil {
			return err
		}
		saved.files = append(saved.files, f)
	}
	return nil
}

// descriptor takes a descriptor of the sentry. It has it in common with the
// sentry, and children do not inherit it.
func (s *sentry) descriptor(number int) (*os.File, error) {
	if s.pidfd == nil {
		return nil, fmt.Errorf("take descriptor %d of sentry %s: %w", number, s.Name, backend.ErrGone)
	}
	raw, err := s.pidfd.SyscallConn()
	if err != nil {
		return nil, err
	}
	fd := -1
	if cerr := raw.Control(func(pidfd uintptr) { fd, err = unix.PidfdGetfd(int(pidfd), number, 0) }); cerr != nil {
		err = cerr
	}
	if err != nil {
		return nil, fmt.Errorf("take descriptor %d of sentry %s: %w", number, s.Name, err)
	}
	return os.NewFile(uintptr(fd), "memory of "+s.Name), nil
}

// isMemory reports whether a file of memory can be written to: it is then the
// sentry's own, and else a layer of it.
func isMemory(f *os.File) (own bool, err error) {
	flags, err := unix.FcntlInt(f.Fd(), unix.F_GETFL, 0)
	if err != nil {
		return false, err
	}
	info, err := f.Stat()
	if err != nil {
		return false, err
	}
	if !info.Mode().IsRegular() {
		return false, fmt.Errorf("%s is no file of memory", f.Name())
	}
	return flags&unix.O_ACCMODE != unix.O_RDONLY, nil
}

func inode(f *os.File) (uint64, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return 0, err
	}
	return st.Ino, nil
}

// readOnly opens a file again, for reading.
func readOnly(f *os.File) (*os.File, error) {
	fd, err := unix.Open(pathOf(f), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a sentry's memory for reading: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// pathOf is a path of an open file.
func pathOf(f *os.File) string { return "/proc/self/fd/" + strconv.Itoa(int(f.Fd())) }

// thaw ends that memory is frozen. It returns how many bytes are yet.
func (s *sentry) thaw(id string) (held int64, err error) {
	err = told(s.call(callLayerRelease, &layerName{ID: id}, &held))
	return held, err
}

// layerStat tells what the sentry shares with others.
func (s *sentry) layerStat() (layerStatus, error) {
	var st layerStatus
	err := told(s.call(callLayerStat, &struct{}{}, &st))
	return st, err
}

// openLayer opens a layer's file, which is the memory of a sentry that has
// ended, for writing. It must be the file of that inode. It returns nil when
// the sentry does not map the layer any more.
func (s *sentry) openLayer(id string, number uint64) (*os.File, error) {
	var all layersOpen
	if err := told(s.call(callLayerFDs, &struct{}{}, &all)); err != nil {
		return nil, err
	}
	i := slices.Index(all.Layers, id)
	if i < 0 || i >= len(all.FDs) {
		return nil, nil
	}
	theirs, err := s.descriptor(all.FDs[i])
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	target, err := os.Readlink(pathOf(theirs))
	if err != nil {
		return nil, err
	}
	if is, err := inode(theirs); err != nil || is != number || !strings.HasPrefix(target, "/memfd:") {
		return nil, fmt.Errorf("sentry %s passes %s, inode %d, off as memory of inode %d: %w", s.Name, target, is, number, err)
	}
	return os.OpenFile(pathOf(theirs), os.O_RDWR, 0)
}

// detach makes the sentry copy memory of layers, some bytes of it at least. It
// returns how much it copied, 0 when none was left.
func (s *sentry) detach(bytes int64) (int64, error) {
	args := struct{ Bytes int64 }{bytes}
	var copied int64
	err := told(s.call(callLayerDetach, &args, &copied))
	return copied, err
}
