package apiserver

import (
	"context"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// sandboxRPC is SandboxService in terms of Server.
type sandboxRPC struct{ s *Server }

var _ opendsecv1connect.SandboxServiceHandler = sandboxRPC{}

func (h sandboxRPC) CreateSandbox(ctx context.Context, req *connect.Request[opendsecv1.CreateSandboxRequest]) (*connect.Response[opendsecv1.CreateSandboxResponse], error) {
	spec, err := specFromProto(req.Msg.GetSpec())
	if err != nil {
		return nil, err
	}
	results, err := h.create(ctx, wish{
		project: req.Msg.GetProject(), spec: spec, key: req.Msg.GetIdempotencyKey(), count: 1, allOrNone: true,
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.CreateSandboxResponse{Sandbox: sandboxToProto(results[0].sandbox)}), nil
}

func (h sandboxRPC) CreateSandboxes(ctx context.Context, req *connect.Request[opendsecv1.CreateSandboxesRequest]) (*connect.Response[opendsecv1.CreateSandboxesResponse], error) {
	spec, err := specFromProto(req.Msg.GetSpec())
	if err != nil {
		return nil, err
	}
	results, err := h.create(ctx, wish{
		project: req.Msg.GetProject(), spec: spec, key: req.Msg.GetIdempotencyKey(),
		count: int(req.Msg.GetCount()), allOrNone: req.Msg.GetAllOrNone(),
	})
	if err != nil {
		return nil, err
	}
	out := &opendsecv1.CreateSandboxesResponse{}
	for _, r := range results {
		out.Results = append(out.Results, resultToProto(ctx, r))
	}
	return connect.NewResponse(out), nil
}

func (h sandboxRPC) create(ctx context.Context, w wish) ([]made, error) {
	order, err := h.s.admit(ctx, w)
	if err != nil {
		return nil, err
	}
	return h.s.create(ctx, order)
}

func resultToProto(ctx context.Context, r made) *opendsecv1.CreateResult {
	if r.err != nil {
		return &opendsecv1.CreateResult{Result: &opendsecv1.CreateResult_Error{Error: fault.Info(rpc.Fault(ctx, r.err))}}
	}
	return &opendsecv1.CreateResult{Result: &opendsecv1.CreateResult_Sandbox{Sandbox: sandboxToProto(r.sandbox)}}
}

func (h sandboxRPC) GetSandbox(ctx context.Context, req *connect.Request[opendsecv1.GetSandboxRequest]) (*connect.Response[opendsecv1.GetSandboxResponse], error) {
	sb, err := h.s.find(ctx, req.Msg.GetId(), role.Viewer)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.GetSandboxResponse{Sandbox: sandboxToProto(h.s.awake(ctx, sb))}), nil
}

func (h sandboxRPC) ListSandboxes(ctx context.Context, req *connect.Request[opendsecv1.ListSandboxesRequest]) (*connect.Response[opendsecv1.ListSandboxesResponse], error) {
	project, err := parseProject(req.Msg.GetProject())
	if err != nil {
		return nil, err
	}
	want := listing{
		project: project, labels: req.Msg.GetLabels(), ended: req.Msg.GetEnded(),
		size: int(req.Msg.GetPageSize()), token: req.Msg.GetPageToken(),
	}
	for _, p := range req.Msg.GetStates() {
		state := fault.StateFromProto(p)
		if state == "" {
			return nil, fault.Invalid("states", "unknown state %d", p)
		}
		want.states = append(want.states, state)
	}
	found, next, err := h.s.list(ctx, want)
	if err != nil {
		return nil, err
	}
	out := &opendsecv1.ListSandboxesResponse{NextPageToken: next}
	for _, sb := range found {
		out.Sandboxes = append(out.Sandboxes, sandboxToProto(sb))
	}
	return connect.NewResponse(out), nil
}

func (h sandboxRPC) StopSandbox(ctx context.Context, req *connect.Request[opendsecv1.StopSandboxRequest]) (*connect.Response[opendsecv1.StopSandboxResponse], error) {
	sb, err := h.s.find(ctx, req.Msg.GetId(), role.Developer)
	if err != nil {
		return nil, err
	}
	sb, err = h.s.stop(ctx, sb, sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Detail: "stopped by a call"})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.StopSandboxResponse{Sandbox: sandboxToProto(sb)}), nil
}

func (h sandboxRPC) SetTTL(ctx context.Context, req *connect.Request[opendsecv1.SetTTLRequest]) (*connect.Response[opendsecv1.SetTTLResponse], error) {
	change := ttlChange{}
	for _, f := range []struct {
		name string
		from *durationpb.Duration
		to   *ttl
	}{
		{"ttl_running_stop", req.Msg.GetTtlRunningStop(), &change.idle},
		{"ttl_lifetime", req.Msg.GetTtlLifetime(), &change.lifetime},
	} {
		if f.from == nil {
			continue
		}
		d, err := durationFromProto(f.name, f.from)
		if err != nil {
			return nil, err
		}
		*f.to = ttl{set: true, value: d}
	}
	sb, err := h.s.setTTL(ctx, req.Msg.GetId(), change)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.SetTTLResponse{Sandbox: sandboxToProto(sb)}), nil
}

func (h sandboxRPC) RefreshSandbox(ctx context.Context, req *connect.Request[opendsecv1.RefreshSandboxRequest]) (*connect.Response[opendsecv1.RefreshSandboxResponse], error) {
	sb, address, err := h.s.findAlive(ctx, req.Msg.GetId(), role.Developer)
	if err != nil {
		return nil, err
	}
	if err := h.s.edges.touch(ctx, address, sb.ID); err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.RefreshSandboxResponse{}), nil
}

