package backendtest

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
)

// testPause pauses a machine and lets it go on, more than once and each time
// twice: while it is paused nothing in it runs or answers, and afterwards all
// goes on, the connections too.
func testPause(e *env) {
	m := e.create(usual)
	m.resume() // of a machine that runs changes nothing
	c := m.startCounter()
	m.busy()
	for range 2 {
		c.goesOn()
		m.standsStill(func() {
			m.pause()
			m.pause()
		}, func() {
			c.stands()
			m.silent()
			m.usageStands()
		}, func() {
			m.resume()
			m.resume()
		})
		m.answers()
		c.goesOn()
	}
	c.stop()
	m.destroy()
	e.noLeftovers()
}

// busy starts a program that computes all the time.
func (m *machine) busy() {
	m.Helper()
	if !m.kind.Simulated {
		m.shell("(while :; do :; done) >/dev/null 2>&1 &")
	}
}

// standsStill checks that the counting program, which is not the agent and is
// not seen through it, had no more time than the machine ran: not between the
// return of pause and the call of resume.
func (m *machine) standsStill(pause, meanwhile, resume func()) {
	m.Helper()
	if m.kind.Simulated {
		pause()
		meanwhile()
		resume()
		return
	}
	begin := time.Now()
	before := m.counted()
	pause()
	ran := time.Since(begin)
	paused := time.Now()
	meanwhile()
	<-time.After(time.Until(paused.Add(50 * tick)))
	resumed := time.Now()
	resume()
	after := m.counted()
	ran += time.Since(resumed)
	if most := int(ran/tick) + 5; after-before > most {
		m.Errorf("over a pause a program counted from %d to %d, and could count to %d at most", before, after, before+most)
	}
}

// usageStands checks that a paused machine can be measured and uses no CPU.
func (m *machine) usageStands() {
	m.Helper()
	before, err := m.instance.Usage(m.ctx)
	if err != nil {
		m.Fatalf("usage of a paused machine: %v", err)
	}
	begin := time.Now()
	<-time.After(silence)
	after, err := m.instance.Usage(m.ctx)
	if err != nil {
		m.Fatalf("usage of a paused machine: %v", err)
	}
	if used, passed := after.CPU-before.CPU, time.Since(begin); used > passed/5 {
		m.Errorf("a paused machine used %v of CPU time in %v", used, passed)
	}
}

// testPauseAtOnce pauses and resumes from several sides: when all have returned,
// it is so.
func testPauseAtOnce(e *env) {
	m := e.create(usual)
	c := m.startCounter()
	p := m.instance.(backend.Pauser)
	all := func(what string, f func(context.Context) error) {
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				ctx, cancel := context.WithTimeout(e.ctx, patience)
				defer cancel()
				if err := f(ctx); err != nil {
					e.Errorf("%s: %v", what, err)
				}
			})
		}
		wg.Wait()
	}
	for range 10 {
		all("pause", p.Pause)
		all("resume", p.Resume)
	}
	m.answers()
	all("pause", p.Pause)
	m.silent()
	var wg sync.WaitGroup
	for range 3 { // whichever is last
		wg.Go(func() { all("pause", p.Pause) })
		wg.Go(func() { all("resume", p.Resume) })
	}
	wg.Wait()
	m.pause()
	m.silent()
	m.resume()
	m.answers()
	c.goesOn()
	c.stop()
}

// testPauseRecover finds a paused machine again: it is paused until it is
// resumed, by a backend that was not the one that paused it.
func testPauseRecover(e *env) {
	m := e.create(usual)
	m.write("/kept", "kept")
	c := m.startCounter()
	m.pause()
	c.stop()
	for range 2 {
		e.reopen()
		m.recovered()
		m.silent()
	}
	e.noLeftovers()
	m.pause()
	m.silent()
	m.resume()
	m.answers()
	m.has("/kept", "kept")
	if !e.kind.Simulated {
		m.countsOn(m.counted())
	}
	e.reopen()
	m.recovered()
	m.answers() // the pause is over for good
	m.destroy()
	e.noLeftovers()
}

// testPauseKilled kills the process that paused two machines: both are found
// paused.
func testPauseKilled(e *env) {
	configs := []backend.Config{e.config(usual), e.config(usual)}
	if err := e.backend.Close(); err != nil {
		e.Fatal(err)
	}
	c := e.startJob(job{Configs: configs, Pause: true})
	handles := []backend.Handle{c.handle(), c.handle()}
	c.kill()
	e.backend = e.kind.Open(e.TB, e.place)
	for n, h := range handles {
		m := e.found(configs[n], h)
		if m == nil {
			continue
		}
		m.silent()
		if n == 0 {
			m.resume()
			m.greet()
			m.answers()
		}
		m.destroy()
	}
	e.noLeftovers()
	e.removeSlots()
}

// found recovers a machine that another process made, nil with an error of the
// test when it cannot.
func (e *env) found(cfg backend.Config, h backend.Handle) *machine {
	e.Helper()
	i, err := e.backend.Recover(e.ctx, h)
	if err != nil {
		e.release(cfg)
		e.Errorf("recover: %v", err)
		return nil
	}
	return e.adopt(cfg, i)
}

// testPauseDestroy destroys paused machines: one that this backend paused, one
// that it found, one that died while it was paused.
func testPauseDestroy(e *env) {
	for _, before := range []func(*machine){
		func(*machine) {},
		func(m *machine) { e.reopen(); m.recovered() },
		func(m *machine) { e.kind.Crash(e.TB, m.instance.Handle()) },
	} {
		m := e.create(usual)
		c := m.startCounter()
		m.pause()
		c.stop()
		before(m)
		m.destroy()
		m.wait()
		e.noLeftovers()
	}
}

// testPauseGone wants errors, and no endless waiting, for machines that are
// not there.
func testPauseGone(e *env) {
	m := e.create(usual)
	p := m.instance.(backend.Pauser)
	m.destroy()
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	for what, f := range map[string]func(context.Context) error{"pause": p.Pause, "resume": p.Resume} {
		if err := f(ctx); err == nil || errors.Is(err, context.DeadlineExceeded) {
			e.Errorf("%s a machine that was destroyed: %v", what, err)
		}
	}
	e.noLeftovers()
}

// writeMany writes a file that has size bytes.
func (m *machine) writeMany(name string, size int) []byte {
	m.Helper()
	data := make([]byte, size)
	fill(data)
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	if err := m.client.WriteBytes(ctx, agentclient.File{Path: name}, data); err != nil {
		m.Fatalf("write %s: %v", name, err)
	}
	return data
}
