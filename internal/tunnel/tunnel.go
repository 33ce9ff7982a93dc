// Package tunnel carries a TCP connection through HTTP, so that it passes the
// same doors as every other call. One request is one connection: its body is
// what the caller sends, and the body's end is the caller's half-close; the
// answer is frames, because an answer cannot end before its request and still
// leave that open. Serve is the end at the machine, Dial the caller's.
//
// It does not know who may connect to what: the doors do. What is slow is
// waited for, and nothing is held but one buffer each way.
package tunnel

import (
	"encoding/binary"
	"strconv"
	"sync"

	"github.com/kernflux/opendsec/internal/fault"
)

// ContentType is that of an answer that is a tunnel.
const ContentType = "application/x-opendsec-tunnel"

// A frame is a byte that says what it is, the length of its payload in four
// bytes, the highest first, and the payload.
const (
	frameData byte = 0 // bytes of the far side
	frameEOF  byte = 1 // the far side sends no more; it may take more
	frameEnd  byte = 2 // the last one: all is over; an error as fault.ToJSON writes it, or nothing
)

const (
	headSize = 5
	// bufferSize is what is read at once.
	bufferSize = 64 << 10
	// mostWords bounds the error in a frame.
	mostWords = 64 << 10
)

var buffers = sync.Pool{New: func() any { return new([headSize + bufferSize]byte) }}

// ParsePort reads a TCP port; InvalidArgument names the field "port".
func ParsePort(s string) (int, error) {
	n, err := strconv.ParseUint(s, 10, 32)
	if err != nil {
		return 0, fault.Invalid("port", "port %.20q is not a number from 1 to 65535", s)
	}
	return int(n), CheckPort(int64(n))
}

// CheckPort refuses what is no TCP port.
func CheckPort(n int64) error {
	if n < 1 || n > 65535 {
		return fault.Invalid("port", "port %d is not one of 1 to 65535", n)
	}
	return nil
}

func putHead(b []byte, kind byte, size int) {
	b[0] = kind
	binary.BigEndian.PutUint32(b[1:], uint32(size))
}
