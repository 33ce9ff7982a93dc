package iam

import (
	"context"
	"fmt"
	"time"
	"unicode/utf8"

	"connectrpc.com/connect"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/iam/token"
	"github.com/kernflux/opendsec/internal/store"
)

func (s identityRPC) WhoAmI(ctx context.Context, _ *connect.Request[opendsecv1.WhoAmIRequest]) (*connect.Response[opendsecv1.WhoAmIResponse], error) {
	return connect.NewResponse(&opendsecv1.WhoAmIResponse{Caller: callerToProto(actorOf(ctx).Caller)}), nil
}

func (s identityRPC) CreateCaller(ctx context.Context, req *connect.Request[opendsecv1.CreateCallerRequest]) (*connect.Response[opendsecv1.CreateCallerResponse], error) {
	if err := checkCallerName("name", req.Msg.GetName()); err != nil {
		return nil, err
	}
	made := store.Caller{Name: req.Msg.GetName(), CreatedAt: s.cfg.Now()}
	for i, g := range req.Msg.GetGrants() {
		grant, err := grantFromProto(fmt.Sprintf("grants[%d].", i), g.GetProject(), g.GetRole())
		if err != nil {
			return nil, err
		}
		for _, other := range made.Grants {
			if other.Project == grant.Project {
				return nil, fault.Invalid(fmt.Sprintf("grants[%d].project", i), "project %s is named twice", grant.Project)
			}
		}
		made.Grants = append(made.Grants, grant)
	}
	err := s.change(ctx, "CreateCaller", made.Name, func(c *store.Change, who actor) error {
		if err := needOver(who, made, "making this caller"); err != nil {
			return err
		}
		if err := c.CreateCaller(ctx, made); err != nil {
			return err
		}
		var err error
		made, err = c.GetCaller(ctx, made.Name)
		return err
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.CreateCallerResponse{Caller: callerToProto(made)}), nil
}

func (s identityRPC) ListCallers(ctx context.Context, _ *connect.Request[opendsecv1.ListCallersRequest]) (*connect.Response[opendsecv1.ListCallersResponse], error) {
	all, err := s.db.ListCallers(ctx)
	if err != nil {
		return nil, err
	}
	who := actorOf(ctx)
	res := &opendsecv1.ListCallersResponse{}
	for _, c := range all {
		if c, ok := seen(who, c); ok {
			res.Callers = append(res.Callers, callerToProto(c))
		}
	}
	return connect.NewResponse(res), nil
}

func (s identityRPC) DeleteCaller(ctx context.Context, req *connect.Request[opendsecv1.DeleteCallerRequest]) (*connect.Response[opendsecv1.DeleteCallerResponse], error) {
	name := req.Msg.GetName()
	if err := checkCallerName("name", name); err != nil {
		return nil, err
	}
	err := s.change(ctx, "DeleteCaller", name, func(c *store.Change, who actor) error {
		target, err := c.GetCaller(ctx, name)
		if err != nil {
			return err
		}
		if err := needOver(who, target, "deleting this caller"); err != nil {
			return err
		}
		return c.DeleteCaller(ctx, name)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.DeleteCallerResponse{}), nil
}

func (s identityRPC) Grant(ctx context.Context, req *connect.Request[opendsecv1.GrantRequest]) (*connect.Response[opendsecv1.GrantResponse], error) {
	name := req.Msg.GetCaller()
	if err := checkCallerName("caller", name); err != nil {
		return nil, err
	}
	project, err := projectFromProto("project", req.Msg.GetProject())
	if err != nil {
		return nil, err
	}
	g := role.Grant{Project: project}
	if word := req.Msg.GetRole(); word != "" {
		if g, err = grantFromProto("", req.Msg.GetProject(), word); err != nil {
			return nil, err
		}
	}
	var changed store.Caller
	subject := fmt.Sprintf("%s %s on %s", name, orNone(g.Role), project)
	err = s.change(ctx, "Grant", subject, func(c *store.Change, who actor) error {
		if err := needAdmin(who, project, project, "giving or taking a role"); err != nil {
			return err
		}
		if changed, err = c.SetGrant(ctx, name, g); err != nil {
			return err
		}
		changed, _ = seen(who, changed)
		return nil
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.GrantResponse{Caller: callerToProto(changed)}), nil
}

func orNone(r role.Role) string {
	if r == "" {
		return "none"
	}
	return string(r)
}

func (s identityRPC) CreateToken(ctx context.Context, req *connect.Request[opendsecv1.CreateTokenRequest]) (*connect.Response[opendsecv1.CreateTokenResponse], error) {
	full, t, err := s.newToken(req.Msg)
	if err != nil {
		return nil, err
	}
	err = s.change(ctx, "CreateToken", fmt.Sprintf("%s of %s", t.ID, t.Caller), func(c *store.Change, who actor) error {
		if t.Caller == who.Name {
			err = outlives(t, who.token)
		} else {
			err = s.mayMakeFor(ctx, c, who, t.Caller)
		}
		if err != nil {
			return err
		}
		n, err := c.CountTokens(ctx, t.Caller, s.cfg.Now())
		if err != nil {
			return err
		}
		if n >= int64(s.cfg.MaxTokens) {
			return fault.New(fault.QuotaExceeded, "caller %s has %d tokens, which is the most; revoke one first", t.Caller, n)
		}
		return c.CreateToken(ctx, t)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.CreateTokenResponse{Token: tokenToProto(t), Secret: full}), nil
}

func (s *Service) newToken(req *opendsecv1.CreateTokenRequest) (full string, t store.Token, err error) {
	if err := checkCallerName("caller", req.GetCaller()); err != nil {
		return "", t, err
	}
	if n := utf8.RuneCountInString(req.GetDescription()); n > 200 {
		return "", t, fault.Invalid("description", "the description has %d characters; at most 200", n)
	}
	now := s.cfg.Now()
	var expires time.Time
	if e := req.GetExpiresAt(); e != nil {
		if err := e.CheckValid(); err != nil {
			return "", t, fault.Invalid("expires_at", "expires_at is no time: %w", err)
		}
		if expires = e.AsTime().Truncate(time.Microsecond); !expires.After(now) {
			return "", t, fault.Invalid("expires_at", "the token would end at %s, which is past", expires.Format(time.RFC3339))
		}
	}
	full, id, hash := token.New()
	return full, store.Token{
		ID: id, Caller: req.GetCaller(), Hash: hash, Description: req.GetDescription(), CreatedAt: now, ExpiresAt: expires,
	}, nil
}

// outlives refuses a token that a caller makes for itself and that would end
// after the one it makes it with.
func outlives(made, with store.Token) error {
	if with.ExpiresAt.IsZero() || !made.ExpiresAt.IsZero() && !made.ExpiresAt.After(with.ExpiresAt) {
		return nil
	}
	return fault.Invalid("expires_at", "a token that you make for yourself cannot outlive the one you use, which ends at %s",
		with.ExpiresAt.Format(time.RFC3339))
}

func (s *Service) mayMakeFor(ctx context.Context, c *store.Change, who actor, name string) error {
	target, err := c.GetCaller(ctx, name)
	if err != nil {
		return err
	}
	return needOver(who, target, "making a token for this caller")
}

func (s identityRPC) ListTokens(ctx context.Context, req *connect.Request[opendsecv1.ListTokensRequest]) (*connect.Response[opendsecv1.ListTokensResponse], error) {
	who, name := actorOf(ctx), req.Msg.GetCaller()
	if name == "" {
		name = who.Name
	}
	if name != who.Name {
		if err := checkCallerName("caller", name); err != nil {
			return nil, err
		}
		target, err := s.db.GetCaller(ctx, name)
		if err != nil {
			return nil, err
		}
		if err := needOver(who, target, "listing this caller's tokens"); err != nil {
			return nil, err
		}
	}
	all, err := s.db.ListTokens(ctx, name)
	if err != nil {
		return nil, err
	}
	res := &opendsecv1.ListTokensResponse{}
	for _, t := range all {
		res.Tokens = append(res.Tokens, tokenToProto(t))
	}
	return connect.NewResponse(res), nil
}

func (s identityRPC) RevokeToken(ctx context.Context, req *connect.Request[opendsecv1.RevokeTokenRequest]) (*connect.Response[opendsecv1.RevokeTokenResponse], error) {
	id := req.Msg.GetId()
	if !token.IsID(id) {
		return nil, fault.Invalid("id", "this is no token's id: want the part between ods_ and the second _")
	}
	err := s.change(ctx, "RevokeToken", id, func(c *store.Change, who actor) error {
		t, err := c.GetToken(ctx, id)
		if err != nil {
			return err
		}
		if t.Caller != who.Name {
			target, err := c.GetCaller(ctx, t.Caller)
			if err != nil {
				return err
			}
			if err := needOver(who, target, "revoking this token"); err != nil {
				return err
			}
		}
		return c.RevokeToken(ctx, id, s.cfg.Now())
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.RevokeTokenResponse{}), nil
}
