package gvisor

import (
	"context"
	"os"
	"testing"
	"time"
)

// usedMB returns how much memory the machine has of its own.
func (m *being) usedMB() int64 {
	m.Helper()
	use, err := m.i.Usage(m.Context())
	if err != nil {
		m.Fatal(err)
	}
	return use.MemoryBytes / megabyte
}

// TestForksDoNotTakeTheSourcesMemory has a source rewrite most of what it may
// have after each of some forks: what they hold must not be taken from it.
func TestForksDoNotTakeTheSourcesMemory(t *testing.T) {
	w := newWorld(t, 4)
	w.limits.MemoryMB = 128
	m := w.guest()
	m.ask("make 80")
	usual := m.memoryLimit()
	var all []*being
	for n := range 4 {
		all = append(all, m.fork())
		m.ask("change anon %d 100 0", 100+n)
	}
	if limit := m.memoryLimit(); limit < usual+4*80 || limit > usual+4*128 {
		t.Errorf("with four generations of some 90 MiB the group's limit is %d MiB; before it was %d", limit, usual)
	}
	sums := m.sums()
	for n, c := range all {
		c.ask("change anon %d 100 0", 200+n)
		c.destroy()
		m.tend()
	}
	m.same("after its forks' end", sums)
	if held := m.i.s.held.Load(); held != 0 {
		t.Errorf("after the end of all forks %d bytes are held", held)
	}
	m.waitLimit(usual)
}

// TestUntouchedMemoryIsNotCopied has a source and its fork read and write
// memory of which little was in use when it was frozen.
func TestUntouchedMemoryIsNotCopied(t *testing.T) {
	w := newWorld(t, 2)
	w.limits.MemoryMB = 128
	m := w.guest()
	m.ask("reserve 600")
	m.ask("dot bare 1 64") // 9 MiB in places
	before := m.usedMB()
	child := m.fork()
	base := child.usedMB()
	for n, x := range []*being{m, child} {
		x.ask("dot bare %d 64", 2+n)
	}
	// In whole units of copies it would be 150 MiB, and all of it 600. The rest
	// is what the sentry needs to write the state down.
	if got := m.usedMB(); got > before+60 {
		t.Errorf("the source has %d MiB after it wrote to 9 again; before it had %d", got, before)
	}
	if got := child.usedMB(); got > base+60 {
		t.Errorf("the fork has %d MiB after it wrote to 9; before it had %d", got, base)
	}

	m = w.guest()
	m.ask("reserve 90")
	m.ask("dot bare 1 64")
	child = m.fork()
	for n, x := range []*being{m, child} {
		x.ask("read bare")
		x.ask("change bare %d 100 0", 2+n)
		x.ask("read bare")
		if got := x.usedMB(); got > 128 {
			t.Errorf("generation %d has %d MiB; it wrote to 90", n, got)
		}
	}
}

// TestMachineEndsAboveItsOwnLimit has a source use what its group may have for
// a fork.
func TestMachineEndsAboveItsOwnLimit(t *testing.T) {
	w := newWorld(t, 2)
	w.limits.MemoryMB = 128
	m := w.guest()
	m.ask("make 90")
	child := m.fork()
	sums := child.sums()
	if said, err := m.request("grow 80"); err == nil && said != "ok" {
		t.Fatalf("grow: %s", said)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	exit, err := m.i.Wait(ctx)
	if err != nil || !exit.OutOfMemory {
		t.Errorf("it ended with %+v, %v; want for its memory", exit, err)
	}
	child.same("after the source's end", sums)
}

// TestPausesLeaveNothing takes what a pause and a resume of a source and of its
// fork come to, and looks that nothing is held for them.
func TestPausesLeaveNothing(t *testing.T) {
	w := newWorld(t, 2)
	m := w.guest()
	m.ask("make 32")
	usual := m.memoryLimit()
	child := m.fork()
	sums := m.sums()
	again := func(m *being) *being {
		t.Helper()
		if err := m.i.Pause(t.Context()); err != nil {
			t.Fatal(err)
		}
		before := len(m.frozen())
		s := m.snapshot(true)
		if n := len(m.frozen()); n != before {
			t.Errorf("a pause has frozen %d more", n-before)
		}
		m.destroy()
		next := w.create(s)
		if err := os.RemoveAll(s.Dir); err != nil {
			t.Fatal(err)
		}
		next.same("after a resume", sums)
		return next
	}
	child = again(child)
	w.tend()
	if n := len(m.frozen()); n != 0 {
		t.Errorf("after its fork's pause %d are frozen", n)
	}
	m.waitLimit(usual)
	grandchild := child.fork()
	child = again(child)
	w.tend()
	uses := w.b.shares.of(child.i.s.Name)
	if len(uses) != 1 || uses[0].Source != "" {
		t.Errorf("a resumed machine maps %+v; want its own saved memory only", uses)
	}
	child.ask("change anon 3 100 0")
	grandchild.same("after its source's pause and writes", sums)
	for _, x := range []*being{child, grandchild} {
		x.destroy()
	}
	if users := w.b.shares.users(); len(users) != 0 {
		t.Errorf("%v share memory yet", users)
	}
}
