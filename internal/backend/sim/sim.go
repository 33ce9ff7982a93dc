// Package sim simulates machines: nothing is isolated and nothing runs. Every
// command ends at once, well and with no output; files are kept; limits but the
// disk's are not enforced. It is for trying out what is built on OpenDsec, at
// any scale and with any fault, on any machine and without root.
//
// A pause stops the time of commands and has callers wait, and a snapshot has
// the files, and with memory the agent's identity and the commands too.
//
// A machine's state is its directory, so a simulated machine is found again
// after a restart like a real one. Its agent is an imitation in this process
// that answers the agent's contract over connections in memory.
package sim

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Behavior says how simulated machines behave. The zero value has no fault and
// takes no time. Shares are from 0 (never) to 1 (always). What happens to a
// machine follows from Seed and its ID alone, so a run can be repeated.
type Behavior struct {
	Seed uint64 `json:"seed,omitempty"`
	// CreateTime is how long a create takes.
	CreateTime time.Duration `json:"create_time,omitempty"`
	// CommandTime is how long each command runs.
	CommandTime time.Duration `json:"command_time,omitempty"`
	// CreateFails is the share of creates that fail, after CreateTime.
	CreateFails float64 `json:"create_fails,omitempty"`
	// SnapshotTime is how long a snapshot takes.
	SnapshotTime time.Duration `json:"snapshot_time,omitempty"`
	// SnapshotFails is the share of machines whose snapshots fail, after SnapshotTime.
	SnapshotFails float64 `json:"snapshot_fails,omitempty"`
	// Dies is the share of machines that end by themselves, at a random moment
	// within DiesWithin of their create.
	Dies       float64       `json:"dies,omitempty"`
	DiesWithin time.Duration `json:"dies_within,omitempty"`
	// OutOfMemory is the share of those that end for their memory limit.
	OutOfMemory float64 `json:"out_of_memory,omitempty"`
	// DialFails is the share of connections that are refused.
	DialFails float64 `json:"dial_fails,omitempty"`
	// Lost is the share of machines that are gone when they are to be recovered.
	Lost float64 `json:"lost,omitempty"`
}

// chance returns the random numbers for one purpose of one machine.
func (b Behavior) chance(id sandbox.ID, purpose string) *rand.Rand {
	h := fnv.New64a()
	h.Write([]byte(string(id) + " " + purpose))
	return rand.New(rand.NewPCG(b.Seed, h.Sum64()))
}

// Backend makes simulated machines.
type Backend struct {
	log      *slog.Logger
	behavior Behavior

	mu   sync.Mutex // guards live
	live map[sandbox.ID]*machine
}

var (
	_ backend.Backend  = (*Backend)(nil)
	_ backend.Restorer = (*Backend)(nil)
)

// Open returns the backend. It makes nothing outside the sandboxes' state
// directories, so it has no audit.
func Open(log *slog.Logger, behavior Behavior) *Backend {
	return &Backend{log: log, behavior: behavior, live: map[sandbox.ID]*machine{}}
}

// Name returns sandbox.Sim.
func (b *Backend) Name() sandbox.Backend { return sandbox.Sim }

// Probe finds that a simulation works everywhere, and can simulate all.
func (b *Backend) Probe(ctx context.Context) (backend.Features, error) {
	return backend.Features{Pause: true, SnapshotMemory: true, SnapshotFiles: true}, ctx.Err()
}

// Close stops to answer for the machines, which can be recovered.
func (b *Backend) Close() error {
	b.mu.Lock()
	live := b.live
	b.live = map[sandbox.ID]*machine{}
	b.mu.Unlock()
	for _, m := range live {
		m.abandon()
	}
	return nil
}

// record is what is in a Handle.
type record struct {
	ID       sandbox.ID     `json:"id"`
	StateDir string         `json:"state_dir"`
	Limits   sandbox.Limits `json:"limits"`
	Agent    string         `json:"agent"` // Agent.ID of the Config; nothing of it runs
	Created  time.Time      `json:"created"`
}

// Names in a machine's state directory.
const (
	stateFile = "sim.json" // as long as it is there, the machine lives
	filesDir  = "files"    // the root of its file system
)

// state is what the imitation of the agent keeps over a restart.
type state struct {
	Token   string `json:"token"` // "" before the first Hello
	User    string `json:"user"`
	Workdir string `json:"workdir"`
	Paused  bool   `json:"paused,omitempty"`
}

