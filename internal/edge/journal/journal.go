// Package journal keeps what an edge must know of its sandboxes after it was
// killed: one directory per sandbox, with one JSON file that says what is
// meant to be. It makes and ends nothing; it does not know what is true of a
// machine, only what the edge intended and what it needs to find it again.
package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/durable"
	"github.com/kernflux/opendsec/internal/netgate"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Phase is what the edge means a sandbox to be.
type Phase string

// The phases, in the order of a life. Each is written before what it names is
// begun, so a machine that exists is never unknown.
const (
	Creating Phase = "creating" // a machine may exist; nobody was told of it
	Running  Phase = "running"  // its creator was told that it runs
	Paused   Phase = "paused"   // its state is kept and nothing of it runs
	Stopping Phase = "stopping" // it is being removed; End is set
	Ended    Phase = "ended"    // nothing of it is left but this entry
)

// Entry is what is known of one sandbox.
type Entry struct {
	ID          sandbox.ID      `json:"id"`
	Project     sandbox.Project `json:"project"`
	Spec        sandbox.Spec    `json:"spec"` // Backend is the one chosen
	ImageDigest string          `json:"image_digest"`
	Phase       Phase           `json:"phase"`
	Handle      *backend.Handle `json:"handle,omitempty"`
	Slot        *backend.Slot   `json:"slot,omitempty"`
	AgentToken  string          `json:"agent_token,omitempty"`
	Agent       string          `json:"agent,omitempty"` // ID of the agent that its machine has
	CreatedAt   time.Time       `json:"created_at"`
	StartedAt   time.Time       `json:"started_at,omitzero"`
	PausedAt    time.Time       `json:"paused_at,omitzero"`   // zero while it is not paused
	PausedFor   time.Duration   `json:"paused_for,omitempty"` // how long it was paused before
	// Saved is the state of a paused sandbox that has no machine; its files are
	// in SavedDir.
	Saved *backend.Snapshot `json:"saved,omitempty"`
	// NetworkRevision counts the changes of Spec.NetworkRules.
	NetworkRevision int64 `json:"network_revision,omitempty"`
	// Pins are what names have led the sandbox to lately.
	Pins []netgate.Pin `json:"pins,omitempty"`
	End  *sandbox.End  `json:"end,omitempty"`
}

// Sync says what an entry must outlive.
type Sync int

// Lazy entries outlive the edge, not the machine. That is enough for all that
// says "there is a machine": when the host goes down there is none any more,
// and an entry that is missing then and one that is found both come to "lost".
// A flush to the disk would be the slowest step of a create.
//
// Durable entries outlive the host: they hold an end that the edge decided by
// itself and has told nobody yet, and which nothing else could tell later.
const (
	Lazy Sync = iota
	Durable
)

const (
	fileName    = "journal.json"
	machineName = "machine"
	savedName   = "saved"
	deniedName  = "denied.json"
	tempPrefix  = "new-"
)

// Journal is the directory with the entries. Its methods may be called side by
// side for different sandboxes; for one, the caller brings an order.
type Journal struct{ dir string }

// Open returns the journal in dir, which it makes if need be.
func Open(dir string) (*Journal, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the journal's directory: %w", err)
	}
	return &Journal{dir: dir}, nil
}

// Root returns the directory with the sandboxes' directories.
func (j *Journal) Root() string { return j.dir }

// Dir returns the directory of a sandbox.
func (j *Journal) Dir(id sandbox.ID) string { return filepath.Join(j.dir, string(id)) }

// MachineDir returns the directory that a sandbox's backend may use.
func (j *Journal) MachineDir(id sandbox.ID) string { return filepath.Join(j.Dir(id), machineName) }

// MakeMachineDir makes a sandbox's empty directory for its backend.
func (j *Journal) MakeMachineDir(id sandbox.ID) (string, error) {
	dir := j.MachineDir(id)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("make the directory of sandbox %s: %w", id, err)
	}
	return dir, nil
}

// RemoveMachineDir removes what a sandbox's backend left in its directory.
func (j *Journal) RemoveMachineDir(id sandbox.ID) error {
	if err := os.RemoveAll(j.MachineDir(id)); err != nil {
		return fmt.Errorf("remove the files of sandbox %s: %w", id, err)
	}
	return nil
}

// SavedDir returns the directory with the state of a paused sandbox.
func (j *Journal) SavedDir(id sandbox.ID) string { return filepath.Join(j.Dir(id), savedName) }

// MakeTemp makes an empty directory for a state of a sandbox that is not whole
// yet, or is wanted for a moment only.
func (j *Journal) MakeTemp(id sandbox.ID) (string, error) {
	dir, err := os.MkdirTemp(j.Dir(id), tempPrefix)
	if err != nil {
		return "", fmt.Errorf("make a directory for the state of sandbox %s: %w", id, err)
	}
	return dir, nil
}

// Keep makes a directory of MakeTemp, whose files are on the disk, the SavedDir.
// It is that for sure once a Durable entry is written: the file system keeps
// the order of changes to one directory.
func (j *Journal) Keep(id sandbox.ID, temp string) error {
	err := os.RemoveAll(j.SavedDir(id)) // of a pause that nobody was told of
	if err == nil {
		err = os.Rename(temp, j.SavedDir(id))
	}
	if err != nil {
		return fmt.Errorf("keep the state of sandbox %s: %w", id, err)
	}
	return nil
}

