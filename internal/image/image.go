// Package image keeps a node's images: it fetches them from where they are
// (package source), lays their layers over each other (package layer), or
// builds one from the machine's package mirror (package debian), and keeps
// each as one read-only EROFS file with its configuration, under its digest.
// All sandboxes and all backends of a node share that file, and the kernel
// mounts it once. Beside these it keeps snapshots with memory: files that a
// backend wrote and can read, and the image that they run on.
//
// Names of images are not kept here, and neither is who may see them; of a
// running sandbox nothing is. The store does not know what is in a snapshot.
//
// A store is a directory:
//
//	lock                     held while a store is open
//	sha256/HEX/image.json    an image's Artifact
//	sha256/HEX/rootfs.erofs  its tree
//	sha256/HEX/tree          where that is mounted
//	sha256/HEX/snapshot/…    the files of a memory image, in place of a tree
//	sha256/HEX/deleted       there when it goes with its last user
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
	"slices"
	"sync"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/layer"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/takeover"
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

// Kinds of images.
const (
	KindOCI    = "oci"    // imported or built
	KindFiles  = "files"  // packed from the files of a sandbox
	KindMemory = "memory" // a snapshot with memory, which runs on another image
)

// Artifact is an image in the store.
type Artifact struct {
	Digest       string  `json:"digest"`         // "sha256:…"
	Kind         string  `json:"kind,omitempty"` // "" in a file means KindOCI
	Size         int64   `json:"size"`           // on the disk, in bytes: of the EROFS file or the snapshot
	Architecture string  `json:"architecture"`
	Source       string  `json:"source"` // where it came from, without credentials
	Config       Config  `json:"config"`
	Memory       *Memory `json:"memory,omitempty"` // of a KindMemory only
}

// Memory is what a memory image is beside its files.
type Memory struct {
	Base string `json:"base"` // digest of the image it runs on, which has a tree
	// Snapshot is as the backend gave it. Read from the store, its Dir is where
	// the files are.
	Snapshot   backend.Snapshot `json:"snapshot"`
	AgentToken string           `json:"agent_token"` // of the agent in it; a secret
	SandboxID  sandbox.ID       `json:"sandbox_id"`  // that it was taken of
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
	plainName    = "plain.erofs"
	artifactName = "image.json"
	treeName     = "tree"
	snapshotName = "snapshot"
	deletedName  = "deleted"
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
	users  map[string]int           // by digest: Acquire less Release; one of a memory image is one of its base too
	bases  map[string]string        // by digest of a memory image: that of its base
	marked map[string]bool          // by digest: deleted, and here as long as it is in use
	former map[string]bool          // by digest: marked in an earlier run, and its users may come back
	flying map[string]chan struct{} // by digest: imports under way; closed at their end
	// held has a lock by digest, for mounting, unmounting, publishing and
	// deleting. That of a memory image is taken before that of its base.
	held map[string]*sync.Mutex
}

// Open opens the store in dir, which it makes if need be, and removes what work
// left that was killed. Images that were deleted while in use stay until Sweep,
// and may be acquired until then, as their users may still be there. It fails
// while another process has the store open.
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
	lock, err := takeover.Lock(filepath.Join(dir, lockName), takeover.Patience)
	if err != nil {
		return nil, fmt.Errorf("open the image store %s, which one process at a time may: %w", dir, err)
	}
	s := &Store{
		log: log, dir: dir, lock: lock, reserve: reserve,
		users: map[string]int{}, bases: map[string]string{}, marked: map[string]bool{}, former: map[string]bool{},
		flying: map[string]chan struct{}{}, held: map[string]*sync.Mutex{},
	}
	if err := errors.Join(s.clean(), s.index()); err != nil {
		return nil, errors.Join(fmt.Errorf("take up the image store %s: %w", dir, err), lock.Close())
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
		s.log.Info("remove unfinished work on an image", "name", e.Name())
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

// index takes note of memory images' bases and of marks.
func (s *Store) index() error {
	digests, err := s.digests()
	if err != nil {
		return err
	}
	for _, digest := range digests {
		dir, err := s.path(digest)
		if err != nil {
			return err
		}
		if _, err := os.Lstat(filepath.Join(dir, deletedName)); err == nil {
			s.marked[digest], s.former[digest] = true, true
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		a, err := s.read(digest)
		if err != nil { // does not keep the others from being used
			s.log.Error("cannot read an image of the store", "digest", digest, "error", err)
		}
		if a.Memory != nil {
			s.bases[digest] = a.Memory.Base
		}
	}
	return nil
}

// digests lists what is in the store, deleted images too.
func (s *Store) digests() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, "sha256"))
	if err != nil {
		return nil, fmt.Errorf("list the images: %w", err)
	}
	var all []string
	for _, e := range entries {
		if digest := "sha256:" + e.Name(); digestForm.MatchString(digest) {
			all = append(all, digest)
		}
	}
	return all, nil
}

// Get returns an image of the store, or a fault.NotFound.
func (s *Store) Get(digest string) (Artifact, error) {
	s.mu.Lock()
	gone := s.marked[digest]
	s.mu.Unlock()
	if gone {
		return Artifact{}, notHere(digest)
	}
	return s.read(digest)
}

func notHere(digest string) error {
	return fault.New(fault.NotFound, "there is no image %s on this node; import it", digest)
}

// read returns an image of the store, a deleted one too, or a fault.NotFound.
func (s *Store) read(digest string) (Artifact, error) {
	dir, err := s.path(digest)
	if err != nil {
		return Artifact{}, err
	}
	b, err := os.ReadFile(filepath.Join(dir, artifactName))
	if errors.Is(err, fs.ErrNotExist) {
		return Artifact{}, notHere(digest)
	}
	if err != nil {
		return Artifact{}, fmt.Errorf("read image %s: %w", digest, err)
	}
	var a Artifact
	if err := json.Unmarshal(b, &a); err != nil {
		return Artifact{}, fmt.Errorf("read image %s: %w", digest, err)
	}
	a.Kind = orDefault(a.Kind, KindOCI)
	if a.Memory != nil {
		a.Memory.Snapshot.Dir = filepath.Join(dir, snapshotName)
	}
	return a, nil
}

// List returns all images of the store, by digest.
func (s *Store) List() ([]Artifact, error) {
	return s.each(s.Get)
}

// each returns what get has of all digests, without those not found.
func (s *Store) each(get func(digest string) (Artifact, error)) ([]Artifact, error) {
	digests, err := s.digests()
	if err != nil {
		return nil, err
	}
	var all []Artifact
	for _, digest := range digests {
		a, err := get(digest)
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

// Agents returns the IDs of the agents that memory images need, deleted ones
// too, in order.
func (s *Store) Agents() ([]string, error) {
	all, err := s.each(s.read)
	if err != nil {
		return nil, fmt.Errorf("find the agents that snapshots need: %w", err)
	}
	var ids []string
	for _, a := range all {
		if a.Memory != nil && a.Memory.Snapshot.Stamp.Agent != "" {
			ids = append(ids, a.Memory.Snapshot.Stamp.Agent)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}

// hold waits until nobody else mounts, unmounts, publishes or deletes the image
// and returns what lets it go.
func (s *Store) hold(digest string) (release func()) {
	s.mu.Lock()
	m := s.held[digest]
	if m == nil {
		m = &sync.Mutex{}
		s.held[digest] = m
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
