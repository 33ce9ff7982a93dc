package backendtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/agentclient"
	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// testRestore makes machines of snapshots: they have the files of that moment,
// and from then on neither the source nor the other machine sees a change.
func testRestore(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		m.write("/kept", "kept")
		m.write("/changes", "of the snapshot")
		data := m.writeMany("/data", 3<<20)
		s := m.take(memory)
		m.write("/changes", "of the source")
		m.write("/later", "of the source")
		a, b := e.restore(s), e.restore(s)
		a.write("/changes", "of a")
		a.write("/new", "of a")
		b.has("/changes", "of the snapshot")
		b.lacks("/new")
		m.has("/changes", "of the source")
		m.lacks("/new")
		for _, r := range []*machine{a, b} {
			r.answers()
			r.has("/kept", "kept")
			r.has("/data", string(data))
			r.lacks("/later")
			if u, err := r.instance.Usage(e.ctx); err != nil || u.DiskBytes < 3<<20*9/10 || u.DiskBytes > 3<<20+16<<20 {
				e.Errorf("usage of a machine with %d bytes of a %s: %+v, %v", len(data), kindOf(memory), u, err)
			}
		}
		e.noLeftovers()
		a.destroy()
		m.destroy()
		b.answers()
		b.has("/kept", "kept")
		b.destroy()
		e.noLeftovers()
	}
}

// testRestoreMemory makes a machine with memory: its programs go on with what
// they had in memory, and each machine's go their own way.
func testRestoreMemory(e *env) {
	m := e.create(usual)
	c := m.startCounter()
	m.shell("mkdir /here; (cd /here; secret=of-memory; rm -r /here; echo $secret >/dev/shm/shared; while ! test -e /ask; do sleep 0.02; done; echo $secret >/answer) >/dev/null 2>&1 & echo $! >/pid")
	m.shell("mkfifo /fifo; (exec 3<>/fifo; echo in-the-pipe >&3; while ! test -e /ask; do sleep 0.02; done; head -n 1 <&3 >/piped) >/dev/null 2>&1 &")
	m.shell("exec 3>/unlinked; rm /unlinked; (while ! test -e /ask; do sleep 0.02; done; echo open >&3; cat /proc/self/fd/3 >/reread) >/dev/null 2>&1 &")
	before := m.counted()
	s := m.take(true)
	c.goesOn()
	c.stop()
	r := e.restore(s)
	n := r.counted()
	if n < before {
		e.Errorf("the program in the restored machine is at %d, and was at %d before", n, before)
	}
	n = r.countsOn(n)
	r.want("kill -0 $(cat /pid) && cat /dev/shm/shared", "of-memory\n")
	r.shell("touch /ask")
	r.awaits("/answer", "of-memory\n")
	r.awaits("/piped", "in-the-pipe\n")
	m.lacks("/answer")
	m.shell("touch /ask")
	m.awaits("/answer", "of-memory\n")
	m.destroy()
	r.countsOn(n)
	r.destroy()
	e.noLeftovers()
}

// awaits waits until a file has a content.
func (m *machine) awaits(name, content string) {
	m.Helper()
	deadline := time.Now().Add(patience)
	for {
		ctx, cancel := context.WithTimeout(m.ctx, patience)
		back, err := m.client.ReadFile(ctx, name, "")
		cancel()
		if err == nil && string(back) == content {
			return
		}
		if time.Now().After(deadline) {
			m.Fatalf("%s has %q, %v; want %q", name, cut(back), err, content)
		}
		<-time.After(tick / 2)
	}
}

