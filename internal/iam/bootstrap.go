package iam

import (
	"context"
	"fmt"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/iam/token"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// Demo is the project that a new installation has for trying things out.
const Demo sandbox.Project = "root/demo"

// Names are the callers that a new installation has.
type Names struct {
	Admin string // admin on root; "" means "admin"
	Demo  string // developer on root/demo; "" means "demo"
}

// Secrets are the whole tokens of the callers that were made just now; "" for
// one that was there already, whose token only its owner knows.
type Secrets struct {
	Admin string
	Demo  string
}

// Bootstrap sees to it that the projects root and root/demo and the two
// callers exist, and makes a token for each caller that it makes. save gets
// the tokens before anything is recorded, so that no crash leaves a caller
// whose token nobody has: it writes them down, over those of an earlier try.
// It is not called when there are none, and may be nil. A second run changes
// nothing.
func Bootstrap(ctx context.Context, db *store.DB, names Names, save func(Secrets) error) (Secrets, error) {
	if names.Admin == "" {
		names.Admin = "admin"
	}
	if names.Demo == "" {
		names.Demo = "demo"
	}
	if names.Admin == names.Demo {
		return Secrets{}, fmt.Errorf("the callers need two names, not %q twice", names.Admin)
	}
	b := bootstrap{now: time.Now(), callers: []store.Caller{
		{Name: names.Admin, Grants: []role.Grant{{Project: role.Root, Role: role.Admin}}},
		{Name: names.Demo, Grants: []role.Grant{{Project: Demo, Role: role.Developer}}},
	}}
	if whole, err := b.whole(ctx, db); err != nil || whole {
		return Secrets{}, err
	}
	entry := store.Audit{Time: b.now, Action: "Bootstrap", Subject: names.Admin + ", " + names.Demo}
	var secrets Secrets
	err := db.Change(ctx, entry, func(c *store.Change) error {
		made, err := b.fill(ctx, c)
		if err != nil {
			return err
		}
		secrets = Secrets{Admin: made[names.Admin], Demo: made[names.Demo]}
		if save == nil || len(made) == 0 {
			return nil
		}
		return save(secrets)
	})
	if err != nil {
		return Secrets{}, fmt.Errorf("make the first projects and callers: %w", err)
	}
	return secrets, nil
}

var firstProjects = []sandbox.Project{role.Root, Demo}

type bootstrap struct {
	now     time.Time
	callers []store.Caller
}

// reader is what the database and a change of it have alike.
type reader interface {
	GetProject(ctx context.Context, path sandbox.Project) (store.Project, error)
	GetCaller(ctx context.Context, name string) (store.Caller, error)
}

// whole reports whether nothing is missing.
func (b bootstrap) whole(ctx context.Context, r reader) (bool, error) {
	for _, p := range firstProjects {
		if _, err := r.GetProject(ctx, p); err != nil {
			return false, unlessMissing(err)
		}
	}
	for _, caller := range b.callers {
		if _, err := r.GetCaller(ctx, caller.Name); err != nil {
			return false, unlessMissing(err)
		}
	}
	return true, nil
}

func unlessMissing(err error) error {
	if fault.Is(err, fault.NotFound) {
		return nil
	}
	return err
}

// fill makes what is missing and returns the tokens it made, by caller.
func (b bootstrap) fill(ctx context.Context, c *store.Change) (map[string]string, error) {
	for _, p := range firstProjects {
		_, err := c.GetProject(ctx, p)
		if fault.Is(err, fault.NotFound) {
			err = c.CreateProject(ctx, store.Project{Path: p, CreatedAt: b.now})
		}
		if err != nil {
			return nil, err
		}
	}
	made := map[string]string{}
	for _, caller := range b.callers {
		_, err := c.GetCaller(ctx, caller.Name)
		if err == nil {
			continue
		}
		if !fault.Is(err, fault.NotFound) {
			return nil, err
		}
		caller.CreatedAt = b.now
		if err := c.CreateCaller(ctx, caller); err != nil {
			return nil, err
		}
		full, id, hash := token.New()
		err = c.CreateToken(ctx, store.Token{
			ID: id, Caller: caller.Name, Hash: hash, Description: "made at installation", CreatedAt: b.now,
		})
		if err != nil {
			return nil, err
		}
		made[caller.Name] = full
	}
	return made, nil
}
