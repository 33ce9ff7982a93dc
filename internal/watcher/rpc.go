package watcher

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// machine is a sandbox as its node knows it.
type machine struct {
	id        sandbox.ID
	state     sandbox.State
	backend   sandbox.Backend
	startedAt time.Time
	pausedAt  time.Time     // zero while it is not paused
	pausedFor time.Duration // how long it was paused before
	end       *sandbox.End  // set once it is removed

	rules    map[string]bool // of its network, once they were changed
	revision int64           // how often they were
}

// view is what a node has said of itself.
type view struct {
	heard    time.Time // when it reported last; zero before it has
	report   *edgev1.NodeReport
	complete bool // machines holds all that the node knows
	machines map[sandbox.ID]machine
}

// edgeURL returns the base URL of the edge at an address.
func edgeURL(address string) string {
	if strings.Contains(address, "://") {
		return strings.TrimSuffix(address, "/")
	}
	return "https://" + address
}

// The time between two attempts to reach a node that does not answer.
const (
	firstRetry = 100 * time.Millisecond
	lastRetry  = 5 * time.Second
)

// follow keeps one stream of reports of a node, until the context ends.
func (w *Watcher) follow(ctx context.Context, n *node) {
	wait := firstRetry
	for ctx.Err() == nil {
		got, err := w.stream(ctx, n)
		if got {
			wait = firstRetry
		}
		if ctx.Err() != nil {
			return
		}
		w.log.Warn("a node's reports ended, asking again", "node", n.Name, "address", n.Address, "error", err, "wait", wait)
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
		wait = min(2*wait, lastRetry)
	}
}

// stream takes a node's reports until they end, or stop coming. It says
// whether there was one.
func (w *Watcher) stream(ctx context.Context, n *node) (got bool, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	silent := time.AfterFunc(w.cfg.SilentAfter, cancel)
	defer silent.Stop()
	reports, err := n.edge.Watch(ctx, connect.NewRequest(&edgev1.WatchRequest{}))
	if err != nil {
		return false, fault.FromConnect(err)
	}
	defer reports.Close() //nolint:errcheck // it has been read to its end, or nobody wants the rest
	for reports.Receive() {
		silent.Reset(w.cfg.SilentAfter)
		got = true
		if err := w.take(ctx, n, reports.Msg(), w.now()); err != nil {
			w.log.Error("take a node's report", "node", n.Name, "error", err)
		}
	}
	return got, fault.FromConnect(reports.Err())
}

// take records a report and what changed with it.
func (w *Watcher) take(ctx context.Context, n *node, msg *edgev1.WatchResponse, now time.Time) error {
	report := msg.GetNode()
	if name := report.GetName(); name != n.Name && report.GetUnhealthy() == "" {
		report.Unhealthy = "the edge at " + n.Address + " calls itself " + name
	}
	changed := make([]machine, 0, len(msg.GetSandboxes()))
	for _, p := range msg.GetSandboxes() {
		changed = append(changed, machineFromProto(p))
	}
	n.mu.Lock()
	n.view.heard, n.view.report = now, report
	if msg.GetComplete() {
		n.view.complete, n.view.machines = true, map[sandbox.ID]machine{}
	}
	if n.view.machines == nil {
		n.view.machines = map[sandbox.ID]machine{}
	}
	for _, m := range changed {
		n.view.machines[m.id] = m
	}
	n.mu.Unlock()

	if err := w.recordNode(ctx, n, report, now); err != nil {
		return err
	}
	for _, m := range changed {
		if err := w.apply(ctx, n.Name, m, now); err != nil {
			return err
		}
	}
	return nil
}