// Unkeep makes the SavedDir one of MakeTemp again, which the caller removes. One
// that is not there is no error.
func (j *Journal) Unkeep(id sandbox.ID) (temp string, err error) {
	if temp, err = j.MakeTemp(id); err == nil {
		// Not by os.Rename, which refuses a directory that is there.
		if err = unix.Rename(j.SavedDir(id), temp); errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		return "", fmt.Errorf("give up the saved state of sandbox %s: %w", id, err)
	}
	return temp, nil
}

// RemoveTemps removes what MakeTemp made.
func (j *Journal) RemoveTemps(id sandbox.ID) error {
	found, err := filepath.Glob(filepath.Join(j.Dir(id), tempPrefix+"*"))
	for _, dir := range found {
		err = errors.Join(err, os.RemoveAll(dir))
	}
	if err != nil {
		return fmt.Errorf("remove unfinished states of sandbox %s: %w", id, err)
	}
	return nil
}

// RemoveFiles removes what a sandbox has on the disk beside its entry: its
// machine's files, its saved state, and what it was denied.
func (j *Journal) RemoveFiles(id sandbox.ID) error {
	denied := os.RemoveAll(filepath.Join(j.Dir(id), deniedName))
	if err := errors.Join(os.RemoveAll(j.MachineDir(id)), os.RemoveAll(j.SavedDir(id)), denied); err != nil {
		return fmt.Errorf("remove the files of sandbox %s: %w", id, err)
	}
	return nil
}

// Write puts an entry in place of the sandbox's last one, whole or not at all.
func (j *Journal) Write(e *Entry, sync Sync) error {
	err := j.write(e, sync)
	if err != nil {
		return fmt.Errorf("write the journal of sandbox %s: %w", e.ID, err)
	}
	return nil
}

func (j *Journal) write(e *Entry, sync Sync) error {
	dir := j.Dir(e.ID)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return replace(dir, fileName, e, sync)
}

// WriteDenied keeps what a sandbox was denied on the network beside its entry,
// in place of what was kept before. It outlives the edge, as Lazy entries.
func (j *Journal) WriteDenied(id sandbox.ID, d netgate.Denied) error {
	if err := replace(j.Dir(id), deniedName, d, Lazy); err != nil {
		return fmt.Errorf("write what sandbox %s was denied: %w", id, err)
	}
	return nil
}

// ReadDenied returns what WriteDenied kept last, nothing if it did not.
func (j *Journal) ReadDenied(id sandbox.ID) (netgate.Denied, error) {
	var d netgate.Denied
	data, err := os.ReadFile(filepath.Join(j.Dir(id), deniedName))
	if errors.Is(err, fs.ErrNotExist) {
		return d, nil
	}
	if err == nil {
		err = json.Unmarshal(data, &d)
	}
	if err != nil {
		return netgate.Denied{}, fmt.Errorf("read what sandbox %s was denied: %w", id, err)
	}
	return d, nil
}

// replace puts a JSON file in place of one, whole or not at all.
func replace(dir, name string, v any, sync Sync) error {
	data, err := json.Marshal(v)
	if err != nil {
		return err
	}
	temp := filepath.Join(dir, name+".new")
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil && sync == Durable {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(temp, filepath.Join(dir, name))
	}
	if err == nil && sync == Durable {
		err = durable.Path(dir)
	}
	return err
}

// Remove drops a sandbox's entry with all that lies beside it. One that is not
// there is no error.
func (j *Journal) Remove(id sandbox.ID) error {
	if err := os.RemoveAll(j.Dir(id)); err != nil {
		return fmt.Errorf("remove the journal of sandbox %s: %w", id, err)
	}
	return nil
}

// Load reads all entries. Names that are no entry, such as a directory whose
// file never got written before the host went down, come back as strays.
func (j *Journal) Load() (entries []*Entry, strays []string, err error) {
	found, err := os.ReadDir(j.dir)
	if err != nil {
		return nil, nil, fmt.Errorf("read the journal: %w", err)
	}
	for _, d := range found {
		e, err := j.read(d)
		switch {
		case err == nil:
			entries = append(entries, e)
		case errors.Is(err, errStray):
			strays = append(strays, d.Name())
		default:
			return nil, nil, fmt.Errorf("read the journal of %s: %w", d.Name(), err)
		}
	}
	return entries, strays, nil
}

// Names lists what lies in the journal's directory.
func (j *Journal) Names() ([]string, error) {
	found, err := os.ReadDir(j.dir)
	if err != nil {
		return nil, fmt.Errorf("read the journal: %w", err)
	}
	names := make([]string, len(found))
	for i, d := range found {
		names[i] = d.Name()
	}
	return names, nil
}

// RemoveStray removes something that Load or Names found and that is no entry.
func (j *Journal) RemoveStray(name string) error {
	if err := os.RemoveAll(filepath.Join(j.dir, filepath.Base(name))); err != nil {
		return fmt.Errorf("remove %s from the journal: %w", name, err)
	}
	return nil
}

var errStray = errors.New("not an entry")

func (j *Journal) read(d fs.DirEntry) (*Entry, error) {
	id, err := sandbox.ParseID(d.Name())
	if err != nil || !d.IsDir() {
		return nil, errStray
	}
	data, err := os.ReadFile(filepath.Join(j.Dir(id), fileName))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errStray
	}
	if err != nil {
		return nil, err
	}
	var e Entry
	// Only a host that went down leaves a file that cannot be read, and then
	// no machine is left that it could be about.
	if err := json.Unmarshal(data, &e); err != nil || e.ID != id {
		return nil, errStray
	}
	if e.Saved != nil {
		e.Saved.Dir = j.SavedDir(id)
	}
	return &e, nil
}
