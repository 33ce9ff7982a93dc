package tree

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"strings"
	"time"
)

// EntryError says which entry of a stream cannot be unpacked because of what
// the stream or the tree holds.
type EntryError struct {
	Name string // as in the stream
	Why  string
}

func (e *EntryError) Error() string { return fmt.Sprintf("entry %q: %s", e.Name, e.Why) }

// ErrBadStream says that what was read is not a tar stream, or not all of it.
var ErrBadStream = errors.New("not a complete tar stream")

// Owner says to whom unpacked entries belong.
type Owner struct {
	UID, GID int
	Keep     bool // take the numbers of the stream instead
}

// unpacker is one stream being read.
type unpacker struct {
	root  *os.Root
	owner Owner
	dirs  []*tar.Header // whose modes and times are set last
	buf   []byte
}

// Unpack reads a tar stream into dir, which must exist. A leading "/"
// of a name is dropped; a name or hard link with "..", or one that leads
// through a symbolic link out of dir, is refused with an *EntryError. An entry
// replaces what is there, but for directories. On an error what was unpacked
// before stays.
func Unpack(r io.Reader, dir string, owner Owner) error {
	root, err := os.OpenRoot(dir)
	if err != nil {
		return err
	}
	defer root.Close()
	u := &unpacker{root: root, owner: owner, buf: make([]byte, copySize)}
	tr := tar.NewReader(r)
	for {
		h, err := tr.Next()
		if err == io.EOF {
			return u.finishDirs()
		}
		if err == nil {
			err = u.entry(h, tr)
		}
		if err != nil {
			return errors.Join(streamError(err), u.finishDirs())
		}
	}
}

// streamError tells a broken stream from a failing source.
func streamError(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) || errors.Is(err, io.ErrUnexpectedEOF) {
		return fmt.Errorf("%w: %w", ErrBadStream, err)
	}
	return err
}

// local turns a name of the stream into a path below the root.
func local(name string) (string, error) {
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", &EntryError{name, "\"..\" is not allowed in it"}
		}
	}
	if strings.ContainsRune(name, 0) {
		return "", &EntryError{name, "it holds a zero byte"}
	}
	return path.Clean(strings.TrimLeft(name, "/")), nil
}

func (u *unpacker) entry(h *tar.Header, r io.Reader) error {
	name, err := local(h.Name)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		err = u.dir(name, h)
	case tar.TypeReg, '\x00': // old streams write a zero
		err = u.file(name, h, r)
	case tar.TypeSymlink:
		err = u.symlink(name, h)
	case tar.TypeLink:
		err = u.link(name, h)
	case tar.TypeXGlobalHeader:
		return nil // comments, as git archive writes them
	default:
		return &EntryError{h.Name, "only files, directories, symbolic and hard links are taken"}
	}
	return u.explain(h.Name, err)
}

// explain names the entry in an error that its own content caused.
func (u *unpacker) explain(name string, err error) error {
	var pe *fs.PathError
	var le *os.LinkError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &pe) && pe.Err.Error() == escapes, errors.As(err, &le) && le.Err.Error() == escapes:
		return &EntryError{name, "a symbolic link in its path leads out of the directory"}
	}
	return fmt.Errorf("entry %q: %w", name, err)
}

// escapes is the text of os.Root's refusal, which has no exported value; a
// test keeps it right.
const escapes = "path escapes from parent"

// parents makes the directories above name, for the owner.
func (u *unpacker) parents(name string) error {
	dir := path.Dir(name)
	if dir == "." {
		return nil
	}
	info, err := u.root.Stat(dir)
	if err == nil && !info.IsDir() {
		return fmt.Errorf("%s is not a directory", dir)
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := u.parents(dir); err != nil {
		return err
	}
	if err := u.root.Mkdir(dir, 0o755); err != nil {
		return err
	}
	return u.root.Lchown(dir, u.owner.UID, u.owner.GID)
}

// clear removes what is in the way of an entry that is no directory.
func (u *unpacker) clear(name string) error {
	if name == "." {
		return errors.New("the directory itself cannot be replaced")
	}
	if err := u.parents(name); err != nil {
		return err
	}
	err := u.root.Remove(name)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err // a directory that is not empty stays, and is in the way
}

func (u *unpacker) dir(name string, h *tar.Header) error {
	u.dirs = append(u.dirs, h)
	if name == "." {
		return nil
	}
	if info, err := u.root.Stat(name); err == nil && info.IsDir() {
		return nil // also a symbolic link to one inside
	}
	if err := u.clear(name); err != nil {
		return err
	}
	return u.root.Mkdir(name, 0o700)
}

func (u *unpacker) file(name string, h *tar.Header, r io.Reader) error {
	if err := u.clear(name); err != nil {
		return err
	}
	f, err := u.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	if _, err := io.CopyBuffer(onlyWriter{f}, onlyReader{r}, u.buf); err != nil {
		return streamError(err)
	}
	uid, gid := u.ids(h)
	if err := f.Chown(uid, gid); err != nil {
		return err
	}
	if err := f.Chmod(mode(h)); err != nil { // after the owner: a change of owner clears set-uid
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	return u.times(name, h)
}

// onlyReader hides WriteTo, so that a copy uses its own buffer.
type onlyReader struct{ io.Reader }

func (u *unpacker) symlink(name string, h *tar.Header) error {
	if err := u.clear(name); err != nil {
		return err
	}
	if err := u.root.Symlink(h.Linkname, name); err != nil {
		return err
	}
	uid, gid := u.ids(h)
	return u.root.Lchown(name, uid, gid)
}

func (u *unpacker) link(name string, h *tar.Header) error {
	old, err := local(h.Linkname)
	if err != nil {
		return err
	}
	if old == name {
		return &EntryError{h.Name, "a hard link to itself"}
	}
	if _, err := u.root.Lstat(old); err != nil {
		return err // before what the link replaces is gone
	}
	if err := u.clear(name); err != nil {
		return err
	}
	return u.root.Link(old, name)
}

func (u *unpacker) ids(h *tar.Header) (uid, gid int) {
	if u.owner.Keep {
		return h.Uid, h.Gid
	}
	return u.owner.UID, u.owner.GID
}

// mode returns an entry's permissions with the three bits above them.
func mode(h *tar.Header) fs.FileMode {
	m := fs.FileMode(h.Mode & 0o777)
	for bit, flag := range map[int64]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if h.Mode&bit != 0 {
			m |= flag
		}
	}
	return m
}

func (u *unpacker) times(name string, h *tar.Header) error {
	t := h.ModTime
	if t.Before(time.Unix(0, 0)) {
		t = time.Unix(0, 0)
	}
	return u.root.Chtimes(name, t, t)
}

// finishDirs gives directories their owners, modes and times, the inner ones
// first, when nothing is written into them any more.
func (u *unpacker) finishDirs() error {
	for i := len(u.dirs) - 1; i >= 0; i-- {
		h := u.dirs[i]
		name, err := local(h.Name)
		if err != nil {
			return err
		}
		if name == "." {
			continue // the target is the caller's own
		}
		if info, err := u.root.Lstat(name); err != nil || !info.IsDir() {
			continue // a symbolic link that was kept, or replaced later
		}
		uid, gid := u.ids(h)
		err = errors.Join(u.root.Lchown(name, uid, gid), u.root.Chmod(name, mode(h)), u.times(name, h))
		if err != nil {
			return u.explain(h.Name, err)
		}
	}
	return nil
}
