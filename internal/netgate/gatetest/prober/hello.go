package main

import (
	"crypto/tls"
	"io"
	"net"
	"time"

	"github.com/kernflux/opendsec/internal/netgate/gatetest"
)

// hello returns the record of a ClientHello that tells a name, "" for none.
func hello(name string) []byte {
	a, b := net.Pipe()
	defer a.Close()
	go tls.Client(b, &tls.Config{ServerName: name, InsecureSkipVerify: true}).Handshake()
	buf := make([]byte, 4096)
	n, err := a.Read(buf)
	if err != nil {
		return nil
	}
	return buf[:n]
}

// hellos tries connections by name to an address that an allowed name led to
// and that is another's too.
func hellos(add func(string, func() (string, error))) {
	send := func(chunks ...[]byte) (string, error) {
		if _, err := lookup("example.com"); err != nil {
			return "", err
		}
		c, err := net.DialTimeout("tcp", gatetest.Good+":443", moment)
		if err != nil {
			return "", err
		}
		defer c.Close()
		c.SetDeadline(time.Now().Add(2 * moment))
		for _, b := range chunks {
			if _, err := c.Write(b); err != nil {
				return "", err
			}
		}
		got, err := io.ReadAll(io.LimitReader(c, 4096))
		if len(got) > 0 && got[0] == 22 {
			return "open: " + gatetest.Banner, nil
		}
		return string(got), err
	}
	evil := hello("evil.test")
	add("another name in TLS", func() (string, error) { return send(evil) })
	add("no name in TLS", func() (string, error) { return send(hello("")) })
	add("an address for a name in TLS", func() (string, error) { return secure(gatetest.Good, gatetest.Bad) })
	add("another name in TLS over IPv6", func() (string, error) { return secure("["+gatetest.Good6+"]", "evil.test") })
	add("an allowed name that did not lead there", func() (string, error) { return secure(gatetest.Good, "evil.wild.example") })
	add("another name, byte by byte", func() (string, error) {
		var chunks [][]byte
		for i := 0; i < len(evil); i += 9 {
			chunks = append(chunks, evil[i:min(i+9, len(evil))])
		}
		return send(chunks...)
	})
	add("another name in records of 5 bytes", func() (string, error) { return send(records(evil, 5)) })
	add("two names", func() (string, error) { return send(twoNames("example.com", "evil.test")) })
	add("two name extensions", func() (string, error) { return send(twoExtensions("example.com", "evil.test")) })
	add("a second ClientHello at once", func() (string, error) {
		_, err := send(hello("example.com"), evil)
		return "the first was answered", err
	})
	add("a second ClientHello after another record", func() (string, error) {
		_, err := send(hello("example.com"), []byte{20, 3, 3, 0, 1, 1}, evil)
		return "the first was answered", err
	})
	add("SSL 2", func() (string, error) {
		return send([]byte{0x80, 0x2e, 1, 3, 1, 0, 0x15, 0, 0, 0, 0x10, 0, 0, 4, 0, 0, 5, 0, 0, 0x0a})
	})
	add("something else on TLS's port", func() (string, error) { return talkAfter("443", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n") })
	add("ssh on TLS's port", func() (string, error) { return talkAfter("443", "SSH-2.0-evil\r\n") })
	add("a record of nothing, and another name", func() (string, error) { return send([]byte{22, 3, 1, 0, 0}, evil) })
	add("an alert, and another name", func() (string, error) { return send([]byte{21, 3, 1, 0, 2, 1, 0}, evil) })
	add("a name with a NUL in it", func() (string, error) { return send(extension("example.com\x00.evil.test")) })
	add("a name with spaces", func() (string, error) { return send(extension(" evil.test")) })
}

// talkAfter talks after example.com was resolved.
func talkAfter(port, say string) (string, error) {
	if _, err := lookup("example.com"); err != nil {
		return "", err
	}
	return talk("tcp", gatetest.Good+":"+port, say)
}

// records cuts a record into several.
func records(record []byte, size int) []byte {
	var out []byte
	for body := record[5:]; len(body) > 0; {
		n := min(size, len(body))
		out = append(out, record[0], record[1], record[2], byte(n>>8), byte(n))
		out = append(out, body[:n]...)
		body = body[n:]
	}
	return out
}

// entry is a name in the extension for it.
func entry(name string) []byte {
	return append([]byte{0, byte(len(name) >> 8), byte(len(name))}, name...)
}

// named is the extension for names.
func named(entries ...[]byte) []byte {
	var list []byte
	for _, e := range entries {
		list = append(list, e...)
	}
	list = append([]byte{byte(len(list) >> 8), byte(len(list))}, list...)
	return append([]byte{0, 0, byte(len(list) >> 8), byte(len(list))}, list...)
}

// with is the record of a small ClientHello with extensions.
func with(extensions ...[]byte) []byte {
	body := append([]byte{3, 3}, make([]byte, 32)...)
	body = append(body, 0, 0, 2, 0x13, 1, 1, 0)
	var all []byte
	for _, e := range extensions {
		all = append(all, e...)
	}
	body = append(body, byte(len(all)>>8), byte(len(all)))
	body = append(body, all...)
	body = append([]byte{1, 0, byte(len(body) >> 8), byte(len(body))}, body...)
	return append([]byte{22, 3, 1, byte(len(body) >> 8), byte(len(body))}, body...)
}

func twoNames(a, b string) []byte      { return with(named(entry(a), entry(b))) }
func twoExtensions(a, b string) []byte { return with(named(entry(a)), named(entry(b))) }
func extension(name string) []byte     { return with(named(entry(name))) }

// requests tries requests of HTTP/1 to an address that an allowed name led to
// and that is another's too.
func requests(add func(string, func() (string, error))) {
	const good = "Host: example.com\r\n"
	for _, t := range []struct{ what, say string }{
		{"another host", "GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"},
		{"no host", "GET /evil HTTP/1.0\r\n\r\n"},
		{"two hosts", "GET / HTTP/1.1\r\n" + good + "Host: evil.test\r\n\r\n"},
		{"two hosts in one", "GET / HTTP/1.1\r\nHost: example.com, evil.test\r\n\r\n"},
		{"a host with a user", "GET / HTTP/1.1\r\nHost: example.com:80@evil.test\r\n\r\n"},
		{"an URL for another host", "GET http://evil.test/ HTTP/1.1\r\n" + good + "\r\n"},
		{"an URL with a user", "GET http://example.com@evil.test/ HTTP/1.1\r\n" + good + "\r\n"},
		{"a tunnel", "CONNECT evil.test:443 HTTP/1.1\r\n" + good + "\r\n"},
		{"HTTP 0.9", "GET /evil\r\n"},
		{"HTTP 2", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\nevil"},
		{"lines without carriage returns", "GET / HTTP/1.1\nHost: evil.test\n\n"},
		{"a carriage return in a line", "GET / HTTP/1.1\r\n" + good + "X: a\rHost: evil.test\r\n\r\n"},
		{"a folded line", "GET / HTTP/1.1\r\n" + good + "X: a\r\n Host: evil.test\r\n\r\n"},
		{"a space before a colon", "GET / HTTP/1.1\r\nHost : evil.test\r\n\r\n"},
		{"a space before a header", "GET / HTTP/1.1\r\n Host: evil.test\r\n" + good + "\r\n"},
		{"a NUL in a header", "GET / HTTP/1.1\r\nHost: example.com\x00.evil.test\r\n\r\n"},
		{"lengths that differ", "POST /evil HTTP/1.1\r\n" + good + "Content-Length: 4\r\nContent-Length: 40\r\n\r\n"},
		{"a length and chunks", "POST /evil HTTP/1.1\r\n" + good + "Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"},
		{"chunks in disguise", "POST /evil HTTP/1.1\r\n" + good + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n"},
		{"chunks twice", "POST /evil HTTP/1.1\r\n" + good + "Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n0\r\n\r\n"},
		{"a signed length", "POST /evil HTTP/1.1\r\n" + good + "Content-Length: +4\r\n\r\nabcd"},
		{"something else on HTTP's port", "SSH-2.0-evil\r\n"},
		{"TLS on HTTP's port", string(hello("evil.test"))},
	} {
		add("HTTP: "+t.what, func() (string, error) {
			got, err := talkAfter("80", t.say)
			if len(got) >= 12 && got[9:12] == "403" {
				return "refused", nil
			}
			return got, err
		})
	}
	// These begin well; what comes after must not arrive.
	for _, t := range []struct{ what, say string }{
		{"another host after the first", "GET / HTTP/1.1\r\n" + good + "\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"},
		{"another host after chunks", "POST / HTTP/1.1\r\n" + good + "Transfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"},
		{"a malformed chunk", "POST / HTTP/1.1\r\n" + good + "Transfer-Encoding: chunked\r\n\r\n1\r\naevil.test\r\n0\r\n\r\n"},
		{"a long chunk length", "POST / HTTP/1.1\r\n" + good + "Transfer-Encoding: chunked\r\n\r\n1\nevil.test\r\n\r\n"},
		{"a switch that is not made", "GET / HTTP/1.1\r\n" + good + "Connection: upgrade\r\nUpgrade: websocket\r\n\r\nGET / HTTP/1.1\r\nHost: evil.test\r\n\r\n"},
		{"a switch to HTTP 2", "GET / HTTP/1.1\r\n" + good + "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: \r\n\r\nPRI * HTTP/2.0 evil\r\n\r\n"},
		{"a body that is none", "GET / HTTP/1.1\r\n" + good + "Content-Length: 0\r\n\r\nGET http://evil.test/ HTTP/1.1\r\nHost: example.com\r\n\r\n"},
	} {
		add("HTTP: "+t.what, func() (string, error) {
			_, err := talkAfter("80", t.say)
			return "the first was answered", err
		})
	}
}
