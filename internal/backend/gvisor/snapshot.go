package gvisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/sentry/state/checkpointfiles"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// The files of a snapshot, in the order in which the sentry wants them.
var (
	memoryFiles = []string{
		checkpointfiles.StateFileName,         // the kernel's objects
		checkpointfiles.PagesMetadataFileName, // where the pages belong
		checkpointfiles.PagesFileName,         // memory, and the writable layer's data
	}
	layerFiles = []string{
		checkpointfiles.FSCheckpointManifestFileName,
		checkpointfiles.FSCheckpointMultiTarFileName, // the file tree, with places in the pages for data
		checkpointfiles.PagesMetadataFileName,
		checkpointfiles.PagesFileName, // data of files
	}
)

// layout is what a Snapshot's Data holds: what its directory has, so that what
// begins with it finds all of it, and nothing else.
type layout struct {
	Files []string `json:"files"`
	// Layer names the private memory when that is not in the pages: in the file
	// packedMemory, or if Live in the machine that it was taken of.
	Layer string `json:"layer,omitempty"`
	Live  bool   `json:"live,omitempty"`
}

// packedMemory is the file with a machine's private memory, which machines that
// are made of the snapshot map.
const packedMemory = "memory.img"

// layoutOf reads a snapshot's layout.
func layoutOf(s backend.Snapshot) (l layout, err error) {
	if err := json.Unmarshal(s.Data, &l); err != nil {
		return l, fmt.Errorf("read what the snapshot in %s consists of: %w", s.Dir, err)
	}
	return l, nil
}

// open opens a snapshot's files, in the sentry's order.
func openSnapshot(s backend.Snapshot) ([]*os.File, error) {
	want := layerFiles
	if s.Memory {
		want = memoryFiles
	}
	l, err := layoutOf(s)
	if err != nil {
		return nil, err
	}
	if l.Layer != "" && !l.Live {
		want = append(slices.Clone(want), packedMemory)
	}
	if strings.Join(l.Files, "/") != strings.Join(want, "/") {
		return nil, fmt.Errorf("the snapshot in %s consists of %q; want %q", s.Dir, l.Files, want)
	}
	var files []*os.File
	for _, name := range want {
		f, err := os.Open(filepath.Join(s.Dir, name))
		if err != nil {
			closeAll(files)
			return nil, fmt.Errorf("open snapshot: %w", err)
		}
		files = append(files, f)
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

// Snapshot writes the machine's state down. The sentry does it in one call, at
// whose end it goes on by itself, whether somebody still listens or not; so a
// ctx that ends in the middle is obeyed when the call has ended.
func (i *instance) Snapshot(ctx context.Context, o backend.SnapshotOptions) (_ backend.Snapshot, err error) {
	i.still.Lock()
	defer i.still.Unlock()
	if err := errors.Join(ctx.Err(), i.alive()); err != nil {
		return backend.Snapshot{}, err
	}
	how := i.method(o)
	files, err := createFiles(o.Dir, how.names)
	defer closeAll(files)
	defer func() {
		if err != nil {
			err = fmt.Errorf("write down machine %s: %w", i.id, err)
			for _, f := range files { // to have the space back soon
				os.Remove(f.Name())
			}
		}
	}()
	if err != nil {
		return backend.Snapshot{}, err
	}
	l, err := how.write(files)
	if err != nil {
		return backend.Snapshot{}, err
	}
	snap, err := i.describe(o, l, files)
	if err == nil {
		err = ctx.Err()
	}
	if err != nil {
		i.b.withdraw(l)
		return backend.Snapshot{}, err
	}
	return snap, nil
}

// method is a way to write a machine down.
type method struct {
	names []string
	write func([]*os.File) (layout, error)
}

// method returns how to write down what is asked for.
func (i *instance) method(o backend.SnapshotOptions) method {
	plain := func(names []string, save func([]*os.File) error) method {
		return method{names, func(files []*os.File) (layout, error) {
			return layout{Files: names}, i.write(save, files)
		}}
	}
	switch {
	case !o.Memory:
		return plain(layerFiles, i.s.saveLayer)
	case !i.s.layered():
		return plain(memoryFiles, i.s.saveMemory)
	case o.Live:
		return method{memoryFiles, i.writeLive}
	}
	return method{append(slices.Clone(memoryFiles), packedMemory), i.writePacked}
}

// write has the sentry write, with memory and CPU to do it.
func (i *instance) write(save func([]*os.File) error, files []*os.File) error {
	if err := i.s.lift(); err != nil {
		return err
	}
	err := save(files)
	return errors.Join(err, i.b.settle(i.s))
}

// describe returns what a snapshot in files is.
func (i *instance) describe(o backend.SnapshotOptions, l layout, files []*os.File) (backend.Snapshot, error) {
	s := backend.Snapshot{Backend: sandbox.GVisor, Dir: o.Dir, Memory: o.Memory, Limits: i.s.Limits}
	for _, f := range files {
		size, err := sizeOf(f)
		if err != nil {
			return backend.Snapshot{}, err
		}
		s.Size += size
	}
	data, err := json.Marshal(l)
	if err != nil {
		return backend.Snapshot{}, err
	}
	s.Data = data
	if o.Memory {
		s.Stamp = i.s.stamp()
		if s.Stamp.Runtime, err = writtenBy(files[0]); err != nil {
			return backend.Snapshot{}, err
		}
	}
	return s, nil
}

// sizeOf returns how much of a file is not a hole, in bytes.
func sizeOf(f *os.File) (size int64, err error) {
	for at := int64(0); ; {
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return size, nil
		}
		if err != nil {
			return 0, fmt.Errorf("measure %s: %w", f.Name(), err)
		}
		if at, err = unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE); err != nil {
			return 0, fmt.Errorf("measure %s: %w", f.Name(), err)
		}
		size += at - start
	}
}

