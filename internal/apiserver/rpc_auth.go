package apiserver

import (
	"context"
	"crypto/sha256"
	"net/http"
	"sync"
	"time"

	"connectrpc.com/connect"
	"golang.org/x/sync/singleflight"

	iamv1 "github.com/kernflux/opendsec/api/gen/iam/v1"
	"github.com/kernflux/opendsec/api/gen/iam/v1/iamv1connect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/sandbox"
)

const (
	// tokenFresh is how long an answer of iam is used without asking again; a
	// revoked token is refused after this time at the latest.
	tokenFresh = 2 * time.Second
	// maxTokens bounds the cache; it is emptied when it is full.
	maxTokens = 10000
	// iamTimeout bounds one question to iam.
	iamTimeout = 10 * time.Second
)

// door tells who calls. It keeps iam's answers for tokenFresh, by a hash, so
// that a dump of its memory holds fewer secrets.
type door struct {
	iam    iamv1connect.AuthClient
	now    func() time.Time
	asking singleflight.Group // one question per token at a time

	mu    sync.Mutex // guards known
	known map[[sha256.Size]byte]known
}

type known struct {
	caller *caller
	until  time.Time
}

func newDoor(iam iamv1connect.AuthClient, now func() time.Time) *door {
	return &door{iam: iam, now: now, known: map[[sha256.Size]byte]known{}}
}

// authenticate returns the caller whose token the request's header bears.
func (d *door) authenticate(ctx context.Context, h http.Header) (*caller, error) {
	token, err := rpc.Bearer(h)
	if err != nil {
		return nil, err
	}
	now, key := d.now(), sha256.Sum256([]byte(token))
	d.mu.Lock()
	k, ok := d.known[key]
	d.mu.Unlock()
	if ok && now.Before(k.until) {
		return k.caller, nil
	}
	// Whoever asks first may go away before the others have their answer.
	lasting := context.WithoutCancel(ctx)
	answer := d.asking.DoChan(string(key[:]), func() (any, error) {
		ctx, cancel := context.WithTimeout(lasting, iamTimeout)
		defer cancel()
		c, err := d.ask(ctx, token)
		if err == nil {
			d.remember(key, c)
		}
		return c, err
	})
	select {
	case a := <-answer:
		if a.Err != nil {
			return nil, a.Err
		}
		return a.Val.(*caller), nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (d *door) remember(key [sha256.Size]byte, c *caller) {
	until := d.now().Add(tokenFresh)
	if !c.expires.IsZero() && c.expires.Before(until) {
		until = c.expires
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if len(d.known) >= maxTokens {
		clear(d.known)
	}
	d.known[key] = known{c, until}
}

func (d *door) ask(ctx context.Context, token string) (*caller, error) {
	res, err := d.iam.Authenticate(ctx, connect.NewRequest(&iamv1.AuthenticateRequest{Token: token}))
	if err != nil {
		return nil, fault.FromConnect(err)
	}
	c := &caller{name: res.Msg.GetCaller().GetName(), expires: timeFromProto(res.Msg.GetExpiresAt())}
	for _, g := range res.Msg.GetCaller().GetGrants() {
		c.grants = append(c.grants, role.Grant{Project: sandbox.Project(g.GetProject()), Role: role.Role(g.GetRole())})
	}
	return c, nil
}

// identify is the interceptor that lets nobody in without a token.
func (d *door) identify() connect.Interceptor { return identify{d} }

type identify struct{ door *door }

func (i identify) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		c, err := i.door.authenticate(ctx, req.Header())
		if err != nil {
			return nil, err
		}
		return next(withCaller(ctx, c), req)
	}
}

func (i identify) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return next
}

func (i identify) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return func(ctx context.Context, conn connect.StreamingHandlerConn) error {
		c, err := i.door.authenticate(ctx, conn.RequestHeader())
		if err != nil {
			return err
		}
		return next(withCaller(ctx, c), conn)
	}
}
