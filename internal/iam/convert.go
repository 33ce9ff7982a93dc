package iam

import (
	"math"
	"regexp"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

func timeToProto(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func callerToProto(c store.Caller) *opendsecv1.Caller {
	p := &opendsecv1.Caller{Name: c.Name, CreatedAt: timeToProto(c.CreatedAt)}
	for _, g := range c.Grants {
		p.Grants = append(p.Grants, &opendsecv1.RoleGrant{Project: string(g.Project), Role: string(g.Role)})
	}
	return p
}

func tokenToProto(t store.Token) *opendsecv1.Token {
	return &opendsecv1.Token{
		Id: t.ID, Caller: t.Caller, Description: t.Description,
		CreatedAt: timeToProto(t.CreatedAt), ExpiresAt: timeToProto(t.ExpiresAt),
	}
}

func projectToProto(p store.Project) *opendsecv1.Project {
	out := &opendsecv1.Project{Path: string(p.Path), CreatedAt: timeToProto(p.CreatedAt)}
	if p.Quota != (store.Quota{}) {
		out.Quota = &opendsecv1.Quota{Sandboxes: p.Quota.Sandboxes, CpuCores: p.Quota.CPU, MemoryMb: p.Quota.MemoryMB}
	}
	return out
}

func quotaFromProto(q *opendsecv1.Quota) (store.Quota, error) {
	if q == nil {
		return store.Quota{}, nil
	}
	switch {
	case q.Sandboxes != nil && q.GetSandboxes() < 0:
		return store.Quota{}, fault.Invalid("quota.sandboxes", "a quota of %d sandboxes is negative", q.GetSandboxes())
	case q.CpuCores != nil && (q.GetCpuCores() < 0 || math.IsNaN(q.GetCpuCores()) || math.IsInf(q.GetCpuCores(), 0)):
		return store.Quota{}, fault.Invalid("quota.cpu_cores", "a quota of %v cores is not a number of cores", q.GetCpuCores())
	case q.MemoryMb != nil && q.GetMemoryMb() < 0:
		return store.Quota{}, fault.Invalid("quota.memory_mb", "a quota of %d MiB is negative", q.GetMemoryMb())
	}
	return store.Quota{Sandboxes: q.Sandboxes, CPU: q.CpuCores, MemoryMB: q.MemoryMb}, nil
}

func projectFromProto(field, path string) (sandbox.Project, error) {
	p, err := sandbox.ParseProject(path)
	if err != nil {
		return "", fault.Invalid(field, "%w", err)
	}
	return p, nil
}

// grantFromProto reads a grant; the role "" is for the caller to allow.
func grantFromProto(field, project, word string) (role.Grant, error) {
	p, err := projectFromProto(field+"project", project)
	if err != nil {
		return role.Grant{}, err
	}
	r, err := role.Parse(word)
	if err != nil {
		return role.Grant{}, fault.Invalid(field+"role", "%w", err)
	}
	return role.Grant{Project: p, Role: r}, nil
}

var callerForm = regexp.MustCompile(`^[a-z0-9._-]{1,63}$`)

func checkCallerName(field, name string) error {
	if !callerForm.MatchString(name) {
		return fault.Invalid(field, "caller %q: want a name of up to 63 of [a-z0-9._-]", name)
	}
	return nil
}