// writtenBy returns the version of the sentry that wrote a snapshot's first
// file. It may be another than the one that sentries are started from now.
func writtenBy(state *os.File) (string, error) {
	if _, err := state.Seek(0, io.SeekStart); err != nil {
		return "", err
	}
	meta, err := statefile.MetadataUnsafe(state)
	if err != nil {
		return "", fmt.Errorf("read the version of %s: %w", state.Name(), err)
	}
	return meta[boot.VersionKey], nil
}

// createFiles makes new files. It returns those that it made also on an error.
func createFiles(dir string, names []string) ([]*os.File, error) {
	var files []*os.File
	for _, name := range names {
		f, err := os.OpenFile(filepath.Join(dir, name), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
		if err != nil {
			return files, err
		}
		files = append(files, f)
	}
	return files, nil
}

// saveMemory makes the sentry write down all that it has. A machine that ran
// goes on. The kernel's objects go through memory: a sentry that fails keeps
// their file open for a while, and so does nothing on the disk.
func (s *sentry) saveMemory(files []*os.File) error {
	return s.saveState(files, func(payload []*os.File) error {
		return told(s.call(boot.ContMgrCheckpoint, &control.SaveOpts{
			// Not compressed, which takes longer than to write.
			Metadata:      statefile.CompressionLevelNone.ToMetadata(),
			HavePagesFile: true,
			Resume:        true,
			FilePayload:   urpc.FilePayload{Files: payload},
		}, nil))
	})
}

// saveState calls save with files for state and pages. The first is in memory
// and copied when save has ended.
func (s *sentry) saveState(files []*os.File, save func(payload []*os.File) error) error {
	state, err := memoryFile("state")
	if err != nil {
		return err
	}
	defer func() {
		state.Truncate(0) // the sentry may have it open
		state.Close()
	}()
	if err := save(append([]*os.File{state}, files[1:]...)); err != nil {
		return err
	}
	if _, err := state.Seek(0, io.SeekStart); err != nil {
		return err
	}
	_, err = io.Copy(files[0], state)
	return err
}

// saveLayer makes the sentry write down its writable layer. A machine that ran
// goes on.
func (s *sentry) saveLayer(files []*os.File) error {
	return told(s.call(boot.ContMgrFSSave, &boot.FSSaveArgs{FilePayload: urpc.FilePayload{Files: files}}, nil))
}

// told makes an error of the sentry's, which is text only, say that the disk is
// full, and no more than a person wants.
func told(err error) error {
	if err == nil || errors.Is(err, unix.ENOSPC) {
		return err
	}
	text := err.Error()
	for _, code := range []unix.Errno{unix.ENOSPC, unix.EDQUOT} {
		if strings.Contains(text, code.Error()) {
			return fmt.Errorf("the disk is full: %w", unix.ENOSPC)
		}
	}
	// What follows the first line is where in the sentry it was.
	if first, _, more := strings.Cut(text, "\n"); more {
		return errors.New(first)
	}
	return err
}

// scratch makes files without a name for what lasts as long as a call.
func (s *sentry) scratch(n int) ([]*os.File, error) {
	var files []*os.File
	for range n {
		f, err := os.OpenFile(s.Dir, os.O_RDWR|unix.O_TMPFILE, 0o600)
		if err != nil {
			closeAll(files)
			return nil, err
		}
		files = append(files, f)
	}
	return files, nil
}

// Diff writes the machine's changed files to w. It stands still while they are
// copied to files of the state file system, not for the making of the tar.
func (i *instance) Diff(ctx context.Context, w *os.File) error {
	files, err := i.layer(ctx)
	if err != nil {
		return fmt.Errorf("read the changed files of machine %s: %w", i.id, err)
	}
	defer closeAll(files)
	if err := writeLayer(ctx, i.b.log, w, files); err != nil {
		return fmt.Errorf("read the changed files of machine %s: %w", i.id, told(err))
	}
	return nil
}

// layer returns the writable layer in files without a name.
func (i *instance) layer(ctx context.Context) ([]*os.File, error) {
	i.still.Lock()
	defer i.still.Unlock()
	if err := errors.Join(ctx.Err(), i.alive()); err != nil {
		return nil, err
	}
	files, err := i.s.scratch(len(layerFiles))
	if err != nil {
		return nil, err
	}
	if err := i.write(i.s.saveLayer, files); err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}
