// Package runwatcher runs opendsec-watcher: its configuration file, and what it
// opens, starts and ends in reverse.
package runwatcher

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/program"
	"github.com/kernflux/opendsec/internal/store"
	"github.com/kernflux/opendsec/internal/watcher"
)

// Server is the configuration file of opendsec-watcher.
type Server struct {
	program.Base
	// Database is "sqlite:PATH" or "postgres://…".
	Database string `json:"database"`
	// Nodes are the machines of the cluster.
	Nodes []watcher.Node `json:"nodes"`
	// LostAfter is how long a node may be silent before its sandboxes count as
	// lost; "" means 5m.
	LostAfter daemon.Duration `json:"lost_after,omitempty"`
	// KeepEnded is how long ended sandboxes can be looked up; "" means 24h.
	KeepEnded daemon.Duration `json:"keep_ended,omitempty"`
}

// Component returns "watcher".
func (c *Server) Component() string { return mtls.RoleWatcher }

// Validate reports all faults of the file.
func (c *Server) Validate() error {
	faults := append(c.Faults(), c.config().Validate())
	if len(c.Nodes) == 0 {
		faults = append(faults, errors.New("nodes: name at least one"))
	}
	return errors.Join(faults...)
}

func (c *Server) config() watcher.Config {
	return watcher.Config{Nodes: c.Nodes, LostAfter: time.Duration(c.LostAfter), KeepEnded: time.Duration(c.KeepEnded)}
}

// Run watches until the context ends.
func (c *Server) Run(ctx context.Context, log *slog.Logger) error {
	db, err := store.Open(ctx, c.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	id, err := mtls.Load(c.PKI, mtls.RoleWatcher)
	if err != nil {
		return err
	}
	toEdge := daemon.Client(id.ClientConfig(mtls.RoleEdge))
	defer toEdge.CloseIdleConnections()
	return watcher.New(c.config(), watcher.Deps{DB: db, Edge: toEdge, Log: log}).Run(ctx)
}
