package proc

import (
	"testing"
	"time"
)

// step is what happens to a clock: time passes, and something is looked at.
type step struct {
	passes  time.Duration // by the machine's clocks
	resumed bool          // the clock is told, else a slice ends
	ran     time.Duration // want, in all
}

func TestClock(t *testing.T) {
	const ms, hour = time.Millisecond, time.Hour
	for name, steps := range map[string][]step{
		"runs":              {{250 * ms, false, 250 * ms}, {251 * ms, false, 501 * ms}, {300 * ms, false, 801 * ms}},
		"stood still":       {{250 * ms, false, 250 * ms}, {hour, false, 375 * ms}, {250 * ms, false, 625 * ms}},
		"is told after":     {{hour, false, 125 * ms}, {10 * ms, true, 135 * ms}, {hour, false, 260 * ms}},
		"is told before":    {{hour, true, 125 * ms}, {10 * ms, false, 135 * ms}, {hour, false, 260 * ms}},
		"a short stand":     {{300 * ms, true, 125 * ms}, {250 * ms, false, 375 * ms}},
		"again and again":   {{hour, true, 125 * ms}, {hour, true, 250 * ms}, {hour, true, 375 * ms}},
		"busy all the time": {{400 * ms, false, 125 * ms}, {400 * ms, false, 525 * ms}, {400 * ms, false, 925 * ms}},
		"busy, then frozen": {{400 * ms, false, 125 * ms}, {400 * ms, false, 525 * ms}, {250 * ms, false, 775 * ms}, {hour, false, 900 * ms}},
		"goes back":         {{-hour, false, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			c := newClock(now)
			defer c.close()
			c.alarms[&alarm{due: 100 * hour, grain: 250 * ms}] = struct{}{}
			c.closed = true // no slice ends by itself
			c.planLocked()
			for i, s := range steps {
				now = now.Add(s.passes)
				if s.resumed {
					c.resumed(now)
				} else if due := c.due(now); len(due) > 0 {
					t.Errorf("step %d: something is due", i)
				}
				if c.ran != s.ran {
					t.Errorf("step %d: it ran for %v, want %v", i, c.ran, s.ran)
				}
			}
		})
	}
}

// Whatever the length of a standstill, nothing is due by it.
func TestNothingIsDueByAStandstill(t *testing.T) {
	for d := time.Millisecond; d < time.Hour; d *= 2 {
		now := time.Now()
		c := newClock(now)
		c.closed = true
		c.alarms[&alarm{due: d, grain: commandGrain}] = struct{}{}
		c.planLocked()
		now = now.Add(48 * time.Hour)
		if len(c.due(now)) > 0 {
			t.Errorf("what was due in %v is due at once", d)
		}
		waited := time.Duration(0)
		for c.slice > 0 {
			waited += c.slice
			now = now.Add(c.slice)
			c.due(now)
		}
		if waited < d/2 || waited > d {
			t.Errorf("what was due in %v came %v after", d, waited)
		}
	}
}

func TestAlarms(t *testing.T) {
	c := newClock(time.Now())
	defer c.close()
	rang := make(chan int, 10)
	for i, d := range []time.Duration{30, 10, 20} {
		c.after(d*time.Millisecond, commandGrain, func() { rang <- i })
	}
	taken := c.after(15*time.Millisecond, commandGrain, func() { rang <- 3 })
	c.cancel(taken)
	c.cancel(taken)
	c.cancel(nil)
	c.after(time.Hour, keepGrain, func() { rang <- 4 })
	for _, want := range []int{1, 2, 0} {
		if got := <-rang; got != want {
			t.Errorf("alarm %d rang, want %d", got, want)
		}
	}
	if got := c.now(); got < 30*time.Millisecond {
		t.Errorf("it ran for %v", got)
	}
}

// Who was cut off and comes back has missed nothing, however much the process
// has to say; without one the process goes on after a while.
func TestAPlaceThatIsKept(t *testing.T) {
	tab := table(t)
	p, sub, err := tab.Start(sh("head -c 5000000 /dev/zero"))
	if err != nil {
		t.Fatal(err)
	}
	var buf []byte
	var got int64
	for {
		c, ok, _ := sub.Next(&buf)
		if ok {
			got += int64(len(c.Data))
			break
		}
		<-sub.Wake()
	}
	sub.Leave()
	peek := p.Subscribe([2]int64{})
	peek.Close() // who only looks does not take the place
	select {
	case <-p.Done():
		t.Error("it ended although somebody may come back")
	case <-time.After(50 * time.Millisecond):
	}
	back := p.Subscribe([2]int64{got, 0})
	back.Follow()
	if held := back.Held()[Stdout]; held > got {
		t.Errorf("it is held from %d, want %d", held, got)
	}
	for ended := false; !ended; {
		var c Chunk
		var ok bool
		if c, ok, ended = back.Next(&buf); ok {
			got += int64(len(c.Data))
		} else if !ended {
			<-back.Wake()
		}
	}
	back.Close()
	if got != 5000000 {
		t.Errorf("%d bytes came", got)
	}

	p, sub, err = tab.Start(sh("head -c 5000000 /dev/zero"))
	if err != nil {
		t.Fatal(err)
	}
	<-sub.Wake()
	sub.Leave()
	tab.clock.mu.Lock()
	tab.clock.ran += leaveFor
	tab.clock.mu.Unlock()
	<-p.Done()

	p, sub, err = tab.Start(sh("head -c 5000000 /dev/zero"))
	if err != nil {
		t.Fatal(err)
	}
	<-sub.Wake()
	sub.Leave()
	tab.Forget()
	<-p.Done()
	if p.SinceEnd() < 0 {
		t.Error("it ended later than now")
	}
}
