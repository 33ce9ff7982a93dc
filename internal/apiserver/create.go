package apiserver

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/internal/apiserver/placement"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

const (
	// maxAttempts is on how many nodes a sandbox is tried before the caller is
	// told of the last failure.
	maxAttempts = 3
	// startTimeout bounds one attempt.
	startTimeout = 2 * time.Minute
	// recordTime bounds what is recorded for a caller that has gone away.
	recordTime = 30 * time.Second
	// awaitEvery is how often a call looks whether an earlier one with the same
	// idempotency key, which may run in another process, is done.
	awaitEvery = 20 * time.Millisecond
	// takeOverAfter is how old a sandbox that nobody here is making must be for
	// a repeated call to go on with it: an ordinary start takes a fraction of it.
	takeOverAfter = 2 * time.Second

	maxCount   = 100
	sideBySide = 32 // starts of one call
)

// order is one or more sandboxes that may be made: checked, complete, allowed.
type order struct {
	caller    string
	project   sandbox.Project
	spec      sandbox.Spec
	from      origin
	filesOnly bool // of a fork: without memory and processes
	count     int
	allOrNone bool
	key       store.Idempotency
}

// origin is what sandboxes are made of.
type origin struct {
	image  store.Image
	source *sandbox.Sandbox // that they are copies of; nil when they start from the image
}

// wish is what a call asks to be made.
type wish struct {
	project   string
	spec      sandbox.Spec
	count     int
	allOrNone bool
	key       string
}

func checkCount(n int) error {
	if n < 1 || n > maxCount {
		return fault.Invalid("count", "count must be from 1 to %d, not %d", maxCount, n)
	}
	return nil
}

// admit checks all about a wish that does not depend on what else runs, and
// fills the defaults of its spec.
func (s *Server) admit(ctx context.Context, w wish) (*order, error) {
	if err := checkCount(w.count); err != nil {
		return nil, err
	}
	if err := checkSpec(&w.spec); err != nil {
		return nil, err
	}
	if err := checkIdempotencyKey(w.key); err != nil {
		return nil, err
	}
	p, err := parseProject(w.project)
	if err != nil {
		return nil, err
	}
	c := callerOf(ctx)
	if err := c.need(role.Developer, p, "project"); err != nil {
		return nil, err
	}
	o := &order{caller: c.name, project: p, spec: w.spec, count: w.count, allOrNone: w.allOrNone}
	o.key, err = idempotency(c.name, w.key, struct {
		Spec      sandbox.Spec
		Closed    bool `json:",omitempty"` // which Spec does not tell from rules that are not given
		Count     int
		AllOrNone bool
	}{w.spec, w.spec.NetworkRules != nil && len(w.spec.NetworkRules) == 0, w.count, w.allOrNone})
	if err != nil {
		return nil, err
	}
	if o.from.image, err = s.resolve(ctx, p, w.spec.Image); err != nil {
		return nil, err
	}
	o.spec.NetworkRules = rulesOfStart(w.spec.NetworkRules, p, o.from.image)
	return o, settle(&o.spec, o.from.image)
}

// idempotency returns the key with a hash of all that is asked.
func idempotency(caller, key string, asked any) (store.Idempotency, error) {
	if key == "" {
		return store.Idempotency{}, nil
	}
	data, err := json.Marshal(asked)
	if err != nil {
		return store.Idempotency{}, fmt.Errorf("hash the request: %w", err)
	}
	sum := sha256.Sum256(data)
	return store.Idempotency{Caller: caller, Key: key, RequestHash: hex.EncodeToString(sum[:])}, nil
}

func parseProject(path string) (sandbox.Project, error) {
	if path == "" {
		return "", fault.Invalid("project", "project is missing: name one, such as root/demo, or set OPENDSEC_PROJECT")
	}
	p, err := sandbox.ParseProject(path)
	if err != nil {
		return "", fault.Invalid("project", "%w", err)
	}
	return p, nil
}

// resolve returns an image that is visible in a project.
func (s *Server) resolve(ctx context.Context, p sandbox.Project, name sandbox.ImageName) (store.Image, error) {
	if name.Project.Contains(p) {
		img, err := s.deps.DB.GetImage(ctx, name)
		if !fault.Is(err, fault.NotFound) {
			return img, err
		}
	}
	err := fault.New(fault.NotFound, "image %s does not exist or is not visible in project %s: see `opendsecctl image list`, or bring it in with `opendsecctl image import SOURCE %s`", name, p, name)
	err.Field = "spec.image"
	return store.Image{}, err
}

// made is a sandbox that was asked for, or why it was not made.
type made struct {
	sandbox *sandbox.Sandbox
	err     error
}

