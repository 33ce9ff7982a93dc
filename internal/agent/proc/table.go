// Package proc runs the processes of a sandbox and is its process 1: it
// reaps every child in one place, keeps the last of what each process wrote,
// and makes a process wait for those that follow it rather than drop or
// merge anything. It knows nothing of users' names, of HTTP or of messages.
package proc

import (
	"context"
	"errors"
	"maps"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"
)

// What is kept of processes that have ended.
const (
	keepTime  = 30 * time.Minute
	keepCount = 1024
	keepBytes = 8 << 20 // output of all of them together; the oldest goes first
)

// ErrNotFound says that there is no such process.
var ErrNotFound = errors.New("process not found")

// Table holds the processes. Its methods may be called side by side.
type Table struct {
	clock *clock

	// forking is held for reading from the birth of a process until it is in
	// the table, so that the reaper can wait for it.
	forking sync.RWMutex

	mu      sync.Mutex // guards what follows; may be taken before a Process's mu, never after
	seq     uint64
	byPID   map[int]*Process // the youngest of each pid
	running map[uint64]*Process
	ended   []*Process // in the order of their ends
	held    int        // bytes of output that the ended ones hold
	keep    *alarm     // for the oldest of the ended ones
	lastEnd time.Duration
	anyEnd  bool
	null    int // descriptor of /dev/null, 0 until it is first needed
}

// New returns an empty table. Run has to be running before a process is started.
func New() *Table {
	return &Table{clock: newClock(time.Now()), byPID: map[int]*Process{}, running: map[uint64]*Process{}}
}

// Spec is a process to start.
type Spec struct {
	Request Request
	Path    string   // of the program: absolute, or relative to Dir
	Args    []string // with the program's own name
	Env     []string
	Dir     string
	User    *syscall.Credential // nil keeps our own
	Stdin   bool                // whether it gets a pipe instead of /dev/null
	Timeout time.Duration       // of running time, after which its group is killed; 0 means never
}

// Start starts a process in a session of its own, and returns it with a
// subscription to all its output, which the caller closes. An error is the
// kernel's, as syscall.Errno.
func (t *Table) Start(spec Spec) (*Process, *Subscription, error) {
	p := &Process{
		Request: spec.Request, table: t, done: make(chan struct{}), gone: make(chan struct{}),
		stdinLock: make(chan struct{}, 1), open: 2,
	}
	p.room.L = &p.mu
	child, err := t.pipes(p, &spec)
	if err != nil {
		return nil, nil, err
	}
	sub := p.subscribeLocked([2]int64{}) // nobody else has p yet
	t.forking.RLock()
	p.PID, err = syscall.ForkExec(spec.Path, spec.Args, &syscall.ProcAttr{
		Dir: spec.Dir, Env: spec.Env, Files: child[:],
		Sys: &syscall.SysProcAttr{Setsid: true, Credential: spec.User},
	})
	if err == nil {
		t.add(p, spec.Timeout)
	}
	t.forking.RUnlock()
	closeChild(child, spec.Stdin)
	if err != nil {
		p.closeOurs()
		return nil, nil, err
	}
	for s := range p.out {
		go p.pump(Stream(s), p.out[s].file)
	}
	return p, sub, nil
}

// add puts a process that was just born into the table.
func (t *Table) add(p *Process, timeout time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.seq++
	p.seq = t.seq
	t.byPID[p.PID], t.running[p.seq] = p, p
	if timeout > 0 {
		p.mu.Lock()
		p.deadline = t.clock.after(timeout, commandGrain, p.Expire)
		p.mu.Unlock()
	}
}

// pipes makes the process's ends of its pipes and returns the descriptors for
// the child.
func (t *Table) pipes(p *Process, spec *Spec) (child [3]uintptr, err error) {
	defer func() {
		if err != nil {
			closeChild(child, spec.Stdin)
			p.closeOurs()
		}
	}()
	if spec.Stdin {
		if child[0], p.stdin, err = pipe(spec.User, 0); err != nil {
			return child, err
		}
	} else if child[0], err = t.nullFD(); err != nil {
		return child, err
	}
	for s := range p.out {
		if child[1+s], p.out[s].file, err = pipe(spec.User, 1); err != nil {
			return child, err
		}
	}
	return child, nil
}

// pipe makes a pipe: the child gets the end with the given index, as a plain
// blocking descriptor, and the other comes back ready for waiting. The
// child's user owns it, so that the child can open /dev/stdout.
func pipe(user *syscall.Credential, childEnd int) (uintptr, *os.File, error) {
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
		return 0, nil, err
	}
	ours := fds[1-childEnd]
	if _, _, errno := syscall.Syscall(syscall.SYS_FCNTL, uintptr(ours), syscall.F_SETFL, syscall.O_NONBLOCK); errno != 0 {
		syscall.Close(fds[0])
		syscall.Close(fds[1])
		return 0, nil, errno
	}
	if user != nil {
		syscall.Fchown(fds[childEnd], int(user.Uid), int(user.Gid)) // harmless where pipes have no owner
	}
	return uintptr(fds[childEnd]), os.NewFile(uintptr(ours), "pipe"), nil
}

// nullFD returns the descriptor of /dev/null, which stays open. Where there is
// none, an empty pipe does: it is at its end at once.
func (t *Table) nullFD() (uintptr, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.null == 0 {
		fd, err := syscall.Open("/dev/null", syscall.O_RDWR|syscall.O_CLOEXEC, 0)
		if err != nil {
			var fds [2]int
			if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC); err != nil {
				return 0, err
			}
			syscall.Close(fds[1])
			fd = fds[0]
		}
		t.null = fd
	}
	return uintptr(t.null), nil
}

