package netgate

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/netslot"
)

// flowKey is what tells a flow from others.
type flowKey struct {
	proto netpolicy.Proto
	from  netip.AddrPort
	to    netip.AddrPort
}

// flow is a TCP connection, or datagrams between the same two ends.
type flow struct {
	key flowKey

	// Guarded by Guard.mu.
	names   []string // that it is allowed by; nil when its address is open by itself
	inspect bool     // it must ask for one of names
	outside net.Conn // on the host; nil while it is being made
	inside  net.Conn // in the slot; nil until the sandbox's end is there

	early bool // its relay's own: TLS with early data

	once sync.Once
	done chan struct{} // closed by cut
}

// allowed reports whether a policy allows what the flow is. Guard.mu is held.
func (f *flow) allowed(p *netpolicy.Policy) bool {
	q := netpolicy.Query{Addr: f.key.to.Addr(), Port: f.key.to.Port(), Proto: f.key.proto}
	if p.Decide(q).Allow {
		return true
	}
	for _, q.Name = range f.names {
		if p.Decide(q).Allow {
			return true
		}
	}
	return false
}

// name is what a person would call the far end, "" for no name.
func (f *flow) name() string {
	if len(f.names) == 0 {
		return ""
	}
	return f.names[0]
}

// cut ends a flow at both ends, with a reset. Guard.mu is not held.
func (gd *Guard) cut(f *flow) {
	f.once.Do(func() { close(f.done) })
	gd.mu.Lock()
	ends := []net.Conn{f.inside, f.outside}
	gd.mu.Unlock()
	for _, c := range ends {
		if t, ok := c.(*net.TCPConn); ok {
			t.SetLinger(0)
		}
		if c != nil {
			c.Close()
		}
	}
}

// forget takes a flow from the books.
func (gd *Guard) forget(f *flow) {
	gd.mu.Lock()
	defer gd.mu.Unlock()
	for _, book := range []map[flowKey]*flow{gd.dialling, gd.flows} {
		if book[f.key] == f {
			delete(book, f.key)
			gd.open[f.key.proto]--
		}
	}
}

// decideAll decides on the flows that the sandbox begins, until Close.
func (gd *Guard) decideAll() {
	for {
		waiting, changed, err := gd.queue.receive()
		if errors.Is(err, os.ErrClosed) || gd.ctx.Err() != nil {
			return
		}
		if err != nil {
			gd.log.Warn("cannot read from the queue of packets", "error", err)
			select {
			case <-time.After(10 * time.Millisecond):
			case <-gd.ctx.Done():
			}
		}
		if changed {
			gd.log.Warn("somebody changed the rules of a network slot; they are put back", "slot", gd.slot.Name)
			if err := gd.refurnish(); err != nil {
				gd.log.Error("cannot put back the rules of a network slot; it is tried again", "slot", gd.slot.Name, "error", err)
			}
		}
		for _, o := range waiting {
			gd.consider(o)
		}
	}
}

func (gd *Guard) refurnish() error {
	return netslot.Inside(gd.slot, func() error { return gd.gate.Furnish(gd.slot) })
}

// consider decides on a flow, or has somebody find out whether it can be.
func (gd *Guard) consider(o opening) {
	key := flowKey{o.proto, o.from, o.to}
	gd.mu.Lock()
	g := gd.judge(o.to, o.proto, gd.gate.now())
	known := gd.flows[key] != nil
	_, going := gd.dialling[key]
	f := &flow{key: key, done: make(chan struct{})}
	full := ""
	if g.allowed() && !known && !going && !gd.closed {
		if full = gd.full(o.proto); full == "" {
			gd.dialling[key] = f
			gd.open[key.proto]++
		}
	}
	closed := gd.closed
	gd.mu.Unlock()
	switch {
	case closed || going && g.allowed():
		gd.queue.decide(o.id, verdictDrop, 0) // the first packet came before, again
	case !g.allowed():
		gd.refuse(o, Denial{Kind: DeniedAddress, Rule: g.why.Rule, Why: g.why.Why})
	case known:
		gd.queue.decide(o.id, verdictAccept, markAllow)
	case full != "":
		gd.refuse(o, Denial{Kind: DeniedLimit, Why: full})
	default:
		gd.work.Go(func() { gd.begin(o, f) })
	}
}

