package netgate

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/netgate/gatetest"
)

// aHello returns a real ClientHello for a name.
func aHello(t testing.TB, name string) []byte {
	t.Helper()
	a, b := net.Pipe()
	defer a.Close()
	go tls.Client(b, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
	buf := make([]byte, 8<<10)
	n, err := a.Read(buf)
	must(t, err)
	return buf[:n]
}

func TestReadHello(t *testing.T) {
	whole := aHello(t, "example.com")
	raw, h, err := readHello(strings.NewReader(string(whole) + "rest"))
	if err != nil || h.name != "example.com" || h.early || string(raw) != string(whole) {
		t.Errorf("got %q, %+v, %v", raw, h, err)
	}
	// Cut anywhere, it is not there yet, and no more is read than needed.
	for n := range whole {
		if _, _, err := readHello(strings.NewReader(string(whole[:n]))); err != io.EOF && err != io.ErrUnexpectedEOF {
			t.Fatalf("after %d bytes: %v", n, err)
		}
	}
	// In as many records as there are bytes.
	var cut []byte
	for _, b := range whole[5:] {
		cut = append(cut, recordHandshake, 3, 1, 0, 1, b)
	}
	if raw, h, err := readHello(strings.NewReader(string(cut))); err != nil || h.name != "example.com" || len(raw) != len(cut) {
		t.Errorf("byte by byte: %d bytes of %d, %+v, %v", len(raw), len(cut), h, err)
	}
	for name, in := range map[string]string{
		"too long": string(append([]byte{recordHandshake, 3, 1, 0x40, 0, messageHello, 0xff, 0xff, 0xff}, make([]byte, 1<<20)...)),
		"HTTP":     "GET / HTTP/1.1\r\nHost: example.com\r\n\r\n",
	} {
		if _, _, err := readHello(strings.NewReader(in)); err == nil || err == io.EOF {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func FuzzReadHello(f *testing.F) {
	f.Add(aHello(f, "example.com"))
	f.Add(aHello(f, ""))
	f.Fuzz(func(t *testing.T, in []byte) {
		raw, h, err := readHello(strings.NewReader(string(in)))
		if err == nil && (h.name == "" || !strings.HasPrefix(string(in), string(raw)) || len(raw) > helloMost+recordMost+5) {
			t.Errorf("%q: %d bytes, %+v", in, len(raw), h)
		}
	})
}

func TestReadHead(t *testing.T) {
	const host = "Host: example.com\r\n"
	for in, want := range map[string]head{
		"GET / HTTP/1.1\r\n" + host + "\r\n":                                              {host: "example.com"},
		"GET / HTTP/1.0\r\nhOsT:\texample.com:8080 \r\n\r\n":                              {host: "example.com"},
		"GET HTTP://Example.com/x?y HTTP/1.1\r\n" + host + "\r\n":                         {host: "example.com"},
		"OPTIONS * HTTP/1.1\r\n" + host + "\r\n":                                          {host: "example.com"},
		"POST / HTTP/1.1\r\n" + host + "Content-Length: 7\r\n\r\n":                        {host: "example.com", length: 7},
		"POST / HTTP/1.1\r\n" + host + "transfer-encoding: Chunked\r\n\r\n":               {host: "example.com", length: -1},
		"GET / HTTP/1.1\r\n" + host + "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n": {host: "example.com", upgrade: "websocket"},
		"GET / HTTP/1.1\r\n" + host + "X: " + strings.Repeat("x", 60<<10) + "\r\n\r\n":    {host: "example.com"},
	} {
		h, err := readHead(bufio.NewReaderSize(strings.NewReader(in+"body"), headMost))
		if err != nil || string(h.raw) != in || h.host != want.host || h.length != want.length || h.upgrade != want.upgrade {
			t.Errorf("%.80q: %+v, %v", in, h, err)
		}
	}
	if _, err := readHead(bufio.NewReaderSize(strings.NewReader("GET / HTTP/1.1\r\n"+strings.Repeat("X: y\r\n", 20000)), headMost)); err == nil {
		t.Error("a head without end was accepted")
	}
}

func FuzzReadHead(f *testing.F) {
	f.Add([]byte("POST / HTTP/1.1\r\nHost: example.com\r\nContent-Length: 3\r\n\r\nabc"))
	f.Fuzz(func(t *testing.T, in []byte) {
		h, err := readHead(bufio.NewReaderSize(strings.NewReader(string(in)), headMost))
		if err == nil && (!strings.HasPrefix(string(in), string(h.raw)) || h.length < -1 || strings.Contains(h.host, "\r")) {
			t.Errorf("%q: %+v", in, h)
		}
	})
}

// A WebSocket is carried once the server has switched to it, whatever is in it.
func TestWebSocket(t *testing.T) {
	w := gatetest.New(t)
	l := w.Listen("198.51.100.53:80") // the resolver's own address, for want of a free one
	switched := func(status string) {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		r := bufio.NewReader(c)
		for line := ""; line != "\r\n"; {
			if line, err = r.ReadString('\n'); err != nil {
				return
			}
		}
		io.WriteString(c, "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 "+status+"\r\nX: y\r\n\r\n")
		io.Copy(c, r)
	}
	gu := newGuest(t, newGate(t, Config{}))
	gu.open(map[string]bool{"example.com:80": true})
	gu.guard.mu.Lock()
	gu.guard.pins.add("example.com", addrOf(t, "198.51.100.53"), time.Now().Add(time.Hour), time.Now())
	gu.guard.mu.Unlock()
	for _, tc := range []struct {
		protocol, status string
		works            bool
	}{
		{"websocket", "101 Switching Protocols", true}, {"h2c", "101 Switching Protocols", false}, {"h2c", "200 OK", true},
	} {
		go switched(tc.status)
		c, err := gu.dial("tcp", "198.51.100.53:80")
		must(t, err)
		io.WriteString(c, "GET / HTTP/1.1\r\nHost: example.com\r\nUpgrade: "+tc.protocol+"\r\n\r\n")
		r := bufio.NewReader(c)
		c.SetDeadline(time.Now().Add(5 * time.Second))
		answer := ""
		for range 2 + 3 { // the lines of both answers
			line, err := r.ReadString('\n')
			if err != nil {
				t.Errorf("%s, %s: %v", tc.protocol, tc.status, err)
			}
			answer += line
		}
		if tc.works != strings.Contains(answer, tc.status) {
			t.Errorf("%s, %s: the sandbox got %q", tc.protocol, tc.status, answer)
		}
		if tc.works && tc.protocol == "websocket" {
			io.WriteString(c, "\x81\x00 anything\n")
			if line, err := r.ReadString('\n'); line != "\x81\x00 anything\n" {
				t.Errorf("in the WebSocket: %q, %v", line, err)
			}
		}
		c.Close()
	}
}
