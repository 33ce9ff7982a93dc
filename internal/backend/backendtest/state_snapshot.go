package backendtest

import (
	"context"
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// testSnapshot takes snapshots of a machine that works: it goes on, and no
// caller of its loses a byte.
func testSnapshot(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		c := m.startCounter()
		m.write("/kept", "kept")
		for range 5 {
			m.take(memory)
			c.goesOn()
		}
		m.answers()
		m.has("/kept", "kept")
		c.stop()
		m.destroy()
		e.noLeftovers()
	}
}

// testSnapshotPaused takes snapshots of a paused machine, which stays paused,
// and can go on and be snapshot.
func testSnapshotPaused(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		c := m.startCounter()
		m.write("/kept", "kept")
		m.pause()
		first := m.take(memory)
		m.take(memory)
		c.stands()
		m.silent()
		m.resume()
		m.answers()
		c.goesOn()
		m.take(memory)
		m.answers()
		c.stop()
		r := e.restore(first)
		r.answers() // a machine of a paused one's snapshot runs
		r.has("/kept", "kept")
		if memory && !e.kind.Simulated {
			r.countsOn(r.counted())
		}
		r.destroy()
		m.destroy()
		e.noLeftovers()
	}
}

// testSnapshotSideBySide takes several snapshots of one machine at once.
func testSnapshotSideBySide(e *env) {
	m := e.create(usual)
	c := m.startCounter()
	m.write("/kept", "kept")
	var wg sync.WaitGroup
	var mu sync.Mutex
	var all []taken
	for _, memory := range e.kinds() {
		for range 3 {
			dir := e.snapshotDir()
			wg.Go(func() {
				s, err := m.snapshot(dir, memory)
				if err != nil {
					e.Errorf("a %s beside others: %v", kindOf(memory), err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				all = append(all, taken{s, m.token})
			})
		}
	}
	wg.Wait()
	m.answers()
	c.goesOn()
	c.stop()
	for _, s := range all {
		r := e.restore(s)
		r.answers()
		r.has("/kept", "kept")
		r.destroy()
	}
}

// onFullDisk calls f with an empty directory on a disk with little room.
func (e *env) onFullDisk(size string, f func(dir string)) {
	e.Helper()
	dir := e.snapshotDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		e.Fatal(err)
	}
	f(dir)
	for _, used := range e.settled(func() []string {
		if err := unix.Unmount(dir, 0); err != nil {
			return []string{err.Error()}
		}
		return nil
	}) {
		e.Errorf("unmount a disk that should not be in use any more: %s", used)
		_ = unix.Unmount(dir, unix.MNT_DETACH) // or nothing could be removed
	}
}

// testSnapshotFullDisk has no room for a snapshot, from the beginning or from
// the middle on: the machine is unharmed, running or paused.
func testSnapshotFullDisk(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		data := m.writeMany("/data", 4<<20)
		c := m.startCounter()
		full := func() {
			for _, size := range []string{"4k", "256k", "2m"} {
				e.onFullDisk(size, func(dir string) {
					if s, err := m.snapshot(dir, memory); !errors.Is(err, unix.ENOSPC) {
						e.Errorf("a %s on a disk of %s: %+v, %v", kindOf(memory), size, s, err)
					}
				})
			}
		}
		full()
		m.answers()
		c.goesOn()
		if e.can.Pause {
			m.pause()
			full()
			c.stands()
			m.silent()
			m.resume()
			m.answers()
			c.goesOn()
		}
		c.stop()
		r := e.restore(m.take(memory))
		r.has("/data", string(data))
		r.destroy()
		m.destroy()
		e.noLeftovers()
	}
}

// testSnapshotCancelled cancels snapshots after more and more time: whenever
// that is, the machine is unharmed.
func testSnapshotCancelled(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		m.writeMany("/data", 4<<20)
		c := m.startCounter()
		var full time.Duration
		for after := time.Duration(0); ; after += max(full/12, time.Millisecond) {
			ctx, cancel := context.WithTimeout(e.ctx, after)
			begin := time.Now()
			dir := e.snapshotDir()
			_, err := m.instance.(backend.Snapshotter).Snapshot(ctx, backend.SnapshotOptions{Dir: dir, Memory: memory})
			cancel()
			took := time.Since(begin)
			c.goesOn()
			if rerr := os.RemoveAll(dir); rerr != nil {
				e.Fatal(rerr)
			}
			if err == nil && after > 0 && took < after {
				break // it was taken before its time was up
			}
			full = max(full, took)
			if after > patience {
				e.Fatalf("a %s never succeeds: %v", kindOf(memory), err)
			}
		}
		m.answers()
		c.stop()
		r := e.restore(m.take(memory))
		r.answers()
		r.destroy()
		m.destroy()
		e.noLeftovers()
	}
}

// testSnapshotKilled kills processes in the middle of snapshots of a machine
// that runs: it is found, and goes on.
func testSnapshotKilled(e *env) { e.killSnapshots(false, func(*machine) {}) }

// testSnapshotKilledPaused kills processes in the middle of snapshots of a
// paused machine: it is found, and is paused.
func testSnapshotKilledPaused(e *env) {
	e.killSnapshots(true, func(m *machine) {
		m.silent()
		m.resume()
	})
}

// killSnapshots kills processes that take snapshots, after more and more time,
// and looks at the machine that is found. Its agent was not greeted yet.
func (e *env) killSnapshots(paused bool, check func(*machine)) {
	const kills = 8
	for _, memory := range e.kinds() {
		for n := range kills {
			cfg := e.config(usual)
			if err := e.backend.Close(); err != nil {
				e.Fatal(err)
			}
			dir := e.snapshotDir()
			c := e.startJob(job{Configs: []backend.Config{cfg}, Pause: paused, Snapshots: dir, Memory: memory})
			h := c.handle()
			c.next(writing)
			<-time.After(time.Duration(n) * 7 * time.Millisecond)
			c.kill()
			e.backend = e.kind.Open(e.TB, e.place)
			if m := e.found(cfg, h); m != nil {
				if err := os.RemoveAll(dir); err != nil {
					e.Fatal(err)
				}
				check(m)
				m.greet()
				m.answers()
				r := e.restore(m.take(memory))
				r.answers()
				r.destroy()
				m.destroy()
			}
			e.noLeftovers()
			e.removeSlots()
		}
	}
}

// testSnapshotGone wants errors for machines that died or were destroyed.
func testSnapshotGone(e *env) {
	for _, memory := range e.kinds() {
		died, destroyed := e.create(usual), e.create(usual)
		e.kind.Crash(e.TB, died.instance.Handle())
		died.wait()
		destroyed.destroy()
		for what, m := range map[string]*machine{"died": died, "was destroyed": destroyed} {
			if s, err := m.snapshot(e.snapshotDir(), memory); err == nil || errors.Is(err, context.DeadlineExceeded) {
				e.Errorf("a %s of a machine that %s: %+v, %v", kindOf(memory), what, s, err)
			}
		}
		died.destroy()
		e.noLeftovers()
	}
}
