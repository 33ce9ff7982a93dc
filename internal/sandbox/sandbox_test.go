package sandbox

import (
	"strconv"
	"testing"
	"time"
)

func TestTransitions(t *testing.T) {
	for _, from := range States {
		for _, to := range States {
			s := Sandbox{ID: "sb-000000000000", State: from}
			err := s.MoveTo(to)
			allowed := from == to || from.CanBecome(to)
			if (err == nil) != allowed {
				t.Errorf("%s to %s: error %v, allowed %v", from, to, err, allowed)
			}
			if !from.Alive() && from != to && err == nil {
				t.Errorf("an ended sandbox moved from %s to %s", from, to)
			}
		}
		if from.Alive() && !from.CanBecome(Stopped) {
			t.Errorf("%s cannot be stopped: something would be stuck", from)
		}
		if from.Alive() && !from.CanBecome(Failed) {
			t.Errorf("%s cannot fail", from)
		}
	}
}

func TestFinishKeepsTheFirstEnd(t *testing.T) {
	s := Sandbox{ID: NewID(), State: Running}
	first := End{Reason: ReasonIdle, Domain: Policy, Time: time.Unix(1, 0)}
	if err := s.Finish(first); err != nil {
		t.Fatal(err)
	}
	if err := s.Finish(End{Reason: ReasonLost, Domain: Infra}); err != nil {
		t.Fatal(err)
	}
	if s.State != Stopped || *s.End != first {
		t.Errorf("got %s, %+v; want stopped, %+v", s.State, s.End, first)
	}
}

func TestPauseKeepsItsBeginning(t *testing.T) {
	first, later := time.Unix(10, 0), time.Unix(20, 0)
	s := Sandbox{State: Running}
	for _, at := range []time.Time{first, later} {
		if err := s.Pause(at); err != nil || s.State != Paused || !s.PausedAt.Equal(first) {
			t.Errorf("paused at %v: %s since %v, %v", at, s.State, s.PausedAt, err)
		}
	}
	// A wake that fails leads back to the same pause.
	if err := s.MoveTo(Starting); err != nil {
		t.Fatal(err)
	}
	if err := s.Pause(later); err != nil || s.State != Paused || !s.PausedAt.Equal(first) {
		t.Errorf("not woken: %s since %v, %v", s.State, s.PausedAt, err)
	}
	ended := Sandbox{State: Stopped}
	if err := ended.Pause(first); err == nil || !ended.PausedAt.IsZero() {
		t.Errorf("an ended sandbox was paused: %+v, %v", ended, err)
	}
}

func TestFollow(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	never := time.Time{}
	type half struct {
		state State
		at    time.Time
		total time.Duration
	}
	for _, c := range []struct {
		name            string
		record, say, is half
	}{
		{"made", half{Pending, never, 0}, half{Running, never, 0}, half{Running, never, 0}},
		{"made and started", half{Starting, never, 0}, half{Running, never, 0}, half{Running, never, 0}},
		{"paused", half{Running, never, 0}, half{Paused, at(1), 0}, half{Paused, at(1), 0}},
		{"paused, said again", half{Paused, at(1), 0}, half{Paused, at(1), 0}, half{Paused, at(1), 0}},
		{"woken", half{Paused, at(1), 0}, half{Running, never, 5e3}, half{Running, never, 5e3}},
		{"woken by a call", half{Starting, at(1), 0}, half{Running, never, 5e3}, half{Running, never, 5e3}},
		{"before the pause", half{Paused, at(1), 7e3}, half{Running, never, 7e3}, half{Paused, at(1), 7e3}},
		{"long before the pause", half{Paused, at(1), 7e3}, half{Running, never, 0}, half{Paused, at(1), 7e3}},
		{"before the wake", half{Running, never, 7e3}, half{Paused, at(1), 0}, half{Running, never, 7e3}},
		{"still being woken", half{Starting, at(1), 7e3}, half{Paused, at(1), 7e3}, half{Starting, at(1), 7e3}},
		{"woken and paused again", half{Paused, at(1), 0}, half{Paused, at(9), 7e3}, half{Paused, at(9), 7e3}},
		{"woken and paused again meanwhile", half{Starting, at(1), 0}, half{Paused, at(9), 7e3}, half{Paused, at(9), 7e3}},
		{"paused and woken", half{Running, never, 0}, half{Running, never, 7e3}, half{Running, never, 7e3}},
		{"less than a record tells", half{Running, never, 7e3}, half{Paused, at(1), 7e3 + 1}, half{Paused, at(1), 7e3 + 1}},
		{"a pause that is over by mistake", half{Running, at(1), 7e3}, half{Running, never, 7e3}, half{Running, never, 7e3}},
		{"a pause without its time", half{Paused, never, 0}, half{Paused, at(1), 0}, half{Paused, at(1), 0}},
	} {
		s := Sandbox{State: c.record.state, PausedAt: c.record.at, PausedFor: c.record.total}
		err := s.Follow(c.say.state, c.say.at, c.say.total)
		if got := (half{s.State, s.PausedAt, s.PausedFor}); err != nil || got != c.is {
			t.Errorf("%s: got %v, %v; want %v", c.name, got, err, c.is)
		}
	}
	s := Sandbox{State: Stopping}
	if err := s.Follow(Running, never, time.Second); err == nil || s.PausedFor != 0 {
		t.Errorf("a sandbox that is being stopped: %+v, %v", s, err)
	}
}

