package backendtest

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// recovered finds m's machine again with the backend as it is now.
func (m *machine) recovered() {
	m.Helper()
	m.client.Close()
	i, err := m.backend.Recover(m.ctx, m.instance.Handle())
	if err != nil {
		m.Fatalf("recover: %v", err)
	}
	m.instance = i
	m.connect()
}

// testRecover finds machines again after a restart of the backend in the same
// process, more than once.
func testRecover(e *env) {
	m := e.create(usual)
	if err := m.client.WriteBytes(e.ctx, agentclient.File{Path: "/kept"}, []byte("kept")); err != nil {
		e.Fatal(err)
	}
	if !e.kind.Simulated {
		m.shell("sleep 1000 >/dev/null 2>&1 & echo $! >/pid")
	}
	for range 2 {
		e.reopen()
		m.recovered()
		m.works()
		if back, err := m.client.ReadFile(e.ctx, "/kept", ""); err != nil || string(back) != "kept" {
			e.Errorf("a file came back as %q, %v", back, err)
		}
		if !e.kind.Simulated {
			m.want("kill -0 $(cat /pid) && echo lives", "lives\n")
		}
		if u, err := m.instance.Usage(e.ctx); err != nil || u.DiskBytes < 0 {
			e.Errorf("usage of a recovered machine: %+v, %v", u, err)
		}
	}
	e.kind.Crash(e.TB, m.instance.Handle())
	m.wait()
	m.destroy()
	e.noLeftovers()
}

// testRecoverAfterKill kills the process that made two machines, and finds
// them again.
func testRecoverAfterKill(e *env) {
	configs := []backend.Config{e.config(usual), e.config(usual)}
	if err := e.backend.Close(); err != nil {
		e.Fatal(err)
	}
	c := e.startCreator(configs...)
	handles := []backend.Handle{c.handle(), c.handle()}
	c.kill()
	e.backend = e.kind.Open(e.TB, e.place)
	for n, h := range handles {
		i, err := e.backend.Recover(e.ctx, h)
		if err != nil {
			e.release(configs[n])
			e.Errorf("recover: %v", err)
			continue
		}
		m := e.adopt(configs[n], i)
		m.greet()
		m.works()
		if n == 0 {
			e.kind.Crash(e.TB, i.Handle())
			m.wait()
		}
	}
	for _, m := range e.made {
		m.destroy()
	}
	e.noLeftovers()
	e.removeSlots()
}

// removeSlots removes the network slots that a killed creator held, as the edge
// does when it starts. No machine may be left.
func (e *env) removeSlots() {
	e.Helper()
	names, err := netslot.List(e.place.Prefix)
	if err != nil {
		e.Fatal(err)
	}
	for _, name := range names {
		if e.slots.Holds(name) {
			continue
		}
		if err := netslot.Remove(name); err != nil {
			e.Error(err)
		}
	}
}

// testRecoverGone wants ErrGone, and nothing left, for machines that died or
// were destroyed while nobody looked.
func testRecoverGone(e *env) {
	died, destroyed := e.create(usual), e.create(usual)
	handles := []backend.Handle{died.instance.Handle(), destroyed.instance.Handle()}
	e.kind.Crash(e.TB, handles[0])
	died.wait()
	destroyed.destroy()
	e.reopen()
	for _, h := range handles {
		for range 2 {
			if _, err := e.backend.Recover(e.ctx, h); !errors.Is(err, backend.ErrGone) {
				e.Errorf("recover a machine that is gone: %v", err)
			}
		}
	}
	// Recover removed what was left, so no Destroy is wanted.
	died.gone = true
	died.client.Close()
	e.release(died.cfg)
	e.checkEmpty(died.cfg)
	e.noLeftovers()
}

// testRecoverForeign gives Recover what is no handle of its own.
func testRecoverForeign(e *env) {
	for _, h := range []backend.Handle{
		{},
		{Backend: e.backend.Name(), Data: json.RawMessage(`{}`)},
		{Backend: e.backend.Name(), Data: json.RawMessage(`{"id":"../../etc"}`)},
		{Backend: "another", Data: json.RawMessage(`{"id":"sb-000000000000"}`)},
	} {
		if i, err := e.backend.Recover(e.ctx, h); err == nil {
			e.Errorf("recover %s: got %v", h.Data, i.Handle())
		}
	}
}

