package edge

import (
	"context"
	"net/http"

	"connectrpc.com/connect"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/api/gen/edge/v1/edgev1connect"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// guard lets in whom the edge serves: the API asks for everything, the watcher
// for what it needs to keep the records true, and the two that have users'
// bytes to pass for the data plane.
func guard(next http.Handler) http.Handler {
	return mtls.Handler(mtls.Allow{
		edgev1connect.EdgeName:                    {mtls.RoleAPIServer},
		edgev1connect.EdgeWatchProcedure:          {mtls.RoleAPIServer, mtls.RoleWatcher},
		edgev1connect.EdgeForgetEndedProcedure:    {mtls.RoleAPIServer, mtls.RoleWatcher},
		edgev1connect.EdgeDestroySandboxProcedure: {mtls.RoleAPIServer, mtls.RoleWatcher},
		edgev1connect.EdgeDeleteImageProcedure:    {mtls.RoleAPIServer, mtls.RoleWatcher},
		dataPlane:                                 {mtls.RoleAPIServer, mtls.RoleE2B},
	}, next)
}

// routes is what the edge answers, before the question who asks.
func (e *Edge) routes() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(edgev1connect.NewEdgeHandler(service{e}, connect.WithInterceptors(rpc.Interceptor(e.log), waiting{e})))
	proxy := e.newProxy()
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		// Not by the mux: it would redirect paths that it finds unclean, and
		// what they mean is the agent's matter.
		if proxy.takes(r) {
			proxy.ServeHTTP(w, r)
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// waiting holds calls back until the edge is ready.
type waiting struct{ e *Edge }

func (i waiting) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		if err := i.e.wait(ctx); err != nil {
			return nil, err
		}
		return next(ctx, req)
	}
}

func (i waiting) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (i waiting) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		if err := i.e.wait(ctx); err != nil {
			return err
		}
		return next(ctx, conn)
	}
}

// service is the Edge service: it reads requests, asks the Edge and renders
// what comes back.
type service struct{ e *Edge }

var _ edgev1connect.EdgeHandler = service{}

func (s service) CreateSandbox(ctx context.Context, req *connect.Request[edgev1.CreateSandboxRequest]) (*connect.Response[edgev1.CreateSandboxResponse], error) {
	entry, err := entryFromProto(req.Msg)
	if err != nil {
		return nil, err
	}
	st, err := s.e.create(ctx, entry, origin{})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.CreateSandboxResponse{Status: statusToProto(st)}), nil
}

