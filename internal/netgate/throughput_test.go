package netgate

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/netgate/gatetest"
	"github.com/kernflux/opendsec/internal/netslot"
)

// carryVariable says to a process of this program that it is one end of a
// connection that is measured, which one, and on which processor.
const carryVariable = "OPENDSEC_TEST_CARRY"

// carries plays the end of a connection that is file 3, if this process is to:
// it sends for a second, or receives until there is no more. It writes how many
// bytes it moved.
func carries() bool {
	role, cpu, ok := strings.Cut(os.Getenv(carryVariable), " ")
	if !ok {
		return false
	}
	if n, err := strconv.Atoi(cpu); err == nil {
		pin(os.Getpid(), n)
	}
	buf, total := make([]byte, 256<<10), 0
	for begin := time.Now(); role != "send" || time.Since(begin) < time.Second; {
		n, err := 0, error(nil)
		if role == "send" {
			n, err = unix.Write(3, buf)
		} else {
			n, err = unix.Read(3, buf)
		}
		if err == unix.EINTR {
			continue
		}
		if n <= 0 {
			break
		}
		total += n
	}
	fmt.Println(total)
	return true
}

// pin keeps all threads of a process to one processor, or with -1 to none.
func pin(pid, cpu int) {
	var set unix.CPUSet
	for i := range 1024 {
		if cpu < 0 || i == cpu {
			set.Set(i)
		}
	}
	tasks, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	for _, task := range tasks {
		if tid, err := strconv.Atoi(task.Name()); err == nil {
			_ = unix.SchedSetaffinity(tid, &set)
		}
	}
}

// carrier is a process that has one end of a connection.
type carrier struct {
	cmd  *exec.Cmd
	said strings.Builder
}

// carryBy hands a connection to a process.
func carryBy(b testing.TB, c net.Conn, role string, cpu int) *carrier {
	b.Helper()
	f, err := c.(*net.TCPConn).File()
	must(b, err)
	c.Close()
	defer f.Close()
	must(b, unix.SetNonblock(int(f.Fd()), false))
	p := &carrier{cmd: exec.Command(os.Args[0])}
	p.cmd.Env = append(os.Environ(), fmt.Sprintf("%s=%s %d", carryVariable, role, cpu))
	p.cmd.ExtraFiles, p.cmd.Stdout, p.cmd.Stderr = []*os.File{f}, &p.said, os.Stderr
	must(b, p.cmd.Start())
	return p
}

// wait returns how many bytes a carrier has moved, and its processor time.
func (p *carrier) wait(b testing.TB) (moved float64, cpu time.Duration) {
	b.Helper()
	must(b, p.cmd.Wait())
	moved, err := strconv.ParseFloat(strings.TrimSpace(p.said.String()), 64)
	must(b, err)
	return moved, p.cmd.ProcessState.UserTime() + p.cmd.ProcessState.SystemTime()
}

// ends are two of one connection's, or of two that are relayed.
type ends struct{ send, receive net.Conn }

// connect dials while the other side accepts.
func (gu *guest) connect(l net.Listener) ends {
	gu.t.Helper()
	accepted := make(chan net.Conn, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			gu.t.Error(err)
		}
		accepted <- c
	}()
	send, err := gu.dial("tcp", l.Addr().String())
	must(gu.t, err)
	return ends{send, <-accepted}
}

// figures are what one run measured.
type figures struct {
	rate  float64 // bits a second
	costs float64 // processor time of all, in seconds a gigabyte
}

// best takes over what is better in other figures: whatever else the machine does
// makes them worse.
func (f *figures) best(o figures) {
	f.rate = max(f.rate, o.rate)
	if f.costs == 0 || o.costs < f.costs {
		f.costs = o.costs
	}
}

// measure has bytes carried for a second.
func (e ends) measure(b testing.TB, sender, receiver int) figures {
	b.Helper()
	begin, own := time.Now(), used()
	r := carryBy(b, e.receive, "receive", receiver)
	s := carryBy(b, e.send, "send", sender)
	_, scpu := s.wait(b)
	n, rcpu := r.wait(b)
	return figures{n * 8 / time.Since(begin).Seconds(), (scpu + rcpu + used() - own).Seconds() / (n / 1e9)}
}

