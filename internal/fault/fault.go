// Package fault holds the errors that cross a process: a kind that the far
// side acts on, whose doing it is, and the field or state that was wrong.
// An error without a kind is internal. The one table that maps kinds to
// Connect codes is codes.go; nothing else in the project does.
package fault

import (
	"errors"
	"fmt"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// Kind is what the far side tells errors apart by.
type Kind string

// The kinds of error.
const (
	Internal         Kind = "internal"
	InvalidArgument  Kind = "invalid_argument"
	Unauthenticated  Kind = "unauthenticated"
	PermissionDenied Kind = "permission_denied"
	NotFound         Kind = "not_found"
	AlreadyExists    Kind = "already_exists"
	WrongState       Kind = "wrong_state"
	Unsupported      Kind = "unsupported"
	QuotaExceeded    Kind = "quota_exceeded"
	Capacity         Kind = "capacity"
	Timeout          Kind = "timeout"
	Unavailable      Kind = "unavailable"
	SandboxEnded     Kind = "sandbox_ended"
)

// Error is an error with a kind.
type Error struct {
	Kind      Kind
	Message   string            // plain English with what to do
	Field     string            // the request's field that is wrong, such as "spec.image"
	Domain    sandbox.Domain    // "" takes the kind's usual one
	State     sandbox.State     // for WrongState: the state it is in
	Backends  []sandbox.Backend // for Unsupported: those that can
	End       *sandbox.End      // for SandboxEnded
	RequestID string            // set where the request is answered
	Err       error             // what lies under it; not sent
}

func (e *Error) Error() string {
	if e.Err != nil {
		if text := e.Err.Error(); text != "" {
			return e.Message + ": " + text
		}
	}
	return e.Message
}

// Unwrap returns the error under it.
func (e *Error) Unwrap() error { return e.Err }

// New returns an error of the kind with a formatted message; %w works.
func New(kind Kind, format string, args ...any) *Error {
	err := fmt.Errorf(format, args...)
	return &Error{Kind: kind, Message: err.Error(), Err: hidden(errors.Unwrap(err))}
}

// Invalid returns an InvalidArgument that names the request's field.
func Invalid(field, format string, args ...any) *Error {
	e := New(InvalidArgument, format, args...)
	e.Field = field
	return e
}

// hiddenError keeps an error in the chain without printing it a second time:
// its text is part of the message already.
type hiddenError struct{ err error }

func (h hiddenError) Error() string { return "" }
func (h hiddenError) Unwrap() error { return h.err }

func hidden(err error) error {
	if err == nil {
		return nil
	}
	return hiddenError{err}
}

// Of returns the kinded error in err's chain. An error without one comes back
// as Internal with err's text; nil comes back as nil.
func Of(err error) *Error {
	if err == nil {
		return nil
	}
	var e *Error
	if errors.As(err, &e) {
		return e
	}
	var ws *sandbox.WrongStateError
	if errors.As(err, &ws) {
		return &Error{Kind: WrongState, Message: err.Error(), State: ws.State}
	}
	return &Error{Kind: Internal, Message: err.Error()}
}

// Is reports whether err has the kind.
func Is(err error, kind Kind) bool { return err != nil && Of(err).Kind == kind }

// DomainOf returns whose doing the error is.
func (e *Error) DomainOf() sandbox.Domain {
	if e.Domain != "" {
		return e.Domain
	}
	return rules[e.Kind].domain
}

// Retryable reports whether the same call may succeed later.
func (e *Error) Retryable() bool { return rules[e.Kind].retryable }
