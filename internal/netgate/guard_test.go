package netgate

import (
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/netgate/gatetest"
	"github.com/kernflux/opendsec/internal/netpolicy/dnsproxy"
	"github.com/kernflux/opendsec/internal/netslot"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// echo answers with what it is sent.
func echo(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			io.Copy(c, c)
			c.Close()
		}()
	}
}

func echoPackets(c net.PacketConn) {
	b := make([]byte, 64<<10)
	for {
		n, from, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		c.WriteTo(b[:n], from)
	}
}

// ping says something on a connection and hears it again.
func ping(c net.Conn) error {
	c.SetDeadline(time.Now().Add(5 * time.Second))
	if _, err := io.WriteString(c, "ping"); err != nil {
		return err
	}
	b := make([]byte, 4)
	if _, err := io.ReadFull(c, b); err != nil {
		return err
	}
	if string(b) != "ping" {
		return errors.New(string(b))
	}
	return nil
}

func TestFlows(t *testing.T) {
	w := gatetest.New(t)
	go echo(w.Listen(gatetest.Network + ":9000"))
	go echo(w.Listen("[" + gatetest.Good6 + "]:9000"))
	go echoPackets(w.Packets(gatetest.Network + ":9000"))
	go echoPackets(w.Packets("[" + gatetest.Good6 + "]:9000"))
	gu := newGuest(t, newGate(t, Config{}))
	gu.open(map[string]bool{gatetest.Networks: true, "2001:db8:51::/64": true, "198.51.100.0/24": true})
	for _, network := range []string{"tcp", "udp"} {
		for _, addr := range []string{gatetest.Network + ":9000", "[" + gatetest.Good6 + "]:9000"} {
			c, err := gu.dial(network, addr)
			if err != nil {
				t.Errorf("%s %s: %v", network, addr, err)
				continue
			}
			for range 3 {
				if err := ping(c); err != nil {
					t.Errorf("%s %s: %v", network, addr, err)
				}
			}
			c.Close()
		}
	}
	large, err := gu.dial("udp", gatetest.Network+":9000")
	must(t, err)
	large.Write(make([]byte, 20000))
	large.SetReadDeadline(time.Now().Add(5 * time.Second))
	if n, err := large.Read(make([]byte, 64<<10)); n != 20000 {
		t.Errorf("a datagram in fragments: %d bytes came back, %v", n, err)
	}
	// The end of one way is passed on, and the other goes on.
	c, err := gu.dial("tcp", gatetest.Network+":9000")
	must(t, err)
	io.WriteString(c, strings.Repeat("x", 1<<20))
	c.(*net.TCPConn).CloseWrite()
	if b, err := io.ReadAll(c); len(b) != 1<<20 || err != nil {
		t.Errorf("%d bytes came back, %v", len(b), err)
	}
	// What the far end says is what the sandbox hears.
	if _, err := gu.dial("tcp", gatetest.Network+":9001"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a closed port: %v", err)
	}
	begin := time.Now()
	if _, err := gu.dial("tcp", "198.51.100.99:9001"); err == nil || !errors.Is(err, unix.EHOSTUNREACH) && time.Since(begin) < time.Second {
		t.Errorf("nobody there: %v", err)
	}
	u := gu.guard.Usage()
	if u.Sent < 1<<20 || u.Received < 1<<20 {
		t.Errorf("usage %+v", u)
	}
	waitFor(t, "the TCP flows to end", func() bool { return gu.guard.tcpFlows() == 0 })
}

func (gd *Guard) tcpFlows() int {
	gd.mu.Lock()
	defer gd.mu.Unlock()
	return gd.open["tcp"]
}

// A slot that nobody serves lets nothing out, and answers nobody.
func TestClosedWithoutGuard(t *testing.T) {
	w := gatetest.New(t)
	gu := newGuest(t, newGate(t, Config{}))
	for _, addr := range []string{gatetest.Good + ":443", gu.slot.GatewayIP + ":53", gatetest.Bad + ":53"} {
		if c, err := gu.dial("tcp", addr); err == nil {
			t.Errorf("%s answers", addr)
			c.Close()
		}
	}
	gu.open(gatetest.Rules())
	if _, err := gu.resolve("example.com"); err != nil {
		t.Error(err)
	}
	gu.guard.Close()
	if _, err := gu.dial("tcp", gatetest.Network+":7005"); err == nil {
		t.Error("open after Close")
	}
	if b := w.Bypasses(); len(b) > 0 {
		t.Errorf("got through: %s", b)
	}
}

