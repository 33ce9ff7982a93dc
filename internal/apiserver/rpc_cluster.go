package apiserver

import (
	"context"

	"connectrpc.com/connect"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// clusterRPC is ClusterService in terms of Server.
type clusterRPC struct{ s *Server }

var _ opendsecv1connect.ClusterServiceHandler = clusterRPC{}

func (h clusterRPC) GetVersion(context.Context, *connect.Request[opendsecv1.GetVersionRequest]) (*connect.Response[opendsecv1.GetVersionResponse], error) {
	return connect.NewResponse(&opendsecv1.GetVersionResponse{Version: h.s.cfg.Version}), nil
}

func (h clusterRPC) GetStatus(ctx context.Context, _ *connect.Request[opendsecv1.GetStatusRequest]) (*connect.Response[opendsecv1.GetStatusResponse], error) {
	if err := callerOf(ctx).needRootAdmin("the cluster's status"); err != nil {
		return nil, err
	}
	nodes, err := h.s.deps.DB.NodeUsages(ctx)
	if err != nil {
		return nil, err
	}
	out := &opendsecv1.GetStatusResponse{}
	for _, n := range nodes {
		out.Nodes = append(out.Nodes, h.s.nodes.status(n))
	}
	return connect.NewResponse(out), nil
}

func (h clusterRPC) SetNodeDrain(ctx context.Context, req *connect.Request[opendsecv1.SetNodeDrainRequest]) (*connect.Response[opendsecv1.SetNodeDrainResponse], error) {
	if err := callerOf(ctx).needRootAdmin("draining a node"); err != nil {
		return nil, err
	}
	if req.Msg.GetNode() == "" {
		return nil, fault.Invalid("node", "node is missing: see `opendsecctl node list`")
	}
	if err := h.s.deps.DB.SetDrained(ctx, req.Msg.GetNode(), req.Msg.GetDrain()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.SetNodeDrainResponse{}), nil
}

func (h clusterRPC) FindLeaks(ctx context.Context, req *connect.Request[opendsecv1.FindLeaksRequest]) (*connect.Response[opendsecv1.FindLeaksResponse], error) {
	if err := callerOf(ctx).needRootAdmin("looking for leaks"); err != nil {
		return nil, err
	}
	nodes, err := h.s.deps.DB.ListNodes(ctx)
	if err != nil {
		return nil, err
	}
	out := &opendsecv1.FindLeaksResponse{}
	for _, n := range nodes {
		leaks, err := h.leaksOn(ctx, n, req.Msg.GetRepair())
		if err != nil {
			return nil, err
		}
		out.Leaks = append(out.Leaks, leaks...)
	}
	return connect.NewResponse(out), nil
}

// leaksOn asks one node. That it cannot be asked is a finding too: nobody
// knows what is on it.
func (h clusterRPC) leaksOn(ctx context.Context, n store.Node, repair bool) ([]*opendsecv1.Leak, error) {
	live, err := h.s.deps.DB.LiveOnNode(ctx, n.Name)
	if err != nil {
		return nil, err
	}
	ids := make([]string, len(live))
	for i, sb := range live {
		ids[i] = string(sb.ID)
	}
	leaks, err := h.s.edges.findLeaks(ctx, n.Address, repair, ids)
	if err != nil {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		return []*opendsecv1.Leak{{Node: n.Name, Kind: "node", Name: n.Name, Detail: "it could not be asked: " + err.Error()}}, nil
	}
	var out []*opendsecv1.Leak
	for _, l := range leaks {
		l.Node = n.Name
		still, err := h.confirm(ctx, n.Name, l, live)
		if err != nil {
			return nil, err
		}
		if still {
			out = append(out, l)
		}
	}
	return out, nil
}

// confirm looks at the record that a leak of kind "record" is about once more:
// sandboxes come and go while a node looks.
func (h clusterRPC) confirm(ctx context.Context, node string, l *opendsecv1.Leak, before []*sandbox.Sandbox) (bool, error) {
	id, err := sandbox.ParseID(l.GetName())
	if l.GetKind() != "record" || err != nil {
		return true, nil
	}
	sb, err := h.s.deps.DB.GetSandbox(ctx, id)
	if fault.Is(err, fault.NotFound) {
		return true, nil
	}
	if err != nil {
		return false, err
	}
	for _, b := range before {
		if b.ID == id && b.State != sandbox.Pending && b.State != sandbox.Starting && b.State != sandbox.Stopping {
			return sb.State == b.State, nil // recorded as there, then and now
		}
	}
	return sb.End != nil || sb.Node != node, nil // what was recorded since is none
}
