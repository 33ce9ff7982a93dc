// Package netgate lets out of a sandbox what its policy allows, and nothing
// else. Nothing is routed: the network namespace of a sandbox's slot has no way
// out, and every packet in it ends there. The first packet of each flow waits
// in a queue until it is decided on, by the policy and by the addresses that
// allowed names have led to. A flow that is allowed is taken at its address by
// a socket in the namespace, and its bytes are carried to one on the host.
//
// So a sandbox's packets never leave its namespace, whatever is in them; a
// namespace that nobody serves is closed; and the host needs neither routes nor
// rules. DESIGN.md has the reasons. What is allowed is netpolicy's to say, and
// names are dnsproxy's.
package netgate

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/netpolicy/dnsproxy"
	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/takeover"
)

// Config is what all sandboxes of a node share. A zero field means its default.
type Config struct {
	// DNS says whom the DNS proxy asks, and how.
	DNS dnsproxy.Config
	// Never are addresses that no rule opens, beside netpolicy.Closed.
	Never []netip.Prefix
	// Limits bound each sandbox.
	Limits Limits
}

// Limits bound one sandbox's network. A zero field means its default.
type Limits struct {
	// Bandwidth is in bytes a second, each way. The default is 125,000,000, which
	// is 1 Gbit/s.
	Bandwidth float64
	// Conns is how many TCP connections may be open. The default is 1024.
	Conns int
	// Sessions is how many UDP flows may be open. The default is 256.
	Sessions int
	// Dials is how many connections may be on their way at once. The default is 128.
	Dials int
	// Packets is how many may come a second. The default is 200,000.
	Packets uint64
	// Flows is how many may be begun a second, after the first FlowsBurst. The
	// defaults are 200 and 1000.
	Flows, FlowsBurst uint64
	// Pins is how many addresses may be open by name. The default is 4096.
	Pins int
}

func (l Limits) withDefaults() Limits {
	def := Limits{Bandwidth: 125e6, Conns: 1024, Sessions: 256, Dials: 128, Packets: 200_000, Flows: 200, FlowsBurst: 1000, Pins: 4096}
	orInt := func(v *int, d int) {
		if *v == 0 {
			*v = d
		}
	}
	orUint := func(v *uint64, d uint64) {
		if *v == 0 {
			*v = d
		}
	}
	if l.Bandwidth == 0 {
		l.Bandwidth = def.Bandwidth
	}
	orInt(&l.Conns, def.Conns)
	orInt(&l.Sessions, def.Sessions)
	orInt(&l.Dials, def.Dials)
	orInt(&l.Pins, def.Pins)
	orUint(&l.Packets, def.Packets)
	orUint(&l.Flows, def.Flows)
	orUint(&l.FlowsBurst, def.FlowsBurst)
	return l
}

// Gate serves the sandboxes of a node.
type Gate struct {
	log    *slog.Logger
	dns    *dnsproxy.Proxy
	limits Limits
	never  []netip.Prefix
	now    func() time.Time
	older  atomic.Bool // the kernel has no nft_queue
	lack   atomic.Pointer[error]

	mu     sync.Mutex
	host   host
	guards map[*Guard]bool
}

// New returns a gate. The error names a resolver that is no address.
func New(log *slog.Logger, cfg Config) (*Gate, error) {
	dns, err := dnsproxy.New(log, cfg.DNS)
	if err != nil {
		return nil, fmt.Errorf("serve sandboxes' networks: %w", err)
	}
	return &Gate{
		log: log, dns: dns, limits: cfg.Limits.withDefaults(), now: time.Now, guards: map[*Guard]bool{},
		never: append(netpolicy.Closed(), cfg.Never...), host: measureHost(),
	}, nil
}

// Run follows the node's own addresses, and sees that the rules of all slots are
// there, until ctx is done.
func (g *Gate) Run(ctx context.Context) error {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
			g.remeasure()
			for _, gd := range g.all() {
				gd.check()
			}
		}
	}
}

