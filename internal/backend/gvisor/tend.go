package gvisor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
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
	for all := true; ; {
		b.tendOnce(stop, all)
		select {
		case <-stop:
			return
		case <-tick.C:
			all = true
		case <-b.tending:
			all = false
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

// tendOnce gives back what nobody needs any more, and if all is to be done looks
// at what machines map now.
func (b *Backend) tendOnce(stop <-chan struct{}, all bool) {
	running, err := b.otherSentries()
	if err != nil {
		b.log.Warn("cannot look who shares memory; it is tried again", "error", err)
		return
	}
	b.forgetEnded(running)
	held := b.machines()
	for _, s := range held {
		if !s.layered() || s.over() {
			continue
		}
		if err := b.thawUnused(s); err != nil && !s.over() {
			b.log.Warn("cannot give memory back that nobody shares any more; it is tried again", "sentry", s.Name, "error", err)
		}
		if !all {
			continue
		}
		if err := b.flatten(s, stop); err != nil && !s.over() {
			b.log.Warn("cannot give a machine memory of its own; it is tried again", "sentry", s.Name, "error", err)
		}
	}
	for _, source := range b.shares.sources() {
		if running[source] {
			continue
		}
		if err := b.punch(source, held, all); err != nil {
			b.log.Warn("cannot free memory of a machine that ended", "sentry", source, "error", err)
		}
	}
}

// forgetEnded forgets what sentries map that this run does not know and that
// have ended.
func (b *Backend) forgetEnded(running map[string]bool) {
	for _, name := range b.shares.users() {
		b.mu.Lock()
		_, known := b.live[name]
		b.mu.Unlock()
		if known || running[name] {
			continue // discard forgets those that are known
		}
		if err := b.shares.forget(name); err != nil {
			b.log.Warn("cannot forget what memory a machine shared that has ended", "sentry", name, "error", err)
		}
	}
}

// otherSentries returns which sentries run that this run of the edge does not
// have as machines, if any of them matters.
func (b *Backend) otherSentries() (map[string]bool, error) {
	names := append(b.shares.users(), b.shares.sources()...)
	b.mu.Lock()
	names = slices.DeleteFunc(names, func(name string) bool { return b.held[name] != nil })
	b.mu.Unlock()
	running := map[string]bool{}
	if len(names) == 0 {
		return running, nil
	}
	processes, err := sentries(context.Background())
	for _, p := range processes {
		running[p.name] = true
	}
	return running, err
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
		held, err := s.thaw(id)
		if err != nil {
			errs = append(errs, err)
			continue
		}
		s.thawed(id, held)
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
func (b *Backend) punch(source string, held []*sentry, again bool) error {
	b.mu.Lock()
	_, runs := b.held[source]
	b.mu.Unlock()
	users := b.shares.usersOf(source)
	slices.Sort(users)
	if runs || b.shares.offering(source) || len(users) == 0 || !again && b.shares.wasPunched(source, users) {
		return nil
	}
	var needed []fileRange
	var memory *os.File
	defer func() { memory.Close() }() // of nil too
	for _, name := range users {
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
	if err := keepOnly(memory, needed); err != nil {
		return err
	}
	b.shares.setPunched(source, users)
	return nil
}

// mapped returns what a sentry maps of a source's memory, and if wanted, that
// memory's file. One that ended meanwhile maps nothing.
func (b *Backend) mapped(s *sentry, source string, want bool) (ranges []fileRange, memory *os.File, err error) {
	st, err := s.layerStat()
	if err != nil {
		return nil, nil, err
	}
	inodes := map[string]uint64{}
	for _, u := range b.shares.of(s.Name) {
		if u.Source == source {
			inodes[u.ID] = u.Inode
		}
	}
	for _, l := range st.Layers {
		number, ok := inodes[l.ID]
		if !ok {
			continue
		}
		ranges = append(ranges, l.Ranges...)
		if want && memory == nil {
			if memory, err = s.openLayer(l.ID, number); err != nil {
				return nil, nil, err
			}
		}
	}
	return ranges, memory, nil
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
