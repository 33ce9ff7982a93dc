package netgate

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
)

// Types of records of TLS, and limits of what is read of a connection's begin.
const (
	recordChange    = 20
	recordAlert     = 21
	recordHandshake = 22
	recordData      = 23

	recordMost = 16<<10 + 256
	helloMost  = 64 << 10  // bytes of a ClientHello
	beginMost  = 512 << 10 // bytes before a second one
)

// retryRandom is how a ServerHello says that it wants another ClientHello
// (RFC 8446, 4.1.3).
var retryRandom = []byte{
	0xCF, 0x21, 0xAD, 0x74, 0xE5, 0x9A, 0x61, 0x11, 0xBE, 0x1D, 0x8C, 0x02, 0x1E, 0x65, 0xB8, 0x91,
	0xC2, 0xA2, 0x11, 0x16, 0x7A, 0xBB, 0x8C, 0x5E, 0x07, 0x9E, 0x09, 0xE2, 0xC8, 0xA8, 0x33, 0x9C,
}

// inspectTLS passes a handshake on as long as it tells a name. Where the server
// asks for a second ClientHello, that must tell the same.
func (gd *Guard) inspectTLS(f *flow, inside, outside net.Conn) error {
	hello, name, err := readHello(inside, helloMost)
	if err != nil {
		return err
	}
	if err := gd.settle(f, name); err != nil {
		return err
	}
	if _, err := outside.Write(hello); err != nil {
		return err
	}
	again, err := passServerHello(inside, outside)
	if err != nil || !again {
		return err
	}
	second, name, err := readHello(inside, beginMost)
	if err != nil {
		return err
	}
	if err := gd.settle(f, name); err != nil {
		return err
	}
	_, err = outside.Write(second)
	return err
}

// readHello reads records up to the end of a ClientHello, and returns them with
// the name that it tells. Before a second one there may be records that
// servers pass over; before a first one with most of helloMost there are none.
func readHello(r io.Reader, most int) (raw []byte, name string, err error) {
	var hello []byte
	for {
		record, err := readRecord(r)
		if err != nil {
			return nil, "", err
		}
		raw = append(raw, record...)
		if len(raw) > most {
			return nil, "", refused("the beginning of the TLS connection is too long")
		}
		if record[0] != recordHandshake {
			if most == helloMost || record[0] != recordChange && record[0] != recordData || len(hello) > 0 {
				return nil, "", refused("the connection does not begin with a ClientHello")
			}
			continue
		}
		hello = append(hello, record[5:]...)
		if hello[0] != 1 {
			return nil, "", refused("the connection does not begin with a ClientHello")
		}
		if len(hello) < 4 {
			continue
		}
		size := int(hello[1])<<16 | int(hello[2])<<8 | int(hello[3])
		if size > helloMost {
			return nil, "", refused("the ClientHello is too long")
		}
		if len(hello) >= 4+size {
			name, err := serverName(hello[4 : 4+size])
			return raw, name, err
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

// serverName returns the name in a ClientHello.
func serverName(hello []byte) (string, error) {
	in := parser{hello, false}
	in.skip(2 + 32)
	in.vector(1) // session
	in.vector(2) // cipher suites
	in.vector(1) // compression
	extensions := parser{in.vector(2), false}
	name := ""
	for len(extensions.rest) > 0 && !extensions.bad {
		kind := extensions.number(2)
		body := parser{extensions.vector(2), false}
		if kind != 0 {
			continue
		}
		list := parser{body.vector(2), false}
		if list.number(1) != 0 || name != "" {
			return "", refused("the ClientHello tells its server's name twice, or in a way that is not known")
		}
		name = string(list.vector(2))
		if body.bad || list.bad || len(list.rest) > 0 || len(body.rest) > 0 || name == "" {
			return "", refused("the ClientHello's server name is malformed")
		}
	}
	if in.bad || extensions.bad || len(in.rest) > 0 {
		return "", refused("the ClientHello is malformed")
	}
	if name == "" {
		return "", refused("the ClientHello tells no server name")
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

// passServerHello passes the begin of the server's answer on, and reports
// whether it asks for another ClientHello.
func passServerHello(inside, outside net.Conn) (again bool, err error) {
	const size = 4 + 2 + 32 // up to the end of the random
	var message []byte
	for len(message) < size {
		header := make([]byte, 5)
		if n, err := io.ReadFull(outside, header); err != nil {
			if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
				_, err = inside.Write(header[:n]) // the end comes when the rest is carried
			}
			return false, err
		}
		if header[0] != recordHandshake {
			_, err := inside.Write(header)
			return false, err
		}
		want := min(int(binary.BigEndian.Uint16(header[3:])), size-len(message))
		body := make([]byte, want)
		n, err := io.ReadFull(outside, body)
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
			return false, err
		}
		if _, werr := inside.Write(append(header, body[:n]...)); werr != nil || err != nil {
			return false, werr
		}
		if message = append(message, body...); message[0] != 2 {
			return false, nil
		}
	}
	return bytes.Equal(message[6:size], retryRandom), nil
}
