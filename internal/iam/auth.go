package iam

import (
	"context"

	"connectrpc.com/connect"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/token"
	"github.com/kernflux/opendsec/internal/rpc"
	"github.com/kernflux/opendsec/internal/store"
)

// actor is who makes a call, and with which token.
type actor struct {
	store.Caller
	token store.Token
}

// authenticate returns whose token it is; Unauthenticated says what is wrong
// with it.
func (s *Service) authenticate(ctx context.Context, full string) (actor, error) {
	id, secret, err := token.Parse(full)
	if err != nil {
		return actor{}, err
	}
	t, err := s.db.GetToken(ctx, id)
	known := err == nil
	if err != nil && !fault.Is(err, fault.NotFound) {
		return actor{}, err
	}
	// An unknown id is compared too, so that the time tells nothing of ids.
	if !token.Check(secret, t.Hash) || !known {
		return actor{}, fault.New(fault.Unauthenticated, "this token is not known here: it may be of another installation, or its caller was deleted")
	}
	if !t.RevokedAt.IsZero() {
		return actor{}, fault.New(fault.Unauthenticated, "the token %s was revoked", id)
	}
	if !t.ExpiresAt.IsZero() && !s.cfg.Now().Before(t.ExpiresAt) {
		return actor{}, fault.New(fault.Unauthenticated, "the token %s ended at %s; make a new one", id, t.ExpiresAt.Format("2006-01-02 15:04:05 MST"))
	}
	c, err := s.db.GetCaller(ctx, t.Caller)
	if fault.Is(err, fault.NotFound) {
		return actor{}, errCallerGone
	}
	if err != nil {
		return actor{}, err
	}
	return actor{c, t}, nil
}

var errCallerGone = fault.New(fault.Unauthenticated, "the caller of this token was deleted")

type actorKey struct{}

// identify lets nobody call the IdentityService without a token.
func (s *Service) identify(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		full, err := rpc.Bearer(req.Header())
		if err != nil {
			return nil, err
		}
		who, err := s.authenticate(ctx, full)
		if err != nil {
			return nil, err
		}
		return next(context.WithValue(ctx, actorKey{}, who), req)
	}
}

// actorOf returns who makes the call; nobody, who has no rights, outside of
// identify.
func actorOf(ctx context.Context) actor {
	who, _ := ctx.Value(actorKey{}).(actor)
	return who
}

// change runs a change of the actor's: in one transaction, with its rights as
// they are in it, and with an entry in the audit log whatever comes of it.
func (s *Service) change(ctx context.Context, action, subject string, do func(*store.Change, actor) error) error {
	who := actorOf(ctx)
	entry := store.Audit{Time: s.cfg.Now(), Caller: who.Name, TokenID: who.token.ID, Action: action, Subject: subject}
	return s.db.Change(ctx, entry, func(c *store.Change) error {
		now, err := c.GetCaller(ctx, who.Name)
		if fault.Is(err, fault.NotFound) {
			return errCallerGone
		}
		if err != nil {
			return err
		}
		return do(c, actor{now, who.token})
	})
}
