package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestPut(t *testing.T) {
	long := strings.Repeat("0123456789", 5000)
	for _, test := range []struct {
		name, content string
		before        func(dir string) error
		mode          fs.FileMode
	}{
		{"a new one, with its directory", "x\n", func(dir string) error { return os.Remove(dir) }, 0o444},
		{"one that is there", "x\n", func(dir string) error { return os.WriteFile(dir+"/f", []byte("older"), 0o640) }, 0o640},
		{"a long one", long, func(dir string) error { return os.WriteFile(dir+"/f", []byte(long+"more"), 0o600) }, 0o600},
		{"over what was left of another", "x\n", func(dir string) error { return os.WriteFile(dir+"/.opendsec-new", nil, 0o600) }, 0o444},
		{"over a directory of the name", "x\n", func(dir string) error { return os.Mkdir(dir+"/.opendsec-new", 0o700) }, 0o444},
	} {
		t.Run(test.name, func(t *testing.T) {
			defer syscall.Umask(syscall.Umask(0o022))
			dir := filepath.Join(t.TempDir(), "dir")
			must(t, os.Mkdir(dir, 0o755))
			must(t, test.before(dir))
			must(t, put(dir+"/f", test.content, 0o444))
			if have, err := contentOf(dir + "/f"); err != nil || have != test.content {
				t.Errorf("%d bytes of %d, %v", len(have), len(test.content), err)
			}
			info, err := os.Stat(dir + "/f")
			must(t, err)
			if info.Mode().Perm() != test.mode {
				t.Errorf("mode %o, want %o", info.Mode().Perm(), test.mode)
			}
			must(t, put(dir+"/f", test.content, 0o444))
			if again, err := os.Stat(dir + "/f"); err != nil || !os.SameFile(info, again) {
				t.Errorf("the same content was written again, %v", err)
			}
			if all, err := os.ReadDir(dir); err != nil || len(all) != 1 {
				t.Errorf("in the directory: %v, %v", all, err)
			}
		})
	}
}

func TestPutKeepsOwnersAndLinks(t *testing.T) {
	dir := t.TempDir()
	must(t, os.WriteFile(dir+"/f", nil, 0o644))
	uid, gid := os.Getuid(), os.Getgid()
	if uid == 0 {
		uid, gid = 1234, 4321
	}
	must(t, os.Chown(dir+"/f", uid, gid))
	must(t, os.Symlink("f", dir+"/link"))
	must(t, put(dir+"/f", "x", 0o600))
	info, err := os.Stat(dir + "/f")
	must(t, err)
	if st := info.Sys().(*syscall.Stat_t); int(st.Uid) != uid || int(st.Gid) != gid {
		t.Errorf("owner %d:%d", st.Uid, st.Gid)
	}
	must(t, put(dir+"/link", "y", 0o600))
	if have, err := contentOf(dir + "/f"); err != nil || have != "y" {
		t.Errorf("by the link %q was written, %v", have, err)
	}
	if to, err := os.Readlink(dir + "/link"); err != nil || to != "f" {
		t.Errorf("the link leads to %q, %v", to, err)
	}
	var perr *fs.PathError
	if err := put(dir+"/f/below", "x", 0o600); !errors.As(err, &perr) || !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("below a file: %v", err)
	}
}
