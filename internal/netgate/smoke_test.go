package netgate

import (
	"io"
	"testing"
)

func TestSmoke(t *testing.T) {
	w := newWorld(t)
	l := w.listen(world1 + ":8000")
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() { io.Copy(c, c); c.Close() }()
		}
	}()
	u := w.packets(world1 + ":9000")
	go func() {
		b := make([]byte, 2000)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			u.WriteTo(b[:n], from)
		}
	}()
	g := newGate(t, Config{})
	gu := newGuest(t, g)
	gu.open(map[string]bool{world1: true})
	c, err := gu.dial("tcp", world1+":8000")
	if err != nil {
		t.Fatal(err)
	}
	c.Write([]byte("hello"))
	b := make([]byte, 5)
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", b)
	c, err = gu.dial("udp", world1+":9000")
	if err != nil {
		t.Fatal(err)
	}
	c.Write([]byte("dgram"))
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	t.Logf("%s", b)
	if _, err := gu.dial("tcp", world2+":8000"); err != nil {
		t.Log("as wanted:", err)
	} else {
		t.Error("open")
	}
	t.Log(gu.guard.Denied())
}
