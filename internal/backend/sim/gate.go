package sim

import (
	"errors"
	"net/http"
	"sync"
)

// errEnded says that the machine ended while something in it waited.
var errEnded = errors.New("the simulated machine has ended")

// gate is what all that happens in a machine passes, so that the machine can
// stand still as one.
type gate struct {
	mu     sync.Mutex // guards what follows
	moved  *sync.Cond // when any of it changed
	shut   bool
	ended  bool
	inside int // how many have passed and are not done
}

func newGate() *gate {
	g := &gate{}
	g.moved = sync.NewCond(&g.mu)
	return g
}

// pass waits until the machine does not stand still, does f, which must be
// short and not pass the gate itself, and returns f's error.
func (g *gate) pass(f func() error) error {
	if err := g.enter(); err != nil {
		return err
	}
	defer g.leave()
	return f()
}

func (g *gate) enter() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	for g.shut && !g.ended {
		g.moved.Wait()
	}
	if g.ended {
		return errEnded
	}
	g.inside++
	return nil
}

func (g *gate) leave() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.inside--
	g.moved.Broadcast()
}

// close lets nobody pass any more, and returns when all who passed are done.
func (g *gate) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = true
	for g.inside > 0 {
		g.moved.Wait()
	}
}

// open lets pass who waits.
func (g *gate) open() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.shut = false
	g.moved.Broadcast()
}

// end sends away who waits and who comes.
func (g *gate) end() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.ended = true
	g.moved.Broadcast()
}

// stillWriter says nothing while the machine stands still.
type stillWriter struct {
	http.ResponseWriter
	gate *gate
}

// Write writes as soon as the machine moves.
func (w stillWriter) Write(p []byte) (n int, err error) {
	if err := w.gate.pass(func() error { return nil }); err != nil {
		return 0, err
	}
	return w.ResponseWriter.Write(p)
}

// Flush sends what was written.
func (w stillWriter) Flush() {
	if f, ok := w.ResponseWriter.(http.Flusher); ok {
		f.Flush()
	}
}

// Unwrap returns the writer below, for http.ResponseController.
func (w stillWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// still has a handler wait while the machine stands still.
func (g *gate) still(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if err := g.pass(func() error { return nil }); err != nil {
			panic(http.ErrAbortHandler) // nobody is there to answer
		}
		next.ServeHTTP(stillWriter{w, g}, r)
	})
}
