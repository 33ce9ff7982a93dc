package gvisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// What is done for layers in the background: memory that nobody maps any more
// is given back to its source, or to the host where the source has ended, and
// a machine with many layers gets memory of its own.

const (
	// tendEvery is how often layers are looked at without a reason.
	tendEvery = time.Minute
	// maxDepth is how many layers a machine may have for long. Each costs a
	// descriptor, and may keep memory that nobody needs.
	maxDepth = 8
	// detachStep is how many bytes a machine copies at once, for which it stands
	// still some tens of milliseconds; detachRest is the time between.
	detachStep = 16 << 20
	detachRest = 100 * time.Millisecond
)

// tend runs until stop is closed, and looks after layers each time it is poked.
func (b *Backend) tend(stop <-chan struct{}) {
	tick := time.NewTicker(tendEvery)
	defer tick.Stop()
	for {
		b.tendOnce(stop)
		select {
		case <-stop:
			return
		case <-tick.C:
		case <-b.tending:
		}
	}
}

// poke has layers looked after soon.
func (b *Backend) poke() {
	select {
	case b.tending <- struct{}{}:
	default:
	}
}

func (b *Backend) tendOnce(stop <-chan struct{}) {
	b.forgetEnded()
	b.mu.Lock()
	held := make([]*sentry, 0, len(b.held))
	for _, s := range b.held {
		held = append(held, s)
	}
	b.mu.Unlock()
	for _, s := range held {
		if !s.layered() || s.over() {
			continue
		}
		if err := b.thawUnused(s); err != nil && !s.over() {
			b.log.Warn("cannot give memory back that nobody shares any more; it is tried again", "sentry", s.Name, "error", err)
		}
		if err := b.flatten(s, stop); err != nil && !s.over() {
			b.log.Warn("cannot give a machine memory of its own; it is tried again", "sentry", s.Name, "error", err)
		}
	}
	for _, source := range b.shares.sources() {
		if err := b.punch(source, held); err != nil {
			b.log.Warn("cannot free memory of a machine that ended", "sentry", source, "error", err)
		}
	}
}

// forgetEnded forgets what sentries map that this run does not know and that
// have ended.
func (b *Backend) forgetEnded() {
	for _, name := range b.shares.users() {
		b.mu.Lock()
		_, known := b.live[name]
		b.mu.Unlock()
		if known {
			continue // discard forgets it
		}
		runs, err := sentryRuns(name)
		if err == nil && !runs {
			err = b.shares.forget(name)
		}
		if err != nil {
			b.log.Warn("cannot tell whether a machine still shares memory", "sentry", name, "error", err)
		}
	}
}

// sentryRuns reports whether a sentry of this name runs.
func sentryRuns(name string) (bool, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return false, err
	}
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			if is, ok := sentryName(pid); ok && is == name {
				return true, nil
			}
		}
	}
	return false, nil
}

// over reports whether a sentry has ended or is about to.
func (s *sentry) over() bool { return s.ending.Load() || s.exited() }

// thawUnused has a sentry drop frozen memory that nobody can map any more.
func (b *Backend) thawUnused(s *sentry) error {
	s.freezing.Lock() // none is being frozen that has no user yet
	defer s.freezing.Unlock()
	if len(s.frozen) == 0 {
		return nil
	}
	var errs []error
	for _, id := range slices.Clone(s.frozen) {
		if b.shares.inUse(id) {
			continue
		}
		if err := s.thaw(id); err != nil {
			errs = append(errs, err)
			continue
		}
		s.thawed(id)
	}
	b.resize(s)
	return errors.Join(errs...)
}

