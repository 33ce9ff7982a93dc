package ctl

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	"github.com/kernflux/opendsec/api/gen/agent/v1/agentv1connect"
	"github.com/kernflux/opendsec/api/gen/opendsec/v1/opendsecv1connect"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/fault"
)

// api holds the clients of one server.
type api struct {
	addr  string
	http  *http.Client
	token string

	sandboxes opendsecv1connect.SandboxServiceClient
	images    opendsecv1connect.ImageServiceClient
	cluster   opendsecv1connect.ClusterServiceClient
	identity  opendsecv1connect.IdentityServiceClient
}

// connect returns the clients of the server that the environment names.
func (a *App) connect() (*api, error) {
	if a.api != nil {
		return a.api, nil
	}
	addr, token := strings.TrimSuffix(a.Env("OPENDSEC_ADDR"), "/"), a.Env("OPENDSEC_TOKEN")
	for _, v := range [][2]string{{"OPENDSEC_ADDR", addr}, {"OPENDSEC_TOKEN", token}} {
		if v[1] == "" {
			return nil, usage(fmt.Errorf("%s is not set; read the env file that quickstart wrote: . /root/opendsec-ops/env", v[0]))
		}
	}
	u, err := url.Parse(addr)
	if err != nil || u.Scheme != "https" || u.Hostname() == "" || u.User != nil || u.Path != "" || u.RawQuery != "" {
		return nil, usage(fmt.Errorf("OPENDSEC_ADDR %q: want https://host:port", addr))
	}
	if strings.ContainsFunc(token, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, usage(errors.New("OPENDSEC_TOKEN has a space or another character that no token has; copy it anew"))
	}
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if file := a.Env("OPENDSEC_CA"); file != "" {
		pem, err := os.ReadFile(file)
		if err != nil {
			return nil, usage(fmt.Errorf("OPENDSEC_CA: %w", err))
		}
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(pem) {
			return nil, usage(fmt.Errorf("OPENDSEC_CA %s holds no certificate in PEM form", file))
		}
	}
	c := daemon.Client(conf)
	opts := []connect.ClientOption{connect.WithInterceptors(bearer(token))}
	a.api = &api{
		addr: addr, http: c, token: token,
		sandboxes: opendsecv1connect.NewSandboxServiceClient(c, addr, opts...),
		images:    opendsecv1connect.NewImageServiceClient(c, addr, opts...),
		cluster:   opendsecv1connect.NewClusterServiceClient(c, addr, opts...),
		identity:  opendsecv1connect.NewIdentityServiceClient(c, addr, opts...),
	}
	return a.api, nil
}

// with makes a command's RunE of a function that needs the server.
func (a *App) with(f func(*cobra.Command, *api, []string) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, args []string) error {
		p, err := a.connect()
		if err != nil {
			return err
		}
		return f(c, p, args)
	}
}

// process returns the client of a sandbox's processes.
func (p *api) process(id string) processconnect.ProcessClient {
	return processconnect.NewProcessClient(p.http, p.addr+"/sandboxes/"+url.PathEscape(id), connect.WithInterceptors(bearer(p.token)))
}

// agent returns the client of a sandbox's agent.
func (p *api) agent(id string) agentv1connect.AgentClient {
	return agentv1connect.NewAgentClient(p.http, p.addr+"/sandboxes/"+url.PathEscape(id), connect.WithInterceptors(bearer(p.token)))
}

// projectFlag registers the flag that names a command's project.
func projectFlag(c *cobra.Command, project *string) {
	c.Flags().StringVarP(project, "project", "p", "", "project; OPENDSEC_PROJECT unless given")
}

// project returns the project that a command works in.
func (a *App) project(flag string) (string, error) {
	if flag != "" {
		return flag, nil
	}
	if p := a.Env("OPENDSEC_PROJECT"); p != "" {
		return p, nil
	}
	return "", usage(fmt.Errorf("no project: give --project or set OPENDSEC_PROJECT"))
}

// bearer adds a token to every call.
type bearer string

func (b bearer) WrapUnary(next connect.UnaryFunc) connect.UnaryFunc {
	return func(ctx context.Context, req connect.AnyRequest) (connect.AnyResponse, error) {
		req.Header().Set("Authorization", "Bearer "+string(b))
		res, err := next(ctx, req)
		return res, fault.FromConnect(err)
	}
}

func (b bearer) WrapStreamingClient(next connect.StreamingClientFunc) connect.StreamingClientFunc {
	return func(ctx context.Context, spec connect.Spec) connect.StreamingClientConn {
		conn := next(ctx, spec)
		conn.RequestHeader().Set("Authorization", "Bearer "+string(b))
		return conn
	}
}

func (b bearer) WrapStreamingHandler(next connect.StreamingHandlerFunc) connect.StreamingHandlerFunc {
	return next
}
