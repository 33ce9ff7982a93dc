package iam

import (
	"context"
	"fmt"

	"connectrpc.com/connect"

	iamv1 "github.com/kernflux/opendsec/api/gen/iam/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
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

func (s authRPC) GetQuotas(ctx context.Context, req *connect.Request[iamv1.GetQuotasRequest]) (*connect.Response[iamv1.GetQuotasResponse], error) {
	path, err := sandbox.ParseProject(req.Msg.GetProject())
	if err != nil {
		return nil, fault.Invalid("project", "%w", err)
	}
	all, err := s.db.ProjectLineage(ctx, path)
	if err != nil {
		return nil, err
	}
	if len(all) != len(path.Lineage()) {
		return nil, fmt.Errorf("project %s: one above it is missing in the records", path)
	}
	return connect.NewResponse(&iamv1.GetQuotasResponse{Projects: projectsToProto(all)}), nil
}
