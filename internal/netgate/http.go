package netgate

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// Limits of a message of HTTP/1.
const (
	headMost = 64 << 10
	lineMost = 8 << 10 // of a chunk's length, and of a trailer
	idleHTTP = 10 * time.Minute
)

// inspectHTTP carries a connection of HTTP/1 to its end. Each request must be
// for the name that the first one is for, and must be read by everybody alike:
// what could be understood in two ways is refused. After a switch to WebSocket
// the rest is the caller's to carry.
func (gd *Guard) inspectHTTP(f *flow, inside, outside *net.TCPConn) (done bool, err error) {
	x := &exchange{gd: gd, f: f, inside: inside, outside: outside, in: bufio.NewReaderSize(inside, headMost), paced: gd.up.spent}
	switched, err := x.first()
	if err != nil {
		return false, err
	}
	if switched {
		// What was read ahead belongs to the tunnel.
		ahead, _ := x.in.Peek(x.in.Buffered())
		_, err := outside.Write(ahead)
		return false, err
	}
	var g errgroup.Group
	g.Go(func() error {
		err := carry(gd.ctx, inside, outside, gd.down, &gd.counts.received)
		if err != nil {
			gd.cut(f)
		}
		return err
	})
	err = x.more()
	if err == nil {
		err = outside.CloseWrite()
	}
	if err != nil && !errors.As(err, new(*badRequest)) {
		gd.cut(f)
	}
	if err != nil {
		outside.CloseRead() // so that the other way ends
		gd.endOutside(f)
	}
	return true, errors.Join(err, g.Wait())
}

// endOutside ends the host's end of a flow, and lets the sandbox's be.
func (gd *Guard) endOutside(f *flow) {
	if t, ok := f.outside.(*net.TCPConn); ok {
		t.SetLinger(0)
		t.Close()
	}
}

// exchange is a connection of HTTP/1.
type exchange struct {
	gd              *Guard
	f               *flow
	inside, outside *net.TCPConn
	in              *bufio.Reader
	paced           func(context.Context, int64) error
}

// head is what is to be known of a request.
type head struct {
	raw     []byte
	host    string
	length  int64 // of the body; -1: in chunks
	upgrade string
}

// first passes the first request on. When that wants to switch to another
// protocol, it waits for the answer and reports whether the switch was made.
func (x *exchange) first() (switched bool, err error) {
	h, err := x.pass()
	if err != nil || h.upgrade == "" {
		return false, err
	}
	return x.passSwitch(strings.EqualFold(h.upgrade, "websocket"))
}

// more passes requests on until the sandbox sends no more.
func (x *exchange) more() error {
	for {
		if err := x.inside.SetReadDeadline(time.Now().Add(idleHTTP)); err != nil {
			return err
		}
		if _, err := x.in.Peek(1); err != nil {
			if err == io.EOF {
				return nil
			}
			return err
		}
		h, err := x.pass()
		if err != nil {
			return err
		}
		if h.upgrade != "" {
			return refused("a request after the first one wants to switch to %q", h.upgrade)
		}
	}
}

// pass reads a request and passes it on.
func (x *exchange) pass() (head, error) {
	h, err := readHead(x.in)
	if err != nil {
		return h, err
	}
	if err := x.gd.settle(x.f, h.host); err != nil {
		return h, err
	}
	if err := x.send(h.raw); err != nil {
		return h, err
	}
	if err := x.inside.SetReadDeadline(time.Time{}); err != nil {
		return h, err
	}
	if h.length < 0 {
		return h, x.passChunks()
	}
	return h, x.passBytes(h.length)
}

func (x *exchange) send(b []byte) error {
	n, err := x.outside.Write(b)
	x.gd.counts.sent.Add(uint64(n))
	return err
}

