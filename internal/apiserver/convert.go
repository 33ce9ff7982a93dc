package apiserver

import (
	"time"

	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// specFromProto reads a spec, without filling defaults.
func specFromProto(p *opendsecv1.SandboxSpec) (sandbox.Spec, error) {
	if p.GetImage() == "" {
		return sandbox.Spec{}, fault.Invalid("spec.image", "image is missing: name one as project/name:tag, such as root/py:latest")
	}
	image, err := sandbox.ParseImageName(p.GetImage())
	if err != nil {
		return sandbox.Spec{}, fault.Invalid("spec.image", "%w", err)
	}
	idle, err := ttlFromProto("spec.ttl_running_stop", p.GetTtlRunningStop())
	if err != nil {
		return sandbox.Spec{}, err
	}
	lifetime, err := ttlFromProto("spec.ttl_lifetime", p.GetTtlLifetime())
	if err != nil {
		return sandbox.Spec{}, err
	}
	onIdle, known := onIdleWords[p.GetOnIdle()]
	if !known {
		return sandbox.Spec{}, fault.Invalid("spec.on_idle", "unknown on_idle %d: use stop or pause", p.GetOnIdle())
	}
	return sandbox.Spec{
		Image:   image,
		Backend: sandbox.Backend(p.GetBackend()),
		Limits: sandbox.Limits{
			CPU: p.GetCpuCoresLimit(), MemoryMB: p.GetMemoryLimitMb(), DiskMB: p.GetDiskLimitMb(), PIDs: p.GetPidsLimit(),
		},
		Deadlines:  sandbox.Deadlines{Idle: idle, Lifetime: lifetime},
		OnIdle:     onIdle,
		AutoResume: p.GetAutoResume(),
		Env:        p.GetEnv(), Workdir: p.GetWorkdir(), User: p.GetUser(), Hostname: p.GetHostname(),
		Labels: p.GetLabels(), Metadata: p.GetMetadata(), NetworkRules: rulesFromProto(p.GetNetworkRules()),
	}, nil
}

// rulesFromProto returns rules, nil when none are given and empty when they are
// given and empty.
func rulesFromProto(p *opendsecv1.NetworkRules) map[string]bool {
	if p == nil {
		return nil
	}
	if p.GetRules() == nil {
		return map[string]bool{}
	}
	return p.GetRules()
}

var onIdleWords = map[opendsecv1.OnIdle]sandbox.OnIdle{
	opendsecv1.OnIdle_ON_IDLE_UNSPECIFIED: sandbox.StopOnIdle,
	opendsecv1.OnIdle_ON_IDLE_STOP:        sandbox.StopOnIdle,
	opendsecv1.OnIdle_ON_IDLE_PAUSE:       sandbox.PauseOnIdle,
}

// ttlFromProto reads the deadline of a new sandbox; absent is never, and 0 is
// refused because it could mean both at once and never.
func ttlFromProto(field string, p *durationpb.Duration) (time.Duration, error) {
	if p == nil {
		return 0, nil
	}
	d, err := durationFromProto(field, p)
	if err == nil && d == 0 {
		return 0, fault.Invalid(field, "0 is no deadline: leave the field out for never")
	}
	return d, err
}

func durationFromProto(field string, p *durationpb.Duration) (time.Duration, error) {
	if err := p.CheckValid(); err != nil {
		return 0, fault.Invalid(field, "not a duration: %w", err)
	}
	return p.AsDuration(), nil
}

func specToProto(s sandbox.Spec) *opendsecv1.SandboxSpec {
	p := &opendsecv1.SandboxSpec{
		Image: s.Image.String(), Backend: string(s.Backend),
		CpuCoresLimit: s.Limits.CPU, MemoryLimitMb: s.Limits.MemoryMB, DiskLimitMb: s.Limits.DiskMB, PidsLimit: s.Limits.PIDs,
		TtlRunningStop: durationToProto(s.Deadlines.Idle), TtlLifetime: durationToProto(s.Deadlines.Lifetime),
		OnIdle: opendsecv1.OnIdle_ON_IDLE_STOP, AutoResume: s.AutoResume,
		Env: s.Env, Workdir: s.Workdir, User: s.User, Hostname: s.Hostname,
		Labels: s.Labels, Metadata: s.Metadata, NetworkRules: &opendsecv1.NetworkRules{Rules: s.NetworkRules},
	}
	if s.OnIdle == sandbox.PauseOnIdle {
		p.OnIdle = opendsecv1.OnIdle_ON_IDLE_PAUSE
	}
	return p
}

// durationToProto renders a deadline; 0, which is never, is absent.
func durationToProto(d time.Duration) *durationpb.Duration {
	if d == 0 {
		return nil
	}
	return durationpb.New(d)
}

func timeToProto(t time.Time) *timestamppb.Timestamp {
	if t.IsZero() {
		return nil
	}
	return timestamppb.New(t)
}

func timeFromProto(p *timestamppb.Timestamp) time.Time {
	if p == nil {
		return time.Time{}
	}
	return p.AsTime()
}

func sandboxToProto(sb *sandbox.Sandbox) *opendsecv1.Sandbox {
	p := &opendsecv1.Sandbox{
		Id: string(sb.ID), Project: string(sb.Project), Spec: specToProto(sb.Spec), State: fault.StateToProto(sb.State),
		CreatedAt: timeToProto(sb.CreatedAt), StartedAt: timeToProto(sb.StartedAt), Node: sb.Node,
		ImageDigest: sb.ImageDigest, Caller: sb.Caller, Warnings: warnings(sb),
		Parent: string(sb.Parent), PausedAt: timeToProto(sb.PausedAt),
	}
	if sb.End != nil {
		p.End = fault.EndToProto(*sb.End)
	}
	return p
}
