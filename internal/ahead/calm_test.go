package ahead

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// calm returns how long Calm takes when the thing is used every settle/2 for a
// while, and there is load for another.
func calm(t *testing.T, used time.Duration, loaded ...time.Duration) (took time.Duration) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var load Load
		for _, d := range loaded {
			time.AfterFunc(d, load.Begin())
		}
		poke := make(chan struct{}, 1)
		begin := time.Now()
		go func() {
			for time.Since(begin) < used && ctx.Err() == nil {
				select {
				case poke <- struct{}{}:
				case <-ctx.Done():
				}
				select {
				case <-time.After(settle / 2):
				case <-ctx.Done():
				}
			}
		}()
		Calm(ctx, poke, &load)
		took = time.Since(begin)
	})
	return took
}

func TestCalm(t *testing.T) {
	if took := calm(t, 0, 0); took != settle {
		t.Errorf("with nothing going on it takes %v", took)
	}
	if took := calm(t, 10*settle, 0); took < 10*settle || took > 12*settle {
		t.Errorf("with uses for %v it takes %v", 10*settle, took)
	}
	if took := calm(t, 0, 10*settle); took < 10*settle || took > 12*settle {
		t.Errorf("with load for %v it takes %v", 10*settle, took)
	}
	if took := calm(t, 0, 10*settle, 10*settle); took != 15*settle {
		t.Errorf("with load of two for %v it takes %v; want half as long again", 10*settle, took)
	}
	if took := calm(t, 0, 3*rest, rest); took < 4*rest || took > 4*rest+settle {
		t.Errorf("with load of two for %v it takes %v; want %v more", 3*rest, took, rest)
	}
	if took := calm(t, time.Hour); took < yield || took > yield+2*settle {
		t.Errorf("with uses without end it takes %v", took)
	}
	if took := calm(t, 0, time.Hour); took < yield || took > yield+2*settle {
		t.Errorf("with load without end it takes %v", took)
	}
}

func TestCalmEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var load Load
	defer load.Begin()()
	Calm(ctx, nil, &load)
	if !load.Busy() || (*Load)(nil).Busy() {
		t.Error("a load is not what was begun and did not end")
	}
}

// What several got at once is not disturbed by one that comes then, nor by their
// having waited for longer than anybody is waited for.
func TestRest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var load Load
		one, two := load.Begin(), load.Begin()
		time.Sleep(yield + 5*settle)
		one()
		two()
		time.Sleep(settle)
		load.Begin()()
		time.Sleep(rest - 2*settle)
		if !load.Busy() {
			t.Error("the rest was cut short")
		}
		time.Sleep(settle)
		if load.Busy() {
			t.Error("there is no end of the rest")
		}
	})
}
