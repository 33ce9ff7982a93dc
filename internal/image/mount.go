package image

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
)

// Mount is an image that the kernel has mounted.
type Mount struct {
	Digest string
	Tree   string // where
	Device string // loop device or file under it
	Users  int    // Acquire less Release
}

// Acquire returns an image's tree, mounted, and counts one user until Release.
// Of a memory image the tree is that of its base, and both have the user. A
// mount of an earlier run of the program is taken over. The tree stays mounted
// without users; Delete and Close unmount it.
func (s *Store) Acquire(ctx context.Context, digest string) (backend.Rootfs, Artifact, error) {
	if _, err := s.path(digest); err != nil {
		return backend.Rootfs{}, Artifact{}, err
	}
	defer s.hold(digest)()
	if err := errors.Join(ctx.Err(), s.usable(digest)); err != nil {
		return backend.Rootfs{}, Artifact{}, err
	}
	a, err := s.read(digest)
	if err != nil {
		return backend.Rootfs{}, Artifact{}, err
	}
	if a.Memory == nil {
		root, err := s.useTree(digest)
		return root, a, err
	}
	root, err := s.useBase(a.Memory.Base)
	if err != nil {
		return backend.Rootfs{}, Artifact{}, fmt.Errorf("open the image that snapshot %s runs on: %w", digest, err)
	}
	s.use(digest)
	return root, a, nil
}

// useBase mounts the base of a held memory image and counts a user of it.
func (s *Store) useBase(digest string) (backend.Rootfs, error) {
	defer s.hold(digest)()
	if _, err := s.read(digest); err != nil {
		return backend.Rootfs{}, err
	}
	return s.useTree(digest)
}

// useTree mounts a held image's tree and counts a user of it.
func (s *Store) useTree(digest string) (backend.Rootfs, error) {
	dir, err := s.path(digest)
	if err != nil {
		return backend.Rootfs{}, err
	}
	root := backend.Rootfs{Digest: digest, EROFS: erofsOf(dir), Tree: filepath.Join(dir, treeName)}
	if s.usersOf(digest) == 0 {
		if err := mountOnce(filepath.Join(dir, rootfsName), root.Tree); err != nil {
			return backend.Rootfs{}, fmt.Errorf("mount image %s: %w", digest, err)
		}
	}
	s.use(digest)
	return root, nil
}

// Dir returns the path of an image's directory, whether it is there or not. All
// that backends read of the image is in it.
func (s *Store) Dir(digest string) (string, error) { return s.path(digest) }

// erofsOf returns the file without extended attributes, if the image in dir has
// one: else it has none.
func erofsOf(dir string) string {
	plain := filepath.Join(dir, plainName)
	if _, err := os.Lstat(plain); err == nil {
		return plain
	}
	return filepath.Join(dir, rootfsName)
}

func (s *Store) use(digest string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.users[digest]++
}

// Release takes back one Acquire. An image that was deleted goes with its last
// user.
func (s *Store) Release(digest string) {
	s.mu.Lock()
	base := ""
	if s.users[digest] > 0 {
		base = s.bases[digest]
		s.unuse(digest)
		s.unuse(base)
	}
	s.mu.Unlock()
	if err := errors.Join(s.sweep(digest), s.sweep(base)); err != nil {
		s.log.Error("a deleted image stays until the next start", "error", err)
	}
}

// unuse takes one user off, if there is one. s.mu is held.
func (s *Store) unuse(digest string) {
	if s.users[digest]--; s.users[digest] <= 0 {
		delete(s.users, digest)
	}
}

// Mounts returns the images of this store that are mounted, whoever did it.
func (s *Store) Mounts() ([]Mount, error) {
	below, err := mountsBelow(filepath.Join(s.dir, "sha256"))
	if err != nil {
		return nil, err
	}
	var all []Mount
	for _, m := range below {
		digest := "sha256:" + filepath.Base(filepath.Dir(m.target))
		all = append(all, Mount{Digest: digest, Tree: m.target, Device: m.source, Users: s.usersOf(digest)})
	}
	return all, nil
}

func (s *Store) unmount(digest string) error {
	dir, err := s.path(digest)
	if err != nil {
		return err
	}
	defer s.hold(digest)()
	return s.unmountHeld(dir)
}

