package tunnel

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
)

// linger is how long a tunnel that was closed may go on with what is on its way.
const linger = 30 * time.Second

// Conn is the caller's end of a tunnel. One read and one write may go on side by
// side. It has no deadlines.
type Conn struct {
	answer io.ReadCloser
	up     *io.PipeWriter
	cancel context.CancelCauseFunc
	closed atomic.Bool
	broke  chan struct{} // closed when err is one

	reading sync.Mutex // held over a read; guards what follows
	rest    uint32     // of the data frame that is being read
	err     error      // comes from Read from now on; not changed once broke is closed
	over    bool       // the last frame has come
}

var _ net.Conn = (*Conn)(nil)

// Dial opens the tunnel at a URL, with the header in its request. The context
// bounds the opening, not the tunnel. What the far side refuses is a
// *fault.Error.
func Dial(ctx context.Context, via http.RoundTripper, url string, header http.Header) (*Conn, error) {
	life, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
	body, up := io.Pipe()
	stop := context.AfterFunc(ctx, func() {
		cancel(context.Cause(ctx))
		up.CloseWithError(context.Cause(ctx)) // over HTTP/1.1 the call waits for who reads it
	})
	req, err := http.NewRequestWithContext(life, http.MethodPost, url, body)
	if err != nil {
		cancel(err)
		stop()
		return nil, fmt.Errorf("open a tunnel: %w", err)
	}
	for name, values := range header {
		req.Header[name] = values
	}
	res, err := via.RoundTrip(req)
	if !stop() && err == nil {
		err = context.Cause(ctx)
		res.Body.Close()
	}
	if err != nil {
		cancel(err)
		if cause := context.Cause(ctx); cause != nil {
			return nil, cause
		}
		return nil, fault.New(fault.Unavailable, "open a tunnel: %w", err)
	}
	if res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != ContentType {
		err := refused(res)
		up.CloseWithError(err)
		cancel(err)
		return nil, err
	}
	return &Conn{answer: res.Body, up: up, cancel: cancel, broke: make(chan struct{})}, nil
}

// refused reads the error of an answer that is no tunnel.
func refused(res *http.Response) error {
	defer res.Body.Close()
	body, err := io.ReadAll(io.LimitReader(res.Body, mostWords))
	f := fault.FromJSON(body)
	switch {
	case err != nil:
		return fault.New(fault.Unavailable, "open a tunnel: %w", err)
	case f.Message == "":
		return fault.New(fault.Internal, "open a tunnel: got %s %s instead of one", res.Status, strings.TrimSpace(res.Header.Get("Content-Type")))
	}
	return f
}

// Read reads what the far side sent: io.EOF when it sends no more, a
// *fault.Error when the tunnel was cut and the reason is known.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.reading.Lock()
	defer c.reading.Unlock()
	if c.closed.Load() {
		return 0, net.ErrClosed
	}
	n, err := c.read(p)
	if c.closed.Load() {
		if n > 0 {
			c.reset()
		}
		return 0, net.ErrClosed
	}
	return n, err
}

func (c *Conn) read(p []byte) (int, error) {
	for c.rest == 0 && c.err == nil {
		c.fail(c.next())
	}
	if c.err != nil {
		return 0, c.err
	}
	n, err := c.answer.Read(p[:min(len(p), int(c.rest))])
	c.rest -= uint32(n)
	if err != nil && (c.rest > 0 || !errors.Is(err, io.EOF)) {
		c.fail(broken(err))
	}
	if n > 0 {
		return n, nil
	}
	return 0, c.err
}

// fail has Read return the error, nil for none, from now on.
func (c *Conn) fail(err error) {
	c.err = err
	if err != nil && !errors.Is(err, io.EOF) {
		close(c.broke)
	}
}

// next reads the head of a frame, and a frame whole that is not data.
func (c *Conn) next() error {
	var head [headSize]byte
	if _, err := io.ReadFull(c.answer, head[:]); err != nil {
		return broken(err)
	}
	size := binary.BigEndian.Uint32(head[1:])
	switch kind := head[0]; {
	case kind == frameData:
		c.rest = size
		return nil
	case kind == frameEOF && size == 0:
		return io.EOF
	case kind == frameEnd && size == 0:
		c.over = true
		return io.EOF
	case kind == frameEnd && size <= mostWords:
		words := make([]byte, size)
		if _, err := io.ReadFull(c.answer, words); err != nil {
			return broken(err)
		}
		c.over = true
		return fault.FromJSON(words)
	}
	return fault.New(fault.Internal, "a tunnel sent a frame of kind %d with %d bytes, which there is none of", head[0], size)
}

// broken is the error of a tunnel that was cut and gave no reason.
func broken(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fault.New(fault.Unavailable, "the tunnel broke: %w", err)
}

// graceToKnow is how long a write that failed waits for a reader to learn why.
const graceToKnow = time.Second

// Write sends to the far side. Where the tunnel was cut its error is Read's.
func (c *Conn) Write(p []byte) (int, error) {
	n, err := c.up.Write(p)
	if err == nil || c.closed.Load() {
		return n, err
	}
	grace := time.NewTimer(graceToKnow)
	defer grace.Stop()
	select {
	case <-c.broke:
		return n, c.err
	case <-grace.C:
		return n, err
	}
}

// CloseWrite says that no more comes from this side.
func (c *Conn) CloseWrite() error { return c.up.Close() }

// Close ends the tunnel as closing a TCP connection does: what was written goes
// on its way, and what still comes breaks it.
func (c *Conn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	c.up.Close()
	timer := time.AfterFunc(linger, c.reset)
	go func() {
		defer timer.Stop()
		defer c.reset()
		c.reading.Lock()
		defer c.reading.Unlock()
		for c.rest == 0 && !c.over && (c.err == nil || errors.Is(c.err, io.EOF)) {
			c.fail(c.next())
		}
	}()
	return nil
}

// SetLinger makes Close break the tunnel at once, whatever the argument, which
// is there to be like TCP's: zero.
func (c *Conn) SetLinger(int) error {
	c.closed.Store(true)
	c.reset()
	return nil
}

// reset breaks the tunnel, or, when that is over, gives back what it used.
func (c *Conn) reset() {
	c.up.CloseWithError(net.ErrClosed) // nothing after a CloseWrite
	c.cancel(net.ErrClosed)
	c.answer.Close()
}

type addr struct{}

func (addr) Network() string { return "tunnel" }
func (addr) String() string  { return "tunnel" }

// LocalAddr returns an address that says only that it is a tunnel.
func (c *Conn) LocalAddr() net.Addr { return addr{} }

// RemoteAddr returns an address that says only that it is a tunnel.
func (c *Conn) RemoteAddr() net.Addr { return addr{} }

// SetDeadline returns os.ErrNoDeadline.
func (c *Conn) SetDeadline(time.Time) error { return os.ErrNoDeadline }

// SetReadDeadline returns os.ErrNoDeadline.
func (c *Conn) SetReadDeadline(time.Time) error { return os.ErrNoDeadline }

// SetWriteDeadline returns os.ErrNoDeadline.
func (c *Conn) SetWriteDeadline(time.Time) error { return os.ErrNoDeadline }
