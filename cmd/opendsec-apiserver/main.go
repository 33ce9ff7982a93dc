// Opendsec-apiserver serves the public API: it admits, places and records
// sandboxes, and passes bytes on to the nodes. It keeps no state of its own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"time"

	"github.com/kernflux/opendsec/internal/apiserver"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/store"
)

// config is the configuration file.
type config struct {
	Listen        string          `json:"listen"`         // address of the public port, such as ":7443"
	CertDir       string          `json:"cert_dir"`       // ca.pem and apiserver.pem
	Database      string          `json:"database"`       // "sqlite:PATH" or "postgres://…"
	IAM           string          `json:"iam"`            // where iam listens, "host:port"
	CPUOvercommit float64         `json:"cpu_overcommit"` // as the edges have it; 0 means 8
	StopTimeout   daemon.Duration `json:"stop_timeout"`   // for a node to end a sandbox; 0 means 20s
	LogLevel      string          `json:"log_level"`      // "debug", "info", "warn" or "error"
}

func (c *config) Validate() error {
	var faults []error
	for field, value := range map[string]string{"listen": c.Listen, "cert_dir": c.CertDir, "database": c.Database} {
		if value == "" {
			faults = append(faults, fmt.Errorf("%s: is missing", field))
		}
	}
	return errors.Join(append(faults, c.api().Validate())...)
}

func (c *config) api() apiserver.Config {
	return apiserver.Config{
		IAMAddress: c.IAM, CPUOvercommit: c.CPUOvercommit, StopTimeout: time.Duration(c.StopTimeout), Version: daemon.Version,
	}
}

func main() {
	path := flag.String("config", "/etc/opendsec/apiserver.json", "configuration file")
	flag.Parse()
	ctx, stop := daemon.Context()
	defer stop()
	if err := run(ctx, *path); err != nil {
		fmt.Fprintln(os.Stderr, "opendsec-apiserver:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, path string) error {
	var cfg config
	if err := daemon.LoadConfig(path, &cfg); err != nil {
		return err
	}
	log, err := daemon.Logger(os.Stderr, "apiserver", cfg.LogLevel)
	if err != nil {
		return err
	}
	// Who we are comes first: without it nobody would talk to us.
	id, err := mtls.Load(cfg.CertDir, mtls.RoleAPIServer)
	if err != nil {
		return err
	}
	db, err := store.Open(ctx, cfg.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	iam, edge := daemon.Client(id.ClientConfig(mtls.RoleIAM)), daemon.Client(id.ClientConfig(mtls.RoleEdge))
	defer iam.CloseIdleConnections()
	defer edge.CloseIdleConnections()
	api := apiserver.New(cfg.api(), apiserver.Deps{DB: db, IAM: iam, Edge: edge, Log: log})
	listener, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return fmt.Errorf("open the public port: %w", err)
	}
	log.Info("serving", "address", listener.Addr().String(), "version", daemon.Version)
	return daemon.Serve(ctx, daemon.Server{Listener: listener, TLS: id.PublicConfig(), Handler: api.Handler(), Log: log})
}