// testRestoreIdentity looks at whom a restored agent obeys, and what it and its
// machine think that they are, before and after it was greeted.
func testRestoreIdentity(e *env) {
	m := e.create(usual)
	s := m.take(true)
	cfg := e.configFrom(s)
	i, err := e.backend.Create(e.ctx, cfg)
	if err != nil {
		e.release(cfg)
		e.Fatalf("create from a snapshot with memory: %v", err)
	}
	r := e.adoptFrom(s, cfg, i)
	if err := r.client.WaitReady(e.ctx); err != nil {
		e.Fatal(err)
	}
	stranger := agentclient.New(r.dialAgent, "a token that nobody gave")
	defer stranger.Close()
	if _, err := stranger.Hello(e.ctx, agentclient.Identity{Token: "another", SandboxID: cfg.ID}); err == nil {
		e.Error("a restored agent takes an identity from a caller without its token")
	}
	r.greet()
	r.answers()
	old := agentclient.New(r.dialAgent, s.token)
	defer old.Close()
	if _, err := old.Run(e.ctx, agentclient.Shell("true")); err == nil {
		e.Error("a restored agent obeys the token of its source after it got its own")
	}
	m.answers() // with the token that it had
	if !e.kind.Simulated {
		r.want("hostname", cfg.Hostname+"\n")
		m.want("hostname", m.cfg.Hostname+"\n")
		r.want("cat /proc/1/comm; echo $FROM_SANDBOX", "agent\nyes\n")
		r.want("cat /run/opendsec/generation", string(cfg.ID)+"\n")
		e.differ("cat /etc/machine-id", m, r)
		e.differ("cat /proc/sys/kernel/random/uuid", m, r)
		e.differ("head -c 32 /dev/urandom | sha1sum", m, r)
	}
	again := e.restore(s)
	if !e.kind.Simulated {
		e.differ("head -c 32 /dev/urandom | sha1sum", r, again)
		e.differ("hostname", r, again)
	}
}

// differ checks that a line gives something, and not the same in both machines.
func (e *env) differ(line string, a, b *machine) {
	e.Helper()
	x, y := a.shell(line), b.shell(line)
	if len(x.Stdout) == 0 || bytes.Equal(x.Stdout, y.Stdout) {
		e.Errorf("%q gives %q in one machine and %q in the other", line, x.Stdout, y.Stdout)
	}
}

// testRestoreClock lets a snapshot grow old: the clock of the machine that is
// made of it is right, after it was greeted, and its timers go on.
func testRestoreClock(e *env) {
	m := e.create(usual)
	c := m.startCounter()
	s := m.take(true)
	c.stop()
	<-time.After(3 * time.Second)
	r := e.restore(s)
	r.countsOn(r.counted())
	res := r.shell("s=$(date +%s); while test $(date +%s) = $s; do :; done; date +%s")
	now := time.Now()
	inside, err := strconv.ParseInt(strings.TrimSpace(string(res.Stdout)), 10, 64)
	if err != nil {
		e.Fatalf("date: %q, %q", res.Stdout, res.Stderr)
	}
	// A second began inside just now.
	if off := now.Sub(time.Unix(inside, 0)); off.Abs() > 300*time.Millisecond {
		e.Errorf("the clock of a restored machine is %v late", off)
	}
	r.want("a=$(date +%s); sleep 1; b=$(date +%s); test $((b-a)) -ge 1 && test $((b-a)) -le 3 && echo ok", "ok\n")
}

// testRestoreConnections restores a machine that has a listener, a connection
// to itself and one to the outside: the first two live on, the third is over.
func testRestoreConnections(e *env) {
	m := e.create(usual)
	outside, addr := m.listenOutside()
	m.shell("(while :; do echo hi | nc -l -p 8080; done) >/dev/null 2>&1 &")
	m.shell("(sleep 100000 | nc -l -p 9000 >/looped) >/dev/null 2>&1 &")
	m.shell("until netstat -ltn | grep -q :9000; do sleep 0.05; done; (while :; do echo x; sleep 0.05; done | nc 127.0.0.1 9000) >/dev/null 2>&1 &")
	m.shell("(sleep 100000 | (nc " + strings.ReplaceAll(addr, ":", " ") + "; echo over >/ended)) >/dev/null 2>&1 &")
	conn, err := outside.Accept()
	if err != nil {
		e.Fatal(err)
	}
	defer conn.Close()
	m.grows("/looped")
	s := m.take(true)
	m.grows("/looped")
	m.hears(8080, "hi\n")
	r := e.restore(s)
	r.grows("/looped")
	r.hears(8080, "hi\n")
	r.awaits("/ended", "over\n")
	m.lacks("/ended")
}

// listenOutside listens where the machine can reach it: at the gateway's
// address in its network slot.
func (m *machine) listenOutside() (net.Listener, string) {
	m.Helper()
	var l net.Listener
	err := netslot.Inside(m.cfg.Slot, func() (err error) {
		var c net.ListenConfig
		l, err = c.Listen(m.ctx, "tcp4", net.JoinHostPort(m.cfg.Slot.GatewayIP, "7000"))
		return err
	})
	if err != nil {
		m.Fatal(err)
	}
	m.Cleanup(func() { l.Close() })
	return l, l.Addr().String()
}

