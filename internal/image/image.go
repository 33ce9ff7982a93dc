// Package image keeps a node's images: it fetches them from where they are
// (package source), lays their layers over each other (package layer), or
// builds one from the machine's package mirror (package debian), and keeps
// each as one read-only EROFS file with its configuration, under its digest.
// All sandboxes and all backends of a node share that file, and the kernel
// mounts it once.
//
// Names of images are not kept here, and neither is who may see them; nothing
// of a sandbox's own is.
//
// A store is a directory:
//
//	lock                     held while a store is open
//	sha256/HEX/rootfs.erofs  an image's tree
//	sha256/HEX/image.json    its Artifact
//	sha256/HEX/tree          where it is mounted
//	staging/…                work in progress, removed when a store is opened
package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/layer"
)

// Config is the part of an image's configuration that a sandbox gets.
type Config struct {
	Env        []string          `json:"env,omitempty"` // "NAME=value"
	User       string            `json:"user,omitempty"`
	Workdir    string            `json:"workdir,omitempty"`
	Entrypoint []string          `json:"entrypoint,omitempty"` // recorded, not run
	Cmd        []string          `json:"cmd,omitempty"`        // recorded, not run
	Labels     map[string]string `json:"labels,omitempty"`
}

// Artifact is an image in the store.
type Artifact struct {
	Digest       string `json:"digest"` // "sha256:…"
	Size         int64  `json:"size"`   // of the EROFS file in bytes
	Architecture string `json:"architecture"`
	Source       string `json:"source"` // where it came from, without credentials
	Config       Config `json:"config"`
}

// Progress says how far an import is. Steps come in the order "pull",
// "unpack", "build", "done"; a step with nothing to do is left out.
type Progress struct {
	Step   string
	Detail string // a line for a person
	Done   int64  // bytes of this step
	Total  int64  // bytes in all; 0 when unknown
}

// Names in the store.
const (
	lockName     = "lock"
	stagingName  = "staging"
	rootfsName   = "rootfs.erofs"
	artifactName = "image.json"
	treeName     = "tree"
)

// reserve is how much of the disk an import leaves free, in bytes: a full disk
// under the sandboxes is worse than an image that is refused.
const reserve = 512 << 20

// Store keeps images in a directory. Its methods may be called side by side.
type Store struct {
	log     *slog.Logger
	dir     string
	lock    *os.File
	reserve int64 // bytes
	limits  layer.Limits

	mu     sync.Mutex
	users  map[string]int           // by digest, of the mounted tree
	flying map[string]chan struct{} // by digest: imports under way; closed at their end
	mounts map[string]*sync.Mutex   // by digest: held while mounting, unmounting or deleting
}

// Open opens the store in dir, which it makes if need be, and removes what an
// import left that was killed. It fails while another process has it open.
func Open(log *slog.Logger, dir string) (*Store, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, fmt.Errorf("open the image store %s: %w", dir, err)
	}
	for _, d := range []string{dir, filepath.Join(dir, stagingName), filepath.Join(dir, "sha256")} {
		if err := os.MkdirAll(d, 0o700); err != nil {
			return nil, fmt.Errorf("open the image store %s: %w", dir, err)
		}
	}
	// mountinfo has paths without links.
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		return nil, fmt.Errorf("open the image store: %w", err)
	}
	lock, err := os.OpenFile(filepath.Join(dir, lockName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the image store %s: %w", dir, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("lock the image store %s: another process has it open: %w", dir, err), lock.Close())
	}
	s := &Store{
		log: log, dir: dir, lock: lock, reserve: reserve,
		users: map[string]int{}, flying: map[string]chan struct{}{}, mounts: map[string]*sync.Mutex{},
	}
	if err := s.clean(); err != nil {
		return nil, errors.Join(fmt.Errorf("clean the image store %s: %w", dir, err), lock.Close())
	}
	return s, nil
}

// clean removes what was under way when the store was last used.
func (s *Store) clean() error {
	left, err := os.ReadDir(filepath.Join(s.dir, stagingName))
	if err != nil {
		return err
	}
	for _, e := range left {
		s.log.Info("remove an unfinished import", "name", e.Name())
		if err := removeStaging(filepath.Join(s.dir, stagingName, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// Close closes the store; with unmount it also unmounts the images that nobody
// uses. Mounts that stay are found again by the next Open.
func (s *Store) Close(unmount bool) error {
	var errs []error
	if unmount {
		mounts, err := s.Mounts()
		errs = append(errs, err)
		for _, m := range mounts {
			if m.Users == 0 {
				errs = append(errs, s.unmount(m.Digest))
			}
		}
	}
	return errors.Join(append(errs, s.lock.Close())...)
}

var digestForm = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// path returns the directory of an image.
func (s *Store) path(digest string) (string, error) {
	if !digestForm.MatchString(digest) {
		return "", fault.Invalid("digest", "%q is no digest of the form sha256:HEX", digest)
	}
	return filepath.Join(s.dir, "sha256", digest[len("sha256:"):]), nil
}

// Get returns an image of the store, or a fault.NotFound.
func (s *Store) Get(digest string) (Artifact, error) {
	dir, err := s.path(digest)
	if err != nil {
		return Artifact{}, err
	}
	b, err := os.ReadFile(filepath.Join(dir, artifactName))
	if errors.Is(err, fs.ErrNotExist) {
		return Artifact{}, fault.New(fault.NotFound, "there is no image %s on this node; import it", digest)
	}
	if err != nil {
		return Artifact{}, fmt.Errorf("read image %s: %w", digest, err)
	}
	var a Artifact
	if err := json.Unmarshal(b, &a); err != nil {
		return Artifact{}, fmt.Errorf("read image %s: %w", digest, err)
	}
	return a, nil
}

// List returns all images of the store, by digest.
func (s *Store) List() ([]Artifact, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "sha256"))
	if err != nil {
		return nil, fmt.Errorf("list the images: %w", err)
	}
	var all []Artifact
	for _, e := range entries {
		digest := "sha256:" + e.Name()
		if !digestForm.MatchString(digest) {
			continue
		}
		a, err := s.Get(digest)
		if fault.Is(err, fault.NotFound) {
			continue // deleted a moment ago
		}
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	return all, nil
}

// Delete removes an image. One that is in use is a fault.WrongState; one that
// is not there is no error, so it may be repeated.
func (s *Store) Delete(digest string) error {
	dir, err := s.path(digest)
	if err != nil {
		return err
	}
	defer s.hold(digest)()
	if n := s.usersOf(digest); n > 0 {
		return fault.New(fault.WrongState, "image %s is used by %d sandboxes; stop them first", digest, n)
	}
	if err := s.unmountHeld(dir); err != nil {
		return fmt.Errorf("delete image %s: %w", digest, err)
	}
	// Into staging first: a half-deleted image is never seen.
	gone, err := os.MkdirTemp(filepath.Join(s.dir, stagingName), "delete-")
	if err != nil {
		return fmt.Errorf("delete image %s: %w", digest, err)
	}
	err = os.Rename(dir, filepath.Join(gone, "image"))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err := errors.Join(err, removeStaging(gone)); err != nil {
		return fmt.Errorf("delete image %s: %w", digest, err)
	}
	return nil
}

// hold waits until nobody else mounts, unmounts or deletes the image and
// returns what lets it go.
func (s *Store) hold(digest string) (release func()) {
	s.mu.Lock()
	m := s.mounts[digest]
	if m == nil {
		m = &sync.Mutex{}
		s.mounts[digest] = m
	}
	s.mu.Unlock()
	m.Lock()
	return m.Unlock
}

func (s *Store) usersOf(digest string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.users[digest]
}