// remeasure judges all anew when the node has other addresses than before.
func (g *Gate) remeasure() {
	now := measureHost()
	g.mu.Lock()
	same := slices.Equal(now.own, g.host.own)
	g.host = now
	g.mu.Unlock()
	if same {
		return
	}
	for _, gd := range g.all() {
		if err := gd.replace(func(old *netpolicy.Policy) *netpolicy.Policy { return old }); err != nil {
			g.log.Error("cannot put a policy in force under the node's new addresses", "sandbox", gd.id, "error", err)
		}
	}
}

func (g *Gate) all() []*Guard {
	g.mu.Lock()
	defer g.mu.Unlock()
	all := make([]*Guard, 0, len(g.guards))
	for gd := range g.guards {
		all = append(all, gd)
	}
	return all
}

// check puts the slot's rules back if they are not there. The kernel has told
// of their change; this is for when that was lost.
func (gd *Guard) check() {
	gd.mu.Lock()
	defer gd.mu.Unlock() // so that Close does not close the namespace meanwhile
	if gd.closed {
		return
	}
	if err := gd.ensure(); err != nil {
		gd.log.Error("cannot see whether the rules of a network slot are there; it is tried again", "slot", gd.slot.Name, "error", err)
	}
}

// on returns a policy as it is on this node.
func (g *Gate) on(p *netpolicy.Policy) (*netpolicy.Policy, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return p.On(netpolicy.Host{Own: g.host.own, Never: g.never})
}

// Sandbox says whom to serve.
type Sandbox struct {
	ID     sandbox.ID
	Slot   backend.Slot
	Policy *netpolicy.Policy // nil allows nothing
	Pins   []Pin             // that an earlier guard of it, or of its source, had
	// Pinned is told when the pins have changed; nil to be told nothing. It must
	// not block.
	Pinned func()
	// Denials take what it is denied; nil to forget it.
	Denials *Denials
}

// Guard serves one sandbox.
type Guard struct {
	id     sandbox.ID
	gate   *Gate
	log    *slog.Logger
	slot   backend.Slot
	limits Limits
	pinned func()

	ns    *os.File
	queue *queue
	taken *net.TCPListener // where connections come that were allowed
	dns   *dnsproxy.Handle

	up, down *pace
	counts   counts
	denials  *Denials

	ctx  context.Context // ends with Close
	stop context.CancelFunc
	work sync.WaitGroup

	// mu guards what follows. It is held over each change of the policy, and
	// never while anything slow is done.
	mu       sync.Mutex
	policy   *netpolicy.Policy // as it is on this node
	pins     pins
	dialling map[flowKey]*flow
	flows    map[flowKey]*flow
	open     map[netpolicy.Proto]int // flows in dialling and flows
	closed   bool
}

// Open begins to serve a sandbox, until Close. Before it returns, and when it
// fails, nothing passes. It installs the rules of its slot if they are not there.
func (g *Gate) Open(sb Sandbox) (_ *Guard, err error) {
	if sb.Denials == nil {
		sb.Denials = NewDenials(Denied{})
	}
	policy, err := g.on(sb.Policy)
	if err != nil {
		return nil, fmt.Errorf("open the network of sandbox %s: %w", sb.ID, err)
	}
	gd := &Guard{
		id: sb.ID, gate: g, log: g.log.With("sandbox", sb.ID), slot: sb.Slot, limits: g.limits, pinned: sb.Pinned,
		up: newPace(g.limits.Bandwidth), down: newPace(g.limits.Bandwidth), denials: sb.Denials,
		policy: policy, pins: newPins(g.limits.Pins), dialling: map[flowKey]*flow{}, flows: map[flowKey]*flow{}, open: map[netpolicy.Proto]int{},
	}
	gd.ctx, gd.stop = context.WithCancel(context.Background())
	gd.pins.adopt(sb.Pins, policy, g.now())
	if err := gd.begun(); err != nil {
		gd.Close()
		return nil, fmt.Errorf("open the network of sandbox %s: %w", sb.ID, err)
	}
	g.mu.Lock()
	g.guards[gd] = true
	g.mu.Unlock()
	return gd, nil
}