// Create makes a machine.
func (b *Backend) Create(ctx context.Context, cfg backend.Config) (_ backend.Instance, err error) {
	select {
	case <-time.After(b.behavior.CreateTime):
	case <-ctx.Done():
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("create simulated machine %s: %w", cfg.ID, err)
	}
	if b.behavior.chance(cfg.ID, "create").Float64() < b.behavior.CreateFails {
		return nil, fmt.Errorf("create simulated machine %s: it is one of the %v that fail", cfg.ID, b.behavior.CreateFails)
	}
	r := record{ID: cfg.ID, StateDir: cfg.StateDir, Limits: cfg.Limits, Agent: cfg.Agent.ID, Created: time.Now()}
	var mem memory
	if cfg.From == nil {
		err = furnish(r)
	} else {
		mem, err = unpackSnapshot(ctx, *cfg.From, r)
	}
	if err == nil {
		err = writeState(r.StateDir, mem.State)
	}
	var m *machine
	if err == nil {
		m, err = b.start(r, mem)
	}
	if err != nil {
		return nil, fmt.Errorf("create simulated machine %s: %w", cfg.ID, errors.Join(err, remove(r)))
	}
	return m, nil
}

// furnish makes the file system of a fresh machine.
func furnish(r record) error {
	for _, dir := range []string{".", "root", "tmp"} {
		if err := os.Mkdir(filepath.Join(r.StateDir, filesDir, dir), 0o755); err != nil {
			return err
		}
	}
	return nil
}

// Recover finds a machine again.
func (b *Backend) Recover(_ context.Context, h backend.Handle) (backend.Instance, error) {
	var r record
	if err := json.Unmarshal(h.Data, &r); err != nil {
		return nil, fmt.Errorf("recover a simulated machine: read its handle: %w", err)
	}
	if _, err := sandbox.ParseID(string(r.ID)); err != nil || h.Backend != sandbox.Sim || !filepath.IsAbs(r.StateDir) {
		return nil, fmt.Errorf("recover a simulated machine: %s is not a handle of one", h.Data)
	}
	var m *machine
	err := backend.ErrGone
	if b.behavior.chance(r.ID, "recover").Float64() >= b.behavior.Lost {
		m, err = b.start(r, memory{})
	}
	if errors.Is(err, backend.ErrGone) {
		err = errors.Join(err, remove(r))
	}
	if err != nil {
		return nil, fmt.Errorf("recover simulated machine %s: %w", r.ID, err)
	}
	return m, nil
}

// start begins to answer for a machine whose state directory is complete, and
// which has the commands of mem.
func (b *Backend) start(r record, mem memory) (*machine, error) {
	data, err := json.Marshal(r)
	if err != nil {
		return nil, err
	}
	agent, err := newAgent(r, b.behavior.CommandTime)
	if err != nil {
		return nil, err
	}
	m := &machine{
		backend: b, record: r, agent: agent, handle: backend.Handle{Backend: sandbox.Sim, Data: data},
		dialling: b.behavior.chance(r.ID, "dial"), done: make(chan struct{}),
	}
	if m.paused = agent.now().Paused; m.paused {
		m.stop()
	}
	if err := agent.table.load(mem.Commands); err != nil {
		agent.close()
		return nil, err
	}
	m.serve()
	b.mu.Lock()
	b.live[r.ID] = m
	b.mu.Unlock()
	fate := b.behavior.chance(r.ID, "fate")
	if fate.Float64() < b.behavior.Dies {
		oom := fate.Float64() < b.behavior.OutOfMemory
		moment := r.Created.Add(time.Duration(fate.Float64() * float64(b.behavior.DiesWithin)))
		m.mu.Lock()
		m.fate = time.AfterFunc(time.Until(moment), func() { m.die(oom) })
		m.mu.Unlock()
	}
	return m, nil
}

func (b *Backend) forget(m *machine) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.live[m.record.ID] == m {
		delete(b.live, m.record.ID)
	}
}

func readState(dir string) (state, error) {
	var s state
	data, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, fs.ErrNotExist) {
		return s, backend.ErrGone
	}
	if err != nil {
		return s, err
	}
	if err := json.Unmarshal(data, &s); err != nil {
		return s, fmt.Errorf("read %s: %w", stateFile, err)
	}
	return s, nil
}

// writeState replaces the state at once, so that no reader sees a part of it.
func writeState(dir string, s state) error {
	data, err := json.Marshal(s)
	if err != nil {
		return err
	}
	temp := filepath.Join(dir, stateFile+".new")
	if err := os.WriteFile(temp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(temp, filepath.Join(dir, stateFile))
}

// remove removes what a machine has. It may be repeated.
func remove(r record) error {
	var errs []error
	for _, name := range []string{stateFile, stateFile + ".new", filesDir} {
		errs = append(errs, os.RemoveAll(filepath.Join(r.StateDir, name)))
	}
	return errors.Join(errs...)
}
