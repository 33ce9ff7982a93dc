// Opendsec-iam keeps who may do what: projects, callers, tokens, quotas. Only
// components reach it; people do through the API.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"

	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/iam"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/store"
)

// config is the configuration file.
type config struct {
	Listen   string     `json:"listen"`   // address for components, such as ":7444"
	CertDir  string     `json:"cert_dir"` // ca.pem and iam.pem
	Database string     `json:"database"` // "sqlite:PATH" or "postgres://…"
	IAM      iam.Config `json:"iam"`
	LogLevel string     `json:"log_level"` // "debug", "info", "warn" or "error"
}

func (c *config) Validate() error {
	var faults []error
	for field, value := range map[string]string{"listen": c.Listen, "cert_dir": c.CertDir, "database": c.Database} {
		if value == "" {
			faults = append(faults, fmt.Errorf("%s: is missing", field))
		}
	}
	return errors.Join(append(faults, c.IAM.Validate())...)
}

func main() {
	path := flag.String("config", "/etc/opendsec/iam.json", "configuration file")
	flag.Parse()
	ctx, stop := daemon.Context()
	defer stop()
	if err := run(ctx, *path); err != nil {
		fmt.Fprintln(os.Stderr, "opendsec-iam:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, path string) error {
	var cfg config
	if err := daemon.LoadConfig(path, &cfg); err != nil {
		return err
	}
	log, err := daemon.Logger(os.Stderr, "iam", cfg.LogLevel)
	if err != nil {
		return err
	}
	// Who we are comes first: callers of iam must prove who they are in turn.
	id, err := mtls.Load(cfg.CertDir, mtls.RoleIAM)
	if err != nil {
		return err
	}
	db, err := store.Open(ctx, cfg.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	listener, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return fmt.Errorf("open the port for components: %w", err)
	}
	log.Info("serving", "address", listener.Addr().String(), "version", daemon.Version)
	return daemon.Serve(ctx, daemon.Server{
		Listener: listener, TLS: id.ServerConfig(), Handler: iam.New(cfg.IAM, db, log).Handler(), Log: log,
	})
}
