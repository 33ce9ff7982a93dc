package rpc_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"connectrpc.com/connect"

	iamv1 "github.com/kernflux/opendsec/api/gen/iam/v1"
	"github.com/kernflux/opendsec/api/gen/iam/v1/iamv1connect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// service answers Authenticate as it is told.
type service struct {
	iamv1connect.UnimplementedAuthHandler
	do func(ctx context.Context) error
}

func (s service) Authenticate(ctx context.Context, _ *connect.Request[iamv1.AuthenticateRequest]) (*connect.Response[iamv1.AuthenticateResponse], error) {
	if err := s.do(ctx); err != nil {
		return nil, err
	}
	return connect.NewResponse(&iamv1.AuthenticateResponse{TokenId: rpc.RequestID(ctx)}), nil
}

func serve(t *testing.T, log *bytes.Buffer, do func(ctx context.Context) error) (iamv1connect.AuthClient, *httptest.Server) {
	t.Helper()
	logger := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	_, h := iamv1connect.NewAuthHandler(service{do: do}, connect.WithInterceptors(rpc.Interceptor(logger)))
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return iamv1connect.NewAuthClient(srv.Client(), srv.URL, connect.WithInterceptors(rpc.Interceptor(logger))), srv
}

func TestErrorsAreToldOnce(t *testing.T) {
	secret := errors.New("pq: password of 10.0.0.7 is hunter2")
	for name, c := range map[string]struct {
		err  error
		want fault.Error
		log  string
	}{
		"plain":     {fmt.Errorf("read node: %w", secret), fault.Error{Kind: fault.Internal, Domain: sandbox.Infra}, "level=ERROR"},
		"panic":     {nil, fault.Error{Kind: fault.Internal, Domain: sandbox.Infra}, "level=ERROR"},
		"field":     {fault.Invalid("spec.image", "image %q is none", "x"), fault.Error{Kind: fault.InvalidArgument, Domain: sandbox.User, Field: "spec.image", Message: `image "x" is none`}, "level=DEBUG"},
		"wrapped":   {fmt.Errorf("create: %w", fault.New(fault.Capacity, "no node has room")), fault.Error{Kind: fault.Capacity, Domain: sandbox.Infra, Message: "no node has room"}, "level=WARN"},
		"beneath":   {&fault.Error{Kind: fault.Unavailable, Message: "the node does not answer", Err: secret}, fault.Error{Kind: fault.Unavailable, Domain: sandbox.Infra, Message: "the node does not answer"}, "hunter2"},
		"state":     {&sandbox.WrongStateError{ID: "sb-1", State: sandbox.Paused, Want: sandbox.Starting}, fault.Error{Kind: fault.WrongState, Domain: sandbox.User, State: sandbox.Paused, Message: "sandbox sb-1 is paused and cannot become starting"}, "level=DEBUG"},
		"of a peer": {fault.ToConnect(fault.Invalid("x", "bad x")), fault.Error{Kind: fault.InvalidArgument, Domain: sandbox.User, Field: "x", Message: "bad x"}, "level=DEBUG"},
		"deadline":  {fmt.Errorf("ask: %w", context.DeadlineExceeded), fault.Error{Kind: fault.Timeout, Domain: sandbox.User}, "deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			var log bytes.Buffer
			client, _ := serve(t, &log, func(context.Context) error {
				if c.err == nil {
					panic(secret)
				}
				return c.err
			})
			_, err := client.Authenticate(t.Context(), connect.NewRequest(&iamv1.AuthenticateRequest{}))
			got := fault.Of(fault.FromConnect(err))
			if got.Kind != c.want.Kind || got.DomainOf() != c.want.Domain || got.Field != c.want.Field || got.State != c.want.State {
				t.Errorf("got %+v, want %+v", got, c.want)
			}
			if c.want.Message != "" && got.Error() != c.want.Message {
				t.Errorf("the caller is told %q, want %q", got.Error(), c.want.Message)
			}
			if strings.Contains(err.Error(), "hunter2") {
				t.Errorf("the caller is told our secret: %v", err)
			}
			if got.RequestID == "" || !strings.Contains(log.String(), got.RequestID) || !strings.Contains(log.String(), c.log) {
				t.Errorf("request id %q; the log lacks it or %q:\n%s", got.RequestID, c.log, log.String())
			}
			if n := strings.Count(log.String(), "call failed"); n != 1 {
				t.Errorf("logged %d times:\n%s", n, log.String())
			}
		})
	}
}

// One call has one id: as its caller names it, through the components, and back.
func TestRequestIDGoesThrough(t *testing.T) {
	var log bytes.Buffer
	client, _ := serve(t, &log, func(context.Context) error { return nil })
	call := func(ctx context.Context) (inside, header string) {
		t.Helper()
		res, err := client.Authenticate(ctx, connect.NewRequest(&iamv1.AuthenticateRequest{}))
		if err != nil {
			t.Fatal(err)
		}
		return res.Msg.GetTokenId(), res.Header().Get(rpc.Header)
	}
	given := rpc.WithRequestID(t.Context(), http.Header{rpc.Header: {"mine-1"}})
	if inside, header := call(given); inside != "mine-1" || header != "mine-1" {
		t.Errorf("got %q inside, %q back; want mine-1", inside, header)
	}
	inside, header := call(t.Context())
	if !strings.HasPrefix(inside, "req-") || inside != header {
		t.Errorf("got %q inside, %q back; want a new one", inside, header)
	}
	for _, bad := range []string{"a b", "x\ny", strings.Repeat("a", 65), "é"} {
		if id := rpc.RequestID(rpc.WithRequestID(t.Context(), http.Header{rpc.Header: {bad}})); !strings.HasPrefix(id, "req-") {
			t.Errorf("%q was taken as %q", bad, id)
		}
	}
	if again := rpc.WithRequestID(given, http.Header{rpc.Header: {"other"}}); rpc.RequestID(again) != "mine-1" {
		t.Errorf("a call's id was replaced by %q", rpc.RequestID(again))
	}
}

func TestBearer(t *testing.T) {
	for in, want := range map[string]string{
		"Bearer ods_x": "ods_x", "bearer  ods_x ": "ods_x", "": "", "ods_x": "", "Basic abc": "", "Bearer ": "",
	} {
		h := http.Header{}
		if in != "" {
			h.Set("Authorization", in)
		}
		got, err := rpc.Bearer(h)
		if got != want || (want == "") != fault.Is(err, fault.Unauthenticated) {
			t.Errorf("%q: got %q, %v; want %q", in, got, err, want)
		}
	}
}
