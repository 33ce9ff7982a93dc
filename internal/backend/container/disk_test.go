package container

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func newTemplates(t testing.TB) *templates {
	t.Helper()
	mkfs, err := lookProgram("mkfs.ext4")
	if err != nil {
		t.Fatal(err)
	}
	return &templates{dir: t.TempDir(), mkfs: mkfs, made: map[int64]string{}}
}

// A disk has the room that was asked for and little more, and its file takes
// next to nothing of the host.
func TestDiskRoom(t *testing.T) {
	templates := newTemplates(t)
	for _, mb := range []int64{1, 16, 64, 500, 1024, 10 << 10, 100 << 10} {
		t.Run(fmt.Sprint(mb), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "disk.ext4")
			d, err := templates.newDisk(context.Background(), mb, path)
			if err != nil {
				t.Fatal(err)
			}
			var fs unix.Statfs_t
			if err := unix.Fstatfs(d.mount, &fs); err != nil {
				t.Fatal(err)
			}
			room := int64(fs.Bavail) * fs.Bsize
			if want := mb << 20; room < want || room > want+want/50+4<<20 {
				t.Errorf("a disk of %d MiB has room for %.2f", mb, float64(room)/(1<<20))
			}
			var st unix.Stat_t
			if err := unix.Stat(path, &st); err != nil {
				t.Fatal(err)
			}
			if used := st.Blocks * 512; used > 4<<20 {
				t.Errorf("an empty disk of %d MiB takes %d bytes of the host", mb, used)
			}
			if err := d.close(); err != nil {
				t.Error(err)
			}
			if _, err := os.Stat(path); !os.IsNotExist(err) {
				t.Errorf("the file of a disk that was closed: %v", err)
			}
		})
	}
	if _, err := templates.newDisk(context.Background(), 0, filepath.Join(t.TempDir(), "x")); err == nil {
		t.Error("a disk of nothing was made")
	}
}

func BenchmarkNewDisk(b *testing.B) {
	templates := newTemplates(b)
	dir := b.TempDir()
	n := 0
	for b.Loop() {
		n++
		d, err := templates.newDisk(context.Background(), 1024, filepath.Join(dir, fmt.Sprint(n)))
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := d.close(); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}
