// Package dnsproxy answers the DNS queries of many sandboxes, each under its own
// policy. A name that the policy does not allow does not exist and is never
// forwarded; of an allowed one's answer only what belongs to it passes, each
// address checked, and the addresses are pinned for their lifetime before the
// answer goes out.
//
// Nothing of a query's bytes goes upstream: a new query is made of its name and
// type. Nothing of an answer's bytes comes back: a new answer is made of the
// records that were asked for.
//
// It keeps no cache. One shared between sandboxes would tell, by the time an
// answer takes, what others have asked; one per sandbox would gain little, since
// the upstream resolver has its own and programs ask again when an answer's time
// is up.
//
// It opens no ports: who serves a sandbox brings the sockets. What a sandbox may
// reach is netpolicy's to say, and to open it the filter's.
package dnsproxy

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kernflux/opendsec/internal/netpolicy"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Config is what all sandboxes of a proxy share. A zero field means its default.
type Config struct {
	// Upstreams are the resolvers to ask, "ADDR" or "ADDR:PORT", the first one
	// first. The default is those of ResolvConf.
	Upstreams []string
	// ResolvConf is a file in the form of resolv.conf(5), read again when it
	// changes. The default is /etc/resolv.conf.
	ResolvConf string
	// Timeout is how long an answer may take in all. The default is 5 s.
	Timeout time.Duration
	// Patience is how long an upstream is waited for before the next one is asked
	// too. The default is 800 ms.
	Patience time.Duration
	// MinTTL and MaxTTL bound the lifetime of what is answered. The defaults are
	// 10 s and 1 h.
	MinTTL, MaxTTL time.Duration
	// Grace is how much longer than its lifetime in the answer an address is
	// pinned, for programs that are slow to use it. The default is 60 s.
	Grace time.Duration
	// Forwarding is how many queries of all sandboxes may be out at once; more
	// wait. Each holds a socket. The default is 4096.
	Forwarding int
	// Limits bound each sandbox.
	Limits Limits
}

// Limits bound what one sandbox may ask. A zero field means its default.
type Limits struct {
	// Rate is how many queries a second are taken, after the first Burst. More of
	// them wait, in the end in the sandbox. The defaults are 100 and 500.
	Rate  float64
	Burst int
	// InFlight is how many queries may be out at once. The default is 32.
	InFlight int
	// Conns is how many TCP connections may be open. The default is 16.
	Conns int
	// FreeLength is how many characters of a name a rule such as "*.example.com"
	// may leave to the sandbox. The default is 128.
	FreeLength int
	// NameBits is how much information they may hold. The default is 320 bits: a
	// label of 64 random letters.
	NameBits float64
	// Bits is how much information new such names may hold in a second, after the
	// first BitsBurst. The defaults are 64 and 16384: 2 KiB at once and 28 KiB an hour.
	Bits      float64
	BitsBurst float64
	// Log is how many queries are kept. The default is 128.
	Log int
}

func (c Config) filled() Config {
	c.ResolvConf = cmp.Or(c.ResolvConf, "/etc/resolv.conf")
	c.Timeout = cmp.Or(c.Timeout, 5*time.Second)
	c.Patience = cmp.Or(c.Patience, 800*time.Millisecond)
	c.MinTTL = cmp.Or(c.MinTTL, 10*time.Second)
	c.MaxTTL = cmp.Or(c.MaxTTL, time.Hour)
	c.Grace = cmp.Or(c.Grace, time.Minute)
	c.Forwarding = cmp.Or(c.Forwarding, 4096)
	l := &c.Limits
	l.Rate = cmp.Or(l.Rate, 100)
	l.Burst = cmp.Or(l.Burst, 500)
	l.InFlight = cmp.Or(l.InFlight, 32)
	l.Conns = cmp.Or(l.Conns, 16)
	l.FreeLength = cmp.Or(l.FreeLength, 128)
	l.NameBits = cmp.Or(l.NameBits, 320)
	l.Bits = cmp.Or(l.Bits, 64)
	l.BitsBurst = cmp.Or(l.BitsBurst, 16384)
	l.Log = cmp.Or(l.Log, 128)
	return c
}

// Proxy serves sandboxes. It does nothing by itself.
type Proxy struct {
	log       *slog.Logger
	cfg       Config
	upstreams *upstreams
	forward   chan struct{} // holds one for each query that is out
}

