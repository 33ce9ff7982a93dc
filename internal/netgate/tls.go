package netgate

import (
	"bytes"
	"encoding/binary"
	"io"
	"net"
)

// Types of records of TLS, and limits of what is read of a connection's begin.
const (
	recordChange    = 20
	recordAlert     = 21
	recordHandshake = 22
	recordData      = 23

	messageHello = 1 // a handshake's first

	recordMost = 16<<10 + 256
	helloMost  = 64 << 10 // bytes of a ClientHello, with its records
)

// inspectTLS passes the ClientHello on if it tells a name that led there, and
// leaves the sandbox's further records to followTLS.
func (gd *Guard) inspectTLS(f *flow, inside, outside net.Conn) error {
	raw, hello, err := readHello(inside)
	if err != nil {
		return err
	}
	if err := gd.settle(f, hello.name); err != nil {
		return err
	}
	f.early = hello.early
	return gd.pass(outside, raw)
}

// followTLS passes the sandbox's records on until none can be a ClientHello any
// more. A second one, for which a server may ask, must tell the same name as
// the first. After early data one may come at any time.
func (gd *Guard) followTLS(f *flow, inside, outside net.Conn) error {
	for {
		record, err := readRecord(inside)
		if err != nil {
			return err
		}
		final := false
		switch {
		case record[0] == recordHandshake && record[5] == messageHello:
			raw, hello, err := readHello(io.MultiReader(bytes.NewReader(record), inside))
			if err != nil {
				return err
			}
			if err := gd.settle(f, hello.name); err != nil {
				return err
			}
			record = raw
		case record[0] == recordHandshake, record[0] == recordData:
			final = !f.early
		}
		if err := gd.pass(outside, record); err != nil || final {
			return err
		}
	}
}

// pass sends on what was read of the sandbox.
func (gd *Guard) pass(outside net.Conn, b []byte) error {
	n, err := outside.Write(b)
	gd.counts.sent.Add(uint64(n))
	if err != nil {
		return err
	}
	return gd.up.spent(gd.ctx, int64(n))
}

// clientHello is what is to be known of one.
type clientHello struct {
	name  string
	early bool // data follows before the server answers
}

// readHello reads records up to the end of a ClientHello, and returns them with
// what is in it.
func readHello(r io.Reader) (raw []byte, h clientHello, err error) {
	var message []byte
	for {
		record, err := readRecord(r)
		if err != nil {
			return nil, h, err
		}
		raw, message = append(raw, record...), append(message, record[5:]...)
		if record[0] != recordHandshake || message[0] != messageHello {
			return nil, h, refused("the connection does not begin with a ClientHello")
		}
		if len(raw) > helloMost {
			return nil, h, refused("the ClientHello is too long")
		}
		if len(message) < 4 {
			continue
		}
		if size := int(message[1])<<16 | int(message[2])<<8 | int(message[3]); len(message) >= 4+size {
			h, err := parseHello(message[4 : 4+size])
			return raw, h, err
		}
	}
}

// readRecord reads one record with its header.
func readRecord(r io.Reader) ([]byte, error) {
	record := make([]byte, 5, 5+512)
	if _, err := io.ReadFull(r, record); err != nil {
		return nil, err
	}
	size := int(binary.BigEndian.Uint16(record[3:]))
	if record[0] < recordChange || record[0] > recordData || record[1] != 3 || size == 0 || size > recordMost {
		return nil, refused("the connection is not TLS")
	}
	record = append(record, make([]byte, size)...)
	if _, err := io.ReadFull(r, record[5:]); err != nil {
		return nil, err
	}
	return record, nil
}

// Types of extensions.
const (
	extensionName  = 0
	extensionEarly = 42
)

// parseHello reads a ClientHello without its header.
func parseHello(b []byte) (h clientHello, err error) {
	in := parser{b, false}
	in.skip(2 + 32)
	in.vector(1) // session
	in.vector(2) // cipher suites
	in.vector(1) // compression
	extensions := parser{in.vector(2), false}
	for len(extensions.rest) > 0 && !extensions.bad {
		kind := extensions.number(2)
		body := parser{extensions.vector(2), false}
		switch kind {
		case extensionEarly:
			h.early = true
		case extensionName:
			if h.name != "" {
				return h, refused("the ClientHello tells its server's name twice")
			}
			if h.name, err = parseName(&body); err != nil {
				return h, err
			}
		}
	}
	if in.bad || extensions.bad || len(in.rest) > 0 {
		return h, refused("the ClientHello is malformed")
	}
	if h.name == "" {
		return h, refused("the ClientHello tells no server name")
	}
	return h, nil
}

// parseName reads the extension for names, which holds one.
func parseName(body *parser) (string, error) {
	list := parser{body.vector(2), false}
	kind := list.number(1)
	name := string(list.vector(2))
	if kind != 0 || body.bad || list.bad || len(list.rest) > 0 || len(body.rest) > 0 || name == "" {
		return "", refused("the ClientHello's server name is malformed, or there is more than one")
	}
	return name, nil
}

// parser takes fields off the front of bytes.
type parser struct {
	rest []byte
	bad  bool // something was missing
}

func (p *parser) skip(n int) []byte {
	if n > len(p.rest) {
		p.bad, p.rest = true, nil
		return make([]byte, n)
	}
	b := p.rest[:n]
	p.rest = p.rest[n:]
	return b
}

func (p *parser) number(size int) int {
	n := 0
	for _, b := range p.skip(size) {
		n = n<<8 | int(b)
	}
	return n
}

// vector takes a number of size bytes, and as many bytes as it says.
func (p *parser) vector(size int) []byte {
	n := p.number(size)
	if p.bad {
		return nil
	}
	if n > len(p.rest) {
		p.bad, p.rest = true, nil
		return nil
	}
	return p.skip(n)
}
