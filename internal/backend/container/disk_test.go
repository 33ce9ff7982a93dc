package container

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

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

// What a killed process kept ready is removed by the next, also when a child of its
// has the file open for a moment longer. What is a living process's stays.
func TestSweepDisksBesideChildOfKilled(t *testing.T) {
	dir := t.TempDir()
	dead := exec.Command("true")
	if err := dead.Run(); err != nil {
		t.Fatal(err)
	}
	locked := func(pid int) (path string, f *os.File) {
		path = filepath.Join(dir, fmt.Sprintf("ready-%d-1.ext4", pid))
		f, err := os.Create(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
			t.Fatal(err)
		}
		return path, f
	}
	left, theirs := locked(dead.Process.Pid)
	used, ours := locked(os.Getpid())
	defer ours.Close()
	time.AfterFunc(100*time.Millisecond, func() { theirs.Close() })
	if err := sweepDisks(dir); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(left); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the killed process's disk: %v", err)
	}
	if _, err := os.Stat(used); err != nil {
		t.Errorf("the living process's disk: %v", err)
	}
}