func (s service) DestroySandbox(ctx context.Context, req *connect.Request[edgev1.DestroySandboxRequest]) (*connect.Response[edgev1.DestroySandboxResponse], error) {
	id, err := idFromProto(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	st, known, err := s.e.destroy(ctx, id, endFromProto(req.Msg.GetEnd(), s.e.now()))
	if err != nil {
		return nil, err
	}
	res := &edgev1.DestroySandboxResponse{}
	if known {
		res.Status = statusToProto(st)
	}
	return connect.NewResponse(res), nil
}

func (s service) SetDeadlines(_ context.Context, req *connect.Request[edgev1.SetDeadlinesRequest]) (*connect.Response[edgev1.SetDeadlinesResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	d, err := deadlinesFromProto(req.Msg)
	if err != nil {
		return nil, err
	}
	if err := b.setDeadlines(d, s.e.now()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.SetDeadlinesResponse{}), nil
}

func (s service) GetSandbox(_ context.Context, req *connect.Request[edgev1.GetSandboxRequest]) (*connect.Response[edgev1.GetSandboxResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.GetSandboxResponse{Status: statusToProto(b.status())}), nil
}

func (s service) Touch(_ context.Context, req *connect.Request[edgev1.TouchRequest]) (*connect.Response[edgev1.TouchResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	if end := b.end(); end != nil {
		return nil, endedFault(b.id, *end)
	}
	b.touch(s.e.now())
	return connect.NewResponse(&edgev1.TouchResponse{}), nil
}

func (s service) GetMetrics(ctx context.Context, req *connect.Request[edgev1.GetMetricsRequest]) (*connect.Response[edgev1.GetMetricsResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	used, err := b.usage(ctx)
	if err != nil {
		return nil, err
	}
	metrics := metricsToProto(b.spec().Limits, used, s.e.now())
	metrics.NetworkDenied = b.denials.Denied().Total
	if guard := b.guarded(); guard != nil {
		addNetwork(metrics, guard.Usage())
	}
	return connect.NewResponse(&edgev1.GetMetricsResponse{Metrics: metrics}), nil
}

func (s service) UpdateNetwork(_ context.Context, req *connect.Request[edgev1.UpdateNetworkRequest]) (*connect.Response[edgev1.UpdateNetworkResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	revision, err := s.e.updateNetwork(b, req.Msg.GetNetworkRules())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.UpdateNetworkResponse{Revision: revision}), nil
}

func (s service) ExplainNetwork(_ context.Context, req *connect.Request[edgev1.ExplainNetworkRequest]) (*connect.Response[edgev1.ExplainNetworkResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	d, err := s.e.explain(b, req.Msg.GetTarget())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.ExplainNetworkResponse{
		Decision: &opendsecv1.NetworkDecision{Allow: d.Allow, Rule: d.Rule, Why: d.Why},
	}), nil
}

func (s service) ListDenied(_ context.Context, req *connect.Request[edgev1.ListDeniedRequest]) (*connect.Response[edgev1.ListDeniedResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	denied := b.denials.Denied()
	res := &edgev1.ListDeniedResponse{Total: denied.Total}
	for _, d := range denied.Newest {
		res.Denials = append(res.Denials, denialToProto(d))
	}
	return connect.NewResponse(res), nil
}

func (s service) PauseSandbox(ctx context.Context, req *connect.Request[edgev1.PauseSandboxRequest]) (*connect.Response[edgev1.PauseSandboxResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	if err := s.e.pause(ctx, b, nil); err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.PauseSandboxResponse{Status: statusToProto(b.status())}), nil
}

func (s service) ResumeSandbox(ctx context.Context, req *connect.Request[edgev1.ResumeSandboxRequest]) (*connect.Response[edgev1.ResumeSandboxResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	if err := s.e.resume(ctx, b); err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.ResumeSandboxResponse{Status: statusToProto(b.status())}), nil
}

func (s service) ForkSandbox(ctx context.Context, req *connect.Request[edgev1.ForkSandboxRequest]) (*connect.Response[edgev1.ForkSandboxResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	var children []journal.Entry
	for _, c := range req.Msg.GetChildren() {
		entry, err := entryFromProto(c)
		if err != nil {
			return nil, err
		}
		children = append(children, entry)
	}
	results, err := s.e.fork(ctx, b, children, !req.Msg.GetFilesOnly())
	if err != nil {
		return nil, err
	}
	res := &edgev1.ForkSandboxResponse{}
	for _, r := range results {
		res.Results = append(res.Results, forkedToProto(r))
	}
	return connect.NewResponse(res), nil
}

func (s service) SnapshotSandbox(ctx context.Context, req *connect.Request[edgev1.SnapshotSandboxRequest]) (*connect.Response[edgev1.SnapshotSandboxResponse], error) {
	b, err := s.e.get(req.Msg.GetId())
	if err != nil {
		return nil, err
	}
	art, err := s.e.snapshot(ctx, b, !req.Msg.GetFilesOnly())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.SnapshotSandboxResponse{Image: imageToProto(art)}), nil
}

func (s service) Watch(ctx context.Context, _ *connect.Request[edgev1.WatchRequest], stream *connect.ServerStream[edgev1.WatchResponse]) error {
	return s.e.watch(ctx, stream.Send)
}

func (s service) ForgetEnded(_ context.Context, req *connect.Request[edgev1.ForgetEndedRequest]) (*connect.Response[edgev1.ForgetEndedResponse], error) {
	for _, id := range req.Msg.GetIds() {
		if b := s.e.find(sandbox.ID(id)); b != nil {
			s.e.forget(b)
		}
	}
	return connect.NewResponse(&edgev1.ForgetEndedResponse{}), nil
}

func (s service) FindLeaks(ctx context.Context, req *connect.Request[edgev1.FindLeaksRequest]) (*connect.Response[edgev1.FindLeaksResponse], error) {
	leaks, err := s.e.findLeaks(ctx, req.Msg.GetRecorded(), req.Msg.GetRepair())
	if err != nil {
		return nil, err
	}
	res := &edgev1.FindLeaksResponse{}
	for _, l := range leaks {
		res.Leaks = append(res.Leaks, s.e.leakToProto(l))
	}
	return connect.NewResponse(res), nil
}
