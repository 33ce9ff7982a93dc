package fault

import (
	"context"
	"errors"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// rules is the one table of what each kind means on the wire and at the shell.
var rules = map[Kind]struct {
	code      connect.Code
	domain    sandbox.Domain
	retryable bool
	exit      int // opendsecctl's exit code
}{
	Internal:         {connect.CodeInternal, sandbox.Infra, false, 1},
	InvalidArgument:  {connect.CodeInvalidArgument, sandbox.User, false, 2},
	Unauthenticated:  {connect.CodeUnauthenticated, sandbox.User, false, 4},
	PermissionDenied: {connect.CodePermissionDenied, sandbox.Policy, false, 4},
	NotFound:         {connect.CodeNotFound, sandbox.User, false, 3},
	AlreadyExists:    {connect.CodeAlreadyExists, sandbox.User, false, 1},
	WrongState:       {connect.CodeFailedPrecondition, sandbox.User, false, 1},
	Unsupported:      {connect.CodeUnimplemented, sandbox.User, false, 1},
	QuotaExceeded:    {connect.CodeResourceExhausted, sandbox.Quota, true, 4},
	Capacity:         {connect.CodeResourceExhausted, sandbox.Infra, true, 4},
	Timeout:          {connect.CodeDeadlineExceeded, sandbox.User, false, 1},
	Unavailable:      {connect.CodeUnavailable, sandbox.Infra, true, 1},
	SandboxEnded:     {connect.CodeFailedPrecondition, sandbox.User, false, 1},
}

// ExitCode returns the exit code of a program that ends with err.
func ExitCode(err error) int {
	if err == nil {
		return 0
	}
	return rules[Of(err).Kind].exit
}

// ToConnect renders err for the wire, with an ErrorInfo as its detail. A
// context's own end becomes canceled or deadline_exceeded.
func ToConnect(err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if errors.As(err, &ce) {
		return err
	}
	e := Of(err)
	if e.Kind == Internal {
		switch {
		case errors.Is(err, context.Canceled):
			return connect.NewError(connect.CodeCanceled, err)
		case errors.Is(err, context.DeadlineExceeded):
			e = &Error{Kind: Timeout, Message: err.Error(), Domain: sandbox.Infra}
		}
	}
	out := connect.NewError(rules[e.Kind].code, errors.New(e.Error()))
	if d, derr := connect.NewErrorDetail(Info(e)); derr == nil {
		out.AddDetail(d)
	}
	return out
}

// FromConnect reads an error that came over the wire back into a *Error. One
// without our detail gets the kind of its code; a transport's failure is
// Unavailable.
func FromConnect(err error) error {
	if err == nil {
		return nil
	}
	var ce *connect.Error
	if !errors.As(err, &ce) {
		return err
	}
	for _, d := range ce.Details() {
		v, verr := d.Value()
		if verr != nil {
			continue
		}
		if info, ok := v.(*opendsecv1.ErrorInfo); ok {
			return fromInfo(info, ce.Message())
		}
	}
	for kind, r := range rules {
		if r.code == ce.Code() && kind != Capacity && kind != SandboxEnded {
			return &Error{Kind: kind, Message: ce.Message()}
		}
	}
	if ce.Code() == connect.CodeCanceled {
		return context.Canceled
	}
	return &Error{Kind: Internal, Message: ce.Message()}
}

// FromInfo reads an error that came as a message of its own.
func FromInfo(info *opendsecv1.ErrorInfo) *Error { return fromInfo(info, info.GetMessage()) }

func fromInfo(info *opendsecv1.ErrorInfo, message string) *Error {
	e := &Error{
		Kind: Kind(info.GetKind()), Message: message, Field: info.GetField(),
		Domain: domains[info.GetDomain()], State: states[info.GetState()], RequestID: info.GetRequestId(),
	}
	if _, known := rules[e.Kind]; !known {
		e.Kind = Internal
	}
	for _, b := range info.GetBackends() {
		e.Backends = append(e.Backends, sandbox.Backend(b))
	}
	if info.GetEnd() != nil {
		end := EndFromProto(info.GetEnd())
		e.End = &end
	}
	return e
}

// Info renders an error as the message that the API sends.
func Info(e *Error) *opendsecv1.ErrorInfo {
	info := &opendsecv1.ErrorInfo{
		Kind: string(e.Kind), Field: e.Field, Domain: DomainToProto(e.DomainOf()), RequestId: e.RequestID,
		Retryable: e.Retryable(), State: StateToProto(e.State), Message: e.Error(),
	}
	for _, b := range e.Backends {
		info.Backends = append(info.Backends, string(b))
	}
	if e.End != nil {
		info.End = EndToProto(*e.End)
	}
	return info
}

var domains = map[opendsecv1.Domain]sandbox.Domain{
	opendsecv1.Domain_DOMAIN_INFRA: sandbox.Infra, opendsecv1.Domain_DOMAIN_USER: sandbox.User,
	opendsecv1.Domain_DOMAIN_POLICY: sandbox.Policy, opendsecv1.Domain_DOMAIN_QUOTA: sandbox.Quota,
}

var states = map[opendsecv1.State]sandbox.State{
	opendsecv1.State_STATE_PENDING: sandbox.Pending, opendsecv1.State_STATE_STARTING: sandbox.Starting,
	opendsecv1.State_STATE_RUNNING: sandbox.Running, opendsecv1.State_STATE_PAUSED: sandbox.Paused,
	opendsecv1.State_STATE_STOPPING: sandbox.Stopping, opendsecv1.State_STATE_STOPPED: sandbox.Stopped,
	opendsecv1.State_STATE_FAILED: sandbox.Failed,
}

// StateToProto returns the wire's word for a state.
func StateToProto(s sandbox.State) opendsecv1.State {
	for p, v := range states {
		if v == s {
			return p
		}
	}
	return opendsecv1.State_STATE_UNSPECIFIED
}

// StateFromProto returns the state of a wire's word, "" for none.
func StateFromProto(p opendsecv1.State) sandbox.State { return states[p] }

// DomainToProto returns the wire's word for a failure domain.
func DomainToProto(d sandbox.Domain) opendsecv1.Domain {
	for p, v := range domains {
		if v == d {
			return p
		}
	}
	return opendsecv1.Domain_DOMAIN_UNSPECIFIED
}

// EndToProto renders how a sandbox ended.
func EndToProto(end sandbox.End) *opendsecv1.End {
	return &opendsecv1.End{Reason: end.Reason, Domain: DomainToProto(end.Domain), Detail: end.Detail, Time: timestamppb.New(end.Time)}
}

// EndFromProto reads how a sandbox ended.
func EndFromProto(p *opendsecv1.End) sandbox.End {
	return sandbox.End{Reason: p.GetReason(), Domain: domains[p.GetDomain()], Detail: p.GetDetail(), Time: p.GetTime().AsTime()}
}
