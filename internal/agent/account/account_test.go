package account

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const passwd = `root:x:0:0:root:/root:/bin/bash
# comment:x:5:5::/:/
broken:x:1
+::::::
user:x:1000:1000:,,,:/home/user:/bin/sh
twin:x:1000:1001::/home/twin:/bin/sh
nohome:x:1002:1002:::
relative:x:1003:1003::home:
minus:x:-1:0::/:
none:x:4294967295:0::/:
7:x:77:77::/seven:
`

const group = `root:x:0:
user:x:1000:
docker:x:998:user,twin
dup:x:998:user
audio:x:29: user ,nohome
short:x:5
bad:x:x:user
`

func TestFind(t *testing.T) {
	a := Parse([]byte(passwd), []byte(group))
	tests := []struct {
		spec string
		want User
	}{
		{"", User{"root", 0, 0, []uint32{0}, "/root"}},
		{"root", User{"root", 0, 0, []uint32{0}, "/root"}},
		{"user", User{"user", 1000, 1000, []uint32{1000, 998, 29}, "/home/user"}},
		{"1000", User{"user", 1000, 1000, []uint32{1000, 998, 29}, "/home/user"}},
		{"twin", User{"twin", 1000, 1001, []uint32{1001, 998}, "/home/twin"}},
		{"nohome", User{"nohome", 1002, 1002, []uint32{1002, 29}, "/"}},
		{"relative", User{"relative", 1003, 1003, []uint32{1003}, "/"}},
		{"7", User{"7", 77, 77, []uint32{77}, "/seven"}},
		{"4711", User{"4711", 4711, 0, []uint32{0}, "/"}},
		{"user:audio", User{"user", 1000, 29, []uint32{29}, "/home/user"}},
		{"user:4711", User{"user", 1000, 4711, []uint32{4711}, "/home/user"}},
		{"4711:4712", User{"4711", 4711, 4712, []uint32{4712}, "/"}},
		{"user:", User{"user", 1000, 1000, []uint32{1000, 998, 29}, "/home/user"}},
	}
	for _, tt := range tests {
		got, err := a.Find(tt.spec)
		if err != nil {
			t.Errorf("Find(%q): %v", tt.spec, err)
		}
		if diff := cmp.Diff(tt.want, got); diff != "" {
			t.Errorf("Find(%q) (-want +got):\n%s", tt.spec, diff)
		}
	}
	for _, spec := range []string{"nobody", "broken", "comment", "+", "none", "4294967295", "-1", "user:nogroup", "x:y"} {
		if got, err := a.Find(spec); err == nil {
			t.Errorf("Find(%q) = %v, want an error", spec, got)
		}
	}
}

func TestNames(t *testing.T) {
	a := Parse([]byte(passwd), []byte(group))
	if got := a.UserName(1000); got != "user" {
		t.Errorf("UserName(1000) = %q, want user", got)
	}
	if got := a.UserName(31); got != "31" {
		t.Errorf("UserName(31) = %q, want 31", got)
	}
	if got := a.GroupName(998); got != "docker" {
		t.Errorf("GroupName(998) = %q, want docker", got)
	}
	empty := Parse(nil, nil)
	if got := empty.GroupName(0); got != "root" {
		t.Errorf("GroupName(0) without files = %q, want root", got)
	}
	for _, spec := range []string{"", "0", "root"} {
		if u, err := empty.Find(spec); err != nil || u.Home != "/root" || u.Name != "root" {
			t.Errorf("Find(%q) without files = %+v, %v; want root at /root", spec, u, err)
		}
	}
}

func TestLoadSeesChanges(t *testing.T) {
	dir := t.TempDir()
	db := New(dir)
	if _, err := db.Load().Find("late"); err == nil {
		t.Fatal("a user was found without any file")
	}
	if err := os.WriteFile(filepath.Join(dir, "passwd"), []byte("late:x:5:6::/l:\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	u, err := db.Load().Find("late")
	if err != nil || u.UID != 5 {
		t.Fatalf("Find after the file came = %v, %v", u, err)
	}
	if first, second := db.Load(), db.Load(); first != second {
		t.Error("unchanged files were parsed again")
	}
}

func FuzzParse(f *testing.F) {
	f.Add(passwd, group, "user:audio")
	f.Add("", "", "0")
	f.Fuzz(func(t *testing.T, passwd, group, spec string) {
		a := Parse([]byte(passwd), []byte(group))
		u, err := a.Find(spec)
		if err != nil {
			return
		}
		if u.Home == "" || u.Home[0] != '/' || u.Name == "" || len(u.Groups) == 0 {
			t.Errorf("Find(%q) = %+v: home, name or groups missing", spec, u)
		}
		if u.UID == 1<<32-1 || u.GID == 1<<32-1 {
			t.Errorf("Find(%q) = %+v: an id that means none", spec, u)
		}
	})
}
