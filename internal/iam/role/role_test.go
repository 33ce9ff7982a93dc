package role

import (
	"testing"

	"github.com/kernflux/opendsec/internal/sandbox"
)

func TestAllows(t *testing.T) {
	grants := []Grant{{"root/demo", Developer}, {"root/other", Viewer}, {"root/odd", "owner"}}
	for _, c := range []struct {
		project sandbox.Project
		want    Role
		allowed bool
	}{
		{"root/demo", Viewer, true},
		{"root/demo", Developer, true},
		{"root/demo", Admin, false},
		{"root/demo/below", Developer, true},
		{"root/demolition", Viewer, false},
		{"root", Viewer, false},
		{"root/other", Viewer, true},
		{"root/other", Developer, false},
		{"root/odd", Viewer, false},
		{"root/odd", "owner", false},
		{"root/demo", "", false},
	} {
		if got := Allows(grants, c.project, c.want); got != c.allowed {
			t.Errorf("%s on %s: got %v, want %v", c.want, c.project, got, c.allowed)
		}
	}
}

func TestParse(t *testing.T) {
	for _, r := range order {
		if got, err := Parse(string(r)); got != r || err != nil {
			t.Errorf("%s: got %s, %v", r, got, err)
		}
	}
	for _, s := range []string{"", "Admin", "owner"} {
		if got, err := Parse(s); err == nil {
			t.Errorf("%q was accepted as %s", s, got)
		}
	}
}
