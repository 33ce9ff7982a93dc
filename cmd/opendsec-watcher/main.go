// Opendsec-watcher keeps the records true to what the nodes say. One runs per
// cluster; it serves nothing and keeps no state of its own.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"time"

	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/store"
	"github.com/kernflux/opendsec/internal/watcher"
)

// config is the configuration file.
type config struct {
	CertDir   string          `json:"cert_dir"`   // ca.pem and watcher.pem
	Database  string          `json:"database"`   // "sqlite:PATH" or "postgres://…"
	Nodes     []watcher.Node  `json:"nodes"`      // the machines of the cluster
	LostAfter daemon.Duration `json:"lost_after"` // silence after which a node's sandboxes are lost; 0 means 5m
	KeepEnded daemon.Duration `json:"keep_ended"` // how long records of ended sandboxes stay; 0 means 24h
	LogLevel  string          `json:"log_level"`  // "debug", "info", "warn" or "error"
}

func (c *config) Validate() error {
	var faults []error
	for field, value := range map[string]string{"cert_dir": c.CertDir, "database": c.Database} {
		if value == "" {
			faults = append(faults, fmt.Errorf("%s: is missing", field))
		}
	}
	return errors.Join(append(faults, c.watcher().Validate())...)
}

func (c *config) watcher() watcher.Config {
	return watcher.Config{Nodes: c.Nodes, LostAfter: time.Duration(c.LostAfter), KeepEnded: time.Duration(c.KeepEnded)}
}

func main() {
	path := flag.String("config", "/etc/opendsec/watcher.json", "configuration file")
	flag.Parse()
	ctx, stop := daemon.Context()
	defer stop()
	if err := run(ctx, *path); err != nil {
		fmt.Fprintln(os.Stderr, "opendsec-watcher:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, path string) error {
	var cfg config
	if err := daemon.LoadConfig(path, &cfg); err != nil {
		return err
	}
	log, err := daemon.Logger(os.Stderr, "watcher", cfg.LogLevel)
	if err != nil {
		return err
	}
	// Who we are comes first: without it no node would report to us.
	id, err := mtls.Load(cfg.CertDir, mtls.RoleWatcher)
	if err != nil {
		return err
	}
	db, err := store.Open(ctx, cfg.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	edge := daemon.Client(id.ClientConfig(mtls.RoleEdge))
	defer edge.CloseIdleConnections()
	log.Info("watching", "nodes", len(cfg.Nodes), "version", daemon.Version)
	return watcher.New(cfg.watcher(), watcher.Deps{DB: db, Edge: edge, Log: log}).Run(ctx)
}
