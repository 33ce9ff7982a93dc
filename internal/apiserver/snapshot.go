package apiserver

import (
	"context"
	"math"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// snapshot makes an image of a sandbox and gives it a name, which it takes from
// another if need be. It does not end with its caller: content that the node
// has would be left without a name.
func (s *Server) snapshot(ctx context.Context, id, name string, filesOnly bool) (store.Image, error) {
	n, err := parseImage("name", name)
	if err != nil {
		return store.Image{}, err
	}
	sb, address, err := s.findAlive(ctx, id, role.Developer)
	if err != nil {
		return store.Image{}, err
	}
	if err := callerOf(ctx).need(role.Developer, n.Project, "name"); err != nil {
		return store.Image{}, err
	}
	if err := s.projectExists(ctx, n.Project); err != nil {
		return store.Image{}, err
	}
	if !hasState(sb) {
		err := fault.New(fault.WrongState, "sandbox %s is %s: an image can be made only of one that runs or is paused", sb.ID, sb.State)
		err.State = sb.State
		return store.Image{}, err
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stateTimeout)
	defer cancel()
	p, err := s.edges.snapshot(ctx, address, sb.ID, filesOnly)
	if err != nil {
		return store.Image{}, err
	}
	m, err := imageFromNode(p, sb.Node)
	if err != nil {
		return store.Image{}, err
	}
	m.Name, m.CreatedAt = n, s.deps.Now().UTC()
	m.Network = &store.ImageNetwork{Project: sb.Project, Rules: sb.Spec.NetworkRules}
	if m.Source == "" {
		m.Source = "sandbox " + string(sb.ID)
	}
	if err := s.nameImage(ctx, m); err != nil {
		s.discard(ctx, address, m)
		return store.Image{}, err
	}
	return m, nil
}

// discard removes new content that got no name. Files of the same content may
// have been named by another call; a memory is like no other.
func (s *Server) discard(ctx context.Context, address string, m store.Image) {
	if m.Kind != kindMemory {
		s.dropContent(ctx, m.Digest)
		return
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), recordTime)
	defer cancel()
	if err := s.edges.deleteImage(ctx, address, m.Digest); err != nil {
		s.log.Warn("remove a snapshot that got no name", "digest", m.Digest, "error", err)
	}
}

// settle gives a spec what its image decides: a snapshot with memory goes on on
// the backend and with the limits of the machine that it was taken of. Others
// have the defaults for limits that are 0.
func settle(spec *sandbox.Spec, m store.Image) error {
	if m.Kind != kindMemory {
		fillLimits(&spec.Limits, defaultLimits)
		return nil
	}
	snap, err := snapshotOf(m)
	if err != nil {
		return err
	}
	if spec.Backend != sandbox.Auto && spec.Backend != snap.backend {
		err := fault.New(fault.Unsupported, "image %s is a snapshot with memory of backend %s, which no other can start: use backend %s or auto",
			m.Name, snap.backend, snap.backend)
		err.Field, err.Backends = "spec.backend", []sandbox.Backend{snap.backend}
		return err
	}
	spec.Backend = snap.backend
	l := spec.Limits
	for _, f := range []struct {
		name      string
		want, has float64
	}{
		{"cpu_cores_limit", l.CPU, snap.limits.CPU},
		{"memory_limit_mb", float64(l.MemoryMB), float64(snap.limits.MemoryMB)},
		{"disk_limit_mb", float64(l.DiskMB), float64(snap.limits.DiskMB)},
		{"pids_limit", float64(l.PIDs), float64(snap.limits.PIDs)},
	} {
		if f.want != 0 && math.Abs(f.want-f.has) > 1e-9 {
			return fault.Invalid("spec."+f.name, "%s must be %v, which snapshot %s was taken with, or absent, not %v", f.name, f.has, m.Name, f.want)
		}
	}
	fillLimits(&spec.Limits, snap.limits)
	return nil
}
