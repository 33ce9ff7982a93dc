// Package role holds the words of who may do what: the three roles, and what
// a caller's grants come to on a project. It decides nothing for a single call;
// each service names the role that its calls want.
package role

import (
	"fmt"
	"slices"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// Role is what a caller may do on a project and all below it. Each role
// includes those before it.
type Role string

// The roles.
const (
	Viewer    Role = "viewer"    // reads
	Developer Role = "developer" // also makes and uses sandboxes and images
	Admin     Role = "admin"     // also manages projects, callers and tokens below
)

// Root is the topmost project. It always exists.
const Root sandbox.Project = "root"

// order lists the roles, weakest first.
var order = []Role{Viewer, Developer, Admin}

// Parse checks that s is a role.
func Parse(s string) (Role, error) {
	if !slices.Contains(order, Role(s)) {
		return "", fmt.Errorf("role %q: want viewer, developer or admin", s)
	}
	return Role(s), nil
}

// Includes reports whether r may do all that want may do. A word that is no
// role includes nothing and is included in nothing.
func (r Role) Includes(want Role) bool {
	have, need := slices.Index(order, r), slices.Index(order, want)
	return need >= 0 && have >= need
}

// Grant is a role on a project and all below it.
type Grant struct {
	Project sandbox.Project
	Role    Role
}

// Allows reports whether one of the grants gives the role on the project.
func Allows(grants []Grant, project sandbox.Project, want Role) bool {
	return slices.ContainsFunc(grants, func(g Grant) bool {
		return g.Project.Contains(project) && g.Role.Includes(want)
	})
}
