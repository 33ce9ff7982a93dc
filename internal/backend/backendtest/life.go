package backendtest

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
)

// testProbe wants a backend to say that it works, twice, and to leave nothing.
func testProbe(e *env) {
	first, err := e.backend.Probe(e.ctx)
	if err != nil {
		e.Fatalf("the backend does not work here: %v", err)
	}
	second, err := e.backend.Probe(e.ctx)
	if err != nil || first != second {
		e.Errorf("probe: first %+v, then %+v, %v", first, second, err)
	}
	e.noLeftovers()
}

// testLife takes a machine from its create to its destroy.
func testLife(e *env) {
	m := e.create(usual)
	m.works()
	if h := m.instance.Handle(); h.Backend != e.backend.Name() || len(h.Data) == 0 {
		e.Errorf("handle %+v of backend %s", h, e.backend.Name())
	}
	ctx, cancel := context.WithTimeout(e.ctx, 50*time.Millisecond)
	defer cancel()
	if exit, err := m.instance.Wait(ctx); !errors.Is(err, context.DeadlineExceeded) {
		e.Errorf("wait for a machine that lives: %+v, %v", exit, err)
	}
	m.destroy()
	if exit := m.wait(); exit.OutOfMemory {
		e.Errorf("a machine that was destroyed: %+v", exit)
	}
	if err := m.instance.Destroy(e.ctx); err != nil {
		e.Errorf("destroy again: %v", err)
	}
	if conn, err := m.instance.Dial(e.ctx, backend.AgentPort); err == nil {
		conn.Close()
		e.Error("a machine that was destroyed takes connections")
	}
	e.noLeftovers()
}

// testCommands runs commands and looks at how they end.
func testCommands(e *env) {
	m := e.create(usual)
	res := m.shell("echo out; echo err >&2; exit 7")
	if string(res.Stdout) != "out\n" || string(res.Stderr) != "err\n" || res.ExitCode != 7 || res.Signal != 0 {
		e.Errorf("got %q, %q, exit code %d, signal %d", res.Stdout, res.Stderr, res.ExitCode, res.Signal)
	}
	if res := m.shell("kill -TERM $$"); res.Signal != syscall.SIGTERM {
		e.Errorf("a command that was ended by signal 15: %+v", res)
	}
	m.want("cat /etc/motd", "of the image\n")
	// Processes that nobody waits for are the agent's, which must reap them.
	m.shell("for i in 1 2 3 4 5; do (true &) ; done")
	m.want("sleep 0.2; ps -o stat | grep -c Z || true", "0\n")
}

// testIdentity looks at what the machine thinks that it is.
func testIdentity(e *env) {
	m := e.create(usual)
	m.want("hostname", m.cfg.Hostname+"\n")
	m.want("echo $FROM_SANDBOX", "yes\n")
	m.want("id -u", "0\n")
	m.want("cat /proc/1/comm", "agent\n")
	m.want("touch "+backend.AgentDir+"/x 2>/dev/null || echo no", "no\n")
	m.want("touch /new && rm /etc/motd && ls /new && test ! -e /etc/motd && echo ok", "/new\nok\n")
	other := e.create(usual)
	other.want("cat /etc/motd; test ! -e /new", "of the image\n")
}

// testExactOutput sends many bytes of all values through a command.
func testExactOutput(e *env) {
	m := e.create(usual)
	data := make([]byte, 10<<20)
	fill(data)
	if err := m.client.WriteBytes(e.ctx, agentclient.File{Path: "/tmp/data"}, data); err != nil {
		e.Fatal(err)
	}
	res := m.shell("cat /tmp/data; echo done >&2")
	if !bytes.Equal(res.Stdout, data) || string(res.Stderr) != "done\n" {
		e.Errorf("%d bytes came back as %d other ones, and %q", len(data), len(res.Stdout), res.Stderr)
	}
}

// fill fills b with bytes by chance.
func fill(b []byte) {
	chance := rand.NewChaCha8([32]byte{1})
	_, _ = chance.Read(b) // never fails
}

// testFiles writes files and reads them.
func testFiles(e *env) {
	m := e.create(usual)
	for _, size := range []int{0, 1, 4097, 3 << 20} {
		data := make([]byte, size)
		fill(data)
		if err := m.client.WriteBytes(e.ctx, agentclient.File{Path: "/root/a/b", Atomic: true}, data); err != nil {
			e.Fatal(err)
		}
		back, err := m.client.ReadFile(e.ctx, "/root/a/b", "")
		if err != nil || !bytes.Equal(back, data) {
			e.Errorf("%d bytes came back as %d, %v", size, len(back), err)
		}
	}
	if _, err := m.client.ReadFile(e.ctx, "/root/missing", ""); err == nil {
		e.Error("a file that does not exist could be read")
	}
}

