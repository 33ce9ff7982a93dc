package program

import (
	"context"
	"errors"
	"log/slog"

	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/iam"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/store"
)

// IAM is the configuration file of opendsec-iam.
type IAM struct {
	Base
	// Listen is where components reach it, "host:port".
	Listen string `json:"listen"`
	// Database is "sqlite:PATH" or "postgres://…".
	Database string `json:"database"`
	iam.Config
}

// Component returns "iam".
func (c *IAM) Component() string { return mtls.RoleIAM }

// Validate reports all faults of the file.
func (c *IAM) Validate() error {
	return errors.Join(append(append(c.faults(), listenFaults(c.Listen)...), c.Config.Validate())...)
}

// Run serves until the context ends.
func (c *IAM) Run(ctx context.Context, log *slog.Logger) error {
	db, err := store.Open(ctx, c.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	id, ln, err := open(c.PKI, mtls.RoleIAM, c.Listen)
	if err != nil {
		return err
	}
	handler := iam.New(c.Config, db, log).Handler()
	log.Info("serving", "address", ln.Addr())
	return daemon.Serve(ctx, daemon.Server{Listener: ln, TLS: id.ServerConfig(), Handler: handler, Log: log})
}
