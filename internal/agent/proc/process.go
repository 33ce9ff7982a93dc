package proc

import (
	"context"
	"errors"
	"os"
	"sync"
	"syscall"
	"time"
)

// Stream is one of a process's outputs.
type Stream int

// The outputs of a process.
const (
	Stdout Stream = iota
	Stderr
)

// Request is what a caller asked to run, kept to be listed.
type Request struct {
	Cmd  string
	Args []string
	Env  map[string]string
	Dir  *string // nil when none was given
	Tag  string  // "" for none
}

// End says how a process ended.
type End struct {
	Code     int            // exit code, -1 when a signal ended it
	Signal   syscall.Signal // 0 for none
	TimedOut bool           // its deadline ended it
}

// Errors of a process.
var (
	ErrEnded   = errors.New("the process has ended")
	ErrNoStdin = errors.New("the process has no open standard input: it was started without one, or it was closed")
)

// window is how many bytes a process may be ahead of its slowest subscriber
// before it has to wait.
const window = 256 << 10

// Process is a process that was started here, or that ended a while ago.
type Process struct {
	PID     int
	Request Request

	table *Table
	seq   uint64        // order of start
	done  chan struct{} // closed at the end
	gone  chan struct{} // closed when the process itself was reaped

	stdin     *os.File      // nil without
	stdinLock chan struct{} // held while writing to or closing stdin
	pieces    pieces        // guarded by stdinLock

	mu       sync.Mutex // guards what follows
	out      [2]output
	open     int  // streams that are not at their end
	reaped   bool // the process itself is no more; others may hold its output open
	cut      bool // do not wait for others that hold the output open
	settled  bool // reaped, and all output is in the rings
	ended    bool // settled, and the table knows
	end      End
	endedAt  time.Duration // when it was reaped, by the table's clock
	deadline *alarm        // nil for none
	subs     []*Subscription
	room     sync.Cond // a subscriber moved on or left
	stdinEnd bool      // closed by the caller
}

// output is one output stream.
type output struct {
	ring
	file *os.File // our end of the pipe, closed at its end
}

// Done returns a channel that is closed when the process has ended and all
// its output is there.
func (p *Process) Done() <-chan struct{} { return p.done }

// Gone returns a channel that is closed when the process itself has exited,
// although what it started may still write to its output.
func (p *Process) Gone() <-chan struct{} { return p.gone }

// End returns how the process ended; false while it runs.
func (p *Process) End() (End, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.end, p.ended
}

// Signal sends a signal to the process, or to its whole group. After SIGTERM
// and SIGKILL its end does not wait for others that hold its output open.
func (p *Process) Signal(sig syscall.Signal, group bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended || p.reaped && !group {
		return ErrEnded
	}
	return p.signalLocked(sig, group)
}

func (p *Process) signalLocked(sig syscall.Signal, group bool) error {
	pid := p.PID
	if group {
		pid = -pid
	}
	err := syscall.Kill(pid, sig)
	if errors.Is(err, syscall.ESRCH) && p.reaped {
		err = nil // only its output is still open, held from outside the group
	}
	if err == nil && (sig == syscall.SIGTERM || sig == syscall.SIGKILL) {
		p.cutLocked()
	}
	return err
}

// cutLocked makes the end not wait for the end of the output, but for the
// process itself.
func (p *Process) cutLocked() {
	p.cut = true
	p.room.Broadcast()
	if !p.reaped {
		return
	}
	for i := range p.out {
		if f := p.out[i].file; f != nil {
			// Wakes the reader, which takes what is in the pipe and stops.
			f.SetReadDeadline(time.Unix(1, 0))
		}
	}
}

// Expire ends the process and its group because its deadline passed. It does
// nothing to one that has ended.
func (p *Process) Expire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.ended {
		return
	}
	p.end.TimedOut = true
	p.signalLocked(syscall.SIGKILL, true)
	p.cutLocked()
}

// Write writes to the process's standard input, all of it or with an error.
// It waits as long as the process does not read. What was written of a piece of
// the same name before is left out; a piece without a name is a new one.
func (p *Process) Write(ctx context.Context, piece string, data []byte) error {
	if p.stdin == nil {
		return ErrNoStdin
	}
	select {
	case p.stdinLock <- struct{}{}:
	case <-p.done:
		return ErrEnded
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.stdinLock }()
	had := min(p.pieces.had(piece), len(data))
	if had == len(data) {
		return nil
	}
	fired := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		defer close(fired)
		p.stdin.SetWriteDeadline(time.Unix(1, 0))
	})
	n, err := p.stdin.Write(data[had:])
	p.pieces.note(piece, had+n)
	if !stop() {
		<-fired
		p.stdin.SetWriteDeadline(time.Time{})
	}
	return p.writeError(ctx, err)
}

func (p *Process) writeError(ctx context.Context, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, os.ErrDeadlineExceeded):
		return ctx.Err()
	case errors.Is(err, os.ErrClosed):
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.stdinEnd && !p.ended {
			return ErrNoStdin
		}
		return ErrEnded
	case errors.Is(err, syscall.EPIPE):
		select {
		case <-p.gone:
			return ErrEnded
		default:
			return ErrNoStdin // it closed its end itself
		}
	}
	return err
}

// CloseStdin ends the process's standard input once pending writes are
// through. It may be repeated, also after the process has ended.
func (p *Process) CloseStdin(ctx context.Context) error {
	if p.stdin == nil {
		return ErrNoStdin
	}
	select {
	case p.stdinLock <- struct{}{}:
	case <-p.done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
	defer func() { <-p.stdinLock }()
	p.mu.Lock()
	p.stdinEnd = true
	p.mu.Unlock()
	p.stdin.Close() // a second close does nothing
	return nil
}

// SinceEnd returns for how long the machine ran since the process ended; 0
// while it runs.
func (p *Process) SinceEnd() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.ended {
		return 0
	}
	return p.table.clock.now() - p.endedAt
}

// wasReaped records how the process itself ended; now is the table's clock.
func (p *Process) wasReaped(ws syscall.WaitStatus, now time.Duration) {
	p.mu.Lock()
	p.reaped = true
	p.endedAt, p.end.Code = now, ws.ExitStatus() // -1 after a signal
	if ws.Signaled() {
		p.end.Signal = ws.Signal()
	}
	close(p.gone)
	if p.cut {
		p.cutLocked()
	}
	p.mu.Unlock()
	p.settle()
}

// settle ends the process once it is reaped and its output is complete. The
// table knows before anybody who follows the process.
func (p *Process) settle() {
	p.mu.Lock()
	last := p.reaped && p.open == 0 && !p.settled
	p.settled = p.settled || last
	p.mu.Unlock()
	if !last {
		return
	}
	p.table.retire(p)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.table.clock.cancel(p.deadline)
	if p.stdin != nil {
		p.stdin.Close()
	}
	for _, s := range p.subs {
		s.notify()
	}
	close(p.done)
}

// reapedAt returns when the process was reaped, by the table's clock.
func (p *Process) reapedAt() time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.endedAt
}

// holds returns how much memory the output takes. With drop it gives that
// back, if nobody follows the process, and returns how much that was.
func (p *Process) holds(drop bool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if drop && len(p.subs) > 0 {
		return 0
	}
	held := 0
	for i := range p.out {
		held += len(p.out[i].buf)
		if drop {
			p.out[i].drop()
		}
	}
	return held
}
