// Package edgetest is a small edge for the tests of those who call one. It
// speaks edge.v1 and the data plane over mutual TLS like the real one, keeps
// its sandboxes in memory, runs nothing, and can be told to fail. It is no
// model of what an edge must do: that is what the real one is tested for.
package edgetest

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/api/gen/edge/v1/edgev1connect"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// heartbeat is how often a report comes without a change.
const heartbeat = 50 * time.Millisecond

// Hooks let a test fail calls or hold them up. A nil hook does nothing. An
// error is the call's; only what comes after a hook is done to the sandbox.
type Hooks struct {
	Create  func(ctx context.Context, id sandbox.ID) error
	Made    func(ctx context.Context, id sandbox.ID) error // after the machine is made, before the answer
	Destroy func(ctx context.Context, id sandbox.ID) error
	Data    http.Handler // serves the data plane instead of an echo

	State     func(ctx context.Context, op Op, id sandbox.ID) error // before a state operation
	StateDone func(ctx context.Context, op Op, id sandbox.ID) error // after it is done, before the answer
}

// Edge is an edge in memory.
type Edge struct {
	Name string
	id   *mtls.Identity
	log  *slog.Logger

	mu       sync.Mutex // guards what follows
	hooks    Hooks
	report   *edgev1.NodeReport
	boxes    map[sandbox.ID]*edgev1.SandboxStatus
	requests map[sandbox.ID]*edgev1.CreateSandboxRequest
	touched  map[sandbox.ID]int
	deadline map[sandbox.ID]*edgev1.SetDeadlinesRequest
	deleted  []string
	forgot   []sandbox.ID
	forks    []*edgev1.ForkSandboxRequest
	watchers map[chan *edgev1.SandboxStatus]bool
	address  string
	stop     func()

	snapshots int
}

// Start serves an edge until the test ends. certDir has the certificates of
// package ca, with that of the role edge for 127.0.0.1.
func Start(t testing.TB, certDir, name string) *Edge {
	t.Helper()
	id, err := mtls.Load(certDir, mtls.RoleEdge)
	if err != nil {
		t.Fatal(err)
	}
	e := &Edge{
		Name: name, id: id, log: slog.New(slog.DiscardHandler),
		boxes: map[sandbox.ID]*edgev1.SandboxStatus{}, requests: map[sandbox.ID]*edgev1.CreateSandboxRequest{},
		touched: map[sandbox.ID]int{}, deadline: map[sandbox.ID]*edgev1.SetDeadlinesRequest{},
		watchers: map[chan *edgev1.SandboxStatus]bool{},
		report: &edgev1.NodeReport{
			Name: name, Version: "test",
			Backends: []*opendsecv1.NodeBackend{
				{Name: "gvisor", Available: true, Features: []string{"pause", "snapshot_files", "snapshot_memory"}},
				{Name: "container", Reason: "runc is not installed"},
				{Name: "sim", Available: true, Features: []string{"pause", "snapshot_files"}},
			},
			Capacity: &opendsecv1.Resources{CpuCores: 32, MemoryMb: 16384, DiskMb: 1 << 20, Sandboxes: 1000},
		},
	}
	e.Serve(t)
	t.Cleanup(func() { e.Kill() })
	return e
}

// Serve begins to serve, after a Kill at the same address.
func (e *Edge) Serve(t testing.TB) {
	t.Helper()
	address := "127.0.0.1:0"
	if e.address != "" {
		address = e.address
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	e.address = l.Addr().String()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := daemon.Serve(ctx, daemon.Server{Listener: l, TLS: e.id.ServerConfig(), Handler: e.handler(), Log: e.log, Grace: time.Nanosecond})
		if err != nil {
			t.Errorf("edge %s: %v", e.Name, err)
		}
	}()
	e.stop = func() { cancel(); <-done }
}

// Kill ends all connections. The sandboxes stay.
func (e *Edge) Kill() { e.stop() }

// Address is where the edge is served, "host:port".
func (e *Edge) Address() string { return e.address }

// SetHooks replaces the hooks.
func (e *Edge) SetHooks(h Hooks) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.hooks = h
}

// SetReport changes what the edge reports of its node.
func (e *Edge) SetReport(change func(*edgev1.NodeReport)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.report = proto.CloneOf(e.report)
	change(e.report)
}

// Status returns what the edge knows of a sandbox, nil for nothing.
func (e *Edge) Status(id sandbox.ID) *edgev1.SandboxStatus {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.boxes[id]
}

