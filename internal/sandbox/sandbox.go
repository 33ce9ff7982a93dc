// Package sandbox holds the words that all of OpenDsec uses: what a sandbox
// is, which states it has, who it belongs to and what it may use. It imports
// the standard library only, and nothing in it does anything.
package sandbox

import (
	"slices"
	"time"
)

// Backend names a kind of machine.
type Backend string

// The kinds of machine. Auto asks the node for the strongest that it can run.
const (
	Auto      Backend = "auto"
	Container Backend = "container"
	GVisor    Backend = "gvisor"
	Sim       Backend = "sim"
)

// Backends lists the kinds of machine that exist, strongest isolation first;
// Sim, which runs nothing, is never chosen by Auto and comes last.
var Backends = []Backend{GVisor, Container, Sim}

// Resources are amounts that sandboxes are given.
type Resources struct {
	CPU       float64 `json:"cpu"`       // cores
	MemoryMB  int64   `json:"memory_mb"` // MiB
	DiskMB    int64   `json:"disk_mb"`   // MiB
	Sandboxes int64   `json:"sandboxes"`
}

// Add returns the sum.
func (r Resources) Add(o Resources) Resources {
	return Resources{r.CPU + o.CPU, r.MemoryMB + o.MemoryMB, r.DiskMB + o.DiskMB, r.Sandboxes + o.Sandboxes}
}

// Sub returns the difference.
func (r Resources) Sub(o Resources) Resources {
	return Resources{r.CPU - o.CPU, r.MemoryMB - o.MemoryMB, r.DiskMB - o.DiskMB, r.Sandboxes - o.Sandboxes}
}

// Fits reports whether r is no more than room in any of its amounts.
func (r Resources) Fits(room Resources) bool {
	const slack = 1e-9 // sums of tenths are not exact
	return r.CPU <= room.CPU+slack && r.MemoryMB <= room.MemoryMB && r.DiskMB <= room.DiskMB && r.Sandboxes <= room.Sandboxes
}

// Limits bound one sandbox. The kernel, or the machine's monitor, enforces them.
type Limits struct {
	CPU      float64 `json:"cpu"`       // cores
	MemoryMB int64   `json:"memory_mb"` // MiB
	DiskMB   int64   `json:"disk_mb"`   // MiB that may be written
	PIDs     int64   `json:"pids"`      // processes and threads
}

// Resources returns what a sandbox with these limits counts for in placement.
func (l Limits) Resources() Resources {
	return Resources{CPU: l.CPU, MemoryMB: l.MemoryMB, DiskMB: l.DiskMB, Sandboxes: 1}
}

// OnIdle is what happens to a sandbox that was idle for its idle time.
type OnIdle string

// The things that can happen on idle.
const (
	StopOnIdle  OnIdle = "stop"
	PauseOnIdle OnIdle = "pause"
)

// Deadlines end a sandbox by themselves; zero means never. The edge keeps them.
type Deadlines struct {
	Idle     time.Duration `json:"idle,omitempty"`     // since the last command, connection and call
	Lifetime time.Duration `json:"lifetime,omitempty"` // since it was asked for
}

// Spec is what a caller asks for, defaults filled in.
type Spec struct {
	Image        ImageName         `json:"image"`
	Backend      Backend           `json:"backend"`
	Limits       Limits            `json:"limits"`
	Deadlines    Deadlines         `json:"deadlines"`
	OnIdle       OnIdle            `json:"on_idle"`
	AutoResume   bool              `json:"auto_resume,omitempty"`
	Env          map[string]string `json:"env,omitempty"`
	Workdir      string            `json:"workdir,omitempty"`
	User         string            `json:"user,omitempty"`
	Hostname     string            `json:"hostname,omitempty"`
	Labels       map[string]string `json:"labels,omitempty"`
	Metadata     map[string]string `json:"metadata,omitempty"`
	NetworkRules map[string]bool   `json:"network_rules,omitempty"`
}

// Domain says whose doing an end or an error is, so that a trainer can leave
// out of its batch what its model is not to blame for.
type Domain string

// The failure domains.
const (
	Infra  Domain = "infra"  // ours: a machine, a network, a defect
	User   Domain = "user"   // the caller's, or the code's in the sandbox
	Policy Domain = "policy" // a rule's, such as a deadline
	Quota  Domain = "quota"  // a limit's
)

// End says how and why a sandbox ended.
type End struct {
	Reason string    `json:"reason"` // one of the Reason words
	Domain Domain    `json:"domain"`
	Detail string    `json:"detail"` // a sentence for a person
	Time   time.Time `json:"time"`
}

// Why a sandbox ended.
const (
	ReasonStopped  = "stopped"       // by a call
	ReasonIdle     = "idle"          // its idle time passed
	ReasonLifetime = "lifetime"      // its lifetime passed
	ReasonExited   = "exited"        // its machine ended by itself
	ReasonMemory   = "out_of_memory" // it went over its memory limit
	ReasonLost     = "lost"          // its node, or its machine, is gone
	ReasonStart    = "start_failed"  // it never ran
)

// State returns the state that this end leads to: an end of ours is a failure.
func (e End) State() State {
	if e.Domain == Infra || e.Reason == ReasonMemory || e.Reason == ReasonExited || e.Reason == ReasonStart {
		return Failed
	}
	return Stopped
}