// A child that a killed process was starting has its sockets open for a moment;
// the next process waits for that.
func TestOpenBesideChildOfKilled(t *testing.T) {
	w := gatetest.New(t)
	gu := newGuest(t, newGate(t, Config{}))
	gu.open(gatetest.Rules())
	child := exec.Command("cat")
	for _, f := range ownSockets(t) {
		defer f.Close()
		child.ExtraFiles = append(child.ExtraFiles, f)
	}
	in, err := child.StdinPipe()
	must(t, err)
	must(t, child.Start())
	t.Cleanup(func() { in.Close(); _ = child.Wait() })
	for _, f := range child.ExtraFiles {
		must(t, f.Close())
	}
	gu.guard.Close()
	time.AfterFunc(100*time.Millisecond, func() { in.Close() })
	gu.open(gatetest.Rules())
	if _, err := gu.resolve("example.com"); err != nil {
		t.Error(err)
	}
	if b := w.Bypasses(); len(b) > 0 {
		t.Errorf("got through: %s", b)
	}
}

// ownSockets returns copies of all sockets that this process has open.
func ownSockets(t *testing.T) (files []*os.File) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	must(t, err)
	for _, e := range entries {
		if to, err := os.Readlink("/proc/self/fd/" + e.Name()); err != nil || !strings.HasPrefix(to, "socket:") {
			continue
		}
		fd, err := strconv.Atoi(e.Name())
		must(t, err)
		copied, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		must(t, err)
		files = append(files, os.NewFile(uintptr(copied), e.Name()))
	}
	return files
}

func TestChangeOfPolicy(t *testing.T) {
	w := gatetest.New(t)
	go echo(w.Listen(gatetest.Network + ":9000"))
	go echo(w.Listen(gatetest.Good + ":9000"))
	go echoPackets(w.Packets(gatetest.Network + ":9000"))
	gu := newGuest(t, newGate(t, Config{}))
	gu.open(map[string]bool{gatetest.Networks: true, "example.com": true})
	if _, err := gu.resolve("example.com"); err != nil {
		t.Fatal(err)
	}
	var flows []net.Conn
	for _, to := range [][2]string{{"tcp", gatetest.Network}, {"udp", gatetest.Network}, {"tcp", gatetest.Good}} {
		c, err := gu.dial(to[0], to[1]+":9000")
		must(t, err)
		must(t, ping(c))
		flows = append(flows, c)
	}
	// Narrower: the network goes, the name stays.
	must(t, gu.guard.SetPolicy(parse(t, map[string]bool{"example.com": true})))
	if err := ping(flows[0]); !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
		t.Errorf("a connection that is not allowed any more: %v", err)
	}
	if err := ping(flows[1]); err == nil {
		t.Error("datagrams that are not allowed any more are carried")
	}
	if err := ping(flows[2]); err != nil {
		t.Errorf("a connection that is allowed still: %v", err)
	}
	if c, err := gu.dial("tcp", gatetest.Good+":9000"); err != nil || ping(c) != nil {
		t.Errorf("what a name led to is closed after a change that allows the name: %v", err)
	}
	// Another port of the name only.
	must(t, gu.guard.SetPolicy(parse(t, map[string]bool{"example.com:443": true})))
	if err := ping(flows[2]); err == nil {
		t.Error("a port that is not allowed any more is open")
	}
	// Wider again.
	must(t, gu.guard.SetPolicy(parse(t, map[string]bool{gatetest.Networks: true})))
	if c, err := gu.dial("tcp", gatetest.Network+":9000"); err != nil || ping(c) != nil {
		t.Errorf("after a change that allows it: %v", err)
	}
	if _, err := gu.resolve("example.com"); err == nil {
		t.Error("a name that is not allowed any more resolves")
	}
	denied := gu.guard.denials.Denied().Newest
	changes := 0
	for _, d := range denied {
		if d.Kind == DeniedByChange {
			changes += d.Count
		}
	}
	if changes != 4 { // three flows, and the second one to the name
		t.Errorf("%d of the denials are by a change: %+v", changes, denied)
	}
}

