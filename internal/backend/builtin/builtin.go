// Package builtin lists the backends that exist, in one switch, and opens
// them. It decides nothing: which of them a node can run is found by Probe.
package builtin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"

	"github.com/kernflux/opendsec/internal/ahead"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/backend/container"
	"github.com/kernflux/opendsec/internal/backend/gvisor"
	"github.com/kernflux/opendsec/internal/backend/sim"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Options say where and with what the backends work.
type Options struct {
	Log *slog.Logger
	// StateDir is the edge's state directory, absolute.
	StateDir string
	// Prefix begins the names of what is on the host; see backend.Prefix.
	Prefix string
	// Agent is what a trial run starts.
	Agent backend.Agent
	// SentryPath is the binary that runs gVisor's kernel, absolute.
	SentryPath string
	// Slots gives network to machines that are made ahead.
	Slots *netslot.Pool
	// Load is what nothing is made ahead beside; nil is none.
	Load *ahead.Load
	// ReadyMachines is how many machines of each kind are made ahead, 4 when zero.
	ReadyMachines int
	// Sim says how simulated machines behave; zero is well.
	Sim sim.Behavior
}

// Open returns all backends, strongest isolation first. One that cannot be
// opened on this machine is in the list too: its Probe says why.
func Open(o Options) ([]backend.Backend, error) {
	if o.Log == nil || o.Prefix == "" || !filepath.IsAbs(o.StateDir) {
		return nil, fmt.Errorf("open the backends: want a log, a prefix and an absolute state directory, got prefix %q and directory %q", o.Prefix, o.StateDir)
	}
	if o.ReadyMachines == 0 {
		o.ReadyMachines = 4
	}
	var all []backend.Backend
	for _, name := range sandbox.Backends {
		b, err := open(name, o)
		if err != nil {
			b = unable{name, err}
		}
		all = append(all, b)
	}
	return all, nil
}

func open(name sandbox.Backend, o Options) (backend.Backend, error) {
	log := o.Log.With("backend", string(name))
	switch name {
	case sandbox.Container:
		return container.Open(container.Options{
			Log: log, StateDir: o.StateDir, Prefix: o.Prefix, Agent: o.Agent, Slots: o.Slots,
			Ready: o.ReadyMachines, ReadyDisks: o.ReadyMachines, Load: o.Load,
		})
	case sandbox.GVisor:
		return gvisor.New(gvisor.Options{
			Log: log, StateDir: filepath.Join(o.StateDir, "gvisor"), Prefix: o.Prefix,
			SentryPath: o.SentryPath, Slots: o.Slots, Pool: o.ReadyMachines, Load: o.Load,
		})
	case sandbox.Sim:
		return sim.Open(log, o.Sim), nil
	}
	return nil, fmt.Errorf("there is no backend %q", name)
}

// unable stands for a backend that could not be opened.
type unable struct {
	name   sandbox.Backend
	reason error
}

func (u unable) Name() sandbox.Backend { return u.name }

func (u unable) Probe(context.Context) (backend.Features, error) {
	return backend.Features{}, u.reason
}

func (u unable) Create(context.Context, backend.Config) (backend.Instance, error) {
	return nil, u.reason
}

// Recover does not say that a machine is gone: nobody can know.
func (u unable) Recover(_ context.Context, h backend.Handle) (backend.Instance, error) {
	return nil, errors.Join(fmt.Errorf("find a machine of backend %s again", h.Backend), u.reason)
}

func (u unable) Close() error { return nil }