// create makes what an order asks for: recorded and placed in one transaction,
// made by the nodes, recorded as running. The error is nil when each result
// says for itself how it went, as it is without allOrNone.
func (s *Server) create(ctx context.Context, o *order) ([]made, error) {
	results, existing, err := s.reserve(ctx, o)
	if err != nil {
		return nil, err
	}
	if existing != nil {
		results, err = s.awaitAll(ctx, o, existing)
		if o.from.source != nil {
			s.clearLost(ctx, o, existing, results, err)
		}
		return results, err
	}
	begin := s.startAll
	if o.from.source != nil {
		begin = s.forkAll
	}
	if err = begin(ctx, o, results); err == nil {
		return results, nil
	}
	s.undo(ctx, results)
	if o.from.source == nil || !fault.Is(err, fault.SandboxEnded) {
		s.freeKey(ctx, o) // else who ended a copy may have taken the key over; see clearLost
	}
	return nil, err
}

// freeKey lets a call that made nothing be repeated with its key.
func (s *Server) freeKey(ctx context.Context, o *order) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	if err := s.deps.DB.ForgetKey(ctx, o.project, o.key); err != nil {
		s.log.Error("a failed call cannot be repeated with its idempotency key", "error", err)
	}
}

// reserve records the sandboxes on the nodes that placement chooses, or returns
// those that an earlier call with the same key made.
func (s *Server) reserve(ctx context.Context, o *order) (results []made, existing []*sandbox.Sandbox, err error) {
	now := s.deps.Now().UTC()
	results = make([]made, o.count)
	sbs := make([]*sandbox.Sandbox, o.count)
	refused := map[sandbox.ID]error{}
	for i := range sbs {
		sbs[i] = &sandbox.Sandbox{
			ID: sandbox.NewID(), Project: o.project, Caller: o.caller, Spec: o.spec,
			State: sandbox.Pending, ImageDigest: o.from.image.Digest, CreatedAt: now,
		}
		if o.from.source != nil {
			sbs[i].Parent = o.from.source.ID
		}
	}
	choose := s.chooser(o.spec, o.from, nil)
	existing, err = s.deps.DB.CreateSandboxes(ctx, sbs, o.key, func(sb *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
		if err := s.forkable(o, nodes); err != nil {
			return "", err
		}
		node, err := choose(sb, nodes, projects)
		if err != nil && !o.allOrNone {
			refused[sb.ID] = err
			return "", store.ErrLeaveOut
		}
		return node, err
	})
	if err != nil || existing != nil {
		return nil, existing, err
	}
	for i, sb := range sbs {
		if sb.Node == "" {
			results[i].err = refused[sb.ID]
			continue
		}
		results[i].sandbox = sb
	}
	return results, nil, nil
}

// chooser returns placement's choice for sandboxes of a spec in the store's terms.
func (s *Server) chooser(spec sandbox.Spec, from origin, avoid []string) store.Place {
	req := placement.Request{
		Backend: spec.Backend, Limits: spec.Limits, ImageDigest: from.image.Digest, Avoid: avoid,
	}
	switch {
	case spec.OnIdle == sandbox.PauseOnIdle:
		req.NeedsPause = "spec.on_idle"
	case spec.AutoResume:
		req.NeedsPause = "spec.auto_resume"
	}
	return func(_ *sandbox.Sandbox, nodes []store.NodeUsage, projects []store.ProjectUsage) (string, error) {
		req.Only = s.nodes.only(nodes, from)
		return placement.Choose(req, s.nodes.placement(nodes), quotas(projects))
	}
}

func quotas(projects []store.ProjectUsage) []placement.Project {
	out := make([]placement.Project, len(projects))
	for i, p := range projects {
		q := p.Project.Quota
		out[i] = placement.Project{
			Path: p.Project.Path, Used: p.Used,
			Quota: placement.Quota{Sandboxes: q.Sandboxes, CPU: q.CPU, MemoryMB: q.MemoryMB},
		}
	}
	return out
}

// startAll starts what was reserved, side by side. With allOrNone the first
// failure ends the others and is the error.
func (s *Server) startAll(ctx context.Context, o *order, results []made) error {
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(sideBySide)
	for i := range results {
		if results[i].sandbox == nil {
			continue
		}
		group.Go(func() error {
			sb, err := s.start(ctx, results[i].sandbox)
			results[i] = made{sb, err}
			if o.allOrNone {
				return err
			}
			return nil
		})
	}
	return group.Wait()
}

