package apiserver

import (
	"context"
	"errors"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

const (
	// forkTimeout bounds how long a node is at the copies of one call. It is
	// shorter than the watcher waits for what a node does not know yet.
	forkTimeout = startTimeout
	// forkLost is the age after which no server can be at a copy any more.
	forkLost = forkTimeout + recordTime
	// forkUnheard is the age after which a copy that its node does not know is
	// lost: the node has begun each of them once the source's state is taken.
	// Should it be at that still for another server, then that call fails.
	forkUnheard = 15 * time.Second
)

// unheardOf reports whether the node of a copy says that it does not know it.
func (s *Server) unheardOf(ctx context.Context, sb *sandbox.Sandbox) bool {
	address, err := s.nodes.of(ctx, sb.Node)
	if err != nil {
		return false
	}
	_, err = s.edges.look(ctx, address, sb.ID)
	return fault.Is(err, fault.NotFound)
}

// forkWish is what a call asks to be copied.
type forkWish struct {
	id        string
	count     int // 0 means 1
	filesOnly bool
	allOrNone bool
	key       string
}

// admitFork checks who asks for copies of a sandbox and for how many. Whether
// they can be made is seen when they are placed, after a look whether the call
// is a repeated one: that has its copies even if the source has ended since.
func (s *Server) admitFork(ctx context.Context, w forkWish) (*order, error) {
	if w.count == 0 {
		w.count = 1
	}
	if err := checkCount(w.count); err != nil {
		return nil, err
	}
	if err := checkIdempotencyKey(w.key); err != nil {
		return nil, err
	}
	source, err := s.find(ctx, w.id, role.Developer)
	if err != nil {
		return nil, err
	}
	o := &order{
		caller: callerOf(ctx).name, project: source.Project, spec: source.Spec, filesOnly: w.filesOnly,
		from:  origin{image: store.Image{Name: source.Spec.Image, Digest: source.ImageDigest}, source: source},
		count: w.count, allOrNone: w.allOrNone,
	}
	o.spec.Hostname = "" // two of a name would be no use: each has its id
	o.key, err = idempotency(o.caller, w.key, struct {
		Fork      sandbox.ID
		FilesOnly bool
		Count     int
		AllOrNone bool
	}{source.ID, w.filesOnly, w.count, w.allOrNone})
	return o, err
}

// forkable says why none of an order's copies can be made, nil also for an
// order that is no fork.
func (s *Server) forkable(o *order, nodes []store.NodeUsage) error {
	source := o.from.source
	switch {
	case source == nil:
		return nil
	case source.End != nil:
		return ended(source.ID, *source.End)
	case !hasState(source):
		err := fault.New(fault.WrongState, "sandbox %s is %s: only one that runs or is paused can be copied", source.ID, source.State)
		err.State = source.State
		return err
	}
	feature, what := "snapshot_memory", "memory"
	if o.filesOnly {
		feature, what = "snapshot_files", "files"
	}
	can, lacks := s.nodes.backendsThat(nodes, feature, source.Node, source.Spec.Backend)
	if !lacks {
		return nil
	}
	hint := ""
	if !o.filesOnly {
		hint = ": ask for files only, or run it on another"
	}
	err := fault.New(fault.Unsupported, "backend %s cannot copy the %s of a sandbox%s", source.Spec.Backend, what, hint)
	err.Field, err.Backends = "files_only", can
	return err
}

// forkAll has the source's node make all copies that were reserved, in one
// call, so that they are copies of one moment. An error is that of all, or with
// allOrNone the first.
func (s *Server) forkAll(ctx context.Context, o *order, results []made) error {
	var children []*sandbox.Sandbox
	var at []int // of children in results
	for i, r := range results {
		if r.sandbox != nil {
			s.making.claim(r.sandbox.ID)
			defer s.making.release(r.sandbox.ID)
			children, at = append(children, r.sandbox), append(at, i)
		}
	}
	if len(children) == 0 {
		return nil
	}
	answers, err := s.fork(ctx, o, children)
	var group errgroup.Group
	group.SetLimit(sideBySide)
	for j, child := range children {
		r := &results[at[j]]
		group.Go(func() error {
			if err != nil {
				r.err = s.notCopied(ctx, child, err)
				return nil
			}
			if answers[j].err != nil {
				r.err = s.failed(ctx, child, answers[j].err)
			} else {
				r.sandbox, r.err = s.recordRunning(ctx, child, answers[j].machine)
			}
			if o.allOrNone {
				return r.err
			}
			return nil
		})
	}
	if first := group.Wait(); first != nil {
		return first
	}
	return err
}

// fork asks the node for the copies.
func (s *Server) fork(ctx context.Context, o *order, children []*sandbox.Sandbox) ([]copied, error) {
	source := o.from.source
	late := fault.New(fault.Unavailable, "node %s did not fork sandbox %s within %s", source.Node, source.ID, forkTimeout)
	within, cancel := context.WithTimeoutCause(ctx, forkTimeout, late)
	defer cancel()
	address, err := s.nodes.of(within, source.Node)
	if err != nil {
		return nil, err
	}
	answers, err := s.edges.fork(within, address, source.ID, o.filesOnly, children)
	if err != nil && errors.Is(context.Cause(within), late) {
		err = &gaveUp{late}
	}
	return answers, err
}

// gaveUp is an error of a call that the node may still be at.
type gaveUp struct{ error }

func (g *gaveUp) Unwrap() error { return g.error }

// notCopied records that a copy was not made because the whole call failed, and
// returns why. When the node did not say so itself, the copy is ended there; if
// it does not answer either, the watcher ends it.
func (s *Server) notCopied(ctx context.Context, child *sandbox.Sandbox, err error) error {
	var late *gaveUp
	switch {
	case ctx.Err() != nil:
		s.abandon(ctx, child, whyAbandoned(ctx))
		return err
	case errors.As(err, &late):
		s.abandon(ctx, child, sandbox.End{Reason: sandbox.ReasonStart, Domain: sandbox.Infra, Detail: late.Error()})
		return err
	}
	return s.failed(ctx, child, err)
}

// clearLost clears up after a call whose copies this one waited for, when that
// made none or, with allOrNone, not all: its server died. The rest goes, and
// the key is free, so that the next call with it forks anew.
func (s *Server) clearLost(ctx context.Context, o *order, existing []*sandbox.Sandbox, results []made, err error) {
	if ctx.Err() != nil || err != nil && !fault.Is(err, fault.SandboxEnded) && !fault.Is(err, fault.Unavailable) {
		return
	}
	if err == nil && slices.ContainsFunc(results, func(r made) bool { return r.err == nil }) {
		return
	}
	rest := make([]made, len(existing))
	for i, sb := range existing {
		rest[i].sandbox = sb
	}
	s.undo(ctx, rest)
	s.freeKey(ctx, o)
}
