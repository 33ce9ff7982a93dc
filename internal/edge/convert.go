package edge

import (
	"fmt"
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	edgev1 "github.com/kernflux/opendsec/api/gen/edge/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/netgate"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func idFromProto(s string) (sandbox.ID, error) {
	id, err := sandbox.ParseID(s)
	if err != nil {
		return "", fault.Invalid("id", "%w", err)
	}
	return id, nil
}

// entryFromProto reads a request that the API has checked already; what would
// do harm here is checked again.
func entryFromProto(req *edgev1.CreateSandboxRequest) (journal.Entry, error) {
	id, err := idFromProto(req.GetId())
	if err != nil {
		return journal.Entry{}, err
	}
	project, err := sandbox.ParseProject(req.GetProject())
	if err != nil {
		return journal.Entry{}, fault.Invalid("project", "%w", err)
	}
	spec, err := specFromProto(req.GetSpec())
	if err != nil {
		return journal.Entry{}, err
	}
	if req.GetImageDigest() == "" {
		return journal.Entry{}, fault.Invalid("image_digest", "the image's digest is missing")
	}
	if err := req.GetCreatedAt().CheckValid(); err != nil {
		return journal.Entry{}, fault.Invalid("created_at", "%w", err)
	}
	return journal.Entry{
		ID: id, Project: project, Spec: spec, ImageDigest: req.GetImageDigest(),
		Phase: journal.Creating, CreatedAt: req.GetCreatedAt().AsTime(),
	}, nil
}

func specFromProto(p *opendsecv1.SandboxSpec) (sandbox.Spec, error) {
	spec := sandbox.Spec{
		Backend: sandbox.Backend(p.GetBackend()),
		Limits: sandbox.Limits{
			CPU: p.GetCpuCoresLimit(), MemoryMB: p.GetMemoryLimitMb(), DiskMB: p.GetDiskLimitMb(), PIDs: p.GetPidsLimit(),
		},
		OnIdle: sandbox.StopOnIdle, AutoResume: p.GetAutoResume(), Env: p.GetEnv(), Workdir: p.GetWorkdir(), User: p.GetUser(),
		Hostname: p.GetHostname(), Labels: p.GetLabels(), Metadata: p.GetMetadata(), NetworkRules: p.GetNetworkRules().GetRules(),
	}
	var err error
	if spec.Image, err = sandbox.ParseImageName(p.GetImage()); err != nil {
		return spec, fault.Invalid("spec.image", "%w", err)
	}
	if p.GetOnIdle() == opendsecv1.OnIdle_ON_IDLE_PAUSE {
		spec.OnIdle = sandbox.PauseOnIdle
	}
	for field, v := range map[string]float64{
		"spec.cpu_cores_limit": spec.Limits.CPU, "spec.memory_limit_mb": float64(spec.Limits.MemoryMB),
		"spec.disk_limit_mb": float64(spec.Limits.DiskMB), "spec.pids_limit": float64(spec.Limits.PIDs),
	} {
		if !(v > 0) { // not "<=": it lets NaN through
			return spec, fault.Invalid(field, "%v must be more than 0", v)
		}
	}
	if spec.Deadlines.Idle, err = deadline("spec.ttl_running_stop", p.GetTtlRunningStop()); err != nil {
		return spec, err
	}
	spec.Deadlines.Lifetime, err = deadline("spec.ttl_lifetime", p.GetTtlLifetime())
	return spec, err
}

// deadline reads a duration; an absent one is 0, which means never.
func deadline(field string, p *durationpb.Duration) (time.Duration, error) {
	if p == nil {
		return 0, nil
	}
	if err := p.CheckValid(); err != nil {
		return 0, fault.Invalid(field, "%w", err)
	}
	d := p.AsDuration()
	if d < 0 {
		return 0, fault.Invalid(field, "%v must not be negative", d)
	}
	return d, nil
}

func deadlinesFromProto(p *edgev1.SetDeadlinesRequest) (sandbox.Deadlines, error) {
	idle, err := deadline("ttl_running_stop", p.GetTtlRunningStop())
	if err != nil {
		return sandbox.Deadlines{}, err
	}
	lifetime, err := deadline("ttl_lifetime", p.GetTtlLifetime())
	return sandbox.Deadlines{Idle: idle, Lifetime: lifetime}, err
}

// endFromProto reads the end that a stop asks for; an absent one is "stopped".
func endFromProto(p *opendsecv1.End, now time.Time) sandbox.End {
	end := sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Detail: "it was stopped by a call"}
	if p.GetReason() != "" {
		end = fault.EndFromProto(p)
	}
	if p.GetTime() == nil {
		end.Time = now
	}
	return end
}

