package edgetest

import (
	"context"
	"fmt"
	"slices"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Op is something that is done to a sandbox's state.
type Op string

// The operations that Hooks.State and Hooks.StateDone hear of.
const (
	Pause    Op = "pause"
	Resume   Op = "resume"
	Fork     Op = "fork"  // with the source's id, once for the call
	Child    Op = "child" // with the child's id, once for each of a fork
	Snapshot Op = "snapshot"
)

// before runs what a test put before an operation.
func (s service) before(ctx context.Context, op Op, id string) error {
	if err := s.known(id); err != nil {
		return err
	}
	if h := s.e.hook().State; h != nil {
		return h(ctx, op, sandbox.ID(id))
	}
	return nil
}

// after runs what a test put between an operation and its answer.
func (s service) after(ctx context.Context, op Op, id string) error {
	if h := s.e.hook().StateDone; h != nil {
		return h(ctx, op, sandbox.ID(id))
	}
	return nil
}

// change replaces what is known of a sandbox that has not ended.
func (e *Edge) change(id string, f func(*edgev1.SandboxStatus)) (*edgev1.SandboxStatus, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	old := e.boxes[sandbox.ID(id)]
	if old == nil || old.GetEnd() != nil {
		return nil, fault.New(fault.NotFound, "sandbox %s does not exist", id)
	}
	status := proto.CloneOf(old)
	f(status)
	if !proto.Equal(old, status) {
		e.putLocked(status)
	}
	return status, nil
}

func (s service) PauseSandbox(ctx context.Context, req *connect.Request[edgev1.PauseSandboxRequest]) (*connect.Response[edgev1.PauseSandboxResponse], error) {
	id := req.Msg.GetId()
	if err := s.before(ctx, Pause, id); err != nil {
		return nil, err
	}
	status, err := s.e.change(id, func(b *edgev1.SandboxStatus) {
		if b.GetState() == opendsecv1.State_STATE_RUNNING {
			b.State, b.PausedAt = opendsecv1.State_STATE_PAUSED, timestamppb.Now()
		}
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.PauseSandboxResponse{Status: status}), s.after(ctx, Pause, id)
}

func (s service) GetSandbox(_ context.Context, req *connect.Request[edgev1.GetSandboxRequest]) (*connect.Response[edgev1.GetSandboxResponse], error) {
	status, err := s.e.change(req.Msg.GetId(), func(*edgev1.SandboxStatus) {})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.GetSandboxResponse{Status: status}), nil
}

func (s service) ResumeSandbox(ctx context.Context, req *connect.Request[edgev1.ResumeSandboxRequest]) (*connect.Response[edgev1.ResumeSandboxResponse], error) {
	id := req.Msg.GetId()
	if err := s.before(ctx, Resume, id); err != nil {
		return nil, err
	}
	status, err := s.e.change(id, func(b *edgev1.SandboxStatus) {
		if b.GetState() == opendsecv1.State_STATE_PAUSED {
			paused := b.GetPausedFor().AsDuration() + max(time.Since(b.GetPausedAt().AsTime()), time.Microsecond)
			b.State, b.PausedAt, b.PausedFor = opendsecv1.State_STATE_RUNNING, nil, durationpb.New(paused)
		}
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.ResumeSandboxResponse{Status: status}), s.after(ctx, Resume, id)
}

func (s service) ForkSandbox(ctx context.Context, req *connect.Request[edgev1.ForkSandboxRequest]) (*connect.Response[edgev1.ForkSandboxResponse], error) {
	if err := s.before(ctx, Fork, req.Msg.GetId()); err != nil {
		return nil, err
	}
	s.e.mu.Lock()
	s.e.forks = append(s.e.forks, req.Msg)
	s.e.mu.Unlock()
	out := &edgev1.ForkSandboxResponse{}
	for _, child := range req.Msg.GetChildren() {
		status, err := s.child(ctx, child)
		if err != nil {
			out.Results = append(out.Results, &edgev1.ForkResult{Result: &edgev1.ForkResult_Error{Error: fault.Info(rpc.Fault(ctx, err))}})
			continue
		}
		out.Results = append(out.Results, &edgev1.ForkResult{Result: &edgev1.ForkResult_Status{Status: status}})
	}
	return connect.NewResponse(out), s.after(ctx, Fork, req.Msg.GetId())
}

func (s service) child(ctx context.Context, req *edgev1.CreateSandboxRequest) (*edgev1.SandboxStatus, error) {
	if h := s.e.hook().State; h != nil {
		if err := h(ctx, Child, sandbox.ID(req.GetId())); err != nil {
			return nil, err
		}
	}
	s.e.make(req)
	return s.e.ran(sandbox.ID(req.GetId())), nil
}

// Forks returns the forks that were asked for, but for those that a hook refused.
func (e *Edge) Forks() []*edgev1.ForkSandboxRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.forks)
}

func (s service) SnapshotSandbox(ctx context.Context, req *connect.Request[edgev1.SnapshotSandboxRequest]) (*connect.Response[edgev1.SnapshotSandboxResponse], error) {
	id := req.Msg.GetId()
	if err := s.before(ctx, Snapshot, id); err != nil {
		return nil, err
	}
	s.e.mu.Lock()
	s.e.snapshots++
	image := &opendsecv1.Image{
		Digest: Digest(fmt.Sprintf("%s snapshot %d", s.e.Name, s.e.snapshots)), Kind: "files", Size: 42 << 20, Architecture: "amd64",
		Source: "sandbox " + id, Config: &opendsecv1.ImageConfig{User: "app"},
	}
	if !req.Msg.GetFilesOnly() {
		spec := s.e.requests[sandbox.ID(id)].GetSpec()
		image.Kind = "memory"
		image.Snapshot = &opendsecv1.SnapshotInfo{
			Backend: s.e.boxes[sandbox.ID(id)].GetBackend(), Virtualization: "systrap", Runtime: "test-1", Kernel: "6.1", Agent: "agent-1",
			CpuFeatures: []string{"avx2"}, CpuCoresLimit: spec.GetCpuCoresLimit(), MemoryLimitMb: spec.GetMemoryLimitMb(),
			DiskLimitMb: spec.GetDiskLimitMb(), PidsLimit: spec.GetPidsLimit(),
		}
	}
	s.e.mu.Unlock()
	s.e.SetReport(func(r *edgev1.NodeReport) { r.Images = append(slices.Clone(r.Images), image.GetDigest()) })
	return connect.NewResponse(&edgev1.SnapshotSandboxResponse{Image: image}), s.after(ctx, Snapshot, id)
}
