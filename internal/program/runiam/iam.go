// Package runiam runs opendsec-iam: its configuration file, and what it opens,
// starts and ends in reverse.
package runiam

import (
	"context"
	"errors"
	"log/slog"

	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/iam"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/program"
	"github.com/kernflux/opendsec/internal/store"
)

// Server is the configuration file of opendsec-iam.
type Server struct {
	program.Base
	// Listen is where components reach it, "host:port".
	Listen string `json:"listen"`
	// Database is "sqlite:PATH" or "postgres://…".
	Database string `json:"database"`
	iam.Config
}

// Component returns "iam".
func (c *Server) Component() string { return mtls.RoleIAM }

// Validate reports all faults of the file.
func (c *Server) Validate() error {
	return errors.Join(append(append(c.Faults(), program.ListenFaults(c.Listen)...), c.Config.Validate())...)
}

// Run serves until the context ends.
func (c *Server) Run(ctx context.Context, log *slog.Logger) error {
	db, err := store.Open(ctx, c.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	id, ln, err := program.Open(c.PKI, mtls.RoleIAM, c.Listen)
	if err != nil {
		return err
	}
	handler := iam.New(c.Config, db, log).Handler()
	log.Info("serving", "address", ln.Addr())
	return daemon.Serve(ctx, daemon.Server{Listener: ln, TLS: id.ServerConfig(), Handler: handler, Log: log})
}