// Live returns the ids of sandboxes that have not ended.
func (e *Edge) Live() []sandbox.ID {
	e.mu.Lock()
	defer e.mu.Unlock()
	var ids []sandbox.ID
	for id, s := range e.boxes {
		if s.GetEnd() == nil {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

// Request returns what the sandbox was made of, nil when it was not.
func (e *Edge) Request(id sandbox.ID) *edgev1.CreateSandboxRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.requests[id]
}

// Touched returns how often a sandbox was refreshed.
func (e *Edge) Touched(id sandbox.ID) int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.touched[id]
}

// Deadlines returns a sandbox's last change of deadlines, nil for none.
func (e *Edge) Deadlines(id sandbox.ID) *edgev1.SetDeadlinesRequest {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.deadline[id]
}

// DeletedImages returns the digests whose content was to be removed.
func (e *Edge) DeletedImages() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.deleted)
}

// Forgotten returns the sandboxes that the edge was allowed to forget.
func (e *Edge) Forgotten() []sandbox.ID {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Clone(e.forgot)
}

// Put makes the edge know a sandbox as it is given, and says so to its watchers.
func (e *Edge) Put(s *edgev1.SandboxStatus) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.putLocked(s)
}

// Lose makes the edge forget a sandbox without a word.
func (e *Edge) Lose(id sandbox.ID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.boxes, id)
}

func (e *Edge) putLocked(s *edgev1.SandboxStatus) {
	e.boxes[sandbox.ID(s.GetId())] = s
	for w := range e.watchers {
		w <- s
	}
}

func (e *Edge) hook() Hooks {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.hooks
}

func (e *Edge) handler() http.Handler {
	mux := http.NewServeMux()
	mux.Handle(edgev1connect.NewEdgeHandler(service{e: e}, connect.WithInterceptors(rpc.Interceptor(e.log))))
	mux.HandleFunc("/sandboxes/{id}/", e.data)
	return mtls.Handler(mtls.Allow{
		edgev1connect.EdgeName: {mtls.RoleAPIServer, mtls.RoleWatcher}, "/sandboxes/": {mtls.RoleAPIServer},
	}, mux)
}

// data answers with the request's head and sends each piece of its body back
// as it comes.
func (e *Edge) data(w http.ResponseWriter, r *http.Request) {
	if h := e.hook().Data; h != nil {
		h.ServeHTTP(w, r)
		return
	}
	if kind := r.Header.Get("Content-Type"); kind != "" {
		w.Header().Set("Content-Type", kind)
	}
	w.Header().Set("X-Node", e.Name)
	w.Header().Set("X-Path", r.URL.RequestURI())
	w.Header().Set("X-Authorization", r.Header.Get("Authorization"))
	w.Header().Set("X-User", r.Header.Get("Opendsec-User"))
	flush := http.NewResponseController(w)
	if err := flush.Flush(); err != nil {
		return
	}
	buf := make([]byte, 64<<10)
	for {
		n, err := r.Body.Read(buf)
		if n > 0 {
			if _, werr := w.Write(buf[:n]); werr != nil || flush.Flush() != nil {
				return
			}
		}
		if err != nil {
			if err != io.EOF {
				panic(http.ErrAbortHandler)
			}
			return
		}
	}
}

type service struct{ e *Edge }

var _ edgev1connect.EdgeHandler = service{}

func (s service) CreateSandbox(ctx context.Context, req *connect.Request[edgev1.CreateSandboxRequest]) (*connect.Response[edgev1.CreateSandboxResponse], error) {
	id := sandbox.ID(req.Msg.GetId())
	hooks := s.e.hook()
	if hooks.Create != nil {
		if err := hooks.Create(ctx, id); err != nil {
			return nil, err
		}
	}
	s.e.make(req.Msg)
	if hooks.Made != nil {
		if err := hooks.Made(ctx, id); err != nil {
			return nil, err
		}
	}
	return connect.NewResponse(&edgev1.CreateSandboxResponse{Status: s.e.ran(id)}), nil
}

// ran says that a sandbox that was made runs, as an edge does with its answer.
func (e *Edge) ran(id sandbox.ID) *edgev1.SandboxStatus {
	e.mu.Lock()
	defer e.mu.Unlock()
	status := e.boxes[id]
	if status.GetState() == opendsecv1.State_STATE_STARTING {
		status = proto.CloneOf(status)
		status.State, status.StartedAt = opendsecv1.State_STATE_RUNNING, timestamppb.Now()
		e.putLocked(status)
	}
	return status
}