// start has a recorded sandbox made by its node, or, when the node fails, by
// another. On an error the record has an end.
func (s *Server) start(ctx context.Context, sb *sandbox.Sandbox) (*sandbox.Sandbox, error) {
	if !s.making.claim(sb.ID) {
		return s.awaitStart(ctx, sb.ID)
	}
	defer s.making.release(sb.ID)
	var failed []string
	for {
		m, err := s.startOn(ctx, sb)
		if err == nil {
			return s.recordRunning(ctx, sb, m)
		}
		if ctx.Err() != nil {
			s.abandon(ctx, sb, whyAbandoned(ctx))
			return nil, err
		}
		if !nodeFailed(err) {
			return nil, s.failed(ctx, sb, err)
		}
		failed = append(failed, sb.Node)
		if len(failed) == maxAttempts {
			return nil, s.failed(ctx, sb, err)
		}
		moved, merr := s.move(ctx, sb, failed)
		var wrong *sandbox.WrongStateError
		if errors.As(merr, &wrong) && wrong.State == sandbox.Running {
			// Its node made it, and said so before it broke off. It runs there.
			return s.deps.DB.GetSandbox(ctx, sb.ID)
		}
		if merr != nil {
			// Why the first node failed tells more than why there is no other.
			return nil, s.failed(ctx, sb, err)
		}
		s.log.Warn("a node could not make a sandbox, trying another", "sandbox", sb.ID, "node", sb.Node, "other", moved.Node, "error", err)
		sb = moved
	}
}

// move places a sandbox whose nodes so far could not make it on another. An
// image whose name has gone, or is another's, may be anything: it takes a node
// that has the content.
func (s *Server) move(ctx context.Context, sb *sandbox.Sandbox, failed []string) (*sandbox.Sandbox, error) {
	img, err := s.deps.DB.GetImage(ctx, sb.Spec.Image)
	if err != nil && !fault.Is(err, fault.NotFound) {
		return nil, err
	}
	if err != nil || img.Digest != sb.ImageDigest {
		img = store.Image{Name: sb.Spec.Image, Digest: sb.ImageDigest, Kind: kindFiles}
	}
	return s.deps.DB.MoveSandbox(ctx, sb.ID, s.chooser(sb.Spec, origin{image: img}, failed))
}

// startOn has the sandbox's node make it.
func (s *Server) startOn(ctx context.Context, sb *sandbox.Sandbox) (machine, error) {
	if err := ctx.Err(); err != nil {
		return machine{}, err
	}
	late := fault.New(fault.Unavailable, "node %s did not make sandbox %s within %s", sb.Node, sb.ID, startTimeout)
	within, cancel := context.WithTimeoutCause(ctx, startTimeout, late)
	defer cancel()
	address, err := s.nodes.of(within, sb.Node)
	if err != nil {
		return machine{}, err
	}
	m, err := s.edges.create(within, address, sb)
	if err != nil && errors.Is(context.Cause(within), late) {
		err = late
	}
	return m, err
}

// nodeFailed reports whether another node might do better: the fault is ours,
// or the node does not have the image.
func nodeFailed(err error) bool {
	e := fault.Of(err)
	return e.DomainOf() == sandbox.Infra || e.Kind == fault.NotFound
}

// whyAbandoned returns the end of a sandbox whose start was given up.
func whyAbandoned(ctx context.Context) sandbox.End {
	end := sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Detail: "its caller went away before it ran"}
	cause := context.Cause(ctx)
	if !errors.Is(cause, context.Canceled) && !errors.Is(cause, context.DeadlineExceeded) {
		end.Detail = undoneDetail
	}
	return end
}

const undoneDetail = "another sandbox of its set could not be made"

// failed records that a sandbox could not be made and returns why.
func (s *Server) failed(ctx context.Context, sb *sandbox.Sandbox, err error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	end := sandbox.End{
		Reason: sandbox.ReasonStart, Domain: fault.Of(err).DomainOf(), Detail: fault.Of(err).Error(), Time: s.deps.Now().UTC(),
	}
	record, uerr := s.deps.DB.UpdateSandbox(ctx, sb.ID, func(r *sandbox.Sandbox) error { return r.Finish(end) })
	if uerr != nil {
		s.log.Error("record that a sandbox could not be made", "sandbox", sb.ID, "error", uerr)
	}
	s.routes.drop(sb.ID)
	if record != nil && record.End != nil && record.End.Reason == sandbox.ReasonStopped {
		return ended(sb.ID, *record.End) // it was stopped meanwhile, that is why
	}
	return fmt.Errorf("start sandbox %s on node %s: %w", sb.ID, sb.Node, err)
}

