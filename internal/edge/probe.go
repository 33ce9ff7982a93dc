package edge

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/edge/host"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// probe is what a trial run of a backend came to.
type probe struct {
	Features backend.Features `json:"features"`
	Reason   string           `json:"reason,omitempty"` // why it does not work; "" when it does
}

// probes is what the backends can do here. A trial costs up to seconds, so
// what worked is remembered until the machine boots again or the program
// changes; it is tried again behind the back of the first calls. What did not
// work is tried before the first call: somebody may have repaired it.
type probes struct {
	mu    sync.Mutex // guards known
	known map[sandbox.Backend]probe
	stale bool // some of known come from an earlier run; set before the edge is ready
}

// first fills in what the edge must know before it answers.
func (p *probes) first(ctx context.Context, e *Edge) error {
	kept := e.loadProbes()
	var todo []backend.Backend
	for _, b := range e.deps.Backends {
		if old, ok := kept[b.Name()]; ok && old.Reason == "" {
			p.set(b.Name(), old)
			p.stale = true
		} else {
			todo = append(todo, b)
		}
	}
	p.try(ctx, e, todo)
	return ctx.Err()
}

// refresh tries again what first took from an earlier run.
func (p *probes) refresh(ctx context.Context, e *Edge) {
	if p.stale {
		p.try(ctx, e, e.deps.Backends)
	}
	if ctx.Err() == nil {
		e.saveProbes(p.all())
	}
}

// try runs the backends side by side and notes what came of it.
func (p *probes) try(ctx context.Context, e *Edge, backends []backend.Backend) {
	var wg sync.WaitGroup
	for _, b := range backends {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, time.Duration(e.cfg.ProbeTimeout))
			defer cancel()
			begin := time.Now()
			features, err := b.Probe(ctx)
			if context.Cause(e.run) != nil {
				return // the edge stops; this says nothing of the backend
			}
			result := probe{Features: features}
			if err != nil {
				result.Reason = err.Error()
			}
			p.set(b.Name(), result)
			e.log.Info("tried a backend", "backend", b.Name(), "works", err == nil, "reason", result.Reason, "took", time.Since(begin))
		})
	}
	wg.Wait()
}

func (p *probes) set(name sandbox.Backend, result probe) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.known[name] = result
}

func (p *probes) all() map[sandbox.Backend]probe {
	p.mu.Lock()
	defer p.mu.Unlock()
	all := make(map[sandbox.Backend]probe, len(p.known))
	for name, result := range p.known {
		all[name] = result
	}
	return all
}

// able lists the backends that work and can do something, strongest first.
func (p *probes) able(can func(backend.Features) bool) []sandbox.Backend {
	p.mu.Lock()
	defer p.mu.Unlock()
	var able []sandbox.Backend
	for _, name := range sandbox.Backends {
		if result, ok := p.known[name]; ok && result.Reason == "" && can(result.Features) {
			able = append(able, name)
		}
	}
	return able
}

// choose returns the backend to take for the one that was asked for.
func (p *probes) choose(want sandbox.Backend) (sandbox.Backend, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var able []sandbox.Backend
	for _, name := range sandbox.Backends {
		if result, ok := p.known[name]; ok && result.Reason == "" && name != sandbox.Sim {
			able = append(able, name)
		}
	}
	refuse := func(format string, args ...any) error {
		f := fault.New(fault.Unsupported, format, args...)
		f.Field, f.Backends = "spec.backend", able
		return f
	}
	if want == sandbox.Auto || want == "" {
		if len(able) == 0 {
			return "", refuse("this node can run no backend; opendsecctl status says why")
		}
		return able[0], nil
	}
	result, ok := p.known[want]
	switch {
	case !ok:
		return "", refuse("this node has no backend %q; it has %v", want, able)
	case result.Reason != "":
		return "", refuse("this node cannot run the backend %q: %s; it can run %v", want, result.Reason, able)
	}
	return want, nil
}

// available lists the backends that work, as far as tried.
func (e *Edge) available() []sandbox.Backend {
	all := e.probes.all()
	var names []sandbox.Backend
	for _, name := range sandbox.Backends {
		if result, ok := all[name]; ok && result.Reason == "" {
			names = append(names, name)
		}
	}
	return names
}

// probeFile is what is remembered of the trials.
type probeFile struct {
	Boot    string                    `json:"boot"`
	Version string                    `json:"version"`
	Program string                    `json:"program"` // size and time of the program's file: a version may be "devel"
	Results map[sandbox.Backend]probe `json:"results"`
}

func (e *Edge) probePath() string { return filepath.Join(e.cfg.StateDir, "probes.json") }

func thisProgram() string {
	path, err := os.Executable()
	if err != nil {
		return ""
	}
	st, err := os.Stat(path)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%d %d", st.Size(), st.ModTime().UnixNano())
}

// loadProbes returns what still holds of an earlier run, nil for nothing.
func (e *Edge) loadProbes() map[sandbox.Backend]probe {
	data, err := os.ReadFile(e.probePath())
	if err != nil {
		return nil // never tried
	}
	var f probeFile
	boot, berr := host.BootID()
	if json.Unmarshal(data, &f) != nil || berr != nil || f.Boot != boot || f.Version != daemon.Version || f.Program != thisProgram() {
		return nil
	}
	return f.Results
}

func (e *Edge) saveProbes(results map[sandbox.Backend]probe) {
	boot, err := host.BootID()
	if err != nil {
		return // then they are simply tried again
	}
	data, err := json.Marshal(probeFile{Boot: boot, Version: daemon.Version, Program: thisProgram(), Results: results})
	if err == nil {
		temp := e.probePath() + ".new"
		if err = os.WriteFile(temp, data, 0o600); err == nil {
			err = os.Rename(temp, e.probePath())
		}
	}
	if err != nil {
		e.log.Warn("cannot remember which backends work; they are tried again at the next start", "error", err)
	}
}