// passBytes passes n bytes on: what was read ahead, and the rest by the kernel.
func (x *exchange) passBytes(n int64) error {
	if ahead := min(n, int64(x.in.Buffered())); ahead > 0 {
		b, err := x.in.Peek(int(ahead))
		if err != nil {
			return err
		}
		if err := x.send(b); err != nil {
			return err
		}
		if _, err := x.in.Discard(int(ahead)); err != nil {
			return err
		}
		n -= ahead
	}
	for n > 0 {
		m, err := io.CopyN(x.outside, x.inside, min(n, x.gd.up.chunk()))
		x.gd.counts.sent.Add(uint64(m))
		if err == nil {
			err = x.paced(x.gd.ctx, m)
		}
		if err != nil {
			return err
		}
		n -= m
	}
	return nil
}

// passChunks passes a body in chunks on, with its trailers.
func (x *exchange) passChunks() error {
	for {
		line, err := readLine(x.in, lineMost)
		if err != nil {
			return err
		}
		digits, _, _ := bytes.Cut(line[:len(line)-2], []byte(";"))
		size, err := strconv.ParseUint(string(digits), 16, 62)
		if err != nil || len(digits) == 0 || digits[0] == '+' || bytes.ContainsAny(line[:len(line)-2], "\r\n\x00") {
			return refused("the length of a chunk is malformed")
		}
		if err := x.send(line); err != nil {
			return err
		}
		if size == 0 {
			return x.passTrailers()
		}
		if err := x.passBytes(int64(size)); err != nil {
			return err
		}
		end := make([]byte, 2)
		if _, err := io.ReadFull(x.in, end); err != nil {
			return err
		}
		if string(end) != "\r\n" {
			return refused("a chunk does not end where it says")
		}
		if err := x.send(end); err != nil {
			return err
		}
	}
}

func (x *exchange) passTrailers() error {
	for total := 0; ; {
		line, err := readLine(x.in, lineMost)
		if err != nil {
			return err
		}
		if total += len(line); total > headMost {
			return refused("the trailers of a request are too long")
		}
		if err := x.send(line); err != nil || len(line) == 2 {
			return err
		}
	}
}

// passSwitch passes the answer to a request for a switch on. One that is made
// though it may not be ends the connection.
func (x *exchange) passSwitch(may bool) (switched bool, err error) {
	out := bufio.NewReaderSize(x.outside, headMost)
	for {
		status, raw, err := readStatus(out)
		if err != nil {
			return false, err
		}
		if status == 101 && !may {
			return false, refused("the server switches to another protocol than WebSocket")
		}
		if _, err := x.inside.Write(raw); err != nil {
			return false, err
		}
		if status/100 == 1 && status != 101 {
			continue
		}
		ahead, _ := out.Peek(out.Buffered())
		_, err = x.inside.Write(ahead)
		return status == 101, err
	}
}

// readStatus reads the head of an answer.
func readStatus(r *bufio.Reader) (status int, raw []byte, err error) {
	for {
		line, err := readLine(r, headMost)
		if err != nil {
			return 0, nil, err
		}
		if raw == nil {
			fields := strings.Fields(string(line))
			if len(fields) < 2 || !strings.HasPrefix(fields[0], "HTTP/1.") {
				return 0, nil, refused("the server does not answer in HTTP/1")
			}
			if status, err = strconv.Atoi(fields[1]); err != nil {
				return 0, nil, refused("the server's answer is malformed")
			}
		}
		if raw = append(raw, line...); len(raw) > headMost {
			return 0, nil, refused("the head of the server's answer is too long")
		}
		if len(line) == 2 {
			return status, raw, nil
		}
	}
}

// readLine reads a line with its end, which must be CR LF.
func readLine(r *bufio.Reader, most int) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	switch {
	case errors.Is(err, bufio.ErrBufferFull) || len(line) > most:
		return nil, refused("a line is too long")
	case err != nil:
		return nil, err
	case len(line) < 2 || line[len(line)-2] != '\r':
		return nil, refused("a line ends without a carriage return")
	}
	return bytes.Clone(line), nil
}