// While rules are changed again and again, a sandbox that tries all the time
// never reaches what is closed at that moment.
func TestNoWindow(t *testing.T) {
	w := gatetest.New(t)
	go echo(w.Listen(gatetest.Network + ":9000"))
	gu := newGuest(t, newGate(t, Config{Limits: Limits{Flows: 1e6, FlowsBurst: 1e6}}))
	gu.open(nil)
	shut, open := parse(t, nil), parse(t, map[string]bool{gatetest.Networks: true})
	stop := make(chan struct{})
	var tries sync.WaitGroup
	for range 4 {
		tries.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if c, err := gu.dial("tcp", gatetest.Network+":9000"); err == nil {
					ping(c)
					c.Close()
				}
			}
		})
	}
	for i := range 1000 {
		must(t, gu.guard.SetPolicy(shut))
		// Now nothing may be open, and nothing may become so.
		gu.guard.mu.Lock()
		for _, f := range gu.guard.flows {
			select {
			case <-f.done:
			default:
				t.Errorf("flip %d: %v is open", i, f.key)
			}
		}
		gu.guard.mu.Unlock()
		if i%50 == 0 {
			if c, err := gu.dial("tcp", gatetest.Network+":9000"); err == nil && ping(c) == nil {
				t.Errorf("flip %d: the sandbox gets through", i)
			}
		}
		must(t, gu.guard.SetPolicy(open))
	}
	close(stop)
	tries.Wait()
	if c, err := gu.dial("tcp", gatetest.Network+":9000"); err != nil || ping(c) != nil {
		t.Errorf("at the end: %v", err)
	}
}

func TestPins(t *testing.T) {
	w := gatetest.New(t)
	go echo(w.Listen(gatetest.Good + ":9000"))
	g := newGate(t, Config{DNS: dnsproxy.Config{Upstreams: []string{gatetest.Resolver}}})
	var mu sync.Mutex
	var ahead time.Duration
	g.now = func() time.Time {
		mu.Lock()
		defer mu.Unlock()
		return time.Now().Add(ahead)
	}
	gu := newGuest(t, g)
	gu.open(map[string]bool{"example.com": true})
	if _, err := gu.dial("tcp", gatetest.Good+":9000"); err == nil {
		t.Error("open before the name was resolved")
	}
	if _, err := gu.resolve("example.com"); err != nil {
		t.Fatal(err)
	}
	c, err := gu.dial("tcp", gatetest.Good+":9000")
	must(t, err)
	must(t, ping(c))
	explain := func(target string, allow bool, why string) {
		t.Helper()
		if d, err := gu.guard.Explain(target); err != nil || d.Allow != allow || !strings.Contains(d.Why, why) {
			t.Errorf("explain %s: %+v, %v", target, d, err)
		}
	}
	explain(gatetest.Good+":9000", true, "example.com led this sandbox to the address")
	explain(gatetest.Good, true, "example.com led")
	explain(gatetest.Good+":53", false, "53")
	explain("example.com:443", true, "")
	explain("evil.test", false, "no rule")
	// The next guard, after a restart.
	pins := gu.guard.Pins()
	gu.guard.Close()
	gu.guard, err = g.Open(Sandbox{ID: sandbox.NewID(), Slot: gu.slot, Policy: parse(t, map[string]bool{"example.com": true}), Pins: pins})
	must(t, err)
	t.Cleanup(gu.guard.Close)
	if c, err = gu.dial("tcp", gatetest.Good+":9000"); err != nil || ping(c) != nil {
		t.Fatalf("pins of an earlier guard: %v", err)
	}
	// When its time is up nothing new begins, and what goes on goes on.
	mu.Lock()
	ahead = 10 * time.Minute
	mu.Unlock()
	if _, err := gu.dial("tcp", gatetest.Good+":9000"); err == nil {
		t.Error("open after its lifetime")
	}
	must(t, ping(c))
	if len(gu.guard.Pins()) > 0 {
		t.Error("pins that have expired are handed on")
	}
}

