package agent

import (
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/internal/agent/account"
)

// caller is who a call acts for, and where its relative paths begin.
type caller struct {
	account.User
	accounts *account.Accounts
	workdir  string // "" when the user's home counts
}

// userOf returns the user that a call's headers name, "" for the default:
// our own header, or the name in HTTP's basic authentication, as E2B's
// clients send it.
func userOf(h http.Header) string {
	if name := h.Get("Opendsec-User"); name != "" {
		return name
	}
	encoded, ok := strings.CutPrefix(h.Get("Authorization"), "Basic ")
	if !ok {
		return ""
	}
	plain, err := base64.StdEncoding.DecodeString(encoded)
	if err != nil {
		return ""
	}
	name, _, _ := strings.Cut(string(plain), ":")
	return name
}

// caller resolves a user. The error is an *account.UnknownError.
func (s *Server) caller(name string) (caller, error) {
	id := s.identity.Load()
	c := caller{accounts: s.accounts.Load()}
	if name == "" || name == id.user {
		name, c.workdir = id.user, id.workdir
	}
	var err error
	c.User, err = c.accounts.Find(name)
	return c, err
}

// rpcCaller resolves the user of an RPC.
func (s *Server) rpcCaller(h http.Header) (caller, error) {
	name := userOf(h)
	c, err := s.caller(name)
	var unknown *account.UnknownError
	if errors.As(err, &unknown) {
		if name == "" {
			name = s.identity.Load().user
		}
		return c, connect.NewError(connect.CodeUnauthenticated, fmt.Errorf("invalid username: '%s': %w", name, err))
	}
	return c, err
}

// httpCaller resolves the user of a call that is no RPC: the "username" or
// "user" of its query, else as in an RPC. It answers the call itself when there
// is no such user.
func (s *Server) httpCaller(w http.ResponseWriter, r *http.Request) (caller, bool) {
	q := r.URL.Query()
	name := q.Get("username")
	if name == "" {
		name = q.Get("user")
	}
	if name == "" {
		name = userOf(r.Header)
	}
	c, err := s.caller(name)
	if err != nil {
		httpError(w, http.StatusUnauthorized, fmt.Sprintf("error looking up user '%s': %v", name, err))
		return c, false
	}
	return c, true
}

// home is where the caller's relative paths begin: the sandbox's default
// directory for its default user, the home for others.
func (c *caller) home() string {
	if c.workdir != "" {
		return c.workdir
	}
	return c.Home
}

// path makes a caller's path absolute and clean. "~" is the home, whatever
// the default directory is.
func (c *caller) path(p string) (string, error) {
	if strings.ContainsRune(p, 0) {
		return "", fmt.Errorf("path %q holds a zero byte", p)
	}
	switch {
	case p == "~":
		p = c.Home
	case strings.HasPrefix(p, "~/"):
		p = path.Join(c.Home, p[2:])
	case !strings.HasPrefix(p, "/"):
		p = path.Join(c.home(), p)
	}
	return path.Clean("/" + p), nil
}

// ownership is whom the agent itself runs as.
type ownership struct {
	uid    uint32
	gid    uint32
	groups []uint32 // without gid
}

func ownOwnership() ownership {
	o := ownership{uid: uint32(os.Getuid()), gid: uint32(os.Getgid())}
	groups, err := os.Getgroups()
	if err != nil {
		return o
	}
	for _, g := range groups {
		if uint32(g) != o.gid {
			o.groups = append(o.groups, uint32(g))
		}
	}
	return o
}

// credential returns what a child has to change to run as u; nil when it is
// the same, which saves the kernel three calls.
func (o ownership) credential(u account.User) *syscall.Credential {
	if u.UID == o.uid && u.GID == o.gid {
		others := slices.DeleteFunc(slices.Clone(u.Groups), func(g uint32) bool { return g == u.GID })
		slices.Sort(others)
		mine := slices.Clone(o.groups)
		slices.Sort(mine)
		if slices.Equal(others, mine) {
			return nil
		}
	}
	return &syscall.Credential{Uid: u.UID, Gid: u.GID, Groups: u.Groups}
}