// closeChild closes the child's ends of a process's pipes.
func closeChild(child [3]uintptr, stdin bool) {
	for i, fd := range child {
		if fd != 0 && (i > 0 || stdin) {
			syscall.Close(int(fd))
		}
	}
}

func (p *Process) closeOurs() {
	for _, f := range []*os.File{p.stdin, p.out[Stdout].file, p.out[Stderr].file} {
		if f != nil {
			f.Close()
		}
	}
}

// ByPID returns the youngest process with the pid, also an ended one that is
// still kept.
func (t *Table) ByPID(pid int) (*Process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p, ok := t.byPID[pid]; ok {
		return p, nil
	}
	return nil, ErrNotFound
}

// ByTag returns the youngest process with the tag, also an ended one that is
// still kept.
func (t *Table) ByTag(tag string) (*Process, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var found *Process
	look := func(p *Process) {
		if tag != "" && p.Request.Tag == tag && (found == nil || found.seq < p.seq) {
			found = p
		}
	}
	for _, p := range t.running {
		look(p)
	}
	for _, p := range t.ended {
		look(p)
	}
	if found == nil {
		return nil, ErrNotFound
	}
	return found, nil
}

// Running returns the processes that have not ended, in the order of their start.
func (t *Table) Running() []*Process {
	t.mu.Lock()
	defer t.mu.Unlock()
	list := make([]*Process, 0, len(t.running))
	for _, p := range t.running {
		list = append(list, p)
	}
	slices.SortFunc(list, func(a, b *Process) int { return int(a.seq) - int(b.seq) })
	return list
}

// Activity returns how many processes run, and for how long the machine ran
// since the last one ended; false when none ever did.
func (t *Table) Activity() (running int, sinceEnd time.Duration, anyEnd bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.running), t.clock.now() - t.lastEnd, t.anyEnd
}

// Resumed says that the machine stood still until a moment ago, which the
// table finds out by itself too, but later and less exactly.
func (t *Table) Resumed() { t.clock.resumed(time.Now()) }

// Forget gives up the places that were kept by Subscription.Leave: nobody
// will come back to them.
func (t *Table) Forget() {
	t.mu.Lock()
	all := append(slices.Collect(maps.Values(t.running)), t.ended...)
	t.mu.Unlock()
	for _, p := range all {
		p.forget()
	}
}

// retire moves a process that is about to end to the kept ones.
func (t *Table) retire(p *Process) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.running, p.seq)
	t.ended = append(t.ended, p)
	t.held += p.holds(false)
	t.lastEnd, t.anyEnd = t.clock.now(), true
	t.trimLocked(t.lastEnd)
}

// trim drops what is kept beyond the bounds.
func (t *Table) trim() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.trimLocked(t.clock.now())
}

// trimLocked drops what is beyond the bounds; now is the table's clock.
func (t *Table) trimLocked(now time.Duration) {
	for len(t.ended) > 0 && (len(t.ended) > keepCount || now-t.ended[0].reapedAt() >= keepTime) {
		old := t.ended[0]
		t.ended[0] = nil
		t.ended = t.ended[1:]
		t.held -= old.holds(false)
		if t.byPID[old.PID] == old {
			delete(t.byPID, old.PID)
		}
	}
	if len(t.ended) > 0 && t.keep == nil {
		t.keep = t.clock.after(t.ended[0].reapedAt()+keepTime-now, keepGrain, t.keptEnough)
	}
	for _, p := range t.ended {
		if t.held <= keepBytes {
			return
		}
		t.held -= p.holds(true)
	}
}

// keptEnough drops what was kept for its time.
func (t *Table) keptEnough() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.keep = nil
	t.trimLocked(t.clock.now())
}

// Run reaps children until ctx ends; then it ends all processes, first
// politely for the given grace, and returns when they are gone.
func (t *Table) Run(ctx context.Context, grace time.Duration) error {
	exits := make(chan os.Signal, 1)
	signal.Notify(exits, syscall.SIGCHLD)
	defer signal.Stop(exits)
	defer t.clock.close()
	for t.reap(); ctx.Err() == nil; t.reap() {
		select {
		case <-exits:
		case <-ctx.Done():
		}
	}
	signalAll(syscall.SIGTERM)
	force := time.NewTimer(grace)
	defer force.Stop()
	for t.reap() {
		select {
		case <-exits:
		case <-force.C:
			signalAll(syscall.SIGKILL)
		}
	}
	return nil
}

// reap takes the exits of all children that have one, our own and those left
// to us by their parents, and reports whether others still run.
func (t *Table) reap() bool {
	for {
		var ws syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &ws, syscall.WNOHANG, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil: // no child at all
			return false
		case pid == 0:
			return true
		default:
			t.exited(pid, ws)
		}
	}
}

func (t *Table) exited(pid int, ws syscall.WaitStatus) {
	now := t.clock.now()
	p := t.unreaped(pid)
	if p == nil {
		t.forking.Lock()
		//lint:ignore SA2001 a process that is not in the table yet comes in now
		t.forking.Unlock()
		p = t.unreaped(pid)
	}
	if p != nil {
		p.wasReaped(ws, now)
	}
}

// unreaped returns the process with the pid unless it was reaped before, which
// means that the pid has a new owner.
func (t *Table) unreaped(pid int) *Process {
	t.mu.Lock()
	defer t.mu.Unlock()
	if p, ok := t.byPID[pid]; ok {
		select {
		case <-p.gone:
		default:
			return p
		}
	}
	return nil
}