func TestPinsMakeRoom(t *testing.T) {
	now := time.Now()
	p := newPins(10)
	for i := range 25 {
		p.add("example.com", netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), now.Add(time.Duration(i+1)*time.Second), now)
		if p.n > 10 || p.n != len(p.list()) {
			t.Fatalf("%d pins, %d listed", p.n, len(p.list()))
		}
	}
	if len(p.names(netip.AddrFrom4([4]byte{198, 51, 100, 24}), now)) != 1 {
		t.Error("the newest is not there")
	}
}

// Somebody flushes the rules of a slot: nothing gets out meanwhile, and they
// are back soon.
func TestFlushedRulesComeBack(t *testing.T) {
	w := gatetest.New(t)
	gu := newGuest(t, newGate(t, Config{}))
	gu.open(gatetest.Rules())
	ns, err := os.Open(gu.slot.NetNS)
	must(t, err)
	defer ns.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns.Fd())))
	must(t, err)
	there := func() bool { ok, err := installed(c); return ok && err == nil }
	for range 3 {
		// By another program than ours.
		if out, err := gu.inSlot("nft", "flush", "ruleset"); err != nil {
			t.Fatalf("%v %s", err, out)
		}
		if _, err := gu.dial("tcp", gatetest.Bad+":80"); err == nil {
			t.Error("open without rules")
		}
		waitFor(t, "the rules to be back", there)
		if c, err := gu.dial("tcp", gatetest.Network+":7005"); err != nil {
			t.Errorf("after the repair: %v", err)
		} else {
			c.Close()
		}
	}
	if b := w.Bypasses(); len(b) > 0 {
		t.Errorf("got through: %s", b)
	}
}

func (gu *guest) inSlot(args ...string) (string, error) {
	other := *gu
	other.ns = gu.slot
	return other.run(args...)
}

func TestLimits(t *testing.T) {
	w := gatetest.New(t)
	go echo(w.Listen(gatetest.Network + ":9000"))
	go echoPackets(w.Packets(gatetest.Network + ":9000"))
	gu := newGuest(t, newGate(t, Config{Limits: Limits{Conns: 3, Sessions: 2, Bandwidth: 1 << 20, Flows: 5, FlowsBurst: 20}}))
	gu.open(map[string]bool{gatetest.Networks: true})
	var open []net.Conn
	for i := range 3 {
		c, err := gu.dial("tcp", gatetest.Network+":9000")
		if err != nil {
			t.Fatalf("connection %d: %v", i, err)
		}
		open = append(open, c)
	}
	if _, err := gu.dial("tcp", gatetest.Network+":9000"); err == nil {
		t.Error("a connection too many")
	}
	for i := range 3 {
		c, err := gu.dial("udp", gatetest.Network+":9000")
		must(t, err)
		if err := ping(c); (err == nil) != (i < 2) {
			t.Errorf("UDP flow %d: %v", i, err)
		}
	}
	// 1 MiB a second each way, after a tenth of it at once.
	begin := time.Now()
	go func() { open[0].Write(make([]byte, 2<<20)) }()
	if _, err := io.ReadFull(open[0], make([]byte, 2<<20)); err != nil {
		t.Error(err)
	}
	if took := time.Since(begin); took < 1200*time.Millisecond || took > 6*time.Second {
		t.Errorf("2 MiB took %v", took)
	}
	open[1].Close()
	waitFor(t, "a place", func() bool { return gu.guard.tcpFlows() < 3 })
	refused := 0
	for range 30 {
		d := net.Dialer{Timeout: 50 * time.Millisecond}
		err := netslot.Inside(gu.ns, func() error {
			c, err := d.DialContext(t.Context(), "tcp", gatetest.Bad+":80")
			if err == nil {
				c.Close()
			}
			return err
		})
		var late net.Error
		if errors.As(err, &late) && late.Timeout() {
			refused++
		}
	}
	if refused == 0 {
		t.Error("flows without end can be begun")
	}
	if d := gu.guard.denials.Denied(); d.Total < 2 {
		t.Errorf("denied %+v", d)
	}
}
