package apiserver

import (
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/api/gen/edge/v1/edgev1connect"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// edges reaches the nodes. Errors come back with their kind; a node that
// cannot be reached is Unavailable.
type edges struct {
	http    *http.Client
	options []connect.ClientOption

	mu    sync.Mutex // guards byURL
	byURL map[string]edgev1connect.EdgeClient
}

func newEdges(client *http.Client, options ...connect.ClientOption) *edges {
	return &edges{http: client, options: options, byURL: map[string]edgev1connect.EdgeClient{}}
}

// edgeURL returns the base URL of the edge at an address, "host:port" or a URL.
func edgeURL(address string) string {
	if strings.Contains(address, "://") {
		return strings.TrimSuffix(address, "/")
	}
	return "https://" + address
}

func (e *edges) at(address string) edgev1connect.EdgeClient {
	url := edgeURL(address)
	e.mu.Lock()
	defer e.mu.Unlock()
	c, ok := e.byURL[url]
	if !ok {
		c = edgev1connect.NewEdgeClient(e.http, url, e.options...)
		e.byURL[url] = c
	}
	return c
}

// machine is what a node says about one of its sandboxes.
type machine struct {
	backend   sandbox.Backend
	state     sandbox.State
	startedAt time.Time
	pausedAt  time.Time
	pausedFor time.Duration
	end       *sandbox.End
}

func machineFromProto(p *edgev1.SandboxStatus) machine {
	m := machine{
		backend: sandbox.Backend(p.GetBackend()), state: fault.StateFromProto(p.GetState()), startedAt: timeFromProto(p.GetStartedAt()),
		pausedAt: timeFromProto(p.GetPausedAt()), pausedFor: p.GetPausedFor().AsDuration(),
	}
	if p.GetEnd() != nil {
		end := fault.EndFromProto(p.GetEnd())
		m.end = &end
	}
	return m
}

// wantedToProto renders a record for the node that is to make it.
func wantedToProto(sb *sandbox.Sandbox) *edgev1.CreateSandboxRequest {
	return &edgev1.CreateSandboxRequest{
		Id: string(sb.ID), Project: string(sb.Project), Spec: specToProto(sb.Spec),
		ImageDigest: sb.ImageDigest, CreatedAt: timeToProto(sb.CreatedAt),
	}
}

// create makes the machine of a record and returns when its agent answers.
func (e *edges) create(ctx context.Context, address string, sb *sandbox.Sandbox) (machine, error) {
	res, err := e.at(address).CreateSandbox(ctx, connect.NewRequest(wantedToProto(sb)))
	if err != nil {
		return machine{}, brokenOff(ctx, err)
	}
	return machineFromProto(res.Msg.GetStatus()), nil
}

// destroy ends a machine. The end that comes back is the node's, which may be
// an earlier one; it is nil when the node knows nothing of the sandbox. A
// machine that is not removed yet is Unavailable.
func (e *edges) destroy(ctx context.Context, address string, id sandbox.ID, end sandbox.End) (*sandbox.End, error) {
	res, err := e.at(address).DestroySandbox(ctx, connect.NewRequest(&edgev1.DestroySandboxRequest{
		Id: string(id), End: fault.EndToProto(end),
	}))
	if err != nil {
		return nil, brokenOff(ctx, err)
	}
	status := res.Msg.GetStatus()
	if state := fault.StateFromProto(status.GetState()); status != nil && state.Alive() {
		return nil, fault.New(fault.Unavailable, "sandbox %s is still %s on its node", id, state)
	}
	return machineFromProto(status).end, nil
}

// brokenOff is fault.FromConnect for calls that a node may take long for. One
// that it ends because it stops, with an answer that may be cut off, or that
// takes longer than ctx allows, is Unavailable: canceled and timeout are said of
// our own caller's doing only.
func brokenOff(ctx context.Context, err error) error {
	told := fault.FromConnect(err)
	cut := connect.CodeOf(err) == connect.CodeUnknown && !connect.IsWireError(err)
	switch {
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return fault.New(fault.Unavailable, "the node took too long, and may be at it still: look again later")
	case ctx.Err() == nil && (cut || errors.Is(told, context.Canceled)):
		return fault.New(fault.Unavailable, "the node ended the call before it was done: try again")
	}
	return told
}

// look returns how a sandbox is now.
func (e *edges) look(ctx context.Context, address string, id sandbox.ID) (machine, error) {
	res, err := e.at(address).GetSandbox(ctx, connect.NewRequest(&edgev1.GetSandboxRequest{Id: string(id)}))
	if err != nil {
		return machine{}, fault.FromConnect(err)
	}
	return machineFromProto(res.Msg.GetStatus()), nil
}

func (e *edges) pause(ctx context.Context, address string, id sandbox.ID) (machine, error) {
	res, err := e.at(address).PauseSandbox(ctx, connect.NewRequest(&edgev1.PauseSandboxRequest{Id: string(id)}))
	if err != nil {
		return machine{}, brokenOff(ctx, err)
	}
	return machineFromProto(res.Msg.GetStatus()), nil
}

func (e *edges) resume(ctx context.Context, address string, id sandbox.ID) (machine, error) {
	res, err := e.at(address).ResumeSandbox(ctx, connect.NewRequest(&edgev1.ResumeSandboxRequest{Id: string(id)}))
	if err != nil {
		return machine{}, brokenOff(ctx, err)
	}
	return machineFromProto(res.Msg.GetStatus()), nil
}

// copied is a copy that a node made, or why it did not.
type copied struct {
	machine machine
	err     error
}

// fork makes copies of a sandbox and returns how each went, in their order.
func (e *edges) fork(ctx context.Context, address string, source sandbox.ID, filesOnly bool, children []*sandbox.Sandbox) ([]copied, error) {
	req := &edgev1.ForkSandboxRequest{Id: string(source), FilesOnly: filesOnly}
	for _, sb := range children {
		req.Children = append(req.Children, wantedToProto(sb))
	}
	res, err := e.at(address).ForkSandbox(ctx, connect.NewRequest(req))
	if err != nil {
		return nil, brokenOff(ctx, err)
	}
	out := make([]copied, len(children))
	for i := range out {
		switch r := res.Msg.GetResults(); {
		case i >= len(r):
			out[i].err = fault.New(fault.Unavailable, "the node did not say how the copy %s went", children[i].ID)
		case r[i].GetError() != nil:
			out[i].err = fault.FromInfo(r[i].GetError())
		default:
			out[i].machine = machineFromProto(r[i].GetStatus())
		}
	}
	return out, nil
}

// snapshot makes an image in the node's store, which has no name yet.
func (e *edges) snapshot(ctx context.Context, address string, id sandbox.ID, filesOnly bool) (*opendsecv1.Image, error) {
	res, err := e.at(address).SnapshotSandbox(ctx, connect.NewRequest(&edgev1.SnapshotSandboxRequest{Id: string(id), FilesOnly: filesOnly}))
	if err != nil {
		return nil, brokenOff(ctx, err)
	}
	return res.Msg.GetImage(), nil
}

func (e *edges) setDeadlines(ctx context.Context, address string, id sandbox.ID, d sandbox.Deadlines) error {
	_, err := e.at(address).SetDeadlines(ctx, connect.NewRequest(&edgev1.SetDeadlinesRequest{
		Id: string(id), TtlRunningStop: durationToProto(d.Idle), TtlLifetime: durationToProto(d.Lifetime),
	}))
	return fault.FromConnect(err)
}

func (e *edges) touch(ctx context.Context, address string, id sandbox.ID) error {
	_, err := e.at(address).Touch(ctx, connect.NewRequest(&edgev1.TouchRequest{Id: string(id)}))
	return fault.FromConnect(err)
}

func (e *edges) metrics(ctx context.Context, address string, id sandbox.ID) (*opendsecv1.Metrics, error) {
	res, err := e.at(address).GetMetrics(ctx, connect.NewRequest(&edgev1.GetMetricsRequest{Id: string(id)}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	return res.Msg.GetMetrics(), nil
}

// updateNetwork returns the number of the change.
func (e *edges) updateNetwork(ctx context.Context, address string, id sandbox.ID, rules map[string]bool) (revision int64, err error) {
	res, err := e.at(address).UpdateNetwork(ctx, connect.NewRequest(&edgev1.UpdateNetworkRequest{Id: string(id), NetworkRules: rules}))
	if err != nil {
		return 0, fault.FromConnect(err)
	}
	return res.Msg.GetRevision(), nil
}

func (e *edges) explainNetwork(ctx context.Context, address string, id sandbox.ID, target string) (*opendsecv1.NetworkDecision, error) {
	res, err := e.at(address).ExplainNetwork(ctx, connect.NewRequest(&edgev1.ExplainNetworkRequest{Id: string(id), Target: target}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	return res.Msg.GetDecision(), nil
}

func (e *edges) denied(ctx context.Context, address string, id sandbox.ID) (*edgev1.ListDeniedResponse, error) {
	res, err := e.at(address).ListDenied(ctx, connect.NewRequest(&edgev1.ListDeniedRequest{Id: string(id)}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	return res.Msg, nil
}

func (e *edges) deleteImage(ctx context.Context, address, digest string) error {
	_, err := e.at(address).DeleteImage(ctx, connect.NewRequest(&edgev1.DeleteImageRequest{Digest: digest}))
	return fault.FromConnect(err)
}

func (e *edges) findLeaks(ctx context.Context, address string, repair bool, recorded []string) ([]*opendsecv1.Leak, error) {
	res, err := e.at(address).FindLeaks(ctx, connect.NewRequest(&edgev1.FindLeaksRequest{Repair: repair, Recorded: recorded}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	return res.Msg.GetLeaks(), nil
}
