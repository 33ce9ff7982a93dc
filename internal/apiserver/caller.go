package apiserver

import (
	"context"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// caller is who makes a call.
type caller struct {
	name    string
	grants  []role.Grant
	expires time.Time // of the token; zero is never
}

func (c *caller) may(want role.Role, p sandbox.Project) bool { return role.Allows(c.grants, p, want) }

// sees reports whether the images of a project are visible to the caller: it
// has a role there, or in a project below, which inherits them.
func (c *caller) sees(p sandbox.Project) bool {
	if c.may(role.Viewer, p) {
		return true
	}
	for _, g := range c.grants {
		if p.Contains(g.Project) && g.Role.Includes(role.Viewer) {
			return true
		}
	}
	return false
}

// need checks that the caller has a role in a project that a request names in
// a field. A project in which it has none might as well not exist.
func (c *caller) need(want role.Role, p sandbox.Project, field string) error {
	if c.may(want, p) {
		return nil
	}
	if !c.may(role.Viewer, p) {
		err := fault.New(fault.NotFound, "project %s does not exist, or you have no role in it", p)
		err.Field = field
		return err
	}
	return fault.New(fault.PermissionDenied, "this needs the role %s in project %s: ask an admin for `opendsecctl caller grant`", want, p)
}

// needRootAdmin checks that the caller runs the cluster.
func (c *caller) needRootAdmin(what string) error {
	if c.may(role.Admin, role.Root) {
		return nil
	}
	return fault.New(fault.PermissionDenied, "%s needs the role admin in project %s", what, role.Root)
}

type callerKey struct{}

func withCaller(ctx context.Context, c *caller) context.Context {
	return context.WithValue(ctx, callerKey{}, c)
}

// callerOf returns who makes the call. The door puts it there for every call
// that it lets in; without one the caller has no role anywhere.
func callerOf(ctx context.Context) *caller {
	if c, ok := ctx.Value(callerKey{}).(*caller); ok {
		return c
	}
	return &caller{}
}
