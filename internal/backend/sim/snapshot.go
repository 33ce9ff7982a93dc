package sim

import (
	"archive/tar"
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Names in a snapshot's directory.
const (
	filesTar   = "files.tar"   // the file system
	memoryFile = "memory.json" // what is in memory; only with memory
)

// What a snapshot with memory is taken with, and wants to be started with.
const (
	virtualization = "simulated"
	version        = "1" // of the form of memoryFile
)

// memory is what a machine has in its memory.
type memory struct {
	State    state          `json:"state"`
	Commands []savedCommand `json:"commands"`
}

// sums are the digests of a snapshot's files, "sha256" in hexadecimal digits.
// They are the snapshot's Data.
type sums struct {
	Files  string `json:"files"`
	Memory string `json:"memory,omitempty"`
}

// Snapshot writes the files, and the identity and the commands with memory.
func (m *machine) Snapshot(ctx context.Context, o backend.SnapshotOptions) (s backend.Snapshot, err error) {
	err = m.whileStill(func() error {
		if err := m.backend.snapshotFate(ctx, m.record.ID); err != nil {
			return err
		}
		s, err = m.write(ctx, o)
		return err
	})
	if err != nil {
		return backend.Snapshot{}, fmt.Errorf("take a snapshot of simulated machine %s: %w", m.record.ID, err)
	}
	return s, nil
}

// snapshotFate takes a snapshot's time, and fails for the machines that it
// always fails for.
func (b *Backend) snapshotFate(ctx context.Context, id sandbox.ID) error {
	select {
	case <-time.After(b.behavior.SnapshotTime):
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if b.behavior.chance(id, "snapshot").Float64() < b.behavior.SnapshotFails {
		return fmt.Errorf("it is one of the %v that fail", b.behavior.SnapshotFails)
	}
	return nil
}

// write writes the snapshot of a machine that stands still.
func (m *machine) write(ctx context.Context, o backend.SnapshotOptions) (backend.Snapshot, error) {
	s := backend.Snapshot{
		Backend: sandbox.Sim, Dir: o.Dir, Memory: o.Memory, Limits: m.record.Limits,
		Stamp: stamp(m.record.Agent),
	}
	var of sums
	var err error
	of.Files, err = addFile(&s, filesTar, func(w io.Writer) error { return m.agent.files.writeTar(ctx, w) })
	if err == nil && o.Memory {
		of.Memory, err = addFile(&s, memoryFile, m.agent.writeMemory)
	}
	if err != nil {
		return s, err
	}
	s.Data, err = json.Marshal(of)
	return s, err
}

// stamp says what snapshots are taken with here.
func stamp(agent string) backend.Stamp {
	var u unix.Utsname
	_ = unix.Uname(&u) // fails for a bad pointer only
	return backend.Stamp{
		Virtualization: virtualization, Runtime: version, Kernel: unix.ByteSliceToString(u.Release[:]),
		CPUFeatures: []string{}, Agent: agent,
	}
}

// addFile writes one file of a snapshot, counts it, and returns its digest.
func addFile(s *backend.Snapshot, name string, write func(io.Writer) error) (string, error) {
	f, err := os.OpenFile(filepath.Join(s.Dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", err
	}
	h := sha256.New()
	b := bufio.NewWriterSize(f, 64<<10)
	err = write(io.MultiWriter(b, h))
	if err == nil {
		err = b.Flush()
	}
	info, serr := f.Stat()
	if err = errors.Join(err, serr, f.Close()); err != nil {
		return "", fmt.Errorf("write %s: %w", name, err)
	}
	s.Size += info.Size()
	return hex.EncodeToString(h.Sum(nil)), nil
}

// writeMemory writes the identity and the commands.
func (a *agent) writeMemory(w io.Writer) error {
	mem := memory{State: a.now()}
	mem.State.Paused = false // what is made of it runs
	var err error
	if mem.Commands, err = a.table.save(); err != nil {
		return err
	}
	return json.NewEncoder(w).Encode(mem)
}

// writeTar writes all files and directories, but those that are being written.
func (t *fileTree) writeTar(ctx context.Context, w io.Writer) error {
	out := tar.NewWriter(w)
	err := fs.WalkDir(t.root.FS(), ".", func(name string, d fs.DirEntry, err error) error {
		if err == nil {
			err = ctx.Err()
		}
		if err != nil || name == "." || strings.HasPrefix(path.Base(name), tempPrefix) {
			return err
		}
		return t.writeEntry(out, name, d)
	})
	if err != nil {
		return err
	}
	return out.Close()
}

func (t *fileTree) writeEntry(out *tar.Writer, name string, d fs.DirEntry) error {
	info, err := d.Info()
	if err != nil {
		return err
	}
	h := &tar.Header{
		Name: name, Typeflag: tar.TypeReg, Mode: int64(info.Mode().Perm()), Size: info.Size(),
		ModTime: info.ModTime(), Format: tar.FormatPAX,
	}
	if d.IsDir() {
		h.Typeflag, h.Name, h.Size = tar.TypeDir, name+"/", 0
		return out.WriteHeader(h)
	}
	if err := out.WriteHeader(h); err != nil {
		return err
	}
	f, err := t.root.Open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(out, f)
	return err
}

// Diff writes all files: a simulated machine has none of its image's.
func (m *machine) Diff(ctx context.Context, w *os.File) error {
	err := m.whileStill(func() error { return m.agent.files.writeTar(ctx, w) })
	if err != nil {
		return fmt.Errorf("read the changed files of simulated machine %s: %w", m.record.ID, err)
	}
	return nil
}

// CanRestore compares what a snapshot was taken with.
func (b *Backend) CanRestore(s backend.Snapshot) error {
	switch here := stamp(""); {
	case s.Backend != sandbox.Sim:
		return fmt.Errorf("the snapshot was made with the backend %s, and memory of one backend cannot run on another (here %s)", s.Backend, sandbox.Sim)
	case !s.Memory:
		return errors.New("the snapshot is one of files only")
	case s.Stamp.Virtualization != here.Virtualization:
		return fmt.Errorf("the snapshot was made with virtualization %q, this node has %q", s.Stamp.Virtualization, here.Virtualization)
	case s.Stamp.Runtime != here.Runtime:
		return fmt.Errorf("the snapshot was made with version %q of the simulation, this node has %q", s.Stamp.Runtime, here.Runtime)
	case len(s.Stamp.CPUFeatures) > 0:
		return fmt.Errorf("the snapshot needs the CPU features %s, and a simulated CPU has none", strings.Join(s.Stamp.CPUFeatures, ", "))
	}
	return nil
}

// Prepare has nothing to do.
func (b *Backend) Prepare(backend.Config) {}

// Withdraw does nothing: simulated machines share nothing.
func (b *Backend) Withdraw(backend.Snapshot) {}

// unpackSnapshot makes the file system of a machine of a snapshot, and returns
// what it has in its memory, which is nothing for one of files only.
func unpackSnapshot(ctx context.Context, s backend.Snapshot, r record) (memory, error) {
	var of sums
	if err := json.Unmarshal(s.Data, &of); s.Backend != sandbox.Sim || err != nil {
		return memory{}, fmt.Errorf("a snapshot of backend %q with data %q is none of a simulated machine", s.Backend, s.Data)
	}
	var mem memory
	if s.Memory {
		data, err := os.ReadFile(filepath.Join(s.Dir, memoryFile))
		if err == nil && hex.EncodeToString(sum(data)) != of.Memory {
			err = errHarmed
		}
		if err == nil {
			err = json.Unmarshal(data, &mem)
		}
		if err != nil {
			return memory{}, fmt.Errorf("read the snapshot's %s: %w", memoryFile, err)
		}
	}
	if err := unpackFiles(ctx, filepath.Join(s.Dir, filesTar), of.Files, r); err != nil {
		return memory{}, fmt.Errorf("read the snapshot's %s: %w", filesTar, err)
	}
	return mem, nil
}

// errHarmed says that a snapshot is not what was written.
var errHarmed = errors.New("it is not what was written: its digest differs")

func sum(data []byte) []byte { s := sha256.Sum256(data); return s[:] }

// unpackFiles makes a machine's file system of an archive with a digest.
func unpackFiles(ctx context.Context, archive, digest string, r record) error {
	f, err := os.Open(archive)
	if err != nil {
		return err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return err
	}
	if hex.EncodeToString(h.Sum(nil)) != digest {
		return errHarmed
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return err
	}
	top := filepath.Join(r.StateDir, filesDir)
	if err := os.Mkdir(top, 0o755); err != nil {
		return err
	}
	root, err := os.OpenRoot(top)
	if err != nil {
		return err
	}
	defer root.Close()
	return unpackTar(ctx, bufio.NewReaderSize(f, 64<<10), root)
}

func unpackTar(ctx context.Context, r io.Reader, root *os.Root) error {
	in := tar.NewReader(r)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		h, err := in.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		name, mode := path.Clean(h.Name), h.FileInfo().Mode().Perm()
		if h.Typeflag == tar.TypeDir {
			err = root.Mkdir(name, mode)
		} else {
			err = unpackFile(root, name, mode, in)
		}
		if err == nil {
			err = root.Chtimes(name, h.ModTime, h.ModTime)
		}
		if err != nil {
			return err
		}
	}
}

func unpackFile(root *os.Root, name string, mode fs.FileMode, r io.Reader) error {
	f, err := root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	return errors.Join(err, f.Close())
}
