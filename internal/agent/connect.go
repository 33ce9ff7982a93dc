package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strconv"
	"syscall"
	"time"

	"github.com/kernflux/opendsec/internal/tunnel/join"
)

// connectProtocol is what a connection becomes that /connect is asked for.
const connectProtocol = "opendsec-tcp"

// dialTimeout bounds a connection to a server of this machine, whose queue may
// be full.
const dialTimeout = 10 * time.Second

// errNothingListens says that no server of the machine has a port.
var errNothingListens = errors.New("nothing listens on it")

// connect makes the connection that a request came by one to a server in this
// machine: GET /connect?port=N with an Upgrade. It takes a port and no address,
// so that it leads nowhere else. A port on which nothing listens is status 502.
func (s *Server) connect(w http.ResponseWriter, r *http.Request) {
	asked := r.URL.Query().Get("port")
	port, err := strconv.Atoi(asked)
	switch {
	case err != nil || port < 1 || port > 65535:
		httpError(w, http.StatusBadRequest, fmt.Sprintf("port %q is not a number from 1 to 65535", asked))
		return
	case port == Port:
		httpError(w, http.StatusBadRequest, fmt.Sprintf("port %d is the agent's own", port))
		return
	case r.ProtoMajor != 1 || r.Header.Get("Upgrade") != connectProtocol:
		httpError(w, http.StatusUpgradeRequired, "ask for the upgrade to "+connectProtocol+" by HTTP/1.1")
		return
	}
	server, err := dialOwn(r.Context(), port)
	if err != nil {
		status := http.StatusServiceUnavailable
		if errors.Is(err, errNothingListens) {
			status = http.StatusBadGateway
		}
		httpError(w, status, fmt.Sprintf("port %d: %v", port, err))
		return
	}
	if err := s.join(w, r, server); err != nil {
		s.cfg.Log.Debug("a connection broke", "port", port, "error", err)
	}
}

// join takes the request's connection over and passes bytes until it is over.
func (s *Server) join(w http.ResponseWriter, r *http.Request, server net.Conn) error {
	hijacked, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		server.Close()
		return err
	}
	defer hijacked.Close()
	caller := hijacked
	if c, ok := hijacked.(*conn); ok {
		caller = c.Conn // the kernel passes bytes between two plain sockets by itself
	}
	_, err = fmt.Fprintf(caller, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", connectProtocol)
	if n := buffered.Reader.Buffered(); err == nil && n > 0 {
		early, _ := buffered.Peek(n)
		_, err = server.Write(early)
	}
	if err != nil {
		join.Break(server)
		return err
	}
	return join.Conns(r.Context(), caller, server)
}

// dialOwn connects to a server of this machine, at whichever of its addresses
// that listens.
func dialOwn(ctx context.Context, port int) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	var dialer net.Dialer
	for _, host := range append([]string{"127.0.0.1", "::1"}, ownAddresses()...) {
		conn, err := dialer.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			return conn, nil
		}
		// The others are what a machine without IPv6, or without a loopback, says.
		if !isOneOf(err, syscall.ECONNREFUSED, syscall.EADDRNOTAVAIL, syscall.ENETUNREACH, syscall.EAFNOSUPPORT) {
			return nil, err
		}
	}
	return nil, errNothingListens
}

func isOneOf(err error, errnos ...syscall.Errno) bool {
	return slices.ContainsFunc(errnos, func(e syscall.Errno) bool { return errors.Is(err, e) })
}

// ownAddresses returns the machine's addresses that are not loopback; a server
// may listen on one of them alone.
func ownAddresses() []string {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	var out []string
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && !n.IP.IsLinkLocalUnicast() {
			out = append(out, n.IP.String())
		}
	}
	return out
}
