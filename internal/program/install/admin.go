package install

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	"connectrpc.com/connect"
	"golang.org/x/sync/errgroup"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/mtls"
)

// Admin calls an installation's API as its admin.
type Admin struct {
	Cluster   opendsecv1connect.ClusterServiceClient
	sandboxes opendsecv1connect.SandboxServiceClient
	http      *http.Client
}

// Admin returns a client with the token in the admin's env file.
func (in *Installation) Admin() (*Admin, error) {
	vars, err := ReadEnv(in.EnvFile())
	if err != nil {
		return nil, err
	}
	var addr, token string
	for _, v := range vars {
		switch v[0] {
		case "OPENDSEC_ADDR":
			addr = v[1]
		case "OPENDSEC_TOKEN":
			token = v[1]
		}
	}
	if addr == "" || token == "" {
		return nil, fmt.Errorf("%s lacks OPENDSEC_ADDR or OPENDSEC_TOKEN: restore the file; a token is shown once, when it is made", in.EnvFile())
	}
	id, err := mtls.Load(in.IAM.PKI, mtls.RoleIAM)
	if err != nil {
		return nil, err
	}
	client := daemon.Client(id.ClientConfig(mtls.RoleAPIServer))
	auth := connect.WithInterceptors(connect.UnaryInterceptorFunc(func(next connect.UnaryFunc) connect.UnaryFunc {
		return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
			req.Header().Set("Authorization", "Bearer "+token)
			res, err := next(ctx, req)
			return res, fault.FromConnect(err)
		}
	}))
	return &Admin{
		Cluster:   opendsecv1connect.NewClusterServiceClient(client, addr, auth),
		sandboxes: opendsecv1connect.NewSandboxServiceClient(client, addr, auth),
		http:      client,
	}, nil
}

// Close drops the client's connections.
func (a *Admin) Close() { a.http.CloseIdleConnections() }

// Ping reports whether the API answers.
func (a *Admin) Ping(ctx context.Context) error {
	_, err := a.Cluster.GetVersion(ctx, connect.NewRequest(&opendsecv1.GetVersionRequest{}))
	return err
}

// StopAll ends all sandboxes of the installation and returns when they are gone.
func (a *Admin) StopAll(ctx context.Context) error {
	for {
		res, err := a.sandboxes.ListSandboxes(ctx, connect.NewRequest(&opendsecv1.ListSandboxesRequest{Project: "root", PageSize: 1000}))
		if err != nil {
			return err
		}
		if len(res.Msg.GetSandboxes()) == 0 {
			return nil
		}
		errs := make([]error, len(res.Msg.GetSandboxes()))
		var g errgroup.Group
		g.SetLimit(8)
		for i, sb := range res.Msg.GetSandboxes() {
			g.Go(func() error {
				_, errs[i] = a.sandboxes.StopSandbox(ctx, connect.NewRequest(&opendsecv1.StopSandboxRequest{Id: sb.GetId()}))
				return nil
			})
		}
		_ = g.Wait() // errs has what happened
		if err := errors.Join(errs...); err != nil {
			return err
		}
	}
}
