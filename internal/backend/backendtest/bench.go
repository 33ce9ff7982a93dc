package backendtest

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
)

// Benchmark measures what a caller waits for: a machine until its agent
// answers, until the first command has ended, one command, and the removal.
// Pools have time to fill between two machines. Each is reported as the median
// in milliseconds, over the machines that were made.
func Benchmark(b *testing.B, k Kind) {
	e := newEnv(b, k, newMaterial(b, k))
	if _, err := e.backend.Probe(e.ctx); err != nil {
		b.Fatal(err)
	}
	e.create(usual).destroy() // fills pools
	var create, answer, command, again, destroy []time.Duration
	for b.Loop() {
		cfg := e.config(usual)
		<-time.After(150 * time.Millisecond)
		begin := time.Now()
		i, err := e.backend.Create(e.ctx, cfg)
		if err != nil {
			b.Fatal(err)
		}
		create = append(create, time.Since(begin))
		m := e.adopt(cfg, i)
		if err := m.client.WaitReady(e.ctx); err != nil {
			b.Fatal(err)
		}
		answer = append(answer, time.Since(begin))
		m.greet()
		m.true()
		command = append(command, time.Since(begin))
		for range 5 {
			begin = time.Now()
			m.true()
			again = append(again, time.Since(begin))
		}
		begin = time.Now()
		m.destroy()
		destroy = append(destroy, time.Since(begin))
	}
	e.made = nil
	for unit, took := range map[string][]time.Duration{
		"ms/create": create, "ms/answer": answer, "ms/first-command": command, "ms/command": again, "ms/destroy": destroy,
	} {
		slices.Sort(took)
		b.ReportMetric(float64(took[len(took)/2].Microseconds())/1000, unit)
	}
}

// true runs the shortest command.
func (m *machine) true() {
	m.Helper()
	ctx, cancel := context.WithTimeout(m.ctx, patience)
	defer cancel()
	if res, err := m.client.Run(ctx, agentclient.Command{Path: "true"}); err != nil || res.ExitCode != 0 {
		m.Fatalf("true: %+v, %v", res, err)
	}
}

// Rootfs builds the suite's image and agent, for a benchmark of something that
// machines are compared with.
func Rootfs(t testing.TB) (backend.Rootfs, backend.Agent) {
	m := newMaterial(t, Kind{})
	return m.rootfs, m.agent
}
