package proc

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	// What our children leave behind comes to us, as to process 1.
	const setChildSubreaper = 36
	syscall.Syscall(syscall.SYS_PRCTL, setChildSubreaper, 1, 0)
	os.Exit(m.Run())
}

func TestRing(t *testing.T) {
	var r ring
	var all []byte
	for i := range 5000 {
		p := bytes.Repeat([]byte{byte(i), byte(i >> 8)}, i%700)
		all = append(all, p...)
		r.write(p)
		if r.head != int64(len(all)) || r.head-r.tail > ringMax || len(r.buf) > ringMax {
			t.Fatalf("after %d bytes: head %d, tail %d, size %d", len(all), r.head, r.tail, len(r.buf))
		}
		if i%100 == 0 {
			for _, pos := range []int64{r.tail, r.tail + 1, (r.tail + r.head) / 2, r.head - 1, r.head, r.head + 5} {
				if pos < r.tail {
					continue
				}
				dst := make([]byte, r.head-r.tail+10)
				n := r.read(dst, pos)
				if want := all[min(pos, r.head):]; !bytes.Equal(dst[:n], want) {
					t.Fatalf("read at %d gave %d bytes, want %d", pos, n, len(want))
				}
			}
		}
	}
	if r.tail == 0 {
		t.Error("nothing was dropped; the test showed too little")
	}
	var small ring
	small.write([]byte("x"))
	if len(small.buf) != ringMin {
		t.Errorf("one byte takes %d", len(small.buf))
	}
}

func table(t *testing.T) *Table {
	t.Helper()
	tab := New()
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		tab.Run(ctx, time.Second)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	return tab
}

func sh(line string) Spec {
	return Spec{Path: "/bin/sh", Args: []string{"sh", "-c", line}, Env: []string{"PATH=/bin:/usr/bin"}, Dir: "/"}
}

// follow reads a process to its end.
func follow(sub *Subscription) (out [2][]byte) {
	var buf []byte
	for {
		c, ok, ended := sub.Next(&buf)
		switch {
		case ok:
			if c.Offset != int64(len(out[c.Stream])) {
				panic(fmt.Sprintf("position %d after %d bytes", c.Offset, len(out[c.Stream])))
			}
			out[c.Stream] = append(out[c.Stream], c.Data...)
		case ended:
			return out
		default:
			<-sub.Wake()
		}
	}
}

func TestManyAtOnce(t *testing.T) {
	tab := table(t)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			spec := sh(fmt.Sprintf("echo out %d; echo err %d >&2; exit %d", i, i, i))
			if i%4 == 0 {
				spec = sh("kill -KILL $$")
			}
			p, sub, err := tab.Start(spec)
			if err != nil {
				t.Error(err)
				return
			}
			defer sub.Close()
			other := p.Subscribe([2]int64{})
			defer other.Close()
			out := follow(sub)
			end, ended := p.End()
			if i%4 == 0 {
				if !ended || end.Signal != syscall.SIGKILL || end.Code != -1 {
					t.Errorf("end %+v, %v", end, ended)
				}
				return
			}
			if string(out[Stdout]) != fmt.Sprintf("out %d\n", i) || string(out[Stderr]) != fmt.Sprintf("err %d\n", i) || !ended || end.Code != i {
				t.Errorf("%d: %q, %+v, %v", i, out, end, ended)
			}
			if again := follow(other); !bytes.Equal(again[Stdout], out[Stdout]) {
				t.Errorf("the second follower read %q", again)
			}
		})
	}
	wg.Wait()
	if n, since, ended := tab.Activity(); n != 0 || since < 0 || !ended {
		t.Errorf("%d run, %v since the end of any (%v)", n, since, ended)
	}
}

func TestSignalsAndStartsRace(t *testing.T) {
	tab := table(t)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			p, sub, err := tab.Start(sh("exec sleep 60"))
			if err != nil {
				t.Error(err)
				return
			}
			wg.Go(func() { p.Signal(syscall.SIGKILL, true) })
			wg.Go(func() { p.Expire() })
			follow(sub)
			sub.Close()
			if err := p.Signal(syscall.SIGKILL, true); !errors.Is(err, ErrEnded) {
				t.Errorf("a signal after the end = %v", err)
			}
		})
	}
	wg.Wait()
}

func TestRetention(t *testing.T) {
	tab := table(t)
	spec := sh("head -c 3000000 /dev/zero")
	var all []*Process
	for i := range 12 {
		spec.Request.Tag = fmt.Sprint(i)
		p, sub, err := tab.Start(spec)
		if err != nil {
			t.Fatal(err)
		}
		if out := follow(sub); len(out[Stdout]) != 3000000 {
			t.Errorf("%d bytes", len(out[Stdout]))
		}
		sub.Close()
		all = append(all, p)
	}
	tab.mu.Lock()
	held := tab.held
	tab.mu.Unlock()
	if held > keepBytes {
		t.Errorf("%d bytes are held, want at most %d", held, keepBytes)
	}
	for i, p := range all {
		got, err := tab.ByTag(fmt.Sprint(i))
		if err != nil || got != p {
			t.Fatalf("process %d is gone: %v", i, err)
		}
		sub := p.Subscribe([2]int64{})
		from := sub.Held()[Stdout]
		if i == 0 && from != 3000000 || i == 11 && from != 3000000-ringMax {
			t.Errorf("process %d is held from %d", i, from)
		}
		sub.Close()
	}
	tab.mu.Lock()
	tab.trimLocked(tab.clock.now() + keepTime)
	left, held := len(tab.ended), tab.held
	tab.mu.Unlock()
	if left != 0 || held != 0 {
		t.Errorf("after their time %d are left with %d bytes", left, held)
	}
	if _, err := tab.ByTag("11"); !errors.Is(err, ErrNotFound) {
		t.Errorf("ByTag = %v", err)
	}
}

// A follower that stops reading stops the process, and leaving lets it go on.
func TestBackPressure(t *testing.T) {
	tab := table(t)
	p, sub, err := tab.Start(sh("head -c 5000000 /dev/zero"))
	if err != nil {
		t.Fatal(err)
	}
	<-sub.Wake()
	select {
	case <-p.Done():
		t.Error("it ended although nobody read")
	case <-time.After(50 * time.Millisecond):
	}
	p.mu.Lock()
	head := p.out[Stdout].head
	p.mu.Unlock()
	if head > window+chunk {
		t.Errorf("%d bytes were read ahead, want at most %d", head, window+chunk)
	}
	sub.Close()
	<-p.Done()
}

func TestStartFailure(t *testing.T) {
	tab := table(t)
	count := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(entries)
	}
	spec := sh("true")
	spec.Path, spec.Stdin = "/no/such/program", true
	tab.Start(spec)
	before := count()
	for range 50 {
		if _, _, err := tab.Start(spec); !errors.Is(err, syscall.ENOENT) {
			t.Fatalf("Start = %v", err)
		}
	}
	if after := count(); after > before {
		t.Errorf("%d descriptors, before %d", after, before)
	}
}

func TestParent(t *testing.T) {
	for in, want := range map[string]int{"12 (a) b) S 34 5 6": 34, "1 (x) R 0 1": 0, "": 0, "1 (x": 0, "1 (x) S x": 0} {
		if got := parent(in); got != want {
			t.Errorf("parent(%q) = %d, want %d", in, got, want)
		}
	}
}
