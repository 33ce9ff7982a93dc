// Package runedge runs opendsec-edge: its configuration file, and what it opens,
// starts and ends in reverse. It is where the backends are opened.
package runedge

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/internal/ahead"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/builtin"
	"github.com/kernflux/opendsec/internal/cgroup"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/edge"
	"github.com/kernflux/opendsec/internal/edge/journal"
	"github.com/kernflux/opendsec/internal/image"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/program"
)

// Server is the configuration file of opendsec-edge.
type Server struct {
	program.Base
	// Listen is where components reach it, "host:port".
	Listen string `json:"listen"`
	// SentryPath is the binary that runs gVisor's kernel.
	SentryPath string `json:"sentry_path"`
	// ReadyMachines is how many machines of each kind are kept ready; 0 means 4. Of
	// what is wanted several at a time there are up to 16 more.
	ReadyMachines int `json:"ready_machines,omitempty"`
	// ReadySlots is how many network slots are kept ready; 0 means 8.
	ReadySlots int `json:"ready_slots,omitempty"`
	// Network says how sandboxes reach out.
	Network Network `json:"network,omitzero"`
	edge.Config
}

// Component returns "edge".
func (c *Server) Component() string { return mtls.RoleEdge }

// Validate reports all faults of the file.
func (c *Server) Validate() error {
	faults := append(append(c.Faults(), program.ListenFaults(c.Listen)...), c.Config.Validate())
	if !filepath.IsAbs(c.SentryPath) {
		faults = append(faults, fmt.Errorf("sentry_path: %q must be the absolute path of opendsec-sentry", c.SentryPath))
	}
	faults = append(faults, c.Network.faults()...)
	if c.ReadyMachines < 0 || c.ReadySlots < 0 {
		faults = append(faults, errors.New("ready_machines, ready_slots: must not be negative"))
	}
	return errors.Join(faults...)
}

// SetPrograms says in which directory the agent and the sentry are.
func (c *Server) SetPrograms(dir string) {
	c.AgentPath, c.SentryPath = filepath.Join(dir, "opendsec-agent"), filepath.Join(dir, "opendsec-sentry")
}

// readySlots returns how many network slots are kept ready.
func (c *Server) readySlots() int { return cmp.Or(c.ReadySlots, 8) }

func (c *Server) images(log *slog.Logger) (*image.Store, error) {
	return image.Open(log, filepath.Join(c.StateDir, "images"))
}

// agent packs the agent. Those of other versions go when no sandbox and no
// snapshot needs them any more.
func (c *Server) agent(ctx context.Context, log *slog.Logger, images *image.Store) (backend.Agent, error) {
	dir := filepath.Join(c.StateDir, "agent")
	agent, err := image.PackAgent(ctx, c.AgentPath, dir)
	if err != nil {
		return agent, err
	}
	ofImages, ierr := images.Agents()
	ofSandboxes, serr := journal.Agents(filepath.Join(c.StateDir, "sandboxes"))
	if err := errors.Join(ierr, serr); err != nil {
		log.Warn("agents of earlier versions are kept, as some may be needed", "error", err)
		return agent, nil
	}
	return agent, image.PruneAgents(dir, slices.Concat([]string{agent.ID}, ofImages, ofSandboxes)...)
}

// Run serves until the context ends. Sandboxes go on.
func (c *Server) Run(ctx context.Context, log *slog.Logger) (err error) {
	id, ln, err := program.Open(c.PKI, mtls.RoleEdge, c.Listen)
	if err != nil {
		return err
	}
	defer ln.Close()
	images, err := c.images(log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, images.Close(false)) }()
	agent, err := c.agent(ctx, log, images)
	if err != nil {
		return err
	}
	prefix := backend.Prefix(c.StateDir)
	gate, err := c.Network.open(log)
	if err != nil {
		return err
	}
	slots := netslot.NewPool(log, prefix, c.readySlots(), furnish(log, gate))
	load := new(ahead.Load)
	slots.YieldTo(load)
	backends, err := builtin.Open(builtin.Options{
		Log: log, Load: load, StateDir: c.StateDir, Prefix: prefix, Agent: agent, SentryPath: c.SentryPath, Slots: slots, ReadyMachines: c.ReadyMachines,
	})
	if err != nil {
		return err
	}
	defer func() {
		for _, b := range backends {
			err = errors.Join(err, b.Close())
		}
	}()
	e := edge.New(c.Config, edge.Deps{Backends: backends, Agent: agent, Images: images, Slots: slots, Gate: gate, Load: load, Log: log})
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return e.Run(ctx) })
	g.Go(func() error {
		return daemon.Serve(ctx, daemon.Server{Listener: ln, TLS: id.ServerConfig(), Handler: e.Handler(), Log: log})
	})
	return g.Wait()
}

// RemoveFromHost removes what the edge keeps on the machine outside its state
// directory. No sandbox and no server may run.
func (c *Server) RemoveFromHost() error {
	dir := c.StateDir
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil // it never ran
	}
	images, err := c.images(slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	err = images.Close(true)
	prefix := backend.Prefix(dir)
	slots, lerr := netslot.List(prefix)
	err = errors.Join(err, lerr)
	for _, name := range slots {
		err = errors.Join(err, netslot.Remove(name))
	}
	return errors.Join(err, cgroup.RemoveParent(prefix))
}
