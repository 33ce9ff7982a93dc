package iam_test

import (
	"testing"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
)

// Each of these makes one call and returns its error.

type identityCall = func(opendsecv1connect.IdentityServiceClient) error

func createProject(t *testing.T, path string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.CreateProject, &opendsecv1.CreateProjectRequest{Path: path})
		return err
	}
}

func getProject(t *testing.T, path string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.GetProject, &opendsecv1.GetProjectRequest{Path: path})
		return err
	}
}

func deleteProject(t *testing.T, path string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.DeleteProject, &opendsecv1.DeleteProjectRequest{Path: path})
		return err
	}
}

func setQuota(t *testing.T, path string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		cores := 2.5
		_, err := call(t, c.SetQuota, &opendsecv1.SetQuotaRequest{Path: path, Quota: &opendsecv1.Quota{CpuCores: &cores}})
		return err
	}
}

func createCaller(t *testing.T, name string, grants []*opendsecv1.RoleGrant) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.CreateCaller, &opendsecv1.CreateCallerRequest{Name: name, Grants: grants})
		return err
	}
}

func deleteCaller(t *testing.T, name string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.DeleteCaller, &opendsecv1.DeleteCallerRequest{Name: name})
		return err
	}
}

func giveRole(t *testing.T, name, project, role string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.Grant, &opendsecv1.GrantRequest{Caller: name, Project: project, Role: role})
		return err
	}
}

func createToken(t *testing.T, name string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.CreateToken, &opendsecv1.CreateTokenRequest{Caller: name})
		return err
	}
}

func listTokens(t *testing.T, name string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.ListTokens, &opendsecv1.ListTokensRequest{Caller: name})
		return err
	}
}

func revoke(t *testing.T, id string) identityCall {
	return func(c opendsecv1connect.IdentityServiceClient) error {
		_, err := call(t, c.RevokeToken, &opendsecv1.RevokeTokenRequest{Id: id})
		return err
	}
}