func TestFollowRules(t *testing.T) {
	s := &Sandbox{Spec: Spec{NetworkRules: map[string]bool{"first": true}}}
	for _, step := range []struct {
		revision int64
		want     string
	}{{2, "2"}, {1, "2"}, {2, "2"}, {3, "3"}} {
		s.FollowRules(map[string]bool{strconv.FormatInt(step.revision, 10): true}, step.revision)
		if !s.Spec.NetworkRules[step.want] || len(s.Spec.NetworkRules) != 1 {
			t.Errorf("after change %d: %v", step.revision, s.Spec.NetworkRules)
		}
	}
}

// Revoked addresses are kept until they would have expired, and are bounded.
func TestRevokeURL(t *testing.T) {
	now := time.Unix(1000, 0)
	s := &Sandbox{}
	for i := range maxRevoked {
		if !s.RevokeURL(RevokedURL{strconv.Itoa(i), now.Add(time.Duration(i+1) * time.Second)}, now) {
			t.Fatalf("after %d there is no room", i)
		}
	}
	before := s.RevokedURLs
	if s.RevokeURL(RevokedURL{"more", now.Add(time.Hour)}, now) || len(s.RevokedURLs) != maxRevoked {
		t.Errorf("%d are revoked", len(s.RevokedURLs))
	}
	if !s.RevokeURL(RevokedURL{"5", now.Add(6 * time.Second)}, now) || !s.RevokeURL(RevokedURL{"old", now}, now) || len(s.RevokedURLs) != maxRevoked {
		t.Errorf("one that is revoked or has expired: %d are", len(s.RevokedURLs))
	}
	if !s.RevokeURL(RevokedURL{"more", now.Add(time.Hour)}, now.Add(10*time.Second)) || len(s.RevokedURLs) != maxRevoked-9 {
		t.Errorf("ten seconds later %d are", len(s.RevokedURLs))
	}
	if len(before) != maxRevoked || before[0].ID != "0" {
		t.Error("what others hold was changed")
	}
}

func TestLifetimeWithPauses(t *testing.T) {
	made := time.Unix(1000, 0)
	for _, c := range []struct {
		name string
		sb   Sandbox
		want time.Time
	}{
		{"never", Sandbox{State: Running}, time.Time{}},
		{"not paused yet", Sandbox{State: Running, Spec: Spec{Deadlines: Deadlines{Lifetime: time.Minute}}}, made.Add(time.Minute)},
		{"was paused", Sandbox{State: Running, PausedFor: time.Hour, Spec: Spec{Deadlines: Deadlines{Lifetime: time.Minute}}}, made.Add(time.Hour + time.Minute)},
		{"is paused", Sandbox{State: Paused, PausedAt: made, Spec: Spec{Deadlines: Deadlines{Lifetime: time.Minute}}}, time.Time{}},
		{"is being woken", Sandbox{State: Starting, PausedAt: made, Spec: Spec{Deadlines: Deadlines{Lifetime: time.Minute}}}, time.Time{}},
	} {
		c.sb.CreatedAt = made
		if got := c.sb.ExpiresAt(); !got.Equal(c.want) {
			t.Errorf("%s: ends at %v; want %v", c.name, got, c.want)
		}
	}
	s := Sandbox{State: Paused, PausedAt: made, PausedFor: time.Second}
	if err := s.Finish(End{Reason: ReasonStopped, Domain: User, Time: made.Add(time.Minute)}); err != nil {
		t.Fatal(err)
	}
	if !s.PausedAt.IsZero() || s.PausedFor != time.Minute+time.Second {
		t.Errorf("ended while paused: %+v", s)
	}
}

func TestNewID(t *testing.T) {
	seen := map[ID]bool{}
	for range 10000 {
		id := NewID()
		if _, err := ParseID(string(id)); err != nil {
			t.Fatal(err)
		}
		if seen[id] {
			t.Fatalf("%s came twice", id)
		}
		seen[id] = true
	}
}

func TestParseImageName(t *testing.T) {
	for in, want := range map[string]string{
		"root/py:3.12":          "root/py:3.12",
		"root/py":               "root/py:latest",
		"root/demo/walk:1":      "root/demo/walk:1",
		"py:3.12":               "",
		"root/py:":              "",
		"root//py":              "",
		"Root/py":               "",
		"root/../py:1":          "",
		"root/demo/walk:1/else": "",
	} {
		n, err := ParseImageName(in)
		if want == "" {
			if err == nil {
				t.Errorf("%q was accepted as %v", in, n)
			}
			continue
		}
		if err != nil || n.String() != want {
			t.Errorf("%q: got %q, %v; want %q", in, n, err, want)
		}
	}
}

func TestProject(t *testing.T) {
	if !Project("root").Contains("root/demo") || !Project("root").Contains("root") {
		t.Error("root must contain itself and root/demo")
	}
	if Project("root/de").Contains("root/demo") || Project("root/demo").Contains("root") {
		t.Error("a project contains only what lies below it")
	}
}