// make makes the sandbox of a request if it is not there.
func (e *Edge) make(req *edgev1.CreateSandboxRequest) {
	backend := req.GetSpec().GetBackend()
	if backend == string(sandbox.Auto) {
		backend = string(sandbox.GVisor)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	id := sandbox.ID(req.GetId())
	if e.boxes[id] == nil {
		e.requests[id] = req
		e.putLocked(&edgev1.SandboxStatus{
			Id: req.GetId(), Project: req.GetProject(), Backend: backend,
			State: opendsecv1.State_STATE_STARTING,
		})
	}
}

func (s service) DestroySandbox(ctx context.Context, req *connect.Request[edgev1.DestroySandboxRequest]) (*connect.Response[edgev1.DestroySandboxResponse], error) {
	id := sandbox.ID(req.Msg.GetId())
	if h := s.e.hook().Destroy; h != nil {
		if err := h(ctx, id); err != nil {
			return nil, err
		}
	}
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	status := s.e.boxes[id]
	if status != nil && status.GetEnd() == nil {
		status = proto.CloneOf(status)
		status.End = req.Msg.GetEnd()
		status.State = fault.StateToProto(fault.EndFromProto(status.GetEnd()).State())
		s.e.putLocked(status)
	}
	return connect.NewResponse(&edgev1.DestroySandboxResponse{Status: status}), nil
}

func (s service) known(id string) error {
	switch status := s.e.Status(sandbox.ID(id)); {
	case status == nil:
		return fault.New(fault.NotFound, "sandbox %s does not exist", id)
	case status.GetEnd() != nil:
		end := fault.EndFromProto(status.GetEnd())
		err := fault.New(fault.SandboxEnded, "sandbox %s has ended", id)
		err.End = &end
		return err
	}
	return nil
}

func (s service) SetDeadlines(_ context.Context, req *connect.Request[edgev1.SetDeadlinesRequest]) (*connect.Response[edgev1.SetDeadlinesResponse], error) {
	if err := s.known(req.Msg.GetId()); err != nil {
		return nil, err
	}
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	s.e.deadline[sandbox.ID(req.Msg.GetId())] = req.Msg
	return connect.NewResponse(&edgev1.SetDeadlinesResponse{}), nil
}

func (s service) Touch(_ context.Context, req *connect.Request[edgev1.TouchRequest]) (*connect.Response[edgev1.TouchResponse], error) {
	if err := s.known(req.Msg.GetId()); err != nil {
		return nil, err
	}
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	s.e.touched[sandbox.ID(req.Msg.GetId())]++
	return connect.NewResponse(&edgev1.TouchResponse{}), nil
}

func (s service) GetMetrics(_ context.Context, req *connect.Request[edgev1.GetMetricsRequest]) (*connect.Response[edgev1.GetMetricsResponse], error) {
	if err := s.known(req.Msg.GetId()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.GetMetricsResponse{Metrics: &opendsecv1.Metrics{Time: timestamppb.Now(), Pids: 3}}), nil
}

// UpdateNetwork replaces the rules in what was asked for, and in what is told.
func (s service) UpdateNetwork(_ context.Context, req *connect.Request[edgev1.UpdateNetworkRequest]) (*connect.Response[edgev1.UpdateNetworkResponse], error) {
	if err := s.known(req.Msg.GetId()); err != nil {
		return nil, err
	}
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	rules := &opendsecv1.NetworkRules{Rules: req.Msg.GetNetworkRules()}
	if asked := s.e.requests[sandbox.ID(req.Msg.GetId())]; asked != nil {
		changed := proto.CloneOf(asked)
		changed.Spec.NetworkRules = rules
		s.e.requests[sandbox.ID(req.Msg.GetId())] = changed
	}
	status := proto.CloneOf(s.e.boxes[sandbox.ID(req.Msg.GetId())])
	status.NetworkRevision, status.NetworkRules = status.GetNetworkRevision()+1, rules
	s.e.putLocked(status)
	return connect.NewResponse(&edgev1.UpdateNetworkResponse{Revision: status.GetNetworkRevision()}), nil
}

// ExplainNetwork denies all.
func (s service) ExplainNetwork(_ context.Context, req *connect.Request[edgev1.ExplainNetworkRequest]) (*connect.Response[edgev1.ExplainNetworkResponse], error) {
	if err := s.known(req.Msg.GetId()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.ExplainNetworkResponse{Decision: &opendsecv1.NetworkDecision{Why: req.Msg.GetTarget()}}), nil
}

// ListDenied has one thing to tell.
func (s service) ListDenied(_ context.Context, req *connect.Request[edgev1.ListDeniedRequest]) (*connect.Response[edgev1.ListDeniedResponse], error) {
	if err := s.known(req.Msg.GetId()); err != nil {
		return nil, err
	}
	return connect.NewResponse(&edgev1.ListDeniedResponse{Denials: []*opendsecv1.Denial{{Name: "example.com", Count: 1}}, Total: 1}), nil
}

func (s service) Watch(ctx context.Context, _ *connect.Request[edgev1.WatchRequest], stream *connect.ServerStream[edgev1.WatchResponse]) error {
	news := make(chan *edgev1.SandboxStatus, 10000)
	s.e.mu.Lock()
	s.e.watchers[news] = true
	first := &edgev1.WatchResponse{Node: s.e.report, Complete: true}
	for _, status := range s.e.boxes {
		first.Sandboxes = append(first.Sandboxes, status)
	}
	s.e.mu.Unlock()
	defer func() {
		s.e.mu.Lock()
		defer s.e.mu.Unlock()
		delete(s.e.watchers, news)
	}()
	next := first
	tick := time.NewTicker(heartbeat)
	defer tick.Stop()
	for {
		if err := stream.Send(next); err != nil {
			return err
		}
		next = &edgev1.WatchResponse{}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case status := <-news:
			next.Sandboxes = append(next.Sandboxes, status)
		case <-tick.C:
		}
		s.e.mu.Lock()
		next.Node = s.e.report
		s.e.mu.Unlock()
	}
}

