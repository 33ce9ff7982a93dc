// Package agentclient is what can be done inside a machine, over any
// connection to its agent: give it its identity, run a command, read and
// write files. How a command ended and whether the agent could be reached are
// two things: the first is a Result, the second an error. It does not reach
// the machine itself; the dial function that it is given does.
package agentclient

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/timestamppb"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	"github.com/kernflux/opendsec/api/gen/agent/v1/agentv1connect"
	"github.com/kernflux/opendsec/api/gen/process/processconnect"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// TokenHeader carries the agent's token in every call but /health.
const TokenHeader = "X-Access-Token"

// UserHeader names the user of a call; absent means the sandbox's default.
const UserHeader = "Opendsec-User"

// receiveBuffer is how many bytes of an answer may be on their way. When a
// machine stands still and its connections break, so much may be lost, which
// the agent still holds: proc.Subscription.Leave counts on this bound.
const receiveBuffer = 512 << 10

// baseURL is only a form: every connection goes through the dial function.
const baseURL = "http://agent"

// Dial connects to the agent.
type Dial func(ctx context.Context) (net.Conn, error)

// Client talks to one agent over one kept HTTP/2 connection. Its methods may
// be called side by side. Close ends its connection.
type Client struct {
	dial      Dial
	transport *http.Transport
	token     atomic.Pointer[string]

	agent   agentv1connect.AgentClient
	process processconnect.ProcessClient
	http    *http.Client

	mu     sync.Mutex // guards what follows
	closed bool
	ready  net.Conn          // made by WaitReady, for the transport's next dial
	open   map[net.Conn]bool // in the transport's hands
}

// New returns a client that shows the token. It connects when first used.
func New(dial func(ctx context.Context) (net.Conn, error), token string) *Client {
	c := &Client{dial: dial, open: map[net.Conn]bool{}}
	c.token.Store(&token)
	c.transport = &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return c.connect(ctx) },
		Protocols:          new(http.Protocols),
		DisableCompression: true,
		HTTP2:              &http.HTTP2Config{MaxReadFrameSize: 256 << 10, MaxReceiveBufferPerStream: receiveBuffer},
	}
	c.transport.Protocols.SetUnencryptedHTTP2(true)
	c.http = &http.Client{Transport: c.Transport()}
	c.agent = agentv1connect.NewAgentClient(c.http, baseURL)
	c.process = processconnect.NewProcessClient(c.http, baseURL)
	return c
}

// connect takes the connection that firstCall made, or makes one.
func (c *Client) connect(ctx context.Context) (net.Conn, error) {
	c.mu.Lock()
	conn := c.ready
	c.ready = nil
	c.mu.Unlock()
	if conn == nil {
		var err error
		if conn, err = c.dial(ctx); err != nil {
			return nil, err
		}
	}
	t := &tracked{Conn: conn, c: c}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		conn.Close()
		return nil, errClosed
	}
	c.open[t] = true
	return t, nil
}

var errClosed = errors.New("the client is closed")

// tracked is a connection that the client knows of until it is closed.
type tracked struct {
	net.Conn
	c *Client
}

// Close closes the connection.
func (t *tracked) Close() error {
	t.c.mu.Lock()
	delete(t.c.open, t)
	t.c.mu.Unlock()
	return t.Conn.Close()
}

// NetConn returns the connection under it.
func (t *tracked) NetConn() net.Conn { return t.Conn }

// Transport returns what sends any request to the agent with the token, for
// reverse proxies. The scheme and host of a request's URL do not matter.
func (c *Client) Transport() http.RoundTripper { return roundTripper{c} }

type roundTripper struct{ c *Client }

// RoundTrip sends a copy of the request with the token in it.
func (t roundTripper) RoundTrip(r *http.Request) (*http.Response, error) {
	out := r.WithContext(r.Context())
	u := *r.URL
	u.Scheme, u.Host = "http", "agent"
	out.URL = &u
	out.Header = r.Header.Clone()
	if out.Header == nil {
		out.Header = http.Header{}
	}
	out.Header.Set(TokenHeader, *t.c.token.Load())
	return t.c.transport.RoundTrip(out)
}