func (h sandboxRPC) GetMetrics(ctx context.Context, req *connect.Request[opendsecv1.GetMetricsRequest]) (*connect.Response[opendsecv1.GetMetricsResponse], error) {
	sb, address, err := h.s.findAlive(ctx, req.Msg.GetId(), role.Viewer)
	if err != nil {
		return nil, err
	}
	metrics, err := h.s.edges.metrics(ctx, address, sb.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.GetMetricsResponse{Metrics: metrics}), nil
}

func (h sandboxRPC) UpdateNetwork(ctx context.Context, req *connect.Request[opendsecv1.UpdateNetworkRequest]) (*connect.Response[opendsecv1.UpdateNetworkResponse], error) {
	sb, err := h.s.updateNetwork(ctx, req.Msg.GetId(), req.Msg.GetNetworkRules())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.UpdateNetworkResponse{Sandbox: sandboxToProto(sb)}), nil
}

func (h sandboxRPC) ExplainNetwork(ctx context.Context, req *connect.Request[opendsecv1.ExplainNetworkRequest]) (*connect.Response[opendsecv1.ExplainNetworkResponse], error) {
	if err := checkTarget(req.Msg.GetTarget()); err != nil {
		return nil, err
	}
	sb, address, err := h.s.findAlive(ctx, req.Msg.GetId(), role.Viewer)
	if err != nil {
		return nil, err
	}
	d, err := h.s.edges.explainNetwork(ctx, address, sb.ID, req.Msg.GetTarget())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.ExplainNetworkResponse{Decision: d}), nil
}

func (h sandboxRPC) ListDenied(ctx context.Context, req *connect.Request[opendsecv1.ListDeniedRequest]) (*connect.Response[opendsecv1.ListDeniedResponse], error) {
	sb, address, err := h.s.findAlive(ctx, req.Msg.GetId(), role.Viewer)
	if err != nil {
		return nil, err
	}
	found, err := h.s.edges.denied(ctx, address, sb.ID)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.ListDeniedResponse{Denials: found.GetDenials(), Total: found.GetTotal()}), nil
}

func (h sandboxRPC) PauseSandbox(ctx context.Context, req *connect.Request[opendsecv1.PauseSandboxRequest]) (*connect.Response[opendsecv1.PauseSandboxResponse], error) {
	sb, err := h.s.pause(ctx, req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.PauseSandboxResponse{Sandbox: sandboxToProto(sb)}), nil
}

func (h sandboxRPC) ResumeSandbox(ctx context.Context, req *connect.Request[opendsecv1.ResumeSandboxRequest]) (*connect.Response[opendsecv1.ResumeSandboxResponse], error) {
	sb, err := h.s.resume(ctx, req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.ResumeSandboxResponse{Sandbox: sandboxToProto(sb)}), nil
}

func (h sandboxRPC) ForkSandbox(ctx context.Context, req *connect.Request[opendsecv1.ForkSandboxRequest]) (*connect.Response[opendsecv1.ForkSandboxResponse], error) {
	order, err := h.s.admitFork(ctx, forkWish{
		id: req.Msg.GetId(), count: int(req.Msg.GetCount()), filesOnly: req.Msg.GetFilesOnly(),
		allOrNone: req.Msg.GetAllOrNone(), key: req.Msg.GetIdempotencyKey(),
	})
	if err != nil {
		return nil, err
	}
	results, err := h.s.create(ctx, order)
	if err != nil {
		return nil, err
	}
	out := &opendsecv1.ForkSandboxResponse{}
	for _, r := range results {
		out.Results = append(out.Results, resultToProto(ctx, r))
	}
	return connect.NewResponse(out), nil
}

func (h sandboxRPC) CreateSnapshot(ctx context.Context, req *connect.Request[opendsecv1.CreateSnapshotRequest]) (*connect.Response[opendsecv1.CreateSnapshotResponse], error) {
	image, err := h.snapshot(ctx, req.Msg.GetId(), req.Msg.GetName(), req.Msg.GetFilesOnly())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.CreateSnapshotResponse{Image: image}), nil
}

func (h sandboxRPC) PackDiff(ctx context.Context, req *connect.Request[opendsecv1.PackDiffRequest]) (*connect.Response[opendsecv1.PackDiffResponse], error) {
	image, err := h.snapshot(ctx, req.Msg.GetId(), req.Msg.GetName(), true)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.PackDiffResponse{Image: image}), nil
}

func (h sandboxRPC) GetURL(ctx context.Context, req *connect.Request[opendsecv1.GetURLRequest]) (*connect.Response[opendsecv1.GetURLResponse], error) {
	ttl := time.Duration(0)
	if p := req.Msg.GetTtl(); p != nil {
		var err error
		if ttl, err = durationFromProto("ttl", p); err != nil {
			return nil, err
		}
		if ttl == 0 {
			return nil, fault.Invalid("ttl", "ttl must not be 0; leave it out for a day")
		}
	}
	made, err := h.s.getURL(ctx, req.Msg.GetId(), int64(req.Msg.GetPort()), ttl)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.GetURLResponse{Url: made.address, ExpiresAt: timestamppb.New(made.expires)}), nil
}

func (h sandboxRPC) RevokeURL(ctx context.Context, req *connect.Request[opendsecv1.RevokeURLRequest]) (*connect.Response[opendsecv1.RevokeURLResponse], error) {
	if err := h.s.revokeURL(ctx, req.Msg.GetId(), req.Msg.GetUrl()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.RevokeURLResponse{}), nil
}

func (h sandboxRPC) snapshot(ctx context.Context, id, name string, filesOnly bool) (*opendsecv1.Image, error) {
	m, err := h.s.snapshot(ctx, id, name, filesOnly)
	if err != nil {
		return nil, err
	}
	return h.s.imageToProto(ctx, m)
}
