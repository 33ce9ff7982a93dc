package gvisor

import (
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// snapshotOfCounter returns a snapshot of a machine in which a program counts,
// some hundred times a second.
func (w *world) snapshotOfCounter() *backend.Snapshot {
	w.Helper()
	m := w.create(nil)
	m.run("(n=0; while :; do n=$((n+1)); echo $n >/count.new; mv /count.new /count; sleep 0.005; done) >/dev/null 2>&1 & while ! test -e /count; do sleep 0.01; done")
	return m.snapshot(true)
}

func (m *being) count() int {
	m.Helper()
	n, err := strconv.Atoi(strings.TrimSpace(m.run("cat /count")))
	if err != nil {
		m.Fatal(err)
	}
	return n
}

// again makes a machine of an image's snapshot.
func (w *world) again(s *backend.Snapshot) *being {
	w.Helper()
	cfg := w.config(s)
	cfg.Again = true
	i, err := w.b.Create(w.Context(), cfg)
	if err != nil {
		w.Fatal(err)
	}
	return w.adopt(cfg, i)
}

// copies waits until so many copies of a snapshot are ready at least, or none
// for 0, and returns them.
func (w *world) copies(s *backend.Snapshot, n int) []*sentry {
	w.Helper()
	k := keyOf(w.config(s))
	k.state = s.Dir
	deadline := time.Now().Add(time.Minute)
	for {
		have := w.b.copies.Ready(k)
		if len(have) == n || n > 0 && len(have) > n {
			return have
		}
		if time.Now().After(deadline) {
			w.Fatalf("%d copies are ready; want %d", len(have), n)
		}
		<-time.After(10 * time.Millisecond)
	}
}

// What waits to be a machine of a snapshot has run nothing of it, and becomes
// what any other machine of it is.
func TestCopiesMadeAhead(t *testing.T) {
	w := newWorld(t, 2)
	s := w.snapshotOfCounter()
	first := w.again(s)
	counted := first.count()
	waiting := w.copies(s, 1)[0]
	state, err := waiting.processState()
	<-time.After(2 * time.Second) // in which it would count on
	if err != nil {
		t.Error(err)
	}
	second := w.again(s)
	if second.i.s != waiting {
		t.Errorf("the copy that waited, in state %s, was not taken", state)
	}
	if n := second.count(); n > counted+200 {
		t.Errorf("a copy that waited is at %d; the first machine was at %d", n, counted)
	}
	for _, m := range []*being{first, second} {
		n := m.count()
		m.run(fmt.Sprintf("until [ $(cat /count) -gt %d ]; do sleep 0.01; done", n))
	}
	a, b := first.run("cat /proc/sys/kernel/random/uuid"), second.run("cat /proc/sys/kernel/random/uuid")
	if a == b {
		t.Error("both have the same random numbers")
	}
	// A copy of the copy, by memory that both share.
	child := second.fork()
	n := child.count()
	child.run(fmt.Sprintf("until [ $(cat /count) -gt %d ]; do sleep 0.01; done", n))
}

func TestCopiesAsManyAsAreWanted(t *testing.T) {
	w := newWorld(t, 2)
	s := w.snapshotOfCounter()
	var made sync.WaitGroup
	all := make([]backend.Instance, 3)
	for i := range all {
		made.Go(func() {
			cfg := w.config(s)
			cfg.Again = true
			var err error
			if all[i], err = w.b.Create(t.Context(), cfg); err != nil {
				t.Error(err)
			}
		})
	}
	made.Wait()
	for _, i := range all {
		if err := i.Destroy(t.Context()); err != nil {
			t.Error(err)
		}
		w.b.opts.Slots.Release(i.(*instance).s.Slot)
	}
	ready := w.copies(s, 3)
	left, err := w.b.Audit(t.Context(), []sandbox.ID{})
	if err != nil {
		t.Error(err)
	}
	for _, l := range left {
		if l.ID == "" {
			t.Errorf("a copy made ahead counts as left: %+v", l)
		}
	}
	// One that somebody killed is not given out.
	if err := ready[0].kill(); err != nil {
		t.Fatal(err)
	}
	<-ready[0].gone
	if m := w.again(s); m.i.s != ready[1] {
		t.Error("not the next that lives was taken")
	}
	w.copies(s, 3)
	w.b.Forget(filepath.Dir(s.Dir)) // an image's, whose snapshot is in it
	w.copies(s, 0)
	w.b.origins.Range(func(state, _ any) bool { t.Errorf("%s is known after Forget", state); return true })
	// One that was being made meanwhile ends once it is made.
	for limit := time.Now().Add(time.Minute); len(w.b.shares.users()) != 1; <-time.After(10 * time.Millisecond) {
		if time.Now().After(limit) {
			t.Fatalf("%v are recorded as users of memory after Forget; want the one machine", w.b.shares.users())
		}
	}
	if got := w.again(s).run("echo works"); got != "works\n" {
		t.Errorf("%q after Forget", got)
	}
}

// A snapshot that is one machine's own, as a pause's, is not copied ahead.
func TestNoCopiesOfAPause(t *testing.T) {
	w := newWorld(t, 2)
	s := w.snapshotOfCounter()
	w.create(s).count()
	if keys := w.b.copies.Keys(); len(keys) != 0 {
		t.Errorf("copies are made for %v", keys)
	}
}
