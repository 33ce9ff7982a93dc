package iam

import (
	"context"

	"connectrpc.com/connect"

	iamv1 "github.com/kernflux/opendsec/api/gen/iam/v1"
	"github.com/kernflux/opendsec/internal/fault"
)

// authRPC is iam.v1.Auth.
type authRPC struct{ *Service }

func (s authRPC) Authenticate(ctx context.Context, req *connect.Request[iamv1.AuthenticateRequest]) (*connect.Response[iamv1.AuthenticateResponse], error) {
	if req.Msg.GetToken() == "" {
		return nil, fault.New(fault.Unauthenticated, "there is no token")
	}
	who, err := s.authenticate(ctx, req.Msg.GetToken())
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&iamv1.AuthenticateResponse{
		Caller: callerToProto(who.Caller), TokenId: who.token.ID, ExpiresAt: timeToProto(who.token.ExpiresAt),
	}), nil
}
