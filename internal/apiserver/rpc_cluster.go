package apiserver

import (
	"context"
	"slices"

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
		look := leakLook{s: h.s, node: n, repair: req.Msg.GetRepair()}
		leaks, err := look.find(ctx)
		if err != nil {
			return nil, err
		}
		out.Leaks = append(out.Leaks, leaks...)
	}
	return connect.NewResponse(out), nil
}

// leakLook is a look for leaks on one node.
type leakLook struct {
	s      *Server
	node   store.Node
	repair bool
	live   []*sandbox.Sandbox // what the records placed there when the look began
}

// find asks the node. That it cannot be asked is a finding too: nobody knows
// what is on it.
func (l *leakLook) find(ctx context.Context) ([]*opendsecv1.Leak, error) {
	var err error
	if l.live, err = l.s.deps.DB.LiveOnNode(ctx, l.node.Name); err != nil {
		return nil, err
	}
	ids := make([]string, len(l.live))
	for i, sb := range l.live {
		ids[i] = string(sb.ID)
	}
	found, err := l.s.edges.findLeaks(ctx, l.node.Address, l.repair, ids)
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	if err != nil {
		return []*opendsecv1.Leak{{Node: l.node.Name, Kind: "node", Name: l.node.Name, Detail: "it could not be asked: " + err.Error()}}, nil
	}
	var out []*opendsecv1.Leak
	for _, leak := range found {
		leak.Node = l.node.Name
		if leak.GetKind() == "record" {
			if still, err := l.confirm(ctx, leak); err != nil {
				return nil, err
			} else if !still {
				continue
			}
		}
		out = append(out, leak)
	}
	return out, nil
}

// confirm looks once more at the record that a leak is about, since sandboxes
// come and go while a node looks. With repair it ends the record of a sandbox
// that its node does not have.
func (l *leakLook) confirm(ctx context.Context, leak *opendsecv1.Leak) (bool, error) {
	id := sandbox.ID(leak.GetName())
	sb, err := l.s.deps.DB.GetSandbox(ctx, id)
	if fault.Is(err, fault.NotFound) {
		return true, nil // it lives there, and nobody knows of it
	}
	if err != nil {
		return false, err
	}
	missing := slices.ContainsFunc(l.live, func(before *sandbox.Sandbox) bool { return before.ID == id })
	if !missing {
		return sb.End != nil || sb.Node != l.node.Name, nil // else it was recorded meanwhile
	}
	if sb.Node != l.node.Name || (sb.State != sandbox.Running && sb.State != sandbox.Paused) {
		return false, nil // on its way in or out
	}
	if l.repair {
		_, err = l.s.deps.DB.UpdateSandbox(ctx, id, func(r *sandbox.Sandbox) error {
			return r.Finish(sandbox.End{
				Reason: sandbox.ReasonLost, Domain: sandbox.Infra, Time: l.s.deps.Now().UTC(),
				Detail: "node " + l.node.Name + " does not know it",
			})
		})
		leak.Repaired = err == nil
	}
	return true, err
}