// unmountHeld unmounts an image's tree if it is mounted. The image is held.
func (s *Store) unmountHeld(dir string) error {
	tree := filepath.Join(dir, treeName)
	for {
		below, err := mountsBelow(tree)
		if err != nil || len(below) == 0 {
			return err
		}
		if err := unix.Unmount(tree, 0); err != nil {
			if err == unix.EBUSY {
				return fault.New(fault.WrongState, "%s is in use", tree)
			}
			return fmt.Errorf("unmount %s: %w", tree, err)
		}
	}
}

// mountOnce mounts an EROFS file unless it is mounted there already.
func mountOnce(file, tree string) error {
	below, err := mountsBelow(tree)
	if err != nil || len(below) > 0 {
		return err
	}
	return mount(file, tree)
}

// mountFlags: nothing in the tree works as a device or setuid program on the
// host; an overlay over it has its own say.
const mountFlags = unix.MS_RDONLY | unix.MS_NODEV | unix.MS_NOSUID

// mount mounts an EROFS file read-only.
func mount(file, tree string) error {
	err := unix.Mount(file, tree, "erofs", mountFlags, "")
	if err == nil {
		return nil
	}
	// Kernels before 6.12, and some file systems, want a block device.
	if lerr := mountLoop(file, tree); lerr != nil {
		return fmt.Errorf("as a file: %w; with a loop device: %w", err, lerr)
	}
	return nil
}

// mountLoop mounts an EROFS file by way of a loop device, which goes with its
// last user: our descriptor, or the mount.
func mountLoop(file, tree string) error {
	loop, err := attachLoop(file)
	if err != nil {
		return err
	}
	defer loop.Close()
	err = unix.Mount(loop.Name(), tree, "erofs", mountFlags, "")
	if err == unix.ENODEV {
		return errors.New("this kernel has no EROFS; load the module erofs, or use a kernel with CONFIG_EROFS_FS")
	}
	if err != nil {
		return fmt.Errorf("mount %s: %w", loop.Name(), err)
	}
	return nil
}

// attachLoop attaches a file to a free loop device, read-only, to be freed by
// the kernel when nobody uses it any more.
func attachLoop(file string) (*os.File, error) {
	backing, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("open the loop driver: %w", err)
	}
	defer control.Close()
	for range 64 {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		loop, err := openLoop(n)
		if err != nil {
			return nil, err
		}
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &unix.LoopConfig{
			Fd: uint32(backing.Fd()), Info: unix.LoopInfo64{Flags: unix.LO_FLAGS_READ_ONLY | unix.LO_FLAGS_AUTOCLEAR},
		})
		if err == nil {
			return loop, nil
		}
		_ = loop.Close()
		if err != unix.EBUSY { // another process was faster
			return nil, fmt.Errorf("attach %s to %s: %w", file, loop.Name(), err)
		}
	}
	return nil, errors.New("no loop device stays free for long enough")
}

// openLoop opens a loop device and makes its node where nobody else does, as
// in containers.
func openLoop(n int) (*os.File, error) {
	name := fmt.Sprintf("/dev/loop%d", n)
	f, err := os.OpenFile(name, os.O_RDONLY, 0)
	if errors.Is(err, fs.ErrNotExist) {
		if err := unix.Mknod(name, unix.S_IFBLK|0o660, int(unix.Mkdev(7, uint32(n)))); err != nil && err != unix.EEXIST {
			return nil, fmt.Errorf("make %s: %w", name, err)
		}
		f, err = os.OpenFile(name, os.O_RDONLY, 0)
	}
	return f, err
}

// mounted is a line of mountinfo.
type mounted struct{ target, source string }

// mountsBelow returns the mounts at and below a directory, outer ones first.
func mountsBelow(dir string) ([]mounted, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read the mounts: %w", err)
	}
	defer f.Close()
	var all []mounted
	lines := bufio.NewScanner(f)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		left, right, ok := strings.Cut(lines.Text(), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 5 || len(r) < 2 {
			continue
		}
		target := unescape(l[4])
		if target == dir || strings.HasPrefix(target, dir+"/") {
			all = append(all, mounted{target, unescape(r[1])})
		}
	}
	sort.SliceStable(all, func(i, j int) bool { return len(all[i].target) < len(all[j].target) })
	return all, lines.Err()
}

var unescaper = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`)

// unescape takes back how the kernel prints blanks in paths.
func unescape(s string) string { return unescaper.Replace(s) }
