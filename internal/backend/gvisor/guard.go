package gvisor

import "time"

// The limit of a machine's group is higher than the machine's own while memory
// is frozen for others, which the group is charged for, and while state is
// written or was just now. The kernel does not tell those apart from the
// machine's own use, so that is looked at here.

// guardEvery is how often, and so how long a machine may have more.
const guardEvery = time.Second

// guard ends machines that use more memory than they may, as the kernel does
// where it knows.
func (b *Backend) guard(stop <-chan struct{}) {
	tick := time.NewTicker(guardEvery)
	defer tick.Stop()
	for {
		select {
		case <-stop:
			return
		case <-tick.C:
		}
		for _, s := range b.machines() {
			over, err := s.overuses()
			if err == nil && over {
				s.overused.Store(true)
				err = s.kill()
				b.log.Info("a machine went over its memory limit", "sentry", s.Name, "limit_mb", s.Limits.MemoryMB)
			}
			if err != nil && !s.over() {
				b.log.Debug("cannot tell how much memory a machine has of its own", "sentry", s.Name, "error", err)
			}
		}
	}
}

// machines returns the sentries that are machines of this run.
func (b *Backend) machines() []*sentry {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := make([]*sentry, 0, len(b.held))
	for _, s := range b.held {
		all = append(all, s)
	}
	return all
}

// overuses reports whether the machine has more memory than it may where its
// group's limit would allow that. Its memory is shared memory to the host, as is
// what it has given back a moment ago; the sentry's own is not.
func (s *sentry) overuses() (bool, error) {
	if s.group == nil || s.Limits.MemoryMB <= 0 || s.over() || !s.isLifted() {
		return false, nil
	}
	limit := hostMemoryMB(s.Limits.MemoryMB) << 20
	used, err := s.group.SharedMemory()
	if err != nil || used <= limit || !s.layered() {
		return false, err
	}
	st, err := s.layerStat()
	return st.Own > limit, err
}

// isLifted reports whether the limit of the sentry's group may be more than the
// machine's own.
func (s *sentry) isLifted() bool {
	if s.held.Load() > 0 {
		return true
	}
	s.room.mu.Lock()
	defer s.room.mu.Unlock()
	return s.room.users > 0 || s.room.waits
}