// noLeftovers wants an audit to find nothing beside the machines of the test.
func (e *env) noLeftovers() {
	e.Helper()
	auditor, ok := e.backend.(backend.Auditor)
	if !ok {
		return
	}
	var known []sandbox.ID
	for _, m := range e.made {
		if !m.gone {
			known = append(known, m.cfg.ID)
		}
	}
	left := e.settled(func() []string {
		found, err := auditor.Audit(e.ctx, known)
		if err != nil {
			e.Fatalf("audit: %v", err)
		}
		return describe(found)
	})
	for _, l := range left {
		e.Errorf("the audit found %s", l)
	}
}

func describe(found []backend.Leftover) []string {
	var all []string
	for _, l := range found {
		all = append(all, string(l.Kind)+" "+l.Name+" "+string(l.ID)+" "+l.Detail)
	}
	return all
}

// testAudit forgets a machine: an audit must find it, and be able to remove it.
func testAudit(e *env) {
	auditor, ok := e.backend.(backend.Auditor)
	if !ok {
		e.Log("the backend makes nothing outside its state directories and has no audit")
		return
	}
	m, other := e.create(usual), e.create(usual)
	found, err := auditor.Audit(e.ctx, []sandbox.ID{other.cfg.ID})
	if err != nil {
		e.Fatal(err)
	}
	if len(found) == 0 {
		e.Error("the audit did not find a machine that nobody knows")
	}
	for _, l := range found {
		if l.ID != m.cfg.ID {
			e.Errorf("the audit names %v beside the forgotten machine", l)
		}
	}
	e.removeLeftovers(other.cfg.ID)
	m.wait()
	other.works()
	m.destroy()
	other.destroy()
	e.noLeftovers()
}

// removeLeftovers removes what an audit finds until it finds nothing.
func (e *env) removeLeftovers(known ...sandbox.ID) {
	e.Helper()
	auditor, ok := e.backend.(backend.Auditor)
	if !ok {
		return
	}
	left := e.settled(func() []string {
		found, err := auditor.Audit(e.ctx, known)
		if err != nil {
			e.Fatalf("audit: %v", err)
		}
		for _, l := range found {
			if err := auditor.Remove(e.ctx, l); err != nil {
				e.Logf("remove %s %s, which is tried again: %v", l.Kind, l.Name, err)
			}
		}
		return describe(found)
	})
	for _, l := range left {
		e.Errorf("%s could not be removed", l)
	}
}

// testCancelled cancels creates after more and more time.
func testCancelled(e *env) {
	if _, err := e.backend.Probe(e.ctx); err != nil {
		e.Fatal(err)
	}
	e.cancelCreates(func() backend.Config { return e.config(usual) })
}

// cancelCreates cancels creates after more and more time: whenever that is,
// nothing is left.
func (e *env) cancelCreates(config func() backend.Config) {
	e.Helper()
	var full time.Duration
	for after := time.Duration(0); ; after += max(full/12, time.Millisecond) {
		cfg := config()
		ctx, cancel := context.WithTimeout(e.ctx, after)
		begin := time.Now()
		i, err := e.backend.Create(ctx, cfg)
		cancel()
		if err == nil {
			e.adopt(cfg, i).destroy()
			if after > 0 && time.Since(begin) < after {
				break // it was made before its time was up
			}
			continue
		}
		full = max(full, time.Since(begin))
		e.release(cfg)
		e.checkEmpty(cfg)
		if after > patience {
			e.Fatalf("a create never succeeds: %v", err)
		}
	}
	e.noLeftovers()
}

// testCreatorKilled kills processes in the middle of a create: an audit by the
// next one finds and removes what is left.
func testCreatorKilled(e *env) {
	const kills = 10
	for n := range kills {
		if err := e.backend.Close(); err != nil {
			e.Fatal(err)
		}
		cfg := e.config(usual)
		c := e.startCreator(cfg)
		c.next(creating)
		<-time.After(time.Duration(n) * 4 * time.Millisecond)
		c.kill()
		e.backend = e.kind.Open(e.TB, e.place)
		e.removeLeftovers()
		e.release(cfg)
		e.removeSlots()
	}
}