// used is the processor time of this process.
func used() time.Duration {
	var u unix.Rusage
	_ = unix.Getrusage(unix.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// forward leads a guest's packets to the world through the node's namespace, by
// the kernel alone.
func (gu *guest) forward(w *gatetest.World) {
	t := gu.t
	guestIP, _, _ := strings.Cut(gu.slot.GuestAddr, "/")
	ip(t, "-n", gu.slot.Name, "link", "set", gatewayLink, "netns", strconv.Itoa(os.Getpid()))
	ip(t, "addr", "add", gu.slot.GatewayIP+"/30", "dev", gatewayLink)
	ip(t, "link", "set", gatewayLink, "up")
	ip(t, "neigh", "replace", guestIP, "lladdr", gu.slot.GuestMAC, "dev", gatewayLink)
	must(t, os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0))
	w.Route(guestIP)
}

// Packets larger than IPv4's length field can say pass the rules and the relay, and
// what they carry comes back as it was.
func TestBulk(t *testing.T) {
	w := gatetest.New(t)
	w.Deaf()
	go echo(w.Listen(gatetest.Network + ":9000"))
	gu := newGuest(t, newGate(t, Config{Limits: Limits{Bandwidth: 1e12}}))
	gu.open(map[string]bool{gatetest.Networks: true})
	c, err := gu.dial("tcp", gatetest.Network+":9000")
	must(t, err)
	defer c.Close()
	must(t, c.SetDeadline(time.Now().Add(time.Minute)))
	const size = 128 << 20
	sent := sha256.New()
	wrote := make(chan error, 1)
	go func() {
		from := io.LimitReader(rand.NewChaCha8([32]byte{}), size)
		_, err := io.CopyBuffer(struct{ io.Writer }{io.MultiWriter(c, sent)}, from, make([]byte, 1<<20))
		wrote <- errors.Join(err, c.(*net.TCPConn).CloseWrite())
	}()
	came := sha256.New()
	n, err := io.Copy(came, c)
	must(t, errors.Join(err, <-wrote))
	if n != size || !bytes.Equal(came.Sum(nil), sent.Sum(nil)) {
		t.Errorf("of %d bytes %d came back, or others", size, n)
	}
}

// BenchmarkThroughput compares a connection through the relay, with rules, with
// two without rules over links of the same kind, as the best of all runs: one to
// the same server, which the kernel forwards, and one that ends in the slot. With
// two processors for all, sender, relay and receiver share them. With the relay
// on one of its own, and sender and receiver on the other in all cases, it is
// what a machine with a processor to spare gives.
func BenchmarkThroughput(b *testing.B) {
	w := gatetest.New(b)
	w.Deaf()
	outside := w.Listen(gatetest.Network + ":9000")
	g := newGate(b, Config{Limits: Limits{Bandwidth: 1e12}})
	gu, bare, routed := newGuest(b, g), newGuestIn(b, g, nil), newGuestIn(b, g, nil)
	gu.open(map[string]bool{gatetest.Networks: true})
	routed.forward(w)
	var inSlot net.Listener
	must(b, netslot.Inside(bare.slot, func() (err error) {
		inSlot, err = (&net.ListenConfig{}).Listen(context.Background(), "tcp4", bare.slot.GatewayIP+":9000")
		return err
	}))
	defer inSlot.Close()
	b.Logf("the host's congestion control is %s", hostsControl(b))
	for _, bench := range []struct {
		name                    string
		sender, receiver, relay int
	}{{"sharing", -1, -1, -1}, {"apart", 0, 0, 1}} {
		b.Run(bench.name, func(b *testing.B) {
			pin(os.Getpid(), bench.relay)
			defer pin(os.Getpid(), -1)
			var relayed, forwarded, direct figures
			for b.Loop() {
				for range 5 {
					relayed.best(gu.connect(outside).measure(b, bench.sender, bench.receiver))
					forwarded.best(routed.connect(outside).measure(b, bench.sender, bench.receiver))
					direct.best(bare.connect(inSlot).measure(b, bench.sender, bench.receiver))
				}
			}
			b.ReportMetric(relayed.rate/1e9, "Gbit/s")
			b.ReportMetric(forwarded.rate/1e9, "Gbit/s-forwarded")
			b.ReportMetric(direct.rate/1e9, "Gbit/s-to-the-slot")
			b.ReportMetric(relayed.rate/forwarded.rate, "of-forwarded")
			b.ReportMetric(relayed.rate/direct.rate, "of-to-the-slot")
			b.ReportMetric(relayed.costs, "cpu-s/GB")
			b.ReportMetric(forwarded.costs, "cpu-s/GB-forwarded")
			b.ReportMetric(direct.costs, "cpu-s/GB-to-the-slot")
		})
	}
}
