// Package rpc is what every Connect service of ours does alike around its
// calls: a request id, errors rendered once and logged once, and the bearer
// token read. Give Interceptor to each handler, and to each client that one
// component has of another; convert what such a client returns with
// fault.FromConnect. Who may call is not decided here.
package rpc

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"time"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/internal/fault"
)

// Header carries the request id: from the API to the components behind it, so
// that one call has one id in all logs, and back to the caller.
const Header = "Opendsec-Request-Id"

type requestIDKey struct{}

// RequestID returns the id of the call that ctx belongs to, "" outside of one.
func RequestID(ctx context.Context) string {
	id, _ := ctx.Value(requestIDKey{}).(string)
	return id
}

// WithRequestID gives a call, unless it has one, the id that its header names
// if that has the form of one, or else a new one. Handlers that are no Connect
// service use it.
func WithRequestID(ctx context.Context, h http.Header) context.Context {
	if RequestID(ctx) != "" {
		return ctx
	}
	id := h.Get(Header)
	if !wellFormed(id) {
		id = "req-" + strings.ToLower(rand.Text())[:16]
	}
	return context.WithValue(ctx, requestIDKey{}, id)
}

func wellFormed(id string) bool {
	if id == "" || len(id) > 64 {
		return false
	}
	for _, c := range id {
		if (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '-' {
			return false
		}
	}
	return true
}

// Bearer returns the bearer token of a request's headers; Unauthenticated when
// there is none.
func Bearer(h http.Header) (string, error) {
	auth := h.Get("Authorization")
	if auth == "" {
		return "", fault.New(fault.Unauthenticated, "this call has no token: send the header \"Authorization: Bearer TOKEN\", or set OPENDSEC_TOKEN")
	}
	scheme, token, ok := strings.Cut(auth, " ")
	token = strings.TrimSpace(token)
	if !ok || !strings.EqualFold(scheme, "Bearer") || token == "" {
		return "", fault.New(fault.Unauthenticated, "the header Authorization has no token: want \"Bearer TOKEN\"")
	}
	return token, nil
}

// Fault returns what the caller of ctx's call is told of err: the kinded error
// in it with the request's id and without what lies under it. Of an error
// without a kind only the id is told; its text stays in the log.
func Fault(ctx context.Context, err error) *fault.Error {
	var kinded *fault.Error
	var ce *connect.Error
	if !errors.As(err, &kinded) && errors.As(err, &ce) {
		err = fault.FromConnect(ce)
	}
	told := *fault.Of(err)
	told.RequestID = RequestID(ctx)
	if !errors.As(err, &kinded) && told.Kind == fault.Internal {
		told.Message = fmt.Sprintf("something failed on our side; the server's log has more under request id %s", told.RequestID)
	}
	told.Err = nil
	return &told
}

// Interceptor goes around every call of a handler: it gives it a request id,
// turns errors and panics into what the caller is told, and logs each failed
// call once, with all that lies under the error. Around a client's calls it
// passes the request id on.
func Interceptor(log *slog.Logger) connect.Interceptor { return interceptor{log} }

type interceptor struct{ log *slog.Logger }

func (i interceptor) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (res connect.AnyResponse, err error) {
		if req.Spec().IsClient {
			forward(ctx, req.Header())
			return next(ctx, req)
		}
		ctx = WithRequestID(ctx, req.Header())
		start := time.Now()
		res, err = i.unary(ctx, req, next)
		if err = i.finish(ctx, req.Spec().Procedure, start, err); err != nil {
			return nil, err
		}
		res.Header().Set(Header, RequestID(ctx))
		return res, nil
	}
}

func (i interceptor) unary(ctx context.Context, req connect.AnyRequest, next connect.UnaryFunc) (res connect.AnyResponse, err error) {
	defer caught(&err)
	return next(ctx, req)
}

func (i interceptor) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		forward(ctx, conn.RequestHeader())
		return conn
	}
}

func (i interceptor) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		ctx = WithRequestID(ctx, conn.RequestHeader())
		conn.ResponseHeader().Set(Header, RequestID(ctx))
		start := time.Now()
		err := i.stream(ctx, conn, next)
		return i.finish(ctx, conn.Spec().Procedure, start, err)
	}
}

func (i interceptor) stream(ctx context.Context, conn connect.StreamingHandlerConn, next connect.StreamingHandlerFunc) (err error) {
	defer caught(&err)
	return next(ctx, conn)
}

func forward(ctx context.Context, h http.Header) {
	if id := RequestID(ctx); id != "" {
		h.Set(Header, id)
	}
}

// caught turns a panic into an error, so that one call's defect is not its
// whole connection's end.
func caught(err *error) {
	p := recover()
	if p == nil {
		return
	}
	if p == http.ErrAbortHandler { //nolint:errorlint // the documented comparison
		panic(p)
	}
	*err = fmt.Errorf("panic: %v\n%s", p, debug.Stack())
}

// finish logs how a call ended and returns what its caller gets.
func (i interceptor) finish(ctx context.Context, procedure string, start time.Time, err error) error {
	log := i.log.With("procedure", procedure, "request_id", RequestID(ctx), "took", time.Since(start))
	if err == nil {
		log.Debug("call")
		return nil
	}
	if ctx.Err() != nil && errors.Is(err, context.Canceled) {
		log.Debug("the caller went away")
		return connect.NewError(connect.CodeCanceled, context.Canceled)
	}
	if errors.Is(err, context.DeadlineExceeded) && fault.Of(err).Kind == fault.Internal {
		err = fault.New(fault.Timeout, "the call's deadline passed after %s", time.Since(start).Round(time.Millisecond))
	}
	told := Fault(ctx, err)
	log.Log(ctx, level(told.Kind), "call failed", "kind", told.Kind, "error", err)
	return fault.ToConnect(told)
}

// level says how loudly a failed call is logged: what callers do wrong is
// their matter, what we do wrong is our admin's.
func level(kind fault.Kind) slog.Level {
	switch kind {
	case fault.Internal:
		return slog.LevelError
	case fault.Unavailable, fault.Capacity:
		return slog.LevelWarn
	case fault.Unauthenticated, fault.PermissionDenied:
		return slog.LevelInfo
	default:
		return slog.LevelDebug
	}
}