// flatten records which layers a machine maps yet, and if they are many has it
// copy what it needs of them.
func (b *Backend) flatten(s *sentry, stop <-chan struct{}) error {
	uses := b.shares.of(s.Name)
	if len(uses) == 0 || s.making.Load() {
		return nil
	}
	st, err := s.layerStat()
	if err != nil {
		return err
	}
	mapped := slices.DeleteFunc(slices.Clone(uses), func(u use) bool {
		return !slices.ContainsFunc(st.Layers, func(l layerUse) bool { return l.ID == u.ID })
	})
	if len(mapped) < len(uses) {
		if err := b.shares.set(s.Name, mapped); err != nil {
			return err
		}
		b.poke()
	}
	if len(mapped) <= maxDepth || len(st.Frozen) > 0 {
		return nil // what others map of it would not become less
	}
	rest := time.NewTicker(detachRest)
	defer rest.Stop()
	for {
		n, err := s.detach(detachStep)
		if err != nil {
			return err
		}
		if n == 0 {
			b.poke() // to record it
			return nil
		}
		select {
		case <-stop:
			return nil
		case <-rest.C:
		}
	}
}

// punch frees what nobody maps of the memory of a source that has ended. Its
// file has that until the last that maps any of it has ended too.
func (b *Backend) punch(source string, held []*sentry) error {
	b.mu.Lock()
	_, runs := b.held[source]
	b.mu.Unlock()
	if runs || b.shares.offering(source) {
		return nil
	}
	if runs, err := sentryRuns(source); err != nil || runs {
		return err
	}
	var needed []fileRange
	var memory *os.File
	defer func() { memory.Close() }() // of nil too
	for _, name := range b.shares.usersOf(source) {
		i := slices.IndexFunc(held, func(s *sentry) bool { return s.Name == name })
		if i < 0 {
			return nil // nobody knows what that one maps
		}
		s := held[i]
		if s.making.Load() {
			return nil // it does not know yet what it maps
		}
		// What a machine maps only becomes less, but for a fork's.
		s.freezing.Lock()
		ranges, f, err := b.mapped(s, source, memory == nil)
		s.freezing.Unlock()
		if err != nil && s.over() {
			return nil // its removal has this done again
		}
		if err != nil {
			return err
		}
		needed = append(needed, ranges...)
		if memory == nil {
			memory = f
		}
	}
	if memory == nil || b.shares.offering(source) {
		return nil
	}
	return keepOnly(memory, needed)
}

// mapped returns what a sentry maps of a source's memory, and if wanted, that
// memory's file. One that ended meanwhile maps nothing.
func (b *Backend) mapped(s *sentry, source string, want bool) (ranges []fileRange, memory *os.File, err error) {
	st, err := s.layerStat()
	if err != nil {
		return nil, nil, err
	}
	ids := map[string]bool{}
	for _, u := range b.shares.of(s.Name) {
		ids[u.ID] = u.Source == source
	}
	for _, l := range st.Layers {
		if !ids[l.ID] {
			continue
		}
		ranges = append(ranges, l.Ranges...)
		if want && memory == nil {
			if memory, err = s.openLayer(l.ID); err != nil {
				return nil, nil, err
			}
		}
	}
	return ranges, memory, nil
}

// openLayer opens a layer's file, which is a source's memory, for writing.
func (s *sentry) openLayer(id string) (*os.File, error) {
	st, err := s.layerFiles()
	if err != nil {
		return nil, err
	}
	defer closeAll(st.Files)
	i := slices.Index(st.Layers, id)
	if i < 0 || i >= len(st.Files) {
		return nil, fmt.Errorf("sentry %s does not map the memory %s any more: %w", s.Name, id, fs.ErrNotExist)
	}
	path := filepath.Join("/proc/self/fd", strconv.Itoa(int(st.Files[i].Fd())))
	if target, err := os.Readlink(path); err != nil || !strings.HasPrefix(target, "/memfd:") {
		return nil, fmt.Errorf("the memory %s of sentry %s is %s, %v", id, s.Name, target, err)
	}
	return os.OpenFile(path, os.O_RDWR, 0)
}

// keepOnly makes holes in a file of all but ranges.
func keepOnly(f *os.File, ranges []fileRange) error {
	info, err := f.Stat()
	if err != nil {
		return err
	}
	slices.SortFunc(ranges, func(a, b fileRange) int { return int(a.Start>>12 - b.Start>>12) })
	at := int64(0)
	for _, r := range append(ranges, fileRange{info.Size(), info.Size()}) {
		if r.Start > at {
			if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, at, r.Start-at); err != nil {
				return fmt.Errorf("make a hole in memory: %w", err)
			}
		}
		at = max(at, r.End)
	}
	return nil
}