// recordRunning records what the node made. When the record has been ended, or
// is being ended, meanwhile, the machine goes too.
func (s *Server) recordRunning(ctx context.Context, sb *sandbox.Sandbox, m machine) (*sandbox.Sandbox, error) {
	record, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	running, err := s.deps.DB.UpdateSandbox(record, sb.ID, func(r *sandbox.Sandbox) error {
		if err := r.MoveTo(sandbox.Running); err != nil {
			return err
		}
		if m.backend != "" {
			r.Spec.Backend = m.backend
		}
		if r.StartedAt.IsZero() {
			r.StartedAt = m.startedAt
		}
		return nil
	})
	switch {
	case err == nil && ctx.Err() != nil:
		s.abandon(ctx, running, whyAbandoned(ctx))
		return nil, ctx.Err()
	case err == nil:
		return running, nil
	}
	end := sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Detail: "stopped before it ran", Time: s.deps.Now().UTC()}
	var wrong *sandbox.WrongStateError
	if !errors.As(err, &wrong) {
		s.abandon(ctx, sb, end)
		return nil, err
	}
	// Who ended it has told the node, but maybe before there was a machine.
	if _, derr := s.destroy(record, sb, end); derr != nil {
		s.log.Warn("end a sandbox that was stopped before it ran; the watcher goes on with it", "sandbox", sb.ID, "error", derr)
	}
	return nil, ended(sb.ID, end)
}

// abandon ends a sandbox that nobody waits for, on its node and in its record.
// What fails here is finished by the watcher.
func (s *Server) abandon(ctx context.Context, sb *sandbox.Sandbox, end sandbox.End) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	if _, err := s.stop(ctx, sb, end); err != nil {
		s.log.Warn("end an abandoned sandbox", "sandbox", sb.ID, "error", err)
	}
}

// undo ends what was made of a set.
func (s *Server) undo(ctx context.Context, results []made) {
	var group errgroup.Group
	group.SetLimit(sideBySide)
	for _, r := range results {
		if r.sandbox == nil || r.err != nil {
			continue
		}
		group.Go(func() error {
			s.abandon(ctx, r.sandbox, sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Detail: undoneDetail})
			return nil
		})
	}
	_ = group.Wait() // none returns an error
}

// awaitAll returns what an earlier call with the same key made, once it is made.
func (s *Server) awaitAll(ctx context.Context, o *order, existing []*sandbox.Sandbox) ([]made, error) {
	results := make([]made, o.count)
	for i := range results {
		if i >= len(existing) {
			results[i].err = fault.New(fault.Capacity, "the first call with this idempotency key did not make it: ask with another key")
			continue
		}
		sb, err := s.awaitStart(ctx, existing[i].ID)
		results[i] = made{sb, err}
		if err != nil && o.allOrNone {
			return nil, err
		}
	}
	return results, nil
}

// claims are the sandboxes that this process is making, each once.
type claims struct {
	mu  sync.Mutex // guards ids
	ids map[sandbox.ID]bool
}

func (c *claims) claim(id sandbox.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ids[id] {
		return false
	}
	if c.ids == nil {
		c.ids = map[sandbox.ID]bool{}
	}
	c.ids[id] = true
	return true
}

func (c *claims) release(id sandbox.ID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.ids, id)
}

func (c *claims) has(id sandbox.ID) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ids[id]
}

// awaitStart returns a sandbox that another call is making, once it is made.
// When that call is not one of this process and takes long, its server may have
// died: then this call goes on in its place. Asking the node again is harmless,
// it makes a sandbox once. Not so for a copy of another sandbox, which could
// only be a copy of what that is now: it fails once no server can be at it.
func (s *Server) awaitStart(ctx context.Context, id sandbox.ID) (*sandbox.Sandbox, error) {
	tick := time.NewTicker(awaitEvery)
	defer tick.Stop()
	var asked time.Time // whether its node knows it
	for {
		sb, err := s.deps.DB.GetSandbox(ctx, id)
		if err != nil {
			return nil, err
		}
		switch {
		case sb.End != nil && sb.StartedAt.IsZero():
			return nil, ended(id, *sb.End)
		case sb.State != sandbox.Pending && sb.State != sandbox.Starting:
			return sb, nil
		case sb.State == sandbox.Pending && !s.making.has(id):
			now := s.deps.Now()
			age := now.Sub(sb.CreatedAt)
			switch {
			case sb.Parent == "" && age > takeOverAfter:
				return s.start(ctx, sb)
			case sb.Parent != "" && age > forkUnheard && now.Sub(asked) > time.Second:
				asked = now
				if age > forkLost || s.unheardOf(ctx, sb) {
					return nil, s.failed(ctx, sb, fault.New(fault.Unavailable, "the server that forked %s has gone, and %s was not made: fork again", sb.Parent, id))
				}
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}
