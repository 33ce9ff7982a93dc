package netgate

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"time"

	"github.com/kernflux/opendsec/internal/netpolicy"
)

// patience is how long a connection by name may say nothing about its name.
const patience = time.Minute

// inspect reads the name that a connection by name asks for and lets the
// connection pass if it is one of those that led there. What was read has been
// passed on; with done all of the connection has.
func (gd *Guard) inspect(f *flow, inside, outside *net.TCPConn) (done bool, err error) {
	if err := inside.SetReadDeadline(time.Now().Add(patience)); err != nil {
		return false, err
	}
	if f.key.to.Port() == 443 {
		err = gd.inspectTLS(f, inside, outside)
	} else {
		done, err = gd.inspectHTTP(f, inside, outside)
	}
	var bad *badRequest
	if errors.As(err, &bad) {
		gd.denyHost(f, bad)
		if _, werr := inside.Write(bad.answer(f.key.to.Port())); werr == nil {
			linger(inside)
		}
	}
	if err != nil || done {
		return done, err
	}
	return false, inside.SetReadDeadline(time.Time{})
}

func (gd *Guard) denyHost(f *flow, bad *badRequest) {
	gd.deny(Denial{
		Kind: DeniedHost, Name: bad.name, Addr: f.key.to.Addr(), Port: f.key.to.Port(), Proto: f.key.proto, Why: bad.Error(),
	})
}

// linger gives the sandbox a moment to read an answer before a reset.
func linger(c *net.TCPConn) {
	if c.CloseWrite() != nil || c.SetReadDeadline(time.Now().Add(time.Second)) != nil {
		return
	}
	var b [4 << 10]byte
	for {
		if _, err := c.Read(b[:]); err != nil {
			return
		}
	}
}

// badRequest is why a connection by name is refused.
type badRequest struct {
	name string // that it asked for
	why  string
}

func (b *badRequest) Error() string { return b.why }

func refused(format string, args ...any) error { return &badRequest{why: fmt.Sprintf(format, args...)} }

// answer is what the sandbox is told: an alert of TLS, or HTTP's "forbidden".
func (b *badRequest) answer(port uint16) []byte {
	if port == 443 {
		return []byte{recordAlert, 3, 3, 0, 2, 2, 112} // fatal, unrecognized_name
	}
	body := "the network rules of this sandbox: " + b.why + "\n"
	return fmt.Appendf(nil, "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s", len(body), body)
}

// settle binds a flow to the name that it asks for.
func (gd *Guard) settle(f *flow, asked string) error {
	name, ok := netpolicy.NormalName(asked)
	gd.mu.Lock()
	defer gd.mu.Unlock()
	if !ok || !slices.Contains(f.names, name) {
		if len(asked) > 253 {
			asked = asked[:253]
		}
		return &badRequest{name: asked, why: fmt.Sprintf("%q is asked for at an address that only %q led to", asked, f.names)}
	}
	f.names = []string{name}
	q := netpolicy.Query{Name: name, Addr: f.key.to.Addr(), Port: f.key.to.Port(), Proto: f.key.proto}
	if d := gd.policy.Decide(q); !d.Allow {
		return &badRequest{name: name, why: d.Why}
	}
	return nil
}
