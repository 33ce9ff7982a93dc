package sim

import (
	"context"
	"fmt"

	"github.com/kernflux/opendsec/internal/backend"
)

// Pause has the machine stand still, which is found again by Recover.
func (m *machine) Pause(context.Context) error { return m.setPaused(true) }

// Resume lets it go on.
func (m *machine) Resume(context.Context) error { return m.setPaused(false) }

func (m *machine) setPaused(paused bool) error {
	m.stillMu.Lock()
	defer m.stillMu.Unlock()
	what := "resume"
	if paused {
		what = "pause"
		if m.shots == 0 {
			m.stop()
		}
	}
	err := m.alive()
	if err == nil {
		err = m.agent.change(func(s *state) { s.Paused = paused })
	}
	if err == nil {
		m.paused = paused
	}
	m.goOnIfFree()
	if err != nil {
		return fmt.Errorf("%s simulated machine %s: %w", what, m.record.ID, err)
	}
	return nil
}

// alive returns why the machine cannot be used any more, nil when it can.
func (m *machine) alive() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	switch {
	case !m.ended:
		return nil
	case m.lost != nil:
		return m.lost
	}
	return backend.ErrGone
}

// whileStill does f while the machine, running or paused, stands still.
func (m *machine) whileStill(f func() error) error {
	m.stillMu.Lock()
	err := m.alive()
	if err == nil {
		m.shots++
		m.stop()
	}
	m.stillMu.Unlock()
	if err != nil {
		return err
	}
	defer func() {
		m.stillMu.Lock()
		defer m.stillMu.Unlock()
		m.shots--
		m.goOnIfFree()
	}()
	return f()
}

// stop has all in the machine stand still.
func (m *machine) stop() {
	m.agent.gate.close()
	m.agent.table.halt()
}

// goOnIfFree lets the machine go on when nothing wants it to stand still. The
// caller holds stillMu.
func (m *machine) goOnIfFree() {
	if m.paused || m.shots > 0 {
		return
	}
	m.agent.table.goOn()
	m.agent.gate.open()
}
