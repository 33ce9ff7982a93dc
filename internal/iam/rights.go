package iam

import (
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// may reports whether the caller has the role on the project.
func may(c store.Caller, want role.Role, p sandbox.Project) bool {
	return role.Allows(c.Grants, p, want)
}

// needAdmin checks that the actor is admin on a project, to do something to
// the project named. One in which it has no role might as well not exist.
func needAdmin(who actor, on, named sandbox.Project, what string) error {
	switch {
	case may(who.Caller, role.Admin, on):
		return nil
	case may(who.Caller, role.Viewer, named):
		return fault.New(fault.PermissionDenied, "%s needs the role admin on project %s", what, on)
	}
	return hiddenProject(named)
}

func hiddenProject(p sandbox.Project) error {
	e := fault.New(fault.NotFound, "project %s does not exist, or you have no role in it", p)
	e.Field = "project"
	return e
}

// above returns the project whose admins manage p: what p may use is not for
// its own admins to say.
func above(p sandbox.Project) sandbox.Project {
	if parent := p.Parent(); parent != "" {
		return parent
	}
	return p
}

// over reports whether the actor is admin wherever the target has a role, so
// that nobody gets hold of more rights than their own through another caller.
// A caller without any role is the topmost project's admins' matter.
func over(who actor, target store.Caller) bool {
	for _, g := range target.Grants {
		if !may(who.Caller, role.Admin, g.Project) {
			return false
		}
	}
	return len(target.Grants) > 0 || may(who.Caller, role.Admin, role.Root)
}

// needOver checks that the actor may manage the target.
func needOver(who actor, target store.Caller, what string) error {
	if over(who, target) {
		return nil
	}
	return fault.New(fault.PermissionDenied, "%s needs the role admin on all projects where caller %s has a role", what, target.Name)
}

// seen returns what the actor may see of a caller: itself whole, of another
// the roles on projects that the actor is admin of; false for nothing at all.
func seen(who actor, c store.Caller) (store.Caller, bool) {
	if c.Name == who.Name || may(who.Caller, role.Admin, role.Root) {
		return c, true
	}
	var grants []role.Grant
	for _, g := range c.Grants {
		if may(who.Caller, role.Admin, g.Project) {
			grants = append(grants, g)
		}
	}
	c.Grants = grants
	return c, len(grants) > 0
}
