package edge

import (
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

func TestJudge(t *testing.T) {
	t0 := time.Unix(1_000_000, 0)
	at := func(s int) time.Time { return t0.Add(time.Duration(s) * time.Second) }
	both := sandbox.Deadlines{Idle: 10 * time.Second, Lifetime: 100 * time.Second}
	for _, c := range []struct {
		name string
		d    sandbox.Deadlines
		u    usage
		a    activity
		now  int
		end  string
		next time.Time
	}{
		{name: "no deadlines", now: 1 << 20},
		{name: "fresh", d: both, u: usage{last: at(0)}, now: 1, next: at(10)},
		{name: "idle", d: both, u: usage{last: at(0)}, now: 10, end: sandbox.ReasonIdle},
		{name: "used meanwhile", d: both, u: usage{last: at(7)}, now: 10, next: at(17)},
		{name: "open request", d: both, u: usage{last: at(0), open: 1}, now: 50, next: at(60)},
		{name: "lifetime in spite of use", d: both, u: usage{last: at(99), open: 3}, now: 100, end: sandbox.ReasonLifetime},
		{name: "lifetime comes before the next look", d: both, u: usage{last: at(95)}, now: 96, next: at(100)},
		{name: "only lifetime", d: sandbox.Deadlines{Lifetime: time.Minute}, u: usage{last: at(0)}, now: 59, next: at(60)},
		{name: "a command runs", d: both, u: usage{last: at(0)}, a: activity{running: 1}, now: 20, next: at(30)},
		{name: "a command ended later than the last call", d: both, u: usage{last: at(0)}, a: activity{ended: at(15)}, now: 20, next: at(25)},
		{name: "a command ended long ago", d: both, u: usage{last: at(0)}, a: activity{ended: at(5)}, now: 20, end: sandbox.ReasonIdle},
	} {
		t.Run(c.name, func(t *testing.T) {
			v := judgeIdle(c.d, t0, c.u, c.a, at(c.now))
			if v.end != c.end || !v.next.Equal(c.next) {
				t.Errorf("got %+v, want end %q, next %v", v, c.end, c.next)
			}
		})
	}
}
