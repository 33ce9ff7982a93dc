package sandbox

import (
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