// readHead reads a request up to its body.
func readHead(r *bufio.Reader) (h head, err error) {
	line, err := readLine(r, headMost)
	if err != nil {
		return h, err
	}
	h.raw = line
	method, rest, _ := strings.Cut(string(line[:len(line)-2]), " ")
	target, version, _ := strings.Cut(rest, " ")
	if !isToken(method) || version != "HTTP/1.1" && version != "HTTP/1.0" || strings.ContainsFunc(target, isControl) || target == "" {
		return h, refused("the connection is not HTTP/1")
	}
	fields := map[string][]string{}
	for {
		line, err := readLine(r, headMost)
		if err != nil {
			return h, err
		}
		if h.raw = append(h.raw, line...); len(h.raw) > headMost {
			return h, refused("the head of a request is too long")
		}
		if len(line) == 2 {
			break
		}
		name, value, ok := strings.Cut(string(line[:len(line)-2]), ":")
		if !ok || !isToken(name) || strings.ContainsFunc(value, isControl) {
			return h, refused("a header of a request is malformed")
		}
		name = strings.ToLower(name)
		fields[name] = append(fields[name], strings.Trim(value, " \t"))
	}
	if err := h.route(method, target, fields["host"]); err != nil {
		return h, err
	}
	if up := fields["upgrade"]; len(up) > 0 {
		h.upgrade = strings.Join(up, ",")
	}
	return h, h.measure(version, fields)
}

// route finds out whom a request is for.
func (h *head) route(method, target string, hosts []string) error {
	if method == "CONNECT" {
		return refused("a request wants a tunnel (CONNECT)")
	}
	if len(hosts) != 1 {
		return refused("a request has %d Host headers; it must have one", len(hosts))
	}
	h.host = hostOf(hosts[0])
	if target == "*" || target[0] == '/' {
		return nil
	}
	rest, ok := cutPrefixFold(target, "http://")
	if !ok {
		return refused("the target of a request is neither a path nor an http URL")
	}
	if i := strings.IndexAny(rest, "/?#"); i >= 0 {
		rest = rest[:i]
	}
	if !strings.EqualFold(hostOf(rest), h.host) {
		return refused("the target of a request and its Host header name different hosts")
	}
	return nil
}

func cutPrefixFold(s, prefix string) (string, bool) {
	if len(s) < len(prefix) || !strings.EqualFold(s[:len(prefix)], prefix) {
		return s, false
	}
	return s[len(prefix):], true
}

// hostOf takes the port off a host.
func hostOf(s string) string {
	host, port, ok := strings.Cut(s, ":")
	if ok && strings.Trim(port, "0123456789") != "" {
		return s // no name
	}
	return host
}

// measure finds out how long a request's body is.
func (h *head) measure(version string, fields map[string][]string) error {
	lengths, encodings := fields["content-length"], fields["transfer-encoding"]
	switch {
	case len(lengths) > 1 || len(encodings) > 1 || len(lengths) > 0 && len(encodings) > 0:
		return refused("the length of a request's body is told twice")
	case len(encodings) == 1:
		if version != "HTTP/1.1" || !strings.EqualFold(encodings[0], "chunked") {
			return refused("the body of a request is encoded in a way that is not known")
		}
		h.length = -1
	case len(lengths) == 1:
		n, err := strconv.ParseUint(lengths[0], 10, 62)
		if err != nil || strings.Trim(lengths[0], "0123456789") != "" {
			return refused("the length of a request's body is malformed")
		}
		h.length = int64(n)
	}
	return nil
}

func isControl(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }

func isToken(s string) bool {
	for i := range len(s) {
		c := s[i]
		if c <= ' ' || c >= 0x7f || strings.IndexByte("()<>@,;:\\\"/[]?={}", c) >= 0 {
			return false
		}
	}
	return s != ""
}
