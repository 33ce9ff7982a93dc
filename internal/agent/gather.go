package agent

import (
	"context"
	"net/http"
	"sync"
)

// gatherer is a response that sends several messages of a stream in one
// piece. Connect flushes after each message, which costs a packet and several
// wake-ups on both sides; a stream that knows that more follows at once calls
// gather before a message, and send before it waits.
type gatherer struct {
	http.ResponseWriter
	flusher http.Flusher
	call    context.Context // without what the protocol adds to it, such as a deadline
	hold    bool
	buf     []byte // written and not passed on yet
}

type gathererKey struct{}

// gatherSize is how much is gathered before it is passed on.
const gatherSize = 64 << 10

var gatherBuffers = sync.Pool{New: func() any { return new([gatherSize]byte) }}

// gathered serves a call with a response that can gather.
func gathered(h http.Handler, w http.ResponseWriter, r *http.Request) {
	flusher, ok := w.(http.Flusher)
	if !ok {
		h.ServeHTTP(w, r)
		return
	}
	g := &gatherer{ResponseWriter: w, flusher: flusher}
	g.call = context.WithValue(r.Context(), gathererKey{}, g)
	h.ServeHTTP(g, r.WithContext(g.call))
	_ = g.pass() // the caller is gone if it fails; the server sends the rest
	g.release()
}

// withoutDeadline returns a call's context without the deadline that its
// headers give. By the machine's clocks that passes while the machine stands
// still; a command's is measured otherwise, in proc.
func withoutDeadline(ctx context.Context) context.Context {
	if g, ok := ctx.Value(gathererKey{}).(*gatherer); ok {
		return g.call
	}
	return ctx
}

// gather holds back what is written to the call's response from now on.
func gather(ctx context.Context) {
	if g, ok := ctx.Value(gathererKey{}).(*gatherer); ok {
		g.hold = true
	}
}

// send sends what was held back.
func send(ctx context.Context) {
	if g, ok := ctx.Value(gathererKey{}).(*gatherer); ok && g.hold {
		g.hold = false
		g.Flush()
	}
}

// Write writes, or holds back as much as it has room for.
func (g *gatherer) Write(p []byte) (int, error) {
	if !g.hold && len(g.buf) == 0 {
		return g.ResponseWriter.Write(p)
	}
	if g.buf == nil {
		g.buf = gatherBuffers.Get().(*[gatherSize]byte)[:0]
	}
	if len(g.buf)+len(p) > gatherSize {
		if err := g.pass(); err != nil {
			return 0, err
		}
	}
	if len(p) > gatherSize {
		return g.ResponseWriter.Write(p)
	}
	g.buf = append(g.buf, p...)
	return len(p), nil
}

func (g *gatherer) pass() error {
	if len(g.buf) == 0 {
		return nil
	}
	_, err := g.ResponseWriter.Write(g.buf)
	g.buf = g.buf[:0]
	return err
}

func (g *gatherer) release() {
	if g.buf != nil {
		gatherBuffers.Put((*[gatherSize]byte)(g.buf[:gatherSize]))
		g.buf = nil
	}
}

// Flush sends all, unless it is to be held back. Between two gatherings no
// buffer is held: a stream may be silent for long.
func (g *gatherer) Flush() {
	if g.hold {
		return
	}
	if g.pass() != nil {
		return // the next Write says it again
	}
	g.release()
	g.flusher.Flush()
}

// Unwrap is for http.ResponseController.
func (g *gatherer) Unwrap() http.ResponseWriter { return g.ResponseWriter }
