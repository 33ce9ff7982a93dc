package edge

import (
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// usage is what a sandbox's idle time depends on, as the edge sees it from
// outside. Commands without a connection are seen by the agent only, and it is
// asked when all else says idle.
type usage struct {
	last time.Time // last call, or end of the last request
	open int       // requests that are open now
}

// verdict is what a look at the deadlines comes to.
type verdict struct {
	end  string    // reason of the end that is due now, "" for none; idle ones still want the agent's word
	next time.Time // when to look again; zero for never
}

// judge says what is due at now. It looks again no later than an idle time
// after now, and that is exact: a request that is open now and ends before the
// next look cannot make the sandbox idle before it.
func judge(d sandbox.Deadlines, created time.Time, u usage, now time.Time) verdict {
	var v verdict
	if d.Lifetime > 0 {
		at := created.Add(d.Lifetime)
		if !now.Before(at) {
			return verdict{end: sandbox.ReasonLifetime}
		}
		v.next = at
	}
	if d.Idle > 0 {
		at := u.last.Add(d.Idle)
		switch {
		case u.open > 0:
			at = now.Add(d.Idle)
		case !now.Before(at):
			return verdict{end: sandbox.ReasonIdle}
		}
		if v.next.IsZero() || at.Before(v.next) {
			v.next = at
		}
	}
	return v
}

// activity is what the agent knows.
type activity struct {
	running int       // commands that run
	ended   time.Time // when the last one ended; zero when none ever ran
}

// judgeIdle is judge for a sandbox that looks idle from outside, with what the
// agent says.
func judgeIdle(d sandbox.Deadlines, created time.Time, u usage, a activity, now time.Time) verdict {
	if a.running > 0 {
		u.open += a.running
	}
	if a.ended.After(u.last) {
		u.last = a.ended
	}
	return judge(d, created, u, now)
}

func deadlineEnd(reason string, d sandbox.Deadlines, now time.Time) sandbox.End {
	end := sandbox.End{Reason: reason, Domain: sandbox.Policy, Time: now}
	if reason == sandbox.ReasonIdle {
		end.Detail = "it was idle for its ttl_running_stop of " + d.Idle.String()
	} else {
		end.Detail = "its ttl_lifetime of " + d.Lifetime.String() + " has passed"
	}
	return end
}
