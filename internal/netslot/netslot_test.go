package netslot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
)

// prefixFor returns a prefix of the test's own, and checks at its end that
// nothing with it is left on the host.
func prefixFor(t testing.TB) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("network namespaces need root")
	}
	prefix := backend.Prefix(t.TempDir())
	t.Cleanup(func() {
		names, err := List(prefix)
		if err != nil || len(names) > 0 {
			t.Errorf("left on the host: %v, %v", names, err)
		}
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(mounts), prefix) {
			t.Errorf("a mount of %s is left: %v", prefix, err)
		}
	})
	return prefix
}

// running starts a pool; its Run has returned when the test ends.
func running(t testing.TB, prefix string, size int) *Pool {
	t.Helper()
	p := NewPool(slog.New(slog.NewTextHandler(t.Output(), nil)), prefix, size, nil)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return p
}

// waitFor polls a condition that no event announces.
func waitFor(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for limit := time.Now().Add(10 * time.Second); !ok(); {
		if time.Now().After(limit) {
			t.Fatalf("waited too long for %s", what)
		}
		time.Sleep(time.Millisecond)
	}
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestSlotIsClosedAndComplete(t *testing.T) {
	slot, err := create(prefixFor(t)+"-a", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer Remove(slot.Name)
	err = Inside(slot, func() error {
		links, err := netlink.LinkList()
		if err != nil {
			return err
		}
		var names []string
		for _, l := range links {
			a := l.Attrs()
			switch {
			case a.Flags&net.FlagUp == 0 && l.Type() != "device" && a.Name != "lo":
				// Kernels with built-in tunnels put an unused one in each namespace.
				continue
			case a.Flags&net.FlagUp == 0:
				t.Errorf("link %s is down", a.Name)
			}
			names = append(names, a.Name)
			if a.Name == slot.GuestLink && (a.HardwareAddr.String() != slot.GuestMAC || a.MTU != slot.MTU) {
				t.Errorf("guest link: %s, MTU %d", a.HardwareAddr, a.MTU)
			}
			if a.Name == gatewayLink && a.HardwareAddr.String() != slot.GatewayMAC {
				t.Errorf("gateway link: %s", a.HardwareAddr)
			}
		}
		if len(names) != 3 {
			t.Errorf("links that are up: %v; want lo and the pair", names)
		}
		routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if err != nil {
			return err
		}
		for _, r := range routes {
			if dst := r.Dst.String(); dst != "192.0.0.0/30" && dst != "fd5e:c0de:5eed::/126" {
				t.Errorf("route %v; want the slot's own nets only", r)
			}
		}
		addrs, err := netlink.AddrList(nil, netlink.FAMILY_V6)
		if err != nil {
			return err
		}
		for _, a := range addrs {
			if !a.IP.IsLoopback() && a.IPNet.String() != gatewayAddr6 {
				t.Errorf("IPv6 address %v", a)
			}
		}
		fwd, err := os.ReadFile("/proc/sys/net/ipv4/ip_forward")
		if err != nil || strings.TrimSpace(string(fwd)) != "0" {
			t.Errorf("ip_forward is %q, %v", fwd, err)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// Whatever a namespace begins with, it ends with one that does not pace, as far as
// the host allows.
func TestSetCongestionControl(t *testing.T) {
	const path = "/proc/sys/net/ipv4/tcp_congestion_control"
	slot, err := create(prefixFor(t)+"-a", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer Remove(slot.Name)
	err = Inside(slot, func() error {
		made, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		allowed := "reno"
		if os.WriteFile(path, []byte("cubic"), 0) == nil {
			allowed = "cubic"
		}
		if got := strings.TrimSpace(string(made)); got != allowed {
			t.Errorf("a slot has %q; want %s", got, allowed)
		}
		if err := os.WriteFile(path, []byte("reno"), 0); err != nil {
			return err
		}
		SetCongestionControl()
		now, err := os.ReadFile(path)
		if got := strings.TrimSpace(string(now)); got != allowed {
			t.Errorf("after Reno: %q; want %s", got, allowed)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestLargeSegments(t *testing.T) {
	slot, err := create(prefixFor(t)+"-a", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer Remove(slot.Name)
	err = Inside(slot, func() error {
		if err := LargeSegments(&netlink.Handle{}); err != nil {
			return err
		}
		for _, name := range []string{slot.GuestLink, gatewayLink} {
			link, err := netlink.LinkByName(name)
			if err != nil {
				return err
			}
			// Both are zero on a kernel that does not know it.
			if a := link.Attrs(); a.GSOIPv4MaxSize != 0 && a.GSOIPv4MaxSize != a.TSOMaxSize {
				t.Errorf("packets of %s: %d bytes of %d", name, a.GSOIPv4MaxSize, a.TSOMaxSize)
			}
			// Larger ones by IPv6 have a header in front, which a gate drops.
			if a := link.Attrs(); a.GSOMaxSize > 64<<10 {
				t.Errorf("packets of %s by IPv6: %d bytes", name, a.GSOMaxSize)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

func TestNameIsTakenOnce(t *testing.T) {
	prefix := prefixFor(t)
	if _, err := create(prefix+"-a", nil); err != nil {
		t.Fatal(err)
	}
	if _, err := create(prefix+"-a", nil); !errors.Is(err, os.ErrExist) {
		t.Errorf("a second slot of the same name: %v", err)
	}
	for range 2 {
		if err := Remove(prefix + "-a"); err != nil {
			t.Fatal(err)
		}
	}
}

func TestRemoveRefusesPaths(t *testing.T) {
	for _, name := range []string{"", ".", "..", "../x", "a/b"} {
		if err := Remove(name); err == nil {
			t.Errorf("%q was accepted", name)
		}
	}
}

// A run that was killed between its steps leaves a file without a namespace.
func TestRemoveHalfMade(t *testing.T) {
	prefix := prefixFor(t)
	path := filepath.Join(dir, prefix+"-half")
	if err := os.WriteFile(path, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := Remove(prefix + "-half"); err != nil {
		t.Fatal(err)
	}
}

func TestRemoveWhileHeld(t *testing.T) {
	slot, err := create(prefixFor(t)+"-held", nil)
	if err != nil {
		t.Fatal(err)
	}
	ns, err := os.Open(slot.NetNS)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	if err := Remove(slot.Name); err != nil {
		t.Fatal(err)
	}
	err = inside(fmt.Sprintf("/proc/self/fd/%d", ns.Fd()), func() error {
		if _, err := netlink.LinkByName(gatewayLink); err == nil {
			t.Error("the link lives on in a namespace that somebody holds")
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

// The first "ip netns add" on a machine mounts the directory of the names on
// itself. That is tried in a mount namespace, where it disturbs nobody.
func TestRemoveCovered(t *testing.T) {
	const variable = "OPENDSEC_TEST_PREFIX"
	prefix := os.Getenv(variable)
	if prefix == "" {
		cmd := exec.Command(os.Args[0], "-test.run=^TestRemoveCovered$", "-test.v")
		cmd.Env = append(os.Environ(), variable+"="+prefixFor(t))
		cmd.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s", err, out)
		}
		return
	}
	before, err := create(prefix+"-before", nil)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount(dir, dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	after, err := create(prefix+"-after", nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, slot := range []backend.Slot{before, after} {
		if err := Inside(slot, func() error { return nil }); err != nil {
			t.Errorf("%s cannot be entered: %v", slot.Name, err)
		}
		for range 2 {
			if err := Remove(slot.Name); err != nil {
				t.Error(err)
			}
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil || strings.Contains(string(mounts), prefix) {
		t.Errorf("a mount is left: %v\n%s", err, mounts)
	}
}

func TestPoolFillsAndEnds(t *testing.T) {
	prefix := prefixFor(t)
	before := descriptors(t)
	p := running(t, prefix, 3)
	waitFor(t, "three slots", func() bool { return len(p.ready) == 3 })
	slot, err := p.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	waitFor(t, "the pool to fill again", func() bool { return len(p.ready) == 3 })
	p.Release(slot)
	waitFor(t, "the released slot to go", func() bool {
		names, err := List(prefix)
		return err == nil && len(names) == 3
	})
	if after := descriptors(t); after > before+1 { // the runtime's poller may have come
		t.Errorf("%d descriptors before, %d after", before, after)
	}
}

func TestAcquireSideBySide(t *testing.T) {
	prefix := prefixFor(t)
	p := running(t, prefix, 2)
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		seen = map[string]bool{}
	)
	for range 12 {
		wg.Go(func() {
			slot, err := p.Acquire(t.Context())
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if seen[slot.Name] {
				t.Errorf("%s was given twice", slot.Name)
			}
			seen[slot.Name] = true
			p.Release(slot)
		})
	}
	wg.Wait()
	if _, err := p.Acquire(canceled(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("acquire with a done context: %v", err)
	}
}

func canceled(t *testing.T) context.Context {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// guest takes the guest's place: the link with its address in a namespace of
// its own, as the container backend does, and a listener there.
func guest(t *testing.T, slot backend.Slot, addr string) net.Listener {
	t.Helper()
	other, err := create(strings.Split(slot.Name, "-")[0]+"-guest", nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := Remove(other.Name); err != nil {
			t.Error(err)
		}
	})
	ns, err := os.Open(other.NetNS)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	err = Inside(other, func() error {
		return netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: gatewayLink}})
	})
	if err != nil {
		t.Fatal(err)
	}
	err = Inside(slot, func() error {
		link, err := netlink.LinkByName(slot.GuestLink)
		if err != nil {
			return err
		}
		return netlink.LinkSetNsFd(link, int(ns.Fd()))
	})
	if err != nil {
		t.Fatal(err)
	}
	var l net.Listener
	err = Inside(other, func() error {
		link, err := netlink.LinkByName(slot.GuestLink)
		if err != nil {
			return err
		}
		a, err := netlink.ParseAddr(slot.GuestAddr)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, a); err != nil {
			return err
		}
		if err := netlink.LinkSetUp(link); err != nil {
			return err
		}
		l, err = net.Listen("tcp4", addr)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func TestDial(t *testing.T) {
	prefix := prefixFor(t)
	slot, err := create(prefix+"-d", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer Remove(slot.Name)
	l := guest(t, slot, "192.0.0.2:7007")
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.Copy(c, c)
			c.Close()
		}
	}()
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			c, err := Dial(t.Context(), slot, 7007)
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			c.SetDeadline(time.Now().Add(10 * time.Second))
			if _, err := c.Write([]byte("ping")); err != nil {
				t.Error(err)
			}
			c.(*net.TCPConn).CloseWrite()
			if b, err := io.ReadAll(c); string(b) != "ping" || err != nil {
				t.Errorf("echo: %q, %v", b, err)
			}
		})
	}
	wg.Wait()
	if _, err := Dial(t.Context(), slot, 7008); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a closed port: %v", err)
	}
	if _, err := Dial(t.Context(), slot, 0); err == nil {
		t.Error("port 0 was accepted")
	}
	// A thread that dialled must be back where it was.
	for range 20 {
		wg.Go(func() {
			if now, err := os.Readlink("/proc/thread-self/ns/net"); now != own {
				t.Errorf("a thread stayed in %s: %v", now, err)
			}
		})
	}
	wg.Wait()
	l.Close()
	<-served
}

// Nobody answers: the context must end the wait, and no descriptor may stay.
func TestDialNobody(t *testing.T) {
	slot, err := create(prefixFor(t)+"-n", nil)
	if err != nil {
		t.Fatal(err)
	}
	defer Remove(slot.Name)
	before := descriptors(t)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Dial(ctx, slot, 80); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	if after := descriptors(t); after > before {
		t.Errorf("%d descriptors before, %d after", before, after)
	}
	if _, err := Dial(t.Context(), describe("none-such"), 80); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a slot that does not exist: %v", err)
	}
}

func BenchmarkCreate(b *testing.B) {
	prefix := prefixFor(b)
	var names []string
	for b.Loop() {
		slot, err := create(fmt.Sprintf("%s-%d", prefix, len(names)), nil)
		if err != nil {
			b.Fatal(err)
		}
		names = append(names, slot.Name)
	}
	b.StopTimer()
	for _, n := range names {
		if err := Remove(n); err != nil {
			b.Error(err)
		}
	}
}
