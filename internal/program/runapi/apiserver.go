// Package runapi runs opendsec-apiserver: its configuration file, and what it
// opens, starts and ends in reverse.
package runapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"

	"github.com/kernflux/opendsec/internal/apiserver"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/ingress"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/program"
	"github.com/kernflux/opendsec/internal/store"
)

// Server is the configuration file of opendsec-apiserver.
type Server struct {
	program.Base
	// Listen is where callers reach it, "host:port".
	Listen string `json:"listen"`
	// Database is "sqlite:PATH" or "postgres://…".
	Database string `json:"database"`
	// IAM is where iam listens, "host:port".
	IAM string `json:"iam"`
	// CPUOvercommit is that of the edges; 0 means 8.
	CPUOvercommit float64 `json:"cpu_overcommit,omitempty"`
	// Domain is below which servers in sandboxes have names of their own, all of
	// which lead here; "" for none.
	Domain string `json:"domain,omitempty"`
}

// Component returns "apiserver".
func (c *Server) Component() string { return mtls.RoleAPIServer }

// Validate reports all faults of the file.
func (c *Server) Validate() error {
	faults := append(c.Faults(), program.ListenFaults(c.Listen)...)
	if _, _, err := net.SplitHostPort(c.IAM); err != nil {
		faults = append(faults, fmt.Errorf("iam: want host:port, not %q", c.IAM))
	}
	if c.CPUOvercommit < 0 {
		faults = append(faults, fmt.Errorf("cpu_overcommit: %v must not be negative", c.CPUOvercommit))
	}
	if err := ingress.CheckDomain(c.Domain); err != nil {
		faults = append(faults, err)
	}
	return errors.Join(faults...)
}

// Run serves until the context ends.
func (c *Server) Run(ctx context.Context, log *slog.Logger) error {
	db, err := store.Open(ctx, c.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	id, ln, err := program.Open(c.PKI, mtls.RoleAPIServer, c.Listen)
	if err != nil {
		return err
	}
	toIAM, toEdge := daemon.Client(id.ClientConfig(mtls.RoleIAM)), daemon.Client(id.ClientConfig(mtls.RoleEdge))
	defer toIAM.CloseIdleConnections()
	defer toEdge.CloseIdleConnections()
	server := apiserver.New(
		apiserver.Config{IAMAddress: c.IAM, CPUOvercommit: c.CPUOvercommit, Domain: c.Domain, Version: daemon.Version},
		apiserver.Deps{DB: db, IAM: toIAM, Edge: toEdge, Log: log})
	log.Info("serving", "address", ln.Addr())
	return daemon.Serve(ctx, daemon.Server{Listener: ln, TLS: id.PublicConfig(), Handler: server.Handler(), Log: log})
}
