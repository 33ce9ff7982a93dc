package reflink_test

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/reflink"
)

// mounted makes a file system in a file and mounts it.
func mounted(t testing.TB, kind string, mb int64, mkfs ...string) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("file systems are made and mounted, which needs root")
	}
	top := t.TempDir()
	image, dir := filepath.Join(top, "image"), filepath.Join(top, "dir")
	if err := errors.Join(os.WriteFile(image, nil, 0o600), os.Truncate(image, mb<<20), os.Mkdir(dir, 0o755)); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{append(mkfs, image), {"mount", "-t", kind, "-o", "loop", image, dir}} {
		if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v: %s", args, err, out)
		}
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, 0); err != nil {
			t.Errorf("unmount %s: %v", dir, err)
		}
	})
	return dir
}

func xfs(t testing.TB) string {
	return mounted(t, "xfs", 400, "mkfs.xfs", "-q", "-m", "reflink=1")
}

func ext4(t testing.TB) string { return mounted(t, "ext4", 200, "mkfs.ext4", "-q", "-F") }

// original writes a file with holes: data at both ends of it and in between.
func original(t testing.TB, path string) []byte {
	t.Helper()
	content := make([]byte, 64<<20)
	random := rand.NewChaCha8([32]byte{})
	for _, part := range [][2]int{{0, 5000}, {20 << 20, 23 << 20}, {40 << 20, 40<<20 + 1}, {64<<20 - 4096, 64 << 20}} {
		_, _ = random.Read(content[part[0]:part[1]]) // never fails
	}
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for at := 0; at < len(content); at += 4096 {
		if block := content[at : at+4096]; bytes.ContainsFunc(block, func(r rune) bool { return r != 0 }) {
			if _, err := f.WriteAt(block, int64(at)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := errors.Join(f.Truncate(int64(len(content))), f.Sync()); err != nil {
		t.Fatal(err)
	}
	return content
}

// shared reports whether the first extent of a file is shared with another.
func shared(t testing.TB, path string) bool {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	// struct fiemap with room for one extent.
	request := struct {
		start, length                  uint64
		flags, mapped, count, reserved uint32
		logical, physical, size        uint64
		reserved64                     [2]uint64
		extentFlags                    uint32
		reserved32                     [3]uint32
	}{length: 1 << 62, flags: 1 /* FIEMAP_FLAG_SYNC */, count: 1}
	const fiemap, extentShared = 0xc020660b, 0x2000
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fiemap, uintptr(unsafe.Pointer(&request))); errno != 0 {
		t.Fatalf("fiemap %s: %v", path, errno)
	}
	return request.mapped == 1 && request.extentFlags&extentShared != 0
}

func blocks(t testing.TB, path string) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

func TestCopy(t *testing.T) {
	onXFS, onExt4 := xfs(t), ext4(t)
	for _, c := range []struct {
		name, from, to string
		want           reflink.Method
	}{
		{"xfs", onXFS, onXFS, reflink.Cloned},
		{"ext4", onExt4, onExt4, reflink.Copied},
		{"xfs to ext4", onXFS, onExt4, reflink.Copied},
		{"ext4 to xfs", onExt4, onXFS, reflink.Copied},
		{"ext4 to tmpfs", onExt4, "/dev/shm", reflink.Copied},
	} {
		t.Run(c.name, func(t *testing.T) {
			from, to := filepath.Join(c.from, "from"), filepath.Join(c.to, "reflink-test-to")
			content := original(t, from)
			how, err := reflink.Copy(t.Context(), to, from)
			if err != nil {
				t.Fatal(err)
			}
			defer os.Remove(to)
			if how != c.want {
				t.Errorf("cloned: %v, want %v", how == reflink.Cloned, c.want == reflink.Cloned)
			}
			if back, err := os.ReadFile(to); err != nil || !bytes.Equal(back, content) {
				t.Errorf("the copy is another, %v", err)
			}
			if used := blocks(t, to); used > 4<<20 {
				t.Errorf("the copy takes %d bytes of the disk", used)
			}
			if c.to != "/dev/shm" && shared(t, to) != (c.want == reflink.Cloned) {
				t.Errorf("blocks shared: %v", !(c.want == reflink.Cloned))
			}
			if info, err := os.Stat(to); err != nil || info.Mode() != 0o600 {
				t.Errorf("mode: %v, %v", info.Mode(), err)
			}
			if _, err := reflink.Copy(t.Context(), to, from); !errors.Is(err, os.ErrExist) {
				t.Errorf("onto a file that exists: %v", err)
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("a file that exists: %v", err)
			}
		})
	}
}

// What is written to a clone is not seen in the original.
func TestCloneIsApart(t *testing.T) {
	dir := xfs(t)
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	content := original(t, from)
	if _, err := reflink.Copy(t.Context(), to, from); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(to, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte("changed"), 100)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	if back, err := os.ReadFile(from); err != nil || !bytes.Equal(back, content) {
		t.Errorf("the original changed, %v", err)
	}
}

func TestSupported(t *testing.T) {
	for dir, want := range map[string]bool{xfs(t): true, ext4(t): false, "/dev/shm": false} {
		if got, err := reflink.Supported(dir); got != want || err != nil {
			t.Errorf("%s: %v, %v; want %v", dir, got, err, want)
		}
	}
	if _, err := reflink.Supported(filepath.Join(t.TempDir(), "missing")); err == nil {
		t.Error("a directory that is missing")
	}
}

// A full disk is told from other errors, and nothing is left of the copy.
func TestFullDisk(t *testing.T) {
	from := filepath.Join(t.TempDir(), "from")
	original(t, from)
	for _, size := range []string{"4k", "1m"} {
		to := t.TempDir()
		if err := unix.Mount("tmpfs", to, "tmpfs", 0, "size="+size); err != nil {
			t.Fatal(err)
		}
		_, err := reflink.Copy(t.Context(), filepath.Join(to, "to"), from)
		if !errors.Is(err, unix.ENOSPC) {
			t.Errorf("on a disk of %s: %v", size, err)
		}
		if left, err := os.ReadDir(to); err != nil || len(left) > 0 {
			t.Errorf("left: %v, %v", left, err)
		}
		if err := unix.Unmount(to, 0); err != nil {
			t.Error(err)
		}
	}
}

func TestCancelled(t *testing.T) {
	dir := t.TempDir()
	from, to := filepath.Join(dir, "from"), filepath.Join(dir, "to")
	original(t, from)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := reflink.Copy(ctx, to, from); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := os.Stat(to); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("left: %v", err)
	}
}