// New returns a proxy. The error names an upstream that is no address.
func New(log *slog.Logger, cfg Config) (*Proxy, error) {
	cfg = cfg.filled()
	if cfg.MinTTL > cfg.MaxTTL {
		return nil, fmt.Errorf("lifetimes of DNS answers: the smallest, %s, is more than the largest, %s", cfg.MinTTL, cfg.MaxTTL)
	}
	ups, err := newUpstreams(log, cfg)
	if err != nil {
		return nil, err
	}
	return &Proxy{log: log, cfg: cfg, upstreams: ups, forward: make(chan struct{}, cfg.Forwarding)}, nil
}

// ErrPolicyChanged is what Sandbox.Pin returns for a policy that is not in force
// any more. The answer is then judged again, under the handle's policy of then.
var ErrPolicyChanged = errors.New("the policy was changed")

// Pin is addresses that a name led to.
type Pin struct {
	Name   string // as it was asked for, in netpolicy's normal form
	Addrs  []netip.Addr
	Until  time.Time         // the lifetime of the answer, and the grace
	Policy *netpolicy.Policy // under which all of Addrs are allowed on some port
}

// Sandbox is what Serve needs of a sandbox.
type Sandbox struct {
	ID     sandbox.ID
	Policy *netpolicy.Policy // nil allows nothing
	// UDP and TCP are sockets that only the sandbox reaches. Serve takes them
	// over. TCP may be nil.
	UDP net.PacketConn
	TCP net.Listener
	// IPv4Only answers that no name has an IPv6 address.
	IPv4Only bool
	// Pin opens addresses, and returns when they are open: the answer goes out
	// after it. On an error the answer is that the server failed. It may be called
	// by many goroutines at once, and must return soon. One that takes a lock may
	// hold it while it calls SetPolicy: neither waits for the other.
	Pin func(Pin) error
	// Event is told of what was refused; nil to be told nothing. It is called by
	// many goroutines, and must not block.
	Event func(Event)
}

// Handle is a sandbox that is served.
type Handle struct {
	p      *Proxy
	sb     Sandbox
	log    *slog.Logger
	policy atomic.Pointer[netpolicy.Policy]

	cancel   context.CancelFunc
	work     sync.WaitGroup
	inFlight chan struct{} // holds one for each query that is out

	pace   *pace
	budget *budget
	record *record

	mu     sync.Mutex
	conns  map[net.Conn]bool
	closed bool
}

// Serve begins to answer a sandbox, until ctx is done or Close is called.
func (p *Proxy) Serve(ctx context.Context, sb Sandbox) *Handle {
	ctx, cancel := context.WithCancel(ctx)
	l := p.cfg.Limits
	h := &Handle{
		p: p, sb: sb, log: p.log.With("sandbox", sb.ID), cancel: cancel,
		inFlight: make(chan struct{}, l.InFlight),
		pace:     newPace(l.Rate, l.Burst),
		budget:   newBudget(l),
		record:   newRecord(l.Log),
		conns:    map[net.Conn]bool{},
	}
	h.policy.Store(sb.Policy)
	context.AfterFunc(ctx, h.hangUp)
	h.work.Go(func() { h.serveUDP(ctx) })
	if sb.TCP != nil {
		h.work.Go(func() { h.serveTCP(ctx) })
	}
	return h
}

// SetPolicy puts another policy in force, also for the answers to queries that
// are out. It does not wait: a Pin under the old policy may still come, and says
// so; an answer that was pinned under it may still be on its way.
func (h *Handle) SetPolicy(p *netpolicy.Policy) { h.policy.Store(p) }

// Policy returns the policy in force.
func (h *Handle) Policy() *netpolicy.Policy { return h.policy.Load() }

// Close stops serving and closes the sockets. When it returns, no Pin and no
// Event is called any more. It must not be called by them, nor with a lock held
// that they wait for.
func (h *Handle) Close() {
	h.cancel()
	h.hangUp()
	h.work.Wait()
}

// hangUp closes all sockets.
func (h *Handle) hangUp() {
	h.sb.UDP.Close()
	if h.sb.TCP != nil {
		h.sb.TCP.Close()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for c := range h.conns {
		c.Close()
	}
}