// full says which limit another flow would go over, "" for none.
func (gd *Guard) full(proto netpolicy.Proto) string {
	switch {
	case len(gd.dialling) >= gd.limits.Dials:
		return "too many connections are on their way"
	case proto == netpolicy.TCP && gd.open[proto] >= gd.limits.Conns:
		return "too many connections are open"
	case proto == netpolicy.UDP && gd.open[proto] >= gd.limits.Sessions:
		return "too many UDP flows are open"
	}
	return ""
}

// refuse refuses a flow and remembers it.
func (gd *Guard) refuse(o opening, d Denial) {
	d.Addr, d.Port, d.Proto = o.to.Addr(), o.to.Port(), o.proto
	gd.deny(d)
	gd.queue.decide(o.id, verdictAccept, markRefuse)
}

// begin makes the host's end of a flow and lets its first packet go on.
func (gd *Guard) begin(o opening, f *flow) {
	outside, err := gd.dial(o)
	if err == nil {
		err = gd.arm(f, outside)
	}
	if err != nil {
		gd.forget(f)
		if d := (*Denial)(nil); errors.As(err, &d) {
			gd.refuse(o, *d)
			return
		}
		mark := uint32(markUnable)
		if errors.Is(err, unix.ECONNREFUSED) || errors.Is(err, unix.ECONNRESET) {
			mark = markRefuse
		}
		gd.queue.decide(o.id, verdictAccept, mark)
		return
	}
	if f.key.proto == netpolicy.UDP {
		gd.carryDatagrams(o, f)
		return
	}
	gd.queue.decide(o.id, verdictAccept, markAllow)
	// Whoever does not answer the handshake has no connection.
	timer := time.AfterFunc(handshake, func() {
		gd.mu.Lock()
		late := f.inside == nil
		gd.mu.Unlock()
		if late {
			gd.cut(f)
		}
	})
	defer timer.Stop()
	select {
	case <-f.done:
	case <-gd.ctx.Done():
		gd.cut(f)
	}
	gd.forget(f)
}

// How long a connection may take to be made, to the far end and to the sandbox.
const (
	dialTime  = 30 * time.Second
	handshake = 10 * time.Second
)

var keepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 15 * time.Second, Count: 6}

func (gd *Guard) dial(o opening) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(gd.ctx, dialTime)
	defer cancel()
	d := net.Dialer{KeepAliveConfig: keepAlive, FallbackDelay: -1}
	network := string(o.proto) + "4"
	if o.to.Addr().Is6() {
		network = string(o.proto) + "6"
	}
	return d.DialContext(ctx, network, o.to.String())
}

// Error lets a denial be the reason why a flow is not begun.
func (d *Denial) Error() string { return d.Why }

// arm makes a flow one that its sandbox can join, if it is allowed still.
func (gd *Guard) arm(f *flow, outside net.Conn) error {
	gd.mu.Lock()
	defer gd.mu.Unlock()
	g := gd.judge(f.key.to, f.key.proto, gd.gate.now())
	var d *Denial
	switch {
	case gd.closed:
		outside.Close()
		return net.ErrClosed
	case sameHost(outside):
		d = &Denial{Kind: DeniedAddress, Why: "the address is the node's own"}
	case !g.allowed():
		d = &Denial{Kind: DeniedByChange, Rule: g.why.Rule, Why: g.why.Why}
	}
	if d != nil {
		outside.Close()
		return d
	}
	port := f.key.to.Port()
	f.names, f.outside = g.names, outside
	f.inspect = !g.direct && f.key.proto == netpolicy.TCP && (port == 80 || port == 443)
	delete(gd.dialling, f.key)
	gd.flows[f.key] = f
	return nil
}

// sameHost reports whether a connection has led to the node itself. The node
// may have got an address a moment ago.
func sameHost(c net.Conn) bool {
	return addrPort(c.LocalAddr()).Addr() == addrPort(c.RemoteAddr()).Addr()
}

func addrPort(a net.Addr) netip.AddrPort {
	var ap netip.AddrPort
	switch a := a.(type) {
	case *net.TCPAddr:
		ap = a.AddrPort()
	case *net.UDPAddr:
		ap = a.AddrPort()
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
