package iam

import (
	"context"

	"connectrpc.com/connect"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/iam/role"
	"github.com/kernflux/opendsec/internal/store"
)

// identityRPC is opendsec.v1.IdentityService.
type identityRPC struct{ *Service }

func (s identityRPC) CreateProject(ctx context.Context, req *connect.Request[opendsecv1.CreateProjectRequest]) (*connect.Response[opendsecv1.CreateProjectResponse], error) {
	path, err := projectFromProto("path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if path.Parent() == "" {
		return nil, fault.Invalid("path", "project %s: a project is made below another, such as %s/%s", path, role.Root, path)
	}
	quota, err := quotaFromProto(req.Msg.GetQuota())
	if err != nil {
		return nil, err
	}
	p := store.Project{Path: path, Quota: quota, CreatedAt: s.cfg.Now()}
	err = s.change(ctx, "CreateProject", string(path), func(c *store.Change, who actor) error {
		if err := needAdmin(who, path.Parent(), path.Parent(), "making a project"); err != nil {
			return err
		}
		return c.CreateProject(ctx, p)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.CreateProjectResponse{Project: projectToProto(p)}), nil
}

func (s identityRPC) ListProjects(ctx context.Context, _ *connect.Request[opendsecv1.ListProjectsRequest]) (*connect.Response[opendsecv1.ListProjectsResponse], error) {
	all, err := s.db.ListProjects(ctx)
	if err != nil {
		return nil, err
	}
	who := actorOf(ctx)
	res := &opendsecv1.ListProjectsResponse{}
	for _, p := range all {
		if may(who.Caller, role.Viewer, p.Path) {
			res.Projects = append(res.Projects, projectToProto(p))
		}
	}
	return connect.NewResponse(res), nil
}

func (s identityRPC) GetProject(ctx context.Context, req *connect.Request[opendsecv1.GetProjectRequest]) (*connect.Response[opendsecv1.GetProjectResponse], error) {
	path, err := projectFromProto("path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	if !may(actorOf(ctx).Caller, role.Viewer, path) {
		return nil, hiddenProject(path)
	}
	p, err := s.db.GetProject(ctx, path)
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.GetProjectResponse{Project: projectToProto(p)}), nil
}

func (s identityRPC) DeleteProject(ctx context.Context, req *connect.Request[opendsecv1.DeleteProjectRequest]) (*connect.Response[opendsecv1.DeleteProjectResponse], error) {
	path, err := projectFromProto("path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	err = s.change(ctx, "DeleteProject", string(path), func(c *store.Change, who actor) error {
		if err := needAdmin(who, above(path), path, "deleting a project"); err != nil {
			return err
		}
		if path == role.Root {
			return fault.New(fault.WrongState, "the project %s cannot be deleted: all others are below it", path)
		}
		return c.DeleteProject(ctx, path)
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.DeleteProjectResponse{}), nil
}

func (s identityRPC) SetQuota(ctx context.Context, req *connect.Request[opendsecv1.SetQuotaRequest]) (*connect.Response[opendsecv1.SetQuotaResponse], error) {
	path, err := projectFromProto("path", req.Msg.GetPath())
	if err != nil {
		return nil, err
	}
	quota, err := quotaFromProto(req.Msg.GetQuota())
	if err != nil {
		return nil, err
	}
	var p store.Project
	err = s.change(ctx, "SetQuota", string(path), func(c *store.Change, who actor) error {
		if err := needAdmin(who, above(path), path, "setting a project's quota"); err != nil {
			return err
		}
		p, err = c.SetQuota(ctx, path, quota)
		return err
	})
	if err != nil {
		return nil, err
	}
	return connect.NewResponse(&opendsecv1.SetQuotaResponse{Project: projectToProto(p)}), nil
}
