package gvisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
)

// A sentry's private memory may be mapped by others, its layers. A layer is
// frozen memory of one sentry, the source, which holds it until it is told
// that nobody maps it any more; or it is a file of a snapshot, which lives as
// long as somebody has it open. What a machine maps is recorded in a file
// beside that with its sandbox's ID, before it can map anything, and until its
// process has ended: so a later run knows it too, whatever became of this one.
// The descriptors of a layer need no keeping. Those who map it have it open, and
// give it on when they are forked.

// use is a layer that a sentry may map.
type use struct {
	ID string `json:"id"`
	// Source names the sentry whose memory it is, "" for a snapshot's file.
	Source string `json:"source,omitempty"`
	Inode  uint64 `json:"inode,omitempty"` // of the source's memory
}

// sharesSuffix ends the name of the file with what a sentry maps.
const sharesSuffix = ".layers"

// shares knows which sentries may map which layers.
type shares struct {
	dir string

	mu sync.Mutex
	// uses has what each sentry may map, by its name.
	uses map[string][]use
	// offered are live snapshots, of which machines may be made at any time, by
	// the layer that each froze.
	offered map[string]offer
	// punched has, for sources that have ended, who used their memory when what
	// they did not need was last freed.
	punched map[string][]string
}

// offer is what a machine of a live snapshot maps: files in the order of uses.
// The first is the memory of the snapshot's own machine.
type offer struct {
	uses  []use
	files []*os.File
}

func newShares(dir string) *shares {
	return &shares{dir: dir, uses: map[string][]use{}, offered: map[string]offer{}, punched: map[string][]string{}}
}

func (h *shares) file(sentry string) string { return filepath.Join(h.dir, sentry+sharesSuffix) }

// load reads what an earlier run recorded.
func (h *shares) load(names []string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	var errs []error
	for _, name := range names {
		sentry, ok := strings.CutSuffix(name, sharesSuffix)
		if !ok || h.uses[sentry] != nil {
			continue
		}
		var uses []use
		text, err := os.ReadFile(h.file(sentry))
		if err == nil {
			err = json.Unmarshal(text, &uses)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("read what memory sentry %s shares: %w", sentry, err))
			continue
		}
		h.uses[sentry] = uses
	}
	return errors.Join(errs...)
}

// set records what a sentry maps, before it does.
func (h *shares) set(sentry string, uses []use) error {
	if len(uses) == 0 {
		return h.forget(sentry)
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	text, err := json.Marshal(uses)
	if err == nil {
		// Whole or not at all; what the machine's end or that of the node makes of
		// it does not matter.
		temp := h.file(sentry) + ".new"
		if err = os.WriteFile(temp, text, 0o600); err == nil {
			err = os.Rename(temp, h.file(sentry))
		}
	}
	if err != nil {
		return fmt.Errorf("record what memory sentry %s shares: %w", sentry, err)
	}
	h.uses[sentry] = uses
	return nil
}

// forget says that a sentry maps nothing of others, or has ended.
func (h *shares) forget(sentry string) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.uses[sentry] == nil {
		return nil
	}
	if err := os.Remove(h.file(sentry)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	delete(h.uses, sentry)
	return nil
}

// of returns what a sentry may map.
func (h *shares) of(sentry string) []use {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.uses[sentry])
}

// inUse reports whether anybody may map a layer.
func (h *shares) inUse(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if _, ok := h.offered[id]; ok {
		return true
	}
	is := func(u use) bool { return u.ID == id }
	for _, o := range h.offered {
		if slices.ContainsFunc(o.uses, is) {
			return true
		}
	}
	for _, uses := range h.uses {
		if slices.ContainsFunc(uses, is) {
			return true
		}
	}
	return false
}

// usersOf returns the sentries that may map memory of a source.
func (h *shares) usersOf(source string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var users []string
	for sentry, uses := range h.uses {
		if slices.ContainsFunc(uses, func(u use) bool { return u.Source == source }) {
			users = append(users, sentry)
		}
	}
	return users
}

// offering reports whether a live snapshot that has memory of a source is kept.
func (h *shares) offering(source string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, o := range h.offered {
		if slices.ContainsFunc(o.uses, func(u use) bool { return u.Source == source }) {
			return true
		}
	}
	return false
}

// wasPunched reports whether memory of a source was freed for these users.
func (h *shares) wasPunched(source string, users []string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Equal(h.punched[source], users)
}

// setPunched notes that, and forgets sources that nobody uses any more.
func (h *shares) setPunched(source string, users []string) {
	sources := h.sources()
	h.mu.Lock()
	defer h.mu.Unlock()
	maps.DeleteFunc(h.punched, func(s string, _ []string) bool { return !slices.Contains(sources, s) })
	h.punched[source] = users
}

// sources returns the sentries whose memory others may map.
func (h *shares) sources() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var names []string
	add := func(uses []use) {
		for _, u := range uses {
			if u.Source != "" && !slices.Contains(names, u.Source) {
				names = append(names, u.Source)
			}
		}
	}
	for _, uses := range h.uses {
		add(uses)
	}
	for _, o := range h.offered {
		add(o.uses)
	}
	slices.Sort(names)
	return names
}

// users returns the sentries that may map anything.
func (h *shares) users() []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	var names []string
	for name := range h.uses {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// offer keeps a live snapshot until withdraw.
func (h *shares) offer(o offer) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.offered[o.uses[0].ID] = o
}

// withdraw forgets a live snapshot.
func (h *shares) withdraw(id string) {
	h.mu.Lock()
	o := h.offered[id]
	delete(h.offered, id)
	h.mu.Unlock()
	closeAll(o.files)
}

// take has a sentry map a live snapshot's layers. The files are the sentry's
// own and are to be closed.
func (h *shares) take(id, sentry string) (uses []use, files []*os.File, err error) {
	h.mu.Lock()
	o, ok := h.offered[id]
	if ok {
		for _, f := range o.files {
			again, err := readOnly(f)
			if err != nil {
				h.mu.Unlock()
				closeAll(files)
				return nil, nil, err
			}
			files = append(files, again)
		}
	}
	h.mu.Unlock()
	if !ok {
		return nil, nil, fmt.Errorf("the memory %s of a live snapshot is not kept any more", id)
	}
	// Another withdraw can only come after the end of what this is for.
	if err := h.set(sentry, o.uses); err != nil {
		closeAll(files)
		return nil, nil, err
	}
	return o.uses, files, nil
}

// close forgets all live snapshots.
func (h *shares) close() {
	h.mu.Lock()
	offered := h.offered
	h.offered = map[string]offer{}
	h.mu.Unlock()
	for _, o := range offered {
		closeAll(o.files)
	}
}
