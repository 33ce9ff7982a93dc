package image

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/durable"
)

// A Draft is a memory image in the making. What a killed program left of one
// goes when the store is opened.
type Draft struct {
	store *Store
	dir   string // in staging
	image string // the image's directory to be, in dir
}

// Begin makes a draft. Abort is to be called in every case.
func (s *Store) Begin() (*Draft, error) {
	if err := s.room(0); err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(filepath.Join(s.dir, stagingName), "draft-")
	if err != nil {
		return nil, diskFault("begin a memory image", err)
	}
	d := &Draft{store: s, dir: dir, image: filepath.Join(dir, "image")}
	if err := errors.Join(os.Mkdir(d.image, 0o700), os.Mkdir(d.Dir(), 0o700)); err != nil {
		return nil, errors.Join(diskFault("begin a memory image", err), d.Abort())
	}
	return d, nil
}

// Dir returns a directory on the store's file system, empty at first, for the
// snapshot's files.
func (d *Draft) Dir() string { return filepath.Join(d.image, snapshotName) }

// Abort removes the draft. After CommitMemory it does no harm.
func (d *Draft) Abort() error { return removeStaging(d.dir) }

// CommitMemory makes the draft an image, whole or not at all, and safe against
// a power cut. Its base is held by it: should m.Base itself be a memory image,
// then it is that one's base. The size is that of the files on the disk.
//
// Faults: NotFound (the base is not on this node), Capacity (the disk is full,
// or so full that the reserve is gone). The draft is as it was then.
func (d *Draft) CommitMemory(m Memory, cfg Config, source string) (Artifact, error) {
	s := d.store
	base, err := s.baseOf(m.Base)
	if err != nil {
		return Artifact{}, err
	}
	if err := durable.Tree(d.Dir()); err != nil {
		return Artifact{}, diskFault("write the snapshot to the disk", err)
	}
	size, err := sizeOnDisk(d.Dir())
	if err != nil {
		return Artifact{}, fmt.Errorf("measure the snapshot: %w", err)
	}
	if err := s.room(0); err != nil {
		return Artifact{}, err
	}
	m.Base, m.Snapshot.Size = base.Digest, size
	a := Artifact{Kind: KindMemory, Size: size, Architecture: base.Architecture, Source: source, Config: cfg, Memory: &m}
	if a.Digest, err = newDigest(a); err != nil {
		return Artifact{}, err
	}
	if err := writeArtifact(d.image, a); err != nil {
		return Artifact{}, err
	}
	if err := s.publishMemory(d.image, a); err != nil {
		return Artifact{}, err
	}
	return s.read(a.Digest)
}

// baseOf returns the image on which one of a digest runs: itself, or that of a
// memory image.
func (s *Store) baseOf(digest string) (Artifact, error) {
	a, err := s.read(digest)
	if err != nil || a.Memory == nil {
		return a, err
	}
	return s.read(a.Memory.Base)
}

// publishMemory puts a memory image's directory under its digest, which is
// new, and holds its base.
func (s *Store) publishMemory(image string, a Artifact) error {
	dir, err := s.path(a.Digest)
	if err != nil {
		return err
	}
	base := a.Memory.Base
	defer s.hold(base)()
	if _, err := s.read(base); err != nil {
		return err // deleted meanwhile
	}
	s.setBase(a.Digest, base)
	if err := os.Rename(image, dir); err != nil {
		s.setBase(a.Digest, "")
		return diskFault("publish the image", err)
	}
	if err := durable.Path(filepath.Dir(dir)); err != nil {
		s.setBase(a.Digest, "")
		return errors.Join(diskFault("publish the image", err), os.Rename(dir, image))
	}
	return nil
}

// setBase notes the base of a memory image; "" forgets it.
func (s *Store) setBase(digest, base string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if base == "" {
		delete(s.bases, digest)
		return
	}
	s.bases[digest] = base
}

// newDigest returns the digest of an image's description and something random:
// no two memory images are the same one.
func newDigest(a Artifact) (string, error) {
	b, err := json.Marshal(struct {
		Artifact
		Nonce string `json:"nonce"`
	}{a, rand.Text()})
	if err != nil {
		return "", fmt.Errorf("compute the image's digest: %w", err)
	}
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

// sizeOnDisk returns how many bytes of the disk the files below a directory
// have. Those that are not synced may have no blocks yet.
func sizeOnDisk(dir string) (size int64, err error) {
	err = filepath.WalkDir(dir, func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(name, &st); err != nil {
			return fmt.Errorf("look at %s: %w", name, err)
		}
		size += st.Blocks * 512
		return nil
	})
	return size, err
}