func (s service) ForgetEnded(_ context.Context, req *connect.Request[edgev1.ForgetEndedRequest]) (*connect.Response[edgev1.ForgetEndedResponse], error) {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	for _, id := range req.Msg.GetIds() {
		s.e.forgot = append(s.e.forgot, sandbox.ID(id))
		delete(s.e.boxes, sandbox.ID(id))
	}
	return connect.NewResponse(&edgev1.ForgetEndedResponse{}), nil
}

// Digest returns the digest of the image that the edge makes of a source.
func Digest(source string) string { return fmt.Sprintf("sha256:%x", sha256.Sum256([]byte(source))) }

func (s service) make(source string, stream *connect.ServerStream[edgev1.ImportImageResponse]) error {
	if strings.Contains(source, "missing") {
		return fault.New(fault.NotFound, "%s: there is no such image", source)
	}
	for _, p := range []*opendsecv1.ImportImageResponse{
		{Step: "pull", Done: 1, Total: 2}, {Step: "unpack", Done: 2, Total: 2},
		{Step: "done", Image: &opendsecv1.Image{
			Digest: Digest(source), Size: 42, Architecture: "amd64", Source: source,
			Config: &opendsecv1.ImageConfig{User: "app", Env: []string{"A=b"}},
		}},
	} {
		if err := stream.Send(&edgev1.ImportImageResponse{Progress: p}); err != nil {
			return err
		}
	}
	s.e.SetReport(func(r *edgev1.NodeReport) { r.Images = append(slices.Clone(r.Images), Digest(source)) })
	return nil
}

func (s service) ImportImage(_ context.Context, req *connect.Request[edgev1.ImportImageRequest], stream *connect.ServerStream[edgev1.ImportImageResponse]) error {
	return s.make(req.Msg.GetRequest().GetSource(), stream)
}

func (s service) BootstrapImage(_ context.Context, req *connect.Request[edgev1.BootstrapImageRequest], stream *connect.ServerStream[edgev1.ImportImageResponse]) error {
	return s.make("bootstrap:"+req.Msg.GetRequest().GetDistribution(), stream)
}

func (s service) DeleteImage(_ context.Context, req *connect.Request[edgev1.DeleteImageRequest]) (*connect.Response[edgev1.DeleteImageResponse], error) {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	s.e.deleted = append(s.e.deleted, req.Msg.GetDigest())
	s.e.report = proto.CloneOf(s.e.report)
	s.e.report.Images = slices.DeleteFunc(s.e.report.Images, func(d string) bool { return d == req.Msg.GetDigest() })
	return connect.NewResponse(&edgev1.DeleteImageResponse{}), nil
}

func (s service) FindLeaks(_ context.Context, req *connect.Request[edgev1.FindLeaksRequest]) (*connect.Response[edgev1.FindLeaksResponse], error) {
	s.e.mu.Lock()
	defer s.e.mu.Unlock()
	out := &edgev1.FindLeaksResponse{}
	for _, id := range req.Msg.GetRecorded() {
		if s.e.boxes[sandbox.ID(id)] == nil {
			out.Leaks = append(out.Leaks, &opendsecv1.Leak{Kind: "record", Name: id, Detail: "is recorded, not here"})
		}
	}
	for id, status := range s.e.boxes {
		if status.GetEnd() == nil && !slices.Contains(req.Msg.GetRecorded(), string(id)) {
			out.Leaks = append(out.Leaks, &opendsecv1.Leak{Kind: "record", Name: string(id), Detail: "is here, not recorded"})
		}
	}
	return connect.NewResponse(out), nil
}
