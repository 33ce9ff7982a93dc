package proc

import (
	"errors"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"
)

// chunk is the largest piece of output that is read or handed out at once.
const chunk = 32 << 10

// chunks are buffers for reading. One is taken only when there is something
// to read, so a silent process costs none.
var chunks = sync.Pool{New: func() any { return new([chunk]byte) }}

// pump moves a stream from its pipe into its ring until the end.
func (p *Process) pump(s Stream, f *os.File) {
	raw, err := f.SyscallConn()
	for err == nil {
		p.waitForRoom(s)
		err = p.pull(s, raw.Read)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) { // cut: take what is there, wait for nothing
		for left := ringMax; left > 0 && p.pull(s, once(raw)) == nil; left -= chunk {
			p.waitForRoom(s)
		}
	}
	f.Close()
	p.mu.Lock()
	p.out[s].file = nil
	p.open--
	p.mu.Unlock()
	p.settle()
}

var errEOF = errors.New("end of output")

// pull reads one chunk; read calls it with the descriptor, again when it
// becomes readable if the function says false.
func (p *Process) pull(s Stream, read func(func(uintptr) bool) error) error {
	var got error
	err := read(func(fd uintptr) bool {
		buf := chunks.Get().(*[chunk]byte)
		defer chunks.Put(buf)
		n, err := syscall.Read(int(fd), buf[:])
		switch {
		case err == syscall.EAGAIN:
			got = errEOF // counts only when nobody waits
			return false
		case err == syscall.EINTR:
			got = nil
		case err != nil:
			got = err
		case n == 0:
			got = errEOF
		default:
			got = nil
			p.append(s, buf[:n])
		}
		return true
	})
	if err != nil {
		return err
	}
	return got
}

// once adapts a descriptor so that pull does not wait.
func once(raw syscall.RawConn) func(func(uintptr) bool) error {
	return func(f func(uintptr) bool) error {
		return raw.Control(func(fd uintptr) { f(fd) })
	}
}

func (p *Process) append(s Stream, data []byte) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.out[s].write(data)
	for _, sub := range p.subs {
		sub.notify()
	}
}

// waitForRoom returns when no subscriber is far behind.
func (p *Process) waitForRoom(s Stream) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.behindLocked(s) >= window {
		p.room.Wait()
	}
}

func (p *Process) behindLocked(s Stream) int64 {
	var most int64
	for _, sub := range p.subs {
		if sub.left != nil && p.cut {
			continue // what is in the pipes still fits beside what it has not seen
		}
		most = max(most, p.out[s].head-sub.pos[s])
	}
	return most
}

// Live, as a position for Subscribe, means from now on.
const Live = -1

// Subscription follows the output of a process. As long as it is open, the
// process waits for it when it falls behind, and nothing that it has not seen
// is dropped. It belongs to one goroutine.
type Subscription struct {
	p     *Process
	pos   [2]int64 // next position wanted; guarded by p.mu
	wake  chan struct{}
	first Stream // looked at first, so that no stream starves the other
	left  *alarm // set by Leave; guarded by p.mu
}

// leaveFor is how long a place is kept, by the table's clock.
const leaveFor = 30 * time.Second

// Subscribe follows the process from the given position of each stream: a
// count of bytes from its start, or Live. What is not held any more is passed
// over.
func (p *Process) Subscribe(from [2]int64) *Subscription {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.subscribeLocked(from)
}

func (p *Process) subscribeLocked(from [2]int64) *Subscription {
	s := &Subscription{p: p, wake: make(chan struct{}, 1)}
	for i := range s.pos {
		if s.pos[i] = max(from[i], p.out[i].tail); from[i] == Live {
			s.pos[i] = p.out[i].head
		}
	}
	p.subs = append(p.subs, s)
	return s
}

func (s *Subscription) notify() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Wake returns a channel that has a value when Next may have something new.
func (s *Subscription) Wake() <-chan struct{} { return s.wake }

// Held returns the oldest position held of each stream.
func (s *Subscription) Held() [2]int64 {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	return [2]int64{s.p.out[Stdout].tail, s.p.out[Stderr].tail}
}

// Chunk is a piece of output.
type Chunk struct {
	Stream Stream
	Offset int64 // position of its first byte
	Data   []byte
}

// Next copies the next piece of output into buf, which it enlarges up to
// 32 KiB as needed and which Chunk.Data shares. Without one, ok is false, and
// ended says whether there will never be one.
func (s *Subscription) Next(buf *[]byte) (c Chunk, ok, ended bool) {
	p := s.p
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, stream := range [2]Stream{s.first, 1 - s.first} {
		ring := &p.out[stream].ring
		pos := max(s.pos[stream], ring.tail)
		n := min(ring.head-pos, chunk)
		if n <= 0 {
			continue
		}
		if int64(len(*buf)) < n {
			*buf = make([]byte, max(n, min(chunk, 2*int64(len(*buf)))))
		}
		data := (*buf)[:n]
		ring.read(data, pos)
		s.pos[stream] = pos + n
		s.first = 1 - stream
		p.room.Broadcast()
		return Chunk{stream, pos, data}, true, false
	}
	return Chunk{}, false, p.ended
}

// Leave ends the subscription and keeps its place for half a minute: the
// process waits for it as before, so that who followed it can come back by
// Follow and has missed nothing. With what is held, that covers 768 KiB which
// were taken from Next and did not arrive.
func (s *Subscription) Leave() {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.left = s.p.table.clock.after(leaveFor, commandGrain, s.Close)
}

// Follow gives up the places that were kept by Leave: the subscription is of
// those who come back to them.
func (s *Subscription) Follow() { s.p.forget() }

// forget gives up all places that are kept.
func (p *Process) forget() {
	p.mu.Lock()
	var left []*Subscription
	for _, s := range p.subs {
		if s.left != nil {
			left = append(left, s)
		}
	}
	p.mu.Unlock()
	for _, s := range left {
		s.Close()
	}
}

// Close ends the subscription; the process does not wait for it any more. It
// may be repeated.
func (s *Subscription) Close() {
	p := s.p
	p.mu.Lock()
	p.subs = slices.DeleteFunc(p.subs, func(o *Subscription) bool { return o == s })
	p.table.clock.cancel(s.left)
	p.room.Broadcast()
	ended := p.ended
	p.mu.Unlock()
	if ended {
		p.table.trim()
	}
}