// grows waits until a file has more bytes than now.
func (m *machine) grows(name string) {
	m.Helper()
	m.want("s=$(stat -c %s "+name+"); while test $(stat -c %s "+name+") -le $s; do sleep 0.05; done; echo ok", "ok\n")
}

// hears connects to a port and wants to be sent a text.
func (m *machine) hears(port int, text string) {
	m.Helper()
	deadline := time.Now().Add(patience)
	for {
		ctx, cancel := context.WithTimeout(m.ctx, patience)
		conn, err := m.instance.Dial(ctx, port)
		cancel()
		if err == nil {
			defer conn.Close()
			got := make([]byte, len(text))
			if err := conn.SetReadDeadline(deadline); err != nil {
				m.Fatal(err)
			}
			if _, err := io.ReadFull(conn, got); err != nil || string(got) != text {
				m.Errorf("port %d says %q, %v; want %q", port, got, err, text)
			}
			return
		}
		if !errors.Is(err, unix.ECONNREFUSED) || time.Now().After(deadline) {
			m.Fatalf("dial port %d: %v", port, err)
		}
		<-time.After(tick)
	}
}

// testRestoreCompatible asks whether snapshots can be started that were taken
// with something else.
func testRestoreCompatible(e *env) {
	m := e.create(usual)
	s := m.take(true)
	restorer := e.backend.(backend.Restorer)
	if err := restorer.CanRestore(s.Snapshot); err != nil {
		e.Errorf("a snapshot that was just taken cannot be started: %v", err)
	}
	for what, test := range map[string]struct {
		change func(*backend.Snapshot)
		starts bool
	}{
		"kernel":         {func(s *backend.Snapshot) { s.Stamp.Kernel = "0.0.1-other" }, true},
		"backend":        {func(s *backend.Snapshot) { s.Backend = "other" }, false},
		"virtualization": {func(s *backend.Snapshot) { s.Stamp.Virtualization = "other" }, false},
		"runtime":        {func(s *backend.Snapshot) { s.Stamp.Runtime = "other-0.1" }, false},
		"CPU": {func(s *backend.Snapshot) {
			s.Stamp.CPUFeatures = append([]string{"no-such-feature"}, s.Stamp.CPUFeatures...)
		}, false},
	} {
		changed := s.Snapshot
		test.change(&changed)
		if err := restorer.CanRestore(changed); (err == nil) != test.starts {
			e.Errorf("a snapshot of another %s: %v; that it can be started should be %t", what, err, test.starts)
		}
	}
}

// ownFiles are files that each machine has its own of, or that change.
const ownFiles = " /etc/hostname /etc/hosts /etc/machine-id /run/opendsec " + countFile + " " + countFile + ".new"

// testRestoreFiles makes a machine of files only: all of them are as they were,
// the ones of the image that were deleted or replaced too, and nothing runs.
func testRestoreFiles(e *env) {
	m := e.create(usual)
	c := m.startCounter()
	m.shell(changeFiles)
	list := listTree + " " + m.mounts() + ownFiles
	want := m.shell(list)
	s := m.take(false)
	c.stop()
	r := e.restore(s)
	r.want("test ! -e /etc/motd && cat /usr/share/replaced/a /usr/share/file/now-a-directory", "replaced\ninside\n")
	m.shell("rm -rf /usr/share/replaced; echo later >/later")
	n := r.counted()
	<-time.After(10 * tick)
	if now := r.counted(); now != n {
		e.Errorf("a program that counts runs in a machine of files only: from %d to %d", n, now)
	}
	r.want("echo $FROM_SANDBOX; hostname; cat /proc/1/comm", "yes\n"+r.cfg.Hostname+"\nagent\n")
	if diff := diffTrees(want.Stdout, r.shell(list).Stdout); diff != "" {
		e.Errorf("files of a machine of files only (-want +got):\n%s", diff)
	}
	// They can be changed like any others.
	r.want("rm -r /made && mkdir /made && echo again >/etc/motd && chmod 600 /usr/share/kept/a && cat /etc/motd", "again\n")
	r.destroy()
	m.destroy()
	e.noLeftovers()
}

