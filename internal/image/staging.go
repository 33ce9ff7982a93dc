package image

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/durable"
	"github.com/kernflux/opendsec/internal/fault"
)

// staging is a directory for one piece of work.
type staging struct {
	dir  string
	tree string // the file tree to be
}

// stage makes a staging directory.
func (s *Store) stage() (*staging, error) {
	dir, err := os.MkdirTemp(filepath.Join(s.dir, stagingName), "import-")
	if err != nil {
		return nil, diskFault("make a staging directory", err)
	}
	st := &staging{dir: dir, tree: filepath.Join(dir, treeName)}
	if err := st.makeTree(); err != nil {
		return nil, errors.Join(diskFault("make a staging directory", err), removeStaging(dir))
	}
	return st, nil
}

// makeTree makes the root directory of a tree: with a fixed time and mode, so
// that equal layers give equal images.
func (st *staging) makeTree() error {
	if err := os.Mkdir(st.tree, 0o755); err != nil {
		return err
	}
	if err := os.Chmod(st.tree, 0o755); err != nil {
		return err
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, st.tree, make([]unix.Timespec, 2), 0)
}

// removeStaging removes a staging directory. What is mounted below it is
// unmounted first: a removal must never go through a mount into the machine.
func removeStaging(dir string) error {
	mounts, err := mountsBelow(dir)
	if err != nil {
		return err
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		if err := unix.Unmount(mounts[i].target, unix.MNT_DETACH); err != nil && err != unix.EINVAL {
			return fmt.Errorf("unmount %s: %w", mounts[i].target, err)
		}
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove %s: %w", dir, err)
	}
	return nil
}

// room fails with a fault.Capacity when the disk has less than need bytes
// beside the reserve.
func (s *Store) room(need int64) error {
	var st unix.Statfs_t
	if err := unix.Statfs(s.dir, &st); err != nil {
		return fmt.Errorf("look at the free space of %s: %w", s.dir, err)
	}
	free := int64(st.Bavail) * st.Bsize
	if free-s.reserve < need {
		return fault.New(fault.Capacity, "the disk of the image store has %d MB free; %d MB are needed and %d MB stay in reserve",
			free>>20, need>>20, s.reserve>>20)
	}
	return nil
}

// diskFault gives a full disk its kind.
func diskFault(doing string, err error) error {
	if fault.DiskFull(err) {
		return fault.New(fault.Capacity, "%s: the disk is full: %w", doing, err)
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// mkfs makes an EROFS file of a tree, with more options of mkfs.erofs if need be.
// Equal trees give equal files.
func mkfs(ctx context.Context, file, tree string, more ...string) error {
	// noinline_data: whole blocks, which gVisor can map. The epoch is the
	// latest time that mkfs keeps; it also stands in the superblock.
	args := append([]string{"-E", "noinline_data", "-U", "00000000-0000-0000-0000-000000000000", "--quiet"}, more...)
	cmd := exec.CommandContext(ctx, "mkfs.erofs", append(args, file, tree)...)
	cmd.Env = append(os.Environ(), "SOURCE_DATE_EPOCH=4294967295")
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	// The signal comes when the starting thread ends, not the process.
	runtime.LockOSThread()
	err := cmd.Run()
	runtime.UnlockOSThread()
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, exec.ErrNotFound):
		return fault.New(fault.Unavailable, "mkfs.erofs is not installed on the node; run: apt-get install erofs-utils")
	case strings.Contains(out.String(), "No space left"):
		return fault.New(fault.Capacity, "make the EROFS file: the disk is full: %w", err)
	}
	if file := longestName(tree); file != "" {
		return fault.Invalid("source", "the name of %q has %d bytes, which mkfs.erofs of this node cannot write; up to %d always work: give it a shorter one",
			file, unix.NAME_MAX, unix.NAME_MAX-1)
	}
	return fmt.Errorf("make the EROFS file: %w: %s", err, lastLine(out.String()))
}

