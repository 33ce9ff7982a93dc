package agentclient

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"strconv"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
)

// connectProtocol is what a connection to the agent becomes that leads on to a
// server in the machine.
const connectProtocol = "opendsec-tcp"

// Connect connects to a server in the machine, whichever of the machine's own
// addresses it listens on, and to nothing else. The connection is one of its
// own, which Close of the client breaks like the others. NotFound, of the field
// "port", says that nothing listens.
func (c *Client) Connect(ctx context.Context, port int) (net.Conn, error) {
	conn, err := c.connect(ctx)
	if err != nil {
		return nil, unreachable(err)
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	joined, err := c.ask(conn, port)
	if !stop() {
		err = context.Cause(ctx)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return joined, nil
}

// ask asks the agent to join the connection to a server.
func (c *Client) ask(conn net.Conn, port int) (net.Conn, error) {
	req, err := http.NewRequest(http.MethodGet, baseURL+"/connect?port="+strconv.Itoa(port), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Connection", "Upgrade")
	req.Header.Set("Upgrade", connectProtocol)
	req.Header.Set(TokenHeader, *c.token.Load())
	if err := req.Write(conn); err != nil {
		return nil, unreachable(err)
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		return nil, unreachable(err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, notJoined(resp, port)
	}
	return &joined{Conn: conn, r: r}, nil
}

// notJoined gives the agent's answer its kind.
func notJoined(resp *http.Response, port int) error {
	defer resp.Body.Close()
	var said struct {
		Message string `json:"message"`
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err == nil {
		err = json.Unmarshal(body, &said)
	}
	if err != nil || said.Message == "" {
		said.Message = resp.Status
	}
	switch resp.StatusCode {
	case http.StatusBadGateway:
		f := fault.New(fault.NotFound, "nothing listens on port %d", port)
		f.Field = "port"
		return f
	case http.StatusBadRequest:
		return fault.Invalid("port", "%s", said.Message)
	case http.StatusUnauthorized:
		return fault.New(fault.Unauthenticated, "the sandbox's agent refused the token")
	case http.StatusNotFound:
		return fault.New(fault.Unsupported, "the sandbox's agent is of an older version, which cannot connect to ports; make a new sandbox")
	}
	return fault.New(fault.Unavailable, "connect to port %d: %s", port, said.Message)
}

// joined is a connection of which some may have been read already.
type joined struct {
	net.Conn
	r *bufio.Reader
}

// Read reads.
func (j *joined) Read(p []byte) (int, error) {
	if j.r == nil {
		return j.Conn.Read(p)
	}
	if j.r.Buffered() == 0 {
		j.r = nil
		return j.Conn.Read(p)
	}
	return j.r.Read(p)
}

// NetConn returns the connection under it.
func (j *joined) NetConn() net.Conn { return j.Conn }