func statusToProto(s status) *edgev1.SandboxStatus {
	p := &edgev1.SandboxStatus{
		Id: string(s.ID), Project: string(s.Project), Backend: string(s.Backend), State: fault.StateToProto(s.State),
	}
	if !s.StartedAt.IsZero() {
		p.StartedAt = timestamppb.New(s.StartedAt)
	}
	if !s.PausedAt.IsZero() {
		p.PausedAt = timestamppb.New(s.PausedAt)
	}
	if s.PausedFor > 0 {
		p.PausedFor = durationpb.New(s.PausedFor)
	}
	if s.End != nil {
		p.End = fault.EndToProto(*s.End)
	}
	if s.NetworkRevision > 0 {
		p.NetworkRevision, p.NetworkRules = s.NetworkRevision, &opendsecv1.NetworkRules{Rules: s.NetworkRules}
	}
	return p
}

func forkedToProto(f forked) *edgev1.ForkResult {
	if f.err != nil {
		return &edgev1.ForkResult{Result: &edgev1.ForkResult_Error{Error: fault.Info(fault.Of(f.err))}}
	}
	return &edgev1.ForkResult{Result: &edgev1.ForkResult_Status{Status: statusToProto(f.status)}}
}

func metricsToProto(limits sandbox.Limits, used backend.Usage, now time.Time) *opendsecv1.Metrics {
	return &opendsecv1.Metrics{
		Time: timestamppb.New(now), CpuTime: durationpb.New(used.CPU), CpuCoresLimit: limits.CPU,
		MemoryBytes: used.MemoryBytes, MemoryLimitBytes: limits.MemoryMB << 20,
		DiskBytes: used.DiskBytes, DiskLimitBytes: limits.DiskMB << 20, Pids: used.PIDs,
		SharedMemoryBytes: used.SharedMemoryBytes,
	}
}

func addNetwork(m *opendsecv1.Metrics, u netgate.Usage) {
	m.NetworkSentBytes, m.NetworkReceivedBytes = u.Sent, u.Received
	m.NetworkFlows = int64(u.Flows)
}

func denialToProto(d netgate.Denial) *opendsecv1.Denial {
	p := &opendsecv1.Denial{
		Time: timestamppb.New(d.Time), Count: int64(d.Count), Kind: string(d.Kind), Name: d.Name,
		Port: uint32(d.Port), Protocol: string(d.Proto), Rule: d.Rule, Why: d.Why,
	}
	if d.Addr.IsValid() {
		p.Address = d.Addr.String()
	}
	return p
}

// report describes the node as it is now.
func (e *Edge) report() *edgev1.NodeReport {
	r := &edgev1.NodeReport{
		Name: e.cfg.Name, Version: daemon.Version, Backends: e.backendsToProto(),
		Capacity: &opendsecv1.Resources{
			CpuCores: e.capacity.CPU, MemoryMb: e.capacity.MemoryMB, DiskMb: e.capacity.DiskMB, Sandboxes: e.capacity.Sandboxes,
		},
	}
	r.Warnings, r.Unhealthy = e.health()
	images, err := e.deps.Images.List()
	if err != nil {
		r.Warnings = append(r.Warnings, fmt.Sprintf("cannot list the images: %v", err))
	}
	for _, art := range images {
		r.Images = append(r.Images, art.Digest)
	}
	return r
}

func (e *Edge) backendsToProto() []*opendsecv1.NodeBackend {
	all := e.probes.all()
	var list []*opendsecv1.NodeBackend
	for _, name := range sandbox.Backends {
		if e.backends[name] == nil {
			continue
		}
		result, tried := all[name]
		p := &opendsecv1.NodeBackend{Name: string(name), Available: tried && result.Reason == "", Reason: result.Reason}
		for feature, has := range map[string]bool{
			"pause": result.Features.Pause, "snapshot_memory": result.Features.SnapshotMemory, "snapshot_files": result.Features.SnapshotFiles,
		} {
			if has {
				p.Features = append(p.Features, feature)
			}
		}
		slices.Sort(p.Features)
		list = append(list, p)
	}
	return list
}

func (e *Edge) leakToProto(l leak) *opendsecv1.Leak {
	return &opendsecv1.Leak{Node: e.cfg.Name, Kind: string(l.kind), Name: l.name, Detail: l.detail, Repaired: l.repaired}
}