// longestName returns a file of a tree whose name is as long as Linux has them,
// "" for none. mkfs.erofs 1.5, which Debian 12 has, cuts such a name and then
// does not find the file.
func longestName(tree string) string {
	long := ""
	// An error ends the search; that of mkfs is told then.
	_ = filepath.WalkDir(tree, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if len(d.Name()) == unix.NAME_MAX && path != tree {
			long = strings.TrimPrefix(path, tree+"/")
			return filepath.SkipAll
		}
		return nil
	})
	return long
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// build turns the staged tree into an EROFS file. mkfs.erofs writes a file's
// holes too, so there must be room for treeBytes, which counts them, until they
// are dug out again.
func (s *Store) build(ctx context.Context, st *staging, treeBytes int64) error {
	if err := s.room(treeBytes); err != nil {
		return err
	}
	image := filepath.Join(st.dir, "image")
	if err := errors.Join(os.Mkdir(image, 0o700), os.Mkdir(filepath.Join(image, treeName), 0o700)); err != nil {
		return diskFault("make the image's directory", err)
	}
	if err := buildFile(ctx, filepath.Join(image, rootfsName), st.tree); err != nil {
		return err
	}
	// gVisor refuses each file of an EROFS that has an extended attribute.
	has, err := hasAttributes(st.tree)
	if err != nil || !has {
		return err
	}
	if err := s.room(treeBytes); err != nil {
		return err
	}
	return buildFile(ctx, filepath.Join(image, plainName), st.tree, "-x-1")
}

// buildFile makes an EROFS file of a tree, with holes for zeros, safe against a
// power cut.
func buildFile(ctx context.Context, file, tree string, more ...string) error {
	if err := mkfs(ctx, file, tree, more...); err != nil {
		return err
	}
	if err := digHoles(file); err != nil {
		return diskFault("write the EROFS file", err)
	}
	if err := errors.Join(os.Chmod(file, 0o400), durable.Path(file)); err != nil {
		return diskFault("write the EROFS file", err)
	}
	return nil
}

// hasAttributes reports whether any file of a tree has an extended attribute
// that an EROFS keeps.
func hasAttributes(tree string) (has bool, err error) {
	names := make([]byte, 64<<10) // the kernel's bound
	err = filepath.WalkDir(tree, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		n, err := unix.Llistxattr(path, names)
		if err != nil && err != unix.ENOTSUP {
			return fmt.Errorf("list extended attributes of %s: %w", path, err)
		}
		for name := range strings.SplitSeq(string(names[:max(n, 0)]), "\x00") {
			if name != "" && !strings.HasPrefix(name, "trusted.overlay.") {
				has = true
				return filepath.SkipAll
			}
		}
		return nil
	})
	return has, err
}

// publish puts a built image under its digest and returns it. An image that is
// there already stays.
func (s *Store) publish(st *staging, a Artifact) (Artifact, error) {
	image := filepath.Join(st.dir, "image")
	info, err := os.Stat(filepath.Join(image, rootfsName))
	if err != nil {
		return Artifact{}, fmt.Errorf("publish the image: %w", err)
	}
	a.Size = info.Size()
	if plain, err := os.Stat(filepath.Join(image, plainName)); err == nil {
		a.Size += plain.Size()
	}
	dir, err := s.path(a.Digest)
	if err != nil {
		return Artifact{}, err
	}
	if err := writeArtifact(image, a); err != nil {
		return Artifact{}, err
	}
	defer s.hold(a.Digest)()
	if have, err := s.read(a.Digest); err == nil {
		return have, s.unmark(a.Digest, dir)
	}
	if err := os.Rename(image, dir); err != nil {
		return Artifact{}, diskFault("publish the image", err)
	}
	return a, durable.Path(filepath.Dir(dir))
}

// writeArtifact writes an image's description into its directory, both safe
// against a power cut.
func writeArtifact(image string, a Artifact) error {
	b, err := json.Marshal(a) // without blanks: a backend's data stays what it is
	if err != nil {
		return fmt.Errorf("write the image's description: %w", err)
	}
	name := filepath.Join(image, artifactName)
	if err := os.WriteFile(name, append(b, '\n'), 0o600); err != nil {
		return diskFault("write the image's description", err)
	}
	if err := errors.Join(durable.Path(name), durable.Path(image)); err != nil {
		return diskFault("write the image's description", err)
	}
	return nil
}

// copyFile writes what r has into a new file.
func copyFile(name string, r io.Reader, mode os.FileMode) (err error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_EXCL, mode)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	_, err = io.CopyBuffer(struct{ io.Writer }{f}, r, make([]byte, 1<<20))
	return err
}
