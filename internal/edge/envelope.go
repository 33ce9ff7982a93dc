package edge

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"

	"github.com/kernflux/opendsec/internal/fault"
)

// Connect's streams are envelopes: a byte of flags, the length in four bytes,
// the message. The last one has endFlag and says in JSON how the call ended.
const (
	envelopeHead = 5
	endFlag      = 0x02
	// mostHeld is the largest envelope that is held back until it is whole.
	mostHeld = 64 << 10
)

// envelopes passes on the answer of a streaming call and, when the sandbox dies
// in the middle of it, ends it with an envelope that says so. For that it must
// stop at an end of an envelope: one that fits in mostHeld is passed on only
// when it is whole, which costs no time, since nobody can use half of one. A
// larger one goes through as it comes; if it breaks, the connection does.
type envelopes struct {
	from io.ReadCloser
	// why says what broke the stream, from the error that the read gave.
	why func(error) *fault.Error

	held  []byte // the beginning of an envelope that is not whole
	begun bool   // something has passed
	rest  uint32 // of an envelope that goes through as it comes: what is to come
	ended bool   // the last envelope has passed
	last  []byte // what is still to be given out of an end of our own making
	err   error  // comes after held and last
}

func (s *envelopes) Read(p []byte) (int, error) {
	for {
		if len(s.last) > 0 {
			n := copy(p, s.last)
			s.last = s.last[n:]
			return n, nil
		}
		if s.err != nil {
			return 0, s.err
		}
		if len(p) < mostHeld+envelopeHead {
			return 0, io.ErrShortBuffer // the proxy's buffers are larger
		}
		k := copy(p, s.held)
		n, err := s.from.Read(p[k:])
		whole := s.split(p[:k+n])
		s.begun = s.begun || whole > 0
		if err != nil {
			s.finish(err)
		}
		if whole > 0 {
			return whole, nil
		}
	}
}

// split walks the envelopes in p, keeps the unfinished one at its end, and
// returns how much can go on.
func (s *envelopes) split(p []byte) int {
	s.held = s.held[:0]
	at := 0
	if s.rest > 0 {
		pass := min(int(s.rest), len(p))
		s.rest -= uint32(pass)
		at = pass
	}
	for at < len(p) {
		left := p[at:]
		if len(left) < envelopeHead {
			break
		}
		size := binary.BigEndian.Uint32(left[1:])
		s.ended = left[0]&endFlag != 0
		switch whole := envelopeHead + int(size); {
		case len(left) >= whole:
			at += whole
			continue
		case whole > mostHeld:
			s.rest = uint32(whole - len(left))
			return len(p)
		}
		s.ended = false // it is not whole
		break
	}
	s.held = append(s.held, p[at:]...)
	return at
}

// finish settles what follows the last whole envelope.
func (s *envelopes) finish(err error) {
	s.err = err
	if s.ended && errors.Is(err, io.EOF) {
		return
	}
	if s.rest > 0 {
		s.err = io.ErrUnexpectedEOF
		return
	}
	s.last, s.err = endEnvelope(s.why(err)), io.EOF
}

func (s *envelopes) Close() error { return s.from.Close() }

// endEnvelope renders an error as the end of a stream.
func endEnvelope(f *fault.Error) []byte {
	body, err := json.Marshal(struct {
		Error json.RawMessage `json:"error"`
	}{fault.ToJSON(f)})
	if err != nil {
		panic(err) // it is JSON
	}
	env := make([]byte, envelopeHead, envelopeHead+len(body))
	env[0] = endFlag
	binary.BigEndian.PutUint32(env[1:], uint32(len(body)))
	return append(env, body...)
}
