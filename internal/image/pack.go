package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/image/layer"
)

// PackOptions says what to make an image of.
type PackOptions struct {
	Base   string    // digest of the image below; of a memory image it is that one's base
	Layer  io.Reader // an uncompressed OCI layer, read to its end
	Config Config
	Source string // what the image's Source is to say
}

// Pack lays a layer over an image and keeps the result as an image of its own,
// which needs the first no more. Its digest is that of its content. The layer
// may come from a stranger.
//
// Faults: NotFound (the base is not on this node), InvalidArgument for the field
// "source" (the layer is damaged or asks for what cannot be), Capacity (the disk
// is full), Unavailable (mkfs.erofs is missing). Nothing is left behind.
func (s *Store) Pack(ctx context.Context, o PackOptions) (Artifact, error) {
	root, base, err := s.Acquire(ctx, o.Base)
	if err != nil {
		return Artifact{}, err
	}
	defer s.Release(o.Base)
	st, err := s.stage()
	if err != nil {
		return Artifact{}, err
	}
	a, err := s.packStaged(ctx, st, root, o)
	if err == nil {
		a.Architecture = base.Architecture
		a, err = s.publish(st, a)
	}
	return a, errors.Join(err, removeStaging(st.dir))
}

func (s *Store) packStaged(ctx context.Context, st *staging, root backend.Rootfs, o PackOptions) (Artifact, error) {
	info, err := os.Stat(root.EROFS)
	if err != nil {
		return Artifact{}, fmt.Errorf("open image %s: %w", root.Digest, err)
	}
	if err := s.room(info.Size()); err != nil {
		return Artifact{}, err
	}
	if err := overlay(root.Tree, st); err != nil {
		return Artifact{}, diskFault("lay an empty layer over image "+root.Digest, err)
	}
	written, err := s.applyLayer(ctx, st.tree, o.Layer)
	if err != nil {
		return Artifact{}, err
	}
	if err := s.build(ctx, st, info.Size()+written); err != nil {
		return Artifact{}, err
	}
	a := Artifact{Kind: KindFiles, Source: o.Source, Config: o.Config}
	a.Digest, err = contentDigest(filepath.Join(st.dir, "image", rootfsName), a.Config)
	return a, err
}

// applyLayer lays a layer over a tree and returns how many bytes it wrote.
func (s *Store) applyLayer(ctx context.Context, tree string, r io.Reader) (int64, error) {
	over, err := layer.New(tree, s.limits, func() error { return s.room(0) })
	if err != nil {
		return 0, err
	}
	err = over.Apply(ctx, r)
	if err == nil {
		err = over.Drain(ctx, r)
	}
	return over.Bytes(), errors.Join(err, over.Close())
}

// overlay mounts a writable view of the tree lower at the staged tree; what is
// written goes into staging. removeStaging unmounts it.
func overlay(lower string, st *staging) error {
	upper := filepath.Join(st.dir, "upper")
	if err := errors.Join(os.Mkdir(upper, 0o755), os.Mkdir(filepath.Join(st.dir, "work"), 0o755)); err != nil {
		return err
	}
	if err := likeDirectory(upper, lower); err != nil {
		return err
	}
	below, err := os.Open(lower)
	if err != nil {
		return err
	}
	defer below.Close()
	dir, err := os.Open(st.dir)
	if err != nil {
		return err
	}
	defer dir.Close()
	// By descriptors, as the paths of a store may have characters that mean
	// something to overlayfs. The index keeps hard links of the image together
	// when one of them is linked again. Volatile (Linux 5.10) has the end of the
	// mount not wait until all of the store's file system is on the disk.
	at := fmt.Sprintf("/proc/self/fd/%d", dir.Fd())
	data := fmt.Sprintf("lowerdir=/proc/self/fd/%d,upperdir=%s/upper,workdir=%s/work,index=on,volatile", below.Fd(), at, at)
	if err := unix.Mount("overlay", st.tree, "overlay", unix.MS_NODEV|unix.MS_NOSUID|unix.MS_NOEXEC, data); err != nil {
		return fmt.Errorf("mount an overlay over %s: %w", lower, err)
	}
	return nil
}

// likeDirectory gives a directory what another has beside its entries: an
// overlay's root shows that of its upper layer alone.
func likeDirectory(dir, as string) error {
	var st unix.Stat_t
	if err := unix.Lstat(as, &st); err != nil {
		return err
	}
	names := make([]byte, 64<<10) // the kernel's bound for both
	value := make([]byte, 64<<10)
	n, err := unix.Llistxattr(as, names)
	if err != nil && err != unix.ENOTSUP {
		return fmt.Errorf("list extended attributes of %s: %w", as, err)
	}
	if err := unix.Lchown(dir, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	for key := range strings.SplitSeq(strings.Trim(string(names[:max(n, 0)]), "\x00"), "\x00") {
		if key == "" {
			continue
		}
		n, err := unix.Lgetxattr(as, key, value)
		if err == nil {
			err = unix.Lsetxattr(dir, key, value[:n], 0)
		}
		if err != nil {
			return fmt.Errorf("copy extended attribute %s of %s: %w", key, as, err)
		}
	}
	if err := unix.Chmod(dir, st.Mode&0o7777); err != nil {
		return err
	}
	return unix.UtimesNanoAt(unix.AT_FDCWD, dir, []unix.Timespec{st.Mtim, st.Mtim}, 0)
}
