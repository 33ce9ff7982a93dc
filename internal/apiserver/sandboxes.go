package apiserver

import (
	"cmp"
	"context"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

func unknownSandbox(id string) error {
	err := fault.New(fault.NotFound, "sandbox %.80q does not exist", id)
	err.Field = "id"
	return err
}

// ended is the error of a call to a sandbox that lives no more.
func ended(id sandbox.ID, end sandbox.End) error {
	detail := end.Detail
	if detail == "" {
		detail = end.Reason
	}
	err := fault.New(fault.SandboxEnded, "sandbox %s has ended: %s", id, detail)
	err.End, err.Domain = &end, end.Domain
	return err
}

// load returns a record.
func (s *Server) load(ctx context.Context, id sandbox.ID) (*sandbox.Sandbox, error) {
	sb, err := s.deps.DB.GetSandbox(ctx, id)
	if fault.Is(err, fault.NotFound) {
		return nil, unknownSandbox(string(id))
	}
	return sb, err
}

// mayUse checks that a caller has a role in a sandbox's project. To one who
// has none there, the sandbox does not exist.
func mayUse(c *caller, want role.Role, id sandbox.ID, p sandbox.Project) error {
	if !c.may(role.Viewer, p) {
		return unknownSandbox(string(id))
	}
	return c.need(want, p, "id")
}

// find returns the sandbox of a request, if the caller has the role there.
func (s *Server) find(ctx context.Context, id string, want role.Role) (*sandbox.Sandbox, error) {
	if id == "" {
		return nil, fault.Invalid("id", "id is missing: name a sandbox, such as sb-0123456789ab")
	}
	parsed, err := sandbox.ParseID(id)
	if err != nil {
		return nil, unknownSandbox(id)
	}
	sb, err := s.load(ctx, parsed)
	if err != nil {
		return nil, err
	}
	return sb, mayUse(callerOf(ctx), want, sb.ID, sb.Project)
}

// findAlive is find, for calls that want a sandbox that has not ended.
func (s *Server) findAlive(ctx context.Context, id string, want role.Role) (*sandbox.Sandbox, string, error) {
	sb, err := s.find(ctx, id, want)
	if err != nil {
		return nil, "", err
	}
	if sb.End != nil {
		return nil, "", ended(sb.ID, *sb.End)
	}
	address, err := s.nodes.of(ctx, sb.Node)
	return sb, address, err
}

// stop ends a sandbox: the intent is recorded, the node removes the machine,
// the end is recorded. When the node does not answer, the sandbox stays in
// state stopping, which is no error: the watcher finishes it.
func (s *Server) stop(ctx context.Context, sb *sandbox.Sandbox, end sandbox.End) (*sandbox.Sandbox, error) {
	if sb.End != nil {
		return sb, nil
	}
	// A caller that goes away does not take its wish back.
	ctx = context.WithoutCancel(ctx)
	end.Time = s.deps.Now().UTC()
	sb, err := s.deps.DB.UpdateSandbox(ctx, sb.ID, func(r *sandbox.Sandbox) error {
		if !r.State.Alive() {
			return nil
		}
		return r.MoveTo(sandbox.Stopping)
	})
	if err != nil {
		return nil, err
	}
	s.routes.drop(sb.ID)
	if sb.End != nil {
		return sb, nil
	}
	first, err := s.destroy(ctx, sb, end)
	if err != nil {
		s.log.Warn("a node could not end a sandbox; the watcher goes on with it", "sandbox", sb.ID, "node", sb.Node, "error", err)
		return sb, nil
	}
	if first != nil {
		end = *first
	}
	defer s.routes.drop(sb.ID)
	return s.deps.DB.UpdateSandbox(ctx, sb.ID, func(r *sandbox.Sandbox) error { return r.Finish(end) })
}

func (s *Server) destroy(ctx context.Context, sb *sandbox.Sandbox, end sandbox.End) (*sandbox.End, error) {
	ctx, cancel := context.WithTimeout(ctx, s.cfg.StopTimeout)
	defer cancel()
	address, err := s.nodes.of(ctx, sb.Node)
	if err != nil {
		return nil, err
	}
	return s.edges.destroy(ctx, address, sb.ID, end)
}

// ttl is a deadline that a call may change; 0 is never.
type ttl struct {
	set   bool
	value time.Duration
}

// ttlChange says which deadlines change.
type ttlChange struct{ idle, lifetime ttl }

// setTTL changes deadlines, in the record first: if the node cannot be told,
// the watcher keeps them all the same.
func (s *Server) setTTL(ctx context.Context, id string, change ttlChange) (*sandbox.Sandbox, error) {
	if err := cmp.Or(checkTTL("ttl_running_stop", change.idle.value), checkTTL("ttl_lifetime", change.lifetime.value)); err != nil {
		return nil, err
	}
	sb, address, err := s.findAlive(ctx, id, role.Developer)
	if err != nil {
		return nil, err
	}
	sb, err = s.deps.DB.UpdateSandbox(ctx, sb.ID, func(r *sandbox.Sandbox) error {
		if r.End != nil {
			return ended(r.ID, *r.End)
		}
		if change.idle.set {
			r.Spec.Deadlines.Idle = change.idle.value
		}
		if change.lifetime.set {
			r.Spec.Deadlines.Lifetime = change.lifetime.value
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	return sb, s.edges.setDeadlines(ctx, address, sb.ID, sb.Spec.Deadlines)
}

// listing says which sandboxes are wanted.
type listing struct {
	project sandbox.Project
	states  []sandbox.State
	labels  map[string]string
	ended   bool
	size    int
	token   string
}

const (
	defaultPage = 100
	maxPage     = 1000
)

// list returns a page of a project's sandboxes and where the next begins.
func (s *Server) list(ctx context.Context, want listing) ([]*sandbox.Sandbox, string, error) {
	if want.size == 0 {
		want.size = defaultPage
	}
	if want.size < 0 || want.size > maxPage {
		return nil, "", fault.Invalid("page_size", "page_size must be from 1 to %d, not %d", maxPage, want.size)
	}
	if err := checkLabels("labels", want.labels); err != nil {
		return nil, "", err
	}
	if err := callerOf(ctx).need(role.Viewer, want.project, "project"); err != nil {
		return nil, "", err
	}
	page, err := s.deps.DB.ListSandboxes(ctx, store.SandboxFilter{
		Project: want.project, States: want.states, Labels: want.labels, Ended: want.ended,
		Limit: want.size, PageToken: want.token,
	})
	if err != nil {
		return nil, "", err
	}
	return page.Sandboxes, page.Next, nil
}