// Sandbox is a sandbox's record.
type Sandbox struct {
	ID          ID
	Project     Project
	Caller      string
	Spec        Spec
	State       State
	Node        string
	ImageDigest string
	Parent      ID // that it was forked from; "" for none
	CreatedAt   time.Time
	StartedAt   time.Time     // zero until its agent answered
	PausedAt    time.Time     // zero unless it is paused, or being woken
	PausedFor   time.Duration // how long it was paused before, in all
	End         *End          // nil while it lives
	// NetworkRevision is the number that the node gave to the change which
	// brought Spec.NetworkRules; 0 when they are as at the start.
	NetworkRevision int64
	RevokedURLs     []RevokedURL
	Version         int64 // counts changes; the store compares it
}

// Holds returns what a living sandbox counts for in placement. A paused one
// whose memory is on the disk gives back processors and memory, and its memory's
// room on the disk counts instead. One that any call may wake keeps all, so
// that it can always wake.
func (s *Sandbox) Holds() Resources {
	return s.Spec.Holds(s.State == Paused)
}

// Holds is Sandbox.Holds for a sandbox that is paused or not.
func (s Spec) Holds(paused bool) Resources {
	r := s.Limits.Resources()
	if paused && s.Backend.PausesToDisk() && !s.AutoResume {
		r.CPU, r.MemoryMB, r.DiskMB = 0, 0, r.DiskMB+r.MemoryMB
	}
	return r
}

// PausesToDisk reports whether a paused sandbox of this backend has its memory
// on the disk and no machine.
func (b Backend) PausesToDisk() bool { return b == GVisor || b == Sim }

// ExpiresAt returns when the sandbox's lifetime ends at the earliest, zero for
// never. Time in which it is paused, or being woken, does not count.
func (s *Sandbox) ExpiresAt() time.Time {
	if s.Spec.Deadlines.Lifetime == 0 || s.State == Paused || !s.PausedAt.IsZero() {
		return time.Time{}
	}
	return s.CreatedAt.Add(s.Spec.Deadlines.Lifetime + s.PausedFor)
}

// Pause records that the sandbox is paused since now. One that is paused
// already, or could not be woken, stays paused since when it was.
func (s *Sandbox) Pause(now time.Time) error {
	if err := s.MoveTo(Paused); err != nil {
		return err
	}
	if s.PausedAt.IsZero() {
		s.PausedAt = now
	}
	return nil
}

// Follow takes over what the sandbox's node says of it: that it is Running or
// Paused, since when it is paused, and for how long it was paused before. Each
// pause makes that longer, so word that is older than what is recorded is known
// by it and changes nothing. Nor does word of the pause that is recorded while
// the sandbox is being woken from it.
func (s *Sandbox) Follow(state State, pausedAt time.Time, pausedFor time.Duration) error {
	if s.knows(state, pausedFor) {
		return nil
	}
	if err := s.MoveTo(state); err != nil {
		return err
	}
	s.PausedAt, s.PausedFor = pausedAt, pausedFor
	return nil
}

// knows reports whether the record says this already, or something newer.
func (s *Sandbox) knows(state State, pausedFor time.Duration) bool {
	const exact = time.Microsecond // records are no more exact
	if had, has := s.PausedFor.Truncate(exact), pausedFor.Truncate(exact); had != has {
		return has < had
	}
	inPause := s.State != Running && !s.PausedAt.IsZero()
	if state == Paused {
		return inPause
	}
	return inPause || s.State == Running && s.PausedAt.IsZero()
}

// RevokedURL is an address of a server in a sandbox that was taken back.
type RevokedURL struct {
	ID    string    `json:"id"`    // of its token
	Until time.Time `json:"until"` // when it would have ended by itself
}

// maxRevoked is how many addresses of a sandbox may be revoked and not expired.
const maxRevoked = 1000

// RevokeURL takes an address back, and forgets those that have expired. It
// reports false when there are too many.
func (s *Sandbox) RevokeURL(u RevokedURL, now time.Time) bool {
	left := slices.DeleteFunc(slices.Clone(s.RevokedURLs), func(r RevokedURL) bool { return r.ID == u.ID || !now.Before(r.Until) })
	if now.Before(u.Until) {
		left = append(left, u)
	}
	if len(left) > maxRevoked {
		return false
	}
	s.RevokedURLs = left
	return true
}

// FollowRules takes over the network rules that the sandbox's node has, which
// counts their changes. Rules older than those that are recorded, as word of two
// changes at once may come late, change nothing.
func (s *Sandbox) FollowRules(rules map[string]bool, revision int64) {
	if revision > s.NetworkRevision {
		s.Spec.NetworkRules, s.NetworkRevision = rules, revision
	}
}

// MoveTo changes the state, if the table of transitions allows it. Moving to
// the present state is no error.
func (s *Sandbox) MoveTo(next State) error {
	if s.State == next {
		return nil
	}
	if !s.State.CanBecome(next) {
		return &WrongStateError{ID: s.ID, State: s.State, Want: next}
	}
	s.State = next
	return nil
}

// Finish ends the sandbox. The first end stands; a later one changes nothing.
func (s *Sandbox) Finish(end End) error {
	if !s.State.Alive() {
		return nil
	}
	if err := s.MoveTo(end.State()); err != nil {
		return err
	}
	if !s.PausedAt.IsZero() {
		s.PausedFor += max(0, end.Time.Sub(s.PausedAt))
		s.PausedAt = time.Time{}
	}
	s.End = &end
	return nil
}
