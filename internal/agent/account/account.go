// Package account finds the users and groups of a sandbox in its /etc/passwd
// and /etc/group, which it parses itself: an image may have neither file, and
// nothing of the C library or of name services exists for a static program.
// It reads; it never changes an account.
package account

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
)

// User is who a process or a file belongs to.
type User struct {
	Name   string // the number in decimal when the user has no name
	UID    uint32
	GID    uint32
	Groups []uint32 // supplementary groups, without duplicates; GID may be among them
	Home   string   // "/" when unknown
}

// UnknownError says that a user or group does not exist in the sandbox.
type UnknownError struct {
	What string // "user" or "group"
	Name string // as it was asked for
}

func (e *UnknownError) Error() string {
	return fmt.Sprintf("%s %q is neither in /etc/%s nor a number", e.What, e.Name, map[string]string{"user": "passwd", "group": "group"}[e.What])
}

// maxFile bounds how much of an account file is read; the rest is ignored.
const maxFile = 4 << 20

// DB reads the account files of one directory and keeps what it read until
// they change. It may be used from many goroutines.
type DB struct {
	passwd, group string // paths

	mu    sync.Mutex // guards what follows
	stamp [2]stamp
	have  *Accounts
}

// New returns the accounts in dir, usually "/etc". It reads nothing yet.
func New(dir string) *DB {
	return &DB{passwd: filepath.Join(dir, "passwd"), group: filepath.Join(dir, "group")}
}

// stamp tells one content of a file from another without reading it.
type stamp struct {
	ino          uint64
	size         int64
	mtime, ctime syscall.Timespec
}

func stampOf(path string) stamp {
	var st syscall.Stat_t
	if syscall.Stat(path, &st) != nil {
		return stamp{}
	}
	return stamp{st.Ino, st.Size, st.Mtim, st.Ctim}
}

// Load returns the accounts as they are now. A missing or unreadable file
// counts as empty.
func (db *DB) Load() *Accounts {
	db.mu.Lock()
	defer db.mu.Unlock()
	now := [2]stamp{stampOf(db.passwd), stampOf(db.group)}
	if db.have == nil || db.stamp != now {
		db.have, db.stamp = Parse(readSome(db.passwd), readSome(db.group)), now
	}
	return db.have
}

func readSome(path string) []byte {
	f, err := os.Open(path)
	if err != nil {
		return nil
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxFile))
	if err != nil {
		return nil
	}
	return data
}

// Accounts are the users and groups of one moment. They do not change.
type Accounts struct {
	users      map[string]*entry
	groups     map[string]uint32
	userNames  map[uint32]string
	groupNames map[uint32]string
	byUID      map[uint32]*entry
	members    map[string][]uint32 // groups that list the user
}

type entry struct {
	name     string
	uid, gid uint32
	home     string
}

// Parse reads the contents of a passwd and a group file. Lines it cannot
// read are passed over; of several lines with one name or number the first
// counts, as in the C library.
func Parse(passwd, group []byte) *Accounts {
	a := &Accounts{
		users: map[string]*entry{}, groups: map[string]uint32{}, userNames: map[uint32]string{},
		groupNames: map[uint32]string{}, byUID: map[uint32]*entry{}, members: map[string][]uint32{},
	}
	for line := range strings.Lines(string(passwd)) {
		a.addUser(strings.Split(strings.TrimRight(line, "\r\n"), ":"))
	}
	for line := range strings.Lines(string(group)) {
		a.addGroup(strings.Split(strings.TrimRight(line, "\r\n"), ":"))
	}
	return a
}

func (a *Accounts) addUser(f []string) {
	if len(f) < 4 || f[0] == "" || strings.HasPrefix(f[0], "#") {
		return
	}
	uid, ok1 := number(f[2])
	gid, ok2 := number(f[3])
	if !ok1 || !ok2 {
		return
	}
	e := &entry{name: f[0], uid: uid, gid: gid, home: "/"}
	if len(f) > 5 && strings.HasPrefix(f[5], "/") {
		e.home = f[5]
	}
	if _, taken := a.users[e.name]; !taken {
		a.users[e.name] = e
	}
	if _, taken := a.byUID[uid]; !taken {
		a.byUID[uid] = e
		a.userNames[uid] = e.name
	}
}

func (a *Accounts) addGroup(f []string) {
	if len(f) < 3 || f[0] == "" || strings.HasPrefix(f[0], "#") {
		return
	}
	gid, ok := number(f[2])
	if !ok {
		return
	}
	if _, taken := a.groups[f[0]]; !taken {
		a.groups[f[0]] = gid
	}
	if _, taken := a.groupNames[gid]; !taken {
		a.groupNames[gid] = f[0]
	}
	if len(f) < 4 {
		return
	}
	for name := range strings.SplitSeq(f[3], ",") {
		if name = strings.TrimSpace(name); name != "" {
			a.members[name] = append(a.members[name], gid)
		}
	}
}

// number reads an id. The largest one means "none" to the kernel and is refused.
func number(s string) (uint32, bool) {
	n, err := strconv.ParseUint(s, 10, 32)
	return uint32(n), err == nil && n != 1<<32-1
}

// Find returns the user that spec names: "name", "uid", or either with
// ":group" or ":gid" after it, as an image's configuration writes it. An
// empty spec is root. A number without an account is a user without a name,
// with group 0 and home "/". The error is an *UnknownError.
func (a *Accounts) Find(spec string) (User, error) {
	name, group, hasGroup := strings.Cut(spec, ":")
	if _, known := a.users[name]; name == "" || name == "root" && !known {
		name = "0" // root exists in an image without /etc/passwd, too
	}
	u, err := a.user(name)
	if err != nil || !hasGroup || group == "" {
		return u, err
	}
	gid, ok := a.groups[group]
	if !ok {
		if gid, ok = number(group); !ok {
			return User{}, &UnknownError{What: "group", Name: group}
		}
	}
	u.GID, u.Groups = gid, []uint32{gid} // a named group replaces the account's groups
	return u, nil
}

func (a *Accounts) user(name string) (User, error) {
	e, ok := a.users[name]
	if !ok {
		uid, isNumber := number(name)
		if !isNumber {
			return User{}, &UnknownError{What: "user", Name: name}
		}
		if e, ok = a.byUID[uid]; !ok {
			return User{Name: a.UserName(uid), UID: uid, Groups: []uint32{0}, Home: a.homeless(uid)}, nil
		}
	}
	u := User{Name: e.name, UID: e.uid, GID: e.gid, Home: e.home, Groups: []uint32{e.gid}}
	for _, gid := range a.members[e.name] {
		if !contains(u.Groups, gid) {
			u.Groups = append(u.Groups, gid)
		}
	}
	return u, nil
}

// homeless returns the home of a user without an account. Root has one even
// in an image without /etc/passwd.
func (a *Accounts) homeless(uid uint32) string {
	if uid == 0 {
		return "/root"
	}
	return "/"
}

func contains(list []uint32, n uint32) bool {
	for _, v := range list {
		if v == n {
			return true
		}
	}
	return false
}

// UserName returns the name of a uid, or the number when it has none.
func (a *Accounts) UserName(uid uint32) string {
	if name, ok := a.userNames[uid]; ok {
		return name
	}
	if uid == 0 {
		return "root"
	}
	return strconv.FormatUint(uint64(uid), 10)
}

// GroupName returns the name of a gid, or the number when it has none.
func (a *Accounts) GroupName(gid uint32) string {
	if name, ok := a.groupNames[gid]; ok {
		return name
	}
	if gid == 0 {
		return "root"
	}
	return strconv.FormatUint(uint64(gid), 10)
}
