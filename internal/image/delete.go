package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/kernflux/opendsec/internal/durable"
	"github.com/kernflux/opendsec/internal/fault"
)

// Delete removes an image. One that is in use, by sandboxes or by a memory
// image that runs on it, is marked: it is not listed any more, can be acquired
// only as long as it has users, and goes with the last of them, also after a
// restart. A new import of it takes the mark off. One that is not there is no
// error, so Delete may be repeated.
func (s *Store) Delete(digest string) error {
	dir, err := s.path(digest)
	if err != nil {
		return err
	}
	release := s.hold(digest)
	base, err := s.deleteHeld(digest, dir)
	release()
	if err != nil {
		return fmt.Errorf("delete image %s: %w", digest, err)
	}
	return s.sweep(base)
}

func (s *Store) deleteHeld(digest, dir string) (base string, err error) {
	_, err = os.Lstat(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	s.mu.Lock()
	used := s.inUse(digest) || s.former[digest]
	s.mu.Unlock()
	if used {
		return "", s.mark(digest, dir)
	}
	return s.remove(digest, dir)
}

// inUse reports whether an image is needed. s.mu is held.
func (s *Store) inUse(digest string) bool {
	if s.users[digest] > 0 {
		return true
	}
	for _, base := range s.bases {
		if base == digest {
			return true
		}
	}
	return false
}

// mark notes, for later runs too, that an image goes with its last user. The
// image is held.
func (s *Store) mark(digest, dir string) error {
	name := filepath.Join(dir, deletedName)
	if err := os.WriteFile(name, nil, 0o600); err != nil {
		return diskFault("mark it as deleted", err)
	}
	s.mu.Lock()
	s.marked[digest] = true
	s.mu.Unlock()
	return durable.Path(dir)
}

// unmark takes a mark off. The image is held.
func (s *Store) unmark(digest, dir string) error {
	err := os.Remove(filepath.Join(dir, deletedName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("take back that image %s was deleted: %w", digest, err)
	}
	s.mu.Lock()
	delete(s.marked, digest)
	delete(s.former, digest)
	s.mu.Unlock()
	return durable.Path(dir)
}

// remove removes an image that nobody uses and returns its base, which may
// have lost its last user. The image is held.
func (s *Store) remove(digest, dir string) (base string, err error) {
	if err := s.unmountHeld(dir); err != nil {
		return "", err
	}
	// Into staging first: a half-deleted image is never seen. There may be one
	// that could not be removed then, and no space for a directory on the way.
	gone := filepath.Join(s.dir, stagingName, "delete-"+filepath.Base(dir))
	if err := removeStaging(gone); err != nil {
		return "", err
	}
	if err := os.Rename(dir, gone); err != nil {
		return "", err
	}
	s.mu.Lock()
	base = s.bases[digest]
	delete(s.bases, digest)
	delete(s.marked, digest)
	delete(s.former, digest)
	s.mu.Unlock()
	return base, errors.Join(durable.Path(filepath.Dir(dir)), removeStaging(gone))
}

// Sweep removes the images that were deleted in an earlier run and are not in
// use. It is to be called when all that used them then has acquired them again.
func (s *Store) Sweep() error {
	s.mu.Lock()
	clear(s.former)
	var marked []string
	for digest := range s.marked {
		marked = append(marked, digest)
	}
	s.mu.Unlock()
	var errs []error
	for _, digest := range marked {
		errs = append(errs, s.sweep(digest))
	}
	return errors.Join(errs...)
}

// sweep removes an image if it is marked and has lost its last user, and then
// its base if that waited for it.
func (s *Store) sweep(digest string) error {
	for digest != "" && s.idle(digest) {
		base, err := s.sweepOne(digest)
		if err != nil {
			return fmt.Errorf("remove image %s, which was deleted: %w", digest, err)
		}
		digest = base
	}
	return nil
}

func (s *Store) sweepOne(digest string) (base string, err error) {
	dir, err := s.path(digest)
	if err != nil {
		return "", err
	}
	defer s.hold(digest)()
	if !s.idle(digest) {
		return "", nil // somebody was faster
	}
	return s.remove(digest, dir)
}

// idle reports whether an image waits for nothing but its removal.
func (s *Store) idle(digest string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.marked[digest] && !s.former[digest] && !s.inUse(digest)
}

// revive returns an image that is there, also one that was deleted and waits
// for its last user: that one stays from now on.
func (s *Store) revive(digest string) (Artifact, error) {
	dir, err := s.path(digest)
	if err != nil {
		return Artifact{}, err
	}
	defer s.hold(digest)()
	a, err := s.read(digest)
	if err != nil {
		return Artifact{}, err
	}
	return a, s.unmark(digest, dir)
}

// usable returns a fault.NotFound for an image that was deleted, unless it has
// users, or may have some of an earlier run.
func (s *Store) usable(digest string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.marked[digest] && !s.former[digest] && s.users[digest] == 0 {
		return fault.New(fault.NotFound, "image %s was deleted", digest)
	}
	return nil
}