// testRestoreSideBySide makes several machines of one snapshot at once, while
// its source works.
func testRestoreSideBySide(e *env) {
	const count = 5
	for _, memory := range e.kinds() {
		m := e.create(usual)
		c := m.startCounter()
		m.write("/kept", "kept")
		s := m.take(memory)
		made := make([]*machine, count)
		configs := make([]backend.Config, count)
		for n := range configs {
			configs[n] = e.configFrom(s)
		}
		var wg sync.WaitGroup
		instances := make([]backend.Instance, count)
		for n, cfg := range configs {
			wg.Go(func() {
				var err error
				if instances[n], err = e.backend.Create(e.ctx, cfg); err != nil {
					e.Errorf("create from a %s beside others: %v", kindOf(memory), err)
				}
			})
		}
		wg.Wait()
		for n, i := range instances {
			if i == nil {
				e.release(configs[n])
				continue
			}
			made[n] = e.adoptFrom(s, configs[n], i)
		}
		for n, r := range made {
			if r == nil {
				continue
			}
			r.greet()
			r.answers()
			r.has("/kept", "kept")
			r.write("/mine", strconv.Itoa(n))
		}
		for n, r := range made {
			if r != nil {
				r.has("/mine", strconv.Itoa(n))
				wg.Go(r.destroy)
			}
		}
		wg.Wait()
		c.goesOn()
		c.stop()
		m.destroy()
		e.noLeftovers()
	}
}

// testRestoreGenerations makes a machine of a machine of a machine, each time
// after the one before is gone with its snapshot's last user.
func testRestoreGenerations(e *env) {
	const generations = 4
	for _, memory := range e.kinds() {
		m := e.create(usual)
		c := m.startCounter()
		c.stop()
		for n := range generations {
			m.write(fmt.Sprintf("/of-%d", n), fmt.Sprint("written in generation ", n))
			m.write("/present", strconv.Itoa(n))
			s := m.take(memory)
			m.destroy()
			e.noLeftovers()
			m = e.restore(s)
			m.answers()
			m.has("/present", strconv.Itoa(n))
			if memory && !e.kind.Simulated {
				m.countsOn(m.counted())
			}
		}
		for n := range generations {
			m.has(fmt.Sprintf("/of-%d", n), fmt.Sprint("written in generation ", n))
		}
		m.destroy()
		e.noLeftovers()
	}
}

// testRestoreRecover finds a restored machine again, running and paused.
func testRestoreRecover(e *env) {
	for _, memory := range e.kinds() {
		m := e.create(usual)
		c := m.startCounter()
		c.stop()
		m.write("/kept", "kept")
		r := e.restore(m.take(memory))
		m.destroy()
		e.reopen()
		r.recovered()
		r.answers()
		r.has("/kept", "kept")
		if memory && !e.kind.Simulated {
			r.countsOn(r.counted())
		}
		if e.can.Pause {
			r.pause()
			e.reopen()
			r.recovered()
			r.silent()
			r.resume()
			r.answers()
		}
		e.noLeftovers()
		r.destroy()
		e.noLeftovers()
	}
}

// testRestoreLimits goes over each limit in machines of a snapshot, and finds
// what the source had written counted.
func testRestoreLimits(e *env) {
	const written = 16 << 20
	for _, memory := range e.kinds() {
		limitsVisible(e.restore(e.create(usual).take(memory)))
		m := e.create(tight)
		m.writeMany("/written", written)
		s := m.take(memory)
		m.destroy()
		for _, limit := range []func(*machine){
			memoryLimit, pidsLimit, cpuLimit,
			func(m *machine) { m.Helper(); diskLimit(m, written) },
		} {
			r := e.restore(s)
			limit(r)
			r.destroy()
		}
		e.noLeftovers()
	}
}

// testRestoreCycles takes a machine through many lives, and compares what this
// process holds before and after.
func testRestoreCycles(e *env) {
	for _, memory := range e.kinds() {
		const cycles = 15
		m := e.create(sandbox.Limits{CPU: 2, MemoryMB: 128, DiskMB: 64, PIDs: 100})
		c := m.startCounter()
		c.stop()
		one := func() {
			s := m.take(memory)
			m.destroy()
			m = e.restore(s)
			m.works()
			if memory && !e.kind.Simulated {
				m.countsOn(m.counted())
			}
		}
		one() // what is made once and kept is no leak
		e.quiet()
		goroutines, files := runtime.NumGoroutine(), openFiles()
		for range cycles {
			one()
		}
		e.notGrown(cycles, goroutines, files)
		m.destroy()
		e.noLeftovers()
	}
}