// Close breaks the client's connections. Calls that run fail, and so do later
// ones. It may be repeated.
func (c *Client) Close() {
	c.mu.Lock()
	c.closed = true
	conns := []net.Conn{}
	for conn := range c.open {
		conns = append(conns, conn)
	}
	if c.ready != nil {
		conns = append(conns, c.ready)
		c.ready = nil
	}
	c.mu.Unlock()
	for _, conn := range conns {
		conn.Close() // its reader fails, and with it the calls
	}
	c.transport.CloseIdleConnections()
}

// Health asks once whether the agent serves.
func (c *Client) Health(ctx context.Context) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, baseURL+"/health", nil)
	if err != nil {
		return err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return unreachable(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusNoContent {
		return fault.New(fault.Unavailable, "the agent's /health answered %s, want 204", resp.Status)
	}
	return nil
}

// Identity is what a machine is told about itself.
type Identity struct {
	Token     string // to be shown from now on; "" keeps the client's
	SandboxID sandbox.ID
	Hostname  string            // "" leaves it alone
	Env       map[string]string // of every process
	User      string            // of processes that name none; "" for root
	Workdir   string            // of processes that name none; "" for the user's home
	Now       time.Time         // zero leaves the clock alone
	Entropy   []byte            // stirred into the kernel's random numbers
	// Generation names this life of the machine; another one says that it stood
	// still or is a copy, and breaks all connections but the client's. "" keeps it.
	Generation string
	Resolver   string // its address, for a machine that has none; "" leaves it alone
}

// Info describes an agent.
type Info struct {
	Version string
	Started time.Time
}

// Hello gives the machine its identity: the first call sets its token, a
// later one must come from a client that shows the present one. From then on
// the client shows the identity's, and another token counts no more. It may be
// repeated, also when its answer did not arrive.
func (c *Client) Hello(ctx context.Context, id Identity) (Info, error) {
	if id.Token == "" {
		id.Token = *c.token.Load()
	}
	req := &agentv1.HelloRequest{
		Token: id.Token, SandboxId: string(id.SandboxID), Hostname: id.Hostname, Env: id.Env,
		DefaultUser: id.User, DefaultWorkdir: id.Workdir, Entropy: id.Entropy, Generation: id.Generation, Resolver: id.Resolver,
	}
	if !id.Now.IsZero() {
		req.Now = timestamppb.New(id.Now)
	}
	resp, err := c.agent.Hello(ctx, connect.NewRequest(req))
	if err != nil {
		return Info{}, fromWire(ctx, err)
	}
	c.token.Store(&id.Token)
	return Info{Version: resp.Msg.GetVersion(), Started: resp.Msg.GetStarted().AsTime()}, nil
}

// Activity says whether a machine is idle.
type Activity struct {
	RunningCommands int           // commands started over the API that still run
	AnyEnded        bool          // whether any has ended yet
	SinceLastEnd    time.Duration // since the last one did
}

// Activity asks what the machine does.
func (c *Client) Activity(ctx context.Context) (Activity, error) {
	resp, err := c.agent.Activity(ctx, connect.NewRequest(&agentv1.ActivityRequest{}))
	if err != nil {
		return Activity{}, fromWire(ctx, err)
	}
	since := resp.Msg.GetSinceLastEnd()
	return Activity{RunningCommands: int(resp.Msg.GetRunningCommands()), SinceLastEnd: since.AsDuration(), AnyEnded: since != nil}, nil
}

// fromWire turns the error of an RPC into one with a kind. A call that ended
// with its context is the context's error; what the agent did not say itself
// is the transport's failure.
func fromWire(ctx context.Context, err error) error {
	switch {
	case connect.IsWireError(err):
		return fault.FromConnect(err)
	case ctx.Err() != nil:
		return fmt.Errorf("call the agent: %w", context.Cause(ctx))
	case connect.CodeOf(err) == connect.CodeUnauthenticated: // a plain HTTP 401
		return fault.New(fault.Unauthenticated, "the sandbox's agent refused the token")
	}
	return fault.New(fault.Unavailable, "call the agent: %w", err)
}

// unreachable gives a transport's failure its kind.
func unreachable(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return fmt.Errorf("call the agent: %w", err)
	}
	return fault.New(fault.Unavailable, "call the agent: %w", err)
}

// drain reads the rest of a body so that its stream ends well.
func drain(body io.ReadCloser) {
	io.Copy(io.Discard, io.LimitReader(body, 64<<10))
	body.Close()
}