// testClosed sees that a machine reaches its loopback and no more, and that
// ports where nobody listens refuse at once.
func testClosed(e *env) {
	m := e.create(usual)
	m.want("ip -o addr show dev lo | grep -c 127.0.0.1", "1\n")
	res := m.shell("nc -l -p 8080 127.0.0.1 >/dev/null & sleep 0.3; echo x | nc -w 2 127.0.0.1 8080 && echo reached")
	if !bytes.Contains(res.Stdout, []byte("reached")) {
		e.Errorf("loopback: %q, %q", res.Stdout, res.Stderr)
	}
	for _, to := range []string{"1.1.1.1 80", "169.254.169.254 80"} {
		if res := m.shell("nc -w 1 " + to + " </dev/null"); res.ExitCode == 0 {
			e.Errorf("the machine reached %s", to)
		}
	}
	ctx, cancel := context.WithTimeout(e.ctx, patience)
	defer cancel()
	conn, err := m.instance.Dial(ctx, 9)
	if err == nil {
		conn.Close()
	}
	if !errors.Is(err, unix.ECONNREFUSED) {
		e.Errorf("dial a port where nobody listens: %v", err)
	}
}

// testDeath lets a machine die by itself.
func testDeath(e *env) {
	m := e.create(usual)
	waited := make(chan backend.Exit, 3)
	for range cap(waited) {
		go func() {
			exit, err := m.instance.Wait(e.ctx)
			if err != nil {
				e.Errorf("wait: %v", err)
			}
			waited <- exit
		}()
	}
	e.kind.Crash(e.TB, m.instance.Handle())
	for range cap(waited) {
		if exit := <-waited; exit.OutOfMemory || exit.Detail == "" {
			e.Errorf("a machine that was killed: %+v", exit)
		}
	}
	if conn, err := m.instance.Dial(e.ctx, backend.AgentPort); err == nil {
		conn.Close()
		e.Error("a machine that died takes connections")
	}
	m.destroy()
	e.noLeftovers()
}

// testDestroyAnyTime destroys machines before their agent listens, while they
// work, and from several sides at once.
func testDestroyAnyTime(e *env) {
	cfg := e.config(usual)
	i, err := e.backend.Create(e.ctx, cfg)
	if err != nil {
		e.Fatal(err)
	}
	e.adopt(cfg, i).destroy()

	m := e.create(usual)
	ended := make(chan struct{})
	if !e.kind.Simulated {
		started := make(chan struct{})
		go func() {
			defer close(ended)
			cmd := agentclient.Shell("while :; do echo y; done")
			cmd.Stdout, cmd.OnStart = discard{}, func(int) { close(started) }
			if _, err := m.client.Run(e.ctx, cmd); err == nil {
				e.Error("a command ended well although its machine was destroyed")
			}
		}()
		<-started
	} else {
		close(ended)
	}
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if err := m.instance.Destroy(e.ctx); err != nil {
				e.Errorf("destroy: %v", err)
			}
		})
	}
	wg.Wait()
	m.destroy()
	<-ended
	e.noLeftovers()
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// testSideBySide makes eight machines at once.
func testSideBySide(e *env) {
	const count = 8
	configs := make([]backend.Config, count)
	for n := range configs {
		configs[n] = e.config(usual)
	}
	made := make([]backend.Instance, count)
	var wg sync.WaitGroup
	for n, cfg := range configs {
		wg.Go(func() {
			i, err := e.backend.Create(e.ctx, cfg)
			if err != nil {
				e.Errorf("create: %v", err)
				return
			}
			made[n] = i
		})
	}
	wg.Wait()
	var all []*machine
	for n, i := range made {
		if i == nil {
			e.release(configs[n])
			continue
		}
		all = append(all, e.adopt(configs[n], i))
	}
	for _, m := range all {
		wg.Go(func() {
			if err := m.hello(); err != nil {
				e.Errorf("greet %s: %v", m.cfg.ID, err)
				return
			}
			if e.kind.Simulated {
				m.works()
			} else {
				m.want("hostname", m.cfg.Hostname+"\n")
			}
		})
	}
	wg.Wait()
	for _, m := range all {
		wg.Go(m.destroy)
	}
	wg.Wait()
	e.noLeftovers()
}
