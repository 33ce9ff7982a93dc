package gvisor

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/kernflux/opendsec/internal/backend"
)

// newLayer returns a name for memory that is about to be frozen.
func newLayer() string { return strings.ToLower(rand.Text()) }

// writeLive writes the machine down but for its private memory, which machines
// that are made of the snapshot map as it is.
func (i *instance) writeLive(files []*os.File) (layout, error) {
	i.b.startTending()
	name := newLayer()
	i.s.freezing.Lock()
	defer i.s.freezing.Unlock()
	var saved *layerSaved
	err := i.write(func(files []*os.File) (err error) {
		saved, err = i.s.saveLayered(files, layerName{ID: name})
		if err == nil {
			i.s.froze(name, saved.Held)
		}
		return err
	}, files)
	if err != nil {
		if saved != nil {
			closeAll(saved.files)
			i.b.poke()
		}
		return layout{}, err
	}
	uses := []use{{ID: name, Source: i.s.Name, Inode: saved.inode}}
	have := i.b.shares.of(i.s.Name)
	for _, id := range saved.Layers {
		n := slices.IndexFunc(have, func(u use) bool { return u.ID == id })
		if n < 0 {
			closeAll(saved.files)
			i.b.poke()
			return layout{}, fmt.Errorf("the sentry says that it maps memory %s, which it was not given", id)
		}
		uses = append(uses, have[n])
	}
	i.b.shares.offer(offer{uses, saved.files})
	return layout{Files: memoryFiles, Layer: name, Live: true}, nil
}

// writePacked writes the machine down with its private memory in a file of its
// own. A machine that ran goes on while that is written.
func (i *instance) writePacked(files []*os.File) (layout, error) {
	i.b.startTending()
	name := newLayer()
	i.s.freezing.Lock()
	defer i.s.freezing.Unlock()
	last := len(files) - 1
	var saved *layerSaved
	err := i.write(func(files []*os.File) (err error) {
		saved, err = i.s.saveLayered(files, layerName{ID: name, Packed: true})
		if err == nil {
			i.s.froze(name, saved.Held)
		}
		return err
	}, files[:last])
	if saved == nil {
		return layout{}, err
	}
	if err == nil {
		for _, f := range files[:last] {
			beginWriting(f, 0, 0)
		}
		_, err = packMemory(files[last], saved)
	}
	if i.paused && err == nil {
		// It is likely to be removed now.
		i.s.keepMemory(saved.files)
	} else {
		closeAll(saved.files)
	}
	if held, terr := i.s.thaw(name); terr == nil {
		i.s.thawed(name, held)
		i.b.resize(i.s)
	} else {
		i.b.poke() // to try it again
		if err == nil {
			err = terr
		}
	}
	if err != nil {
		return layout{}, err
	}
	return layout{Files: append(append([]string(nil), memoryFiles...), packedMemory), Layer: name}, nil
}

// Shares reports whether live snapshots leave memory where it is.
func (i *instance) Shares() bool { return i.s.layered() }

// froze and thawed note which of the sentry's memory is frozen, and how many
// bytes that is. s.freezing is held.
func (s *sentry) froze(id string, held int64) {
	s.frozen = append(s.frozen, id)
	s.held.Store(held)
}

func (s *sentry) thawed(id string, held int64) {
	s.frozen = slices.DeleteFunc(s.frozen, func(f string) bool { return f == id })
	s.held.Store(held)
}

// Withdraw says that no more machines will be made of a live snapshot.
func (b *Backend) Withdraw(s backend.Snapshot) {
	if l, err := layoutOf(s); err == nil {
		b.withdraw(l)
	}
}

// withdraw forgets a snapshot if it is a live one.
func (b *Backend) withdraw(l layout) {
	if l.Live {
		b.shares.withdraw(l.Layer)
		b.poke()
	}
}

// layersOf returns the layers that a machine of a snapshot maps, and their
// files, which are to be closed. It records that the sentry maps them. The
// snapshot's own files come with the last of them being memory if it is packed.
func (b *Backend) layersOf(s *sentry, from backend.Snapshot, files []*os.File) (ids []string, all []*os.File, err error) {
	l, err := layoutOf(from)
	if err != nil || l.Layer == "" {
		return nil, files, err
	}
	if !s.layered() {
		return nil, files, errors.New("the sentry cannot map memory of a snapshot: it was built without the changes of gVisor that belong to this program")
	}
	b.startTending()
	if !l.Live {
		return []string{l.Layer}, files, b.shares.set(s.Name, []use{{ID: l.Layer}})
	}
	uses, memory, err := b.shares.take(l.Layer, s.Name)
	if err != nil {
		return nil, files, err
	}
	for _, u := range uses {
		ids = append(ids, u.ID)
	}
	return ids, append(files, memory...), nil
}

// rediscover learns what of a sentry's memory is frozen, after a restart.
func (b *Backend) rediscover(s *sentry) error {
	if !s.layered() {
		return nil
	}
	s.freezing.Lock()
	defer s.freezing.Unlock()
	st, err := s.layerStat()
	if err != nil {
		// Its limit stays what it is: it may need all of that.
		s.held.Store(lifted(hostMemoryMB(s.Limits.MemoryMB)) << 20)
		return fmt.Errorf("ask for shared memory: %w", err)
	}
	s.frozen = st.Frozen
	s.held.Store(st.Held)
	if len(st.Frozen)+len(st.Layers) > 0 {
		b.startTending()
		b.poke()
	}
	return nil
}
