package host

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestMachine(t *testing.T) {
	if Cores() < 1 {
		t.Error("no processor")
	}
	if mb, err := MemoryMB(); err != nil || mb < 64 {
		t.Errorf("memory %d MiB, error %v", mb, err)
	}
	dir := t.TempDir()
	if s, err := Disk(dir); err != nil || s.TotalMB < s.FreeMB || s.TotalMB == 0 {
		t.Errorf("disk %+v, error %v", s, err)
	}
	if id, err := BootID(); err != nil || len(id) != 36 {
		t.Errorf("boot id %q, error %v", id, err)
	}
}

func TestParseMount(t *testing.T) {
	for line, want := range map[string]Mount{
		`36 35 98:0 /mnt1 /mnt\0402 rw,noatime master:1 - ext3 /dev/root rw,errors=continue`: {Point: "/mnt 2", Source: "/dev/root"},
		`22 1 0:21 / /proc rw - proc none rw`:                                                {Point: "/proc", Source: "none"},
	} {
		if m, ok := parseMount(line); !ok || m != want {
			t.Errorf("%q: got %+v, %v", line, m, ok)
		}
	}
	if _, ok := parseMount("nonsense"); ok {
		t.Error("nonsense was read as a mount")
	}
}

func TestMountIsFoundAndRemoved(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("this test mounts and must run as root")
	}
	dir := filepath.Join(t.TempDir(), "a b")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", dir, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	defer unix.Unmount(dir, unix.MNT_DETACH)
	mine := func(m Mount) bool { return m.Point == dir }
	found, err := Mounts(mine)
	if err != nil || len(found) == 0 {
		t.Fatalf("found %v, error %v", found, err)
	}
	for _, m := range found {
		if err := Unmount(m); err != nil {
			t.Fatal(err)
		}
		if err := Unmount(m); err != nil {
			t.Errorf("a second time: %v", err)
		}
	}
	if found, _ = Mounts(mine); len(found) != 0 {
		t.Errorf("still there: %v", found)
	}
}
