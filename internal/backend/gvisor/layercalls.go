package gvisor

import (
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/pkg/urpc"

	"github.com/kernflux/opendsec/internal/backend/gvisor/patch"
)

// The calls that our own changes of gVisor add. The module that this package is
// built with does not know them, so their fields are here too; they must agree
// with the diffs in package patch.
const (
	callLayerSave    = "containerManager.LayerSave"
	callLayerRelease = "containerManager.LayerRelease"
	callLayerStat    = "containerManager.LayerStat"
	callLayerFiles   = "containerManager.LayerFiles"
	callLayerDetach  = "containerManager.LayerDetach"
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
	urpc.FilePayload
	Layers []string // of Files, but for the first
	Pieces []piece
}

// piece is a part of a packed memory file.
type piece struct {
	File                  int // of layerSaved.Files
	Source, Place, Length int64
}

// fileRange is a part of a layer.
type fileRange struct{ Start, End int64 }

// layerStatus says what a sentry shares with others.
type layerStatus struct {
	Layers []layerUse
	Frozen []string // of its own memory, for others to map
	Kept   int64    // bytes of its own memory that it has for others only
}

// layerUse is what a sentry maps of a layer.
type layerUse struct {
	ID     string
	Ranges []fileRange // sorted
	Bytes  int64       // of them, without holes
}

// layersOpen are a sentry's layers and their files.
type layersOpen struct {
	urpc.FilePayload
	Layers []string
}

// layerRestoreArgs are boot.RestoreOpts with what the diffs add.
type layerRestoreArgs struct {
	urpc.FilePayload
	HavePagesFile bool
	Layers        []string // whose files are the last
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
	if err == nil && (len(saved.Files) == 0 || len(saved.Layers) != len(saved.Files)-1) {
		err = fmt.Errorf("the sentry gave %d files of memory for %d layers", len(saved.Files), len(saved.Layers))
	}
	for i, f := range saved.Files {
		if err == nil {
			saved.Files[i], err = readOnly(f)
		}
		f.Close()
	}
	if err != nil {
		closeAll(saved.Files) // again, of some
		return nil, err
	}
	return &saved, nil
}

// readOnly opens a file again, for reading.
func readOnly(f *os.File) (*os.File, error) {
	fd, err := unix.Open("/proc/self/fd/"+strconv.Itoa(int(f.Fd())), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open a sentry's memory for reading: %w", err)
	}
	return os.NewFile(uintptr(fd), f.Name()), nil
}

// thaw ends that memory is frozen.
func (s *sentry) thaw(id string) error {
	return told(s.call(callLayerRelease, &layerName{ID: id}, nil))
}

// layerStat tells what the sentry shares with others.
func (s *sentry) layerStat() (layerStatus, error) {
	var st layerStatus
	err := told(s.call(callLayerStat, &struct{}{}, &st))
	return st, err
}

// layerFiles returns the files of the sentry's layers, which are to be closed.
func (s *sentry) layerFiles() (*layersOpen, error) {
	var all layersOpen
	if err := told(s.call(callLayerFiles, &struct{}{}, &all)); err != nil {
		closeAll(all.Files)
		return nil, err
	}
	return &all, nil
}

// detach makes the sentry copy memory of layers, some bytes of it at least. It
// returns how much it copied, 0 when none was left.
func (s *sentry) detach(bytes int64) (int64, error) {
	args := struct{ Bytes int64 }{bytes}
	var copied int64
	err := told(s.call(callLayerDetach, &args, &copied))
	return copied, err
}