func machineFromProto(p *edgev1.SandboxStatus) machine {
	m := machine{
		id: sandbox.ID(p.GetId()), state: fault.StateFromProto(p.GetState()), backend: sandbox.Backend(p.GetBackend()),
		pausedFor: p.GetPausedFor().AsDuration(),
		rules:     p.GetNetworkRules().GetRules(), revision: p.GetNetworkRevision(),
	}
	if p.GetStartedAt() != nil {
		m.startedAt = p.GetStartedAt().AsTime()
	}
	if p.GetPausedAt() != nil {
		m.pausedAt = p.GetPausedAt().AsTime()
	}
	if p.GetEnd() != nil && !m.state.Alive() { // else it is on its way
		end := fault.EndFromProto(p.GetEnd())
		m.end = &end
	}
	return m
}

// recordNode writes a node's report, with the time of it, into its record.
func (w *Watcher) recordNode(ctx context.Context, n *node, report *edgev1.NodeReport, seen time.Time) error {
	data, err := protojson.Marshal(report)
	if err != nil {
		return err
	}
	return w.db.PutNode(ctx, store.Node{Name: n.Name, Address: edgeURL(n.Address), Report: data, LastSeen: seen})
}

// markUnhealthy writes into a node's record why it takes no sandboxes; its
// last report otherwise stays as it is.
func (w *Watcher) markUnhealthy(ctx context.Context, record store.Node, why string) error {
	report := &edgev1.NodeReport{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(record.Report, report); err != nil {
		w.log.Warn("a node's last report cannot be read", "node", record.Name, "error", err)
		report = &edgev1.NodeReport{Name: record.Name}
	}
	if report.GetUnhealthy() == why {
		return nil
	}
	report.Unhealthy = why
	data, err := protojson.Marshal(report)
	if err != nil {
		return err
	}
	record.Report = data
	return w.db.PutNode(ctx, record)
}

// emptyReport is the record of a node that has not reported yet.
func emptyReport(name string) ([]byte, error) {
	return protojson.Marshal(&edgev1.NodeReport{Name: name, Unhealthy: "it has not reported yet"})
}

// look returns a copy of what the node has said.
func (n *node) look() view {
	n.mu.Lock()
	defer n.mu.Unlock()
	v := n.view
	v.machines = maps.Clone(v.machines)
	if v.report != nil {
		v.report = proto.CloneOf(v.report)
	}
	return v
}

// destroy ends a machine and returns its end, nil when the node knows nothing
// of it. A machine that is not removed yet is Unavailable.
func (n *node) destroy(ctx context.Context, id sandbox.ID, end sandbox.End) (*sandbox.End, error) {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	res, err := n.edge.DestroySandbox(ctx, connect.NewRequest(&edgev1.DestroySandboxRequest{Id: string(id), End: fault.EndToProto(end)}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	status := res.Msg.GetStatus()
	if status.GetEnd() == nil {
		return nil, nil
	}
	if state := fault.StateFromProto(status.GetState()); state.Alive() {
		return nil, fault.New(fault.Unavailable, "sandbox %s is still %s", id, state)
	}
	first := fault.EndFromProto(status.GetEnd())
	return &first, nil
}

// callTime bounds one call to a node, so that a node that hangs does not stop
// the passes over the others. It is longer than a node waits for itself.
const callTime = 20 * time.Second

// deleteImage has the node remove image content once nothing uses it there.
func (n *node) deleteImage(ctx context.Context, digest string) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	_, err := n.edge.DeleteImage(ctx, connect.NewRequest(&edgev1.DeleteImageRequest{Digest: digest}))
	return fault.FromConnect(err)
}

// forget lets the node drop ended sandboxes.
func (n *node) forget(ctx context.Context, ids []sandbox.ID) error {
	ctx, cancel := context.WithTimeout(ctx, callTime)
	defer cancel()
	words := make([]string, len(ids))
	for i, id := range ids {
		words[i] = string(id)
	}
	slices.Sort(words)
	if _, err := n.edge.ForgetEnded(ctx, connect.NewRequest(&edgev1.ForgetEndedRequest{Ids: words})); err != nil {
		return fault.FromConnect(err)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, id := range ids {
		delete(n.view.machines, id)
	}
	return nil
}