// begun takes the slot's queue and opens its sockets.
func (gd *Guard) begun() error {
	var err error
	if gd.ns, err = os.Open(gd.slot.NetNS); err != nil {
		return err
	}
	if err := gd.ensure(); err != nil {
		return err
	}
	// After a restart a child of the killed process may have them yet.
	var s sockets
	err = takeover.Wait(takeover.Patience, func() (err error) { s, err = openSockets(gd.slot); return err }, unix.EADDRINUSE)
	if err != nil {
		return err
	}
	gd.taken = s.tcp
	err = takeover.Wait(takeover.Patience, func() (err error) {
		gd.queue, err = openQueue(gd.ns, uint32(gd.limits.FlowsBurst))
		return err
	}, unix.EPERM, unix.EBUSY)
	if err != nil {
		return errors.Join(err, s.dns.Close(), s.dnsTCP.Close())
	}
	gd.dns = gd.gate.dns.Serve(gd.ctx, dnsproxy.Sandbox{
		ID: gd.id, Policy: gd.policy, UDP: s.dns, TCP: s.dnsTCP, IPv4Only: gd.gate.ipv4Only() || gd.slot.GuestAddr6 == "",
		Pin: gd.pin, Event: gd.deniedByDNS,
	})
	gd.work.Go(gd.decideAll)
	gd.work.Go(gd.accept)
	return nil
}

// ensure installs the slot's rules if they are not there.
func (gd *Guard) ensure() error {
	c, err := nftables.New(nftables.WithNetNSFd(int(gd.ns.Fd())))
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	there, err := installed(c)
	if err != nil || there {
		return err
	}
	return gd.refurnish()
}

// Close ends all flows of the sandbox; from then on it reaches nothing. It may
// be repeated.
func (gd *Guard) Close() {
	gd.mu.Lock()
	gd.closed = true
	var open []*flow
	for _, f := range gd.flows {
		open = append(open, f)
	}
	gd.mu.Unlock()
	gd.stop()
	for _, f := range open {
		gd.cut(f)
	}
	if gd.queue != nil {
		gd.queue.close()
	}
	if gd.taken != nil {
		gd.taken.Close()
	}
	if gd.dns != nil {
		gd.dns.Close()
	}
	gd.work.Wait()
	if gd.ns != nil {
		gd.ns.Close()
	}
	gd.gate.mu.Lock()
	delete(gd.gate.guards, gd)
	gd.gate.mu.Unlock()
}

// Policy returns the policy in force, as it is on this node.
func (gd *Guard) Policy() *netpolicy.Policy {
	gd.mu.Lock()
	defer gd.mu.Unlock()
	return gd.policy
}

// SetPolicy puts another policy in force. When it returns, flows that it does
// not allow are cut, and none begins any more; what it allows beyond the last
// one is open. It is one step: no packet is judged by a mixture.
func (gd *Guard) SetPolicy(p *netpolicy.Policy) error {
	return gd.replace(func(*netpolicy.Policy) *netpolicy.Policy { return p })
}

// replace puts in force what next returns of the present policy.
func (gd *Guard) replace(next func(*netpolicy.Policy) *netpolicy.Policy) error {
	gd.mu.Lock()
	p, err := gd.gate.on(next(gd.policy))
	if err != nil {
		gd.mu.Unlock()
		return fmt.Errorf("change the network of sandbox %s: %w", gd.id, err)
	}
	gd.policy = p
	gd.dns.SetPolicy(p)
	gd.pins.judge(p)
	var cut []*flow
	for _, f := range gd.flows {
		if !f.allowed(p) {
			cut = append(cut, f)
		}
	}
	gd.mu.Unlock()
	for _, f := range cut {
		gd.deny(Denial{
			Kind: DeniedByChange, Name: f.name(), Addr: f.key.to.Addr(), Port: f.key.to.Port(), Proto: f.key.proto,
			Why: "the rules were changed and do not allow this open connection any more",
		})
		gd.cut(f)
	}
	gd.changed()
	return nil
}

func (gd *Guard) changed() {
	if gd.pinned != nil {
		gd.pinned()
	}
}
