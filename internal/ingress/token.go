package ingress

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"time"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// Target is a port of a sandbox.
type Target struct {
	Sandbox sandbox.ID
	Port    int
}

func (t Target) String() string { return fmt.Sprintf("port %d of sandbox %s", t.Port, t.Sandbox) }

// Key makes and checks the tokens by which a target may be reached. A token is
// good for one target, up to a time, and cannot be made without the key.
type Key []byte

const (
	timeSize   = 5 // seconds since 1970, the highest byte first
	numberSize = 8 // of chance, so that no two tokens are alike
	macSize    = 16
)

// Token is what a token says.
type Token struct {
	ID    string    // of no other token
	Until time.Time // when it ends to be good
}

// encoding is made of letters that stay as they are in URLs.
var encoding = base64.RawURLEncoding

// Sign returns a new token for a target that is good until a time, to the second.
func (k Key) Sign(t Target, until time.Time) string {
	said := binary.BigEndian.AppendUint64(nil, uint64(until.Unix()))[8-timeSize:]
	said = append(said, make([]byte, numberSize)...)
	_, _ = rand.Read(said[timeSize:]) // never fails
	return encoding.EncodeToString(append(said, k.mac(t, said)...))
}

func (k Key) mac(t Target, said []byte) []byte {
	h := hmac.New(sha256.New, k)
	fmt.Fprintf(h, "opendsec url 2\n%s\n%d\n%x", t.Sandbox, t.Port, said)
	return h.Sum(nil)[:macSize]
}

// Read returns what a token for a target says, whether or not it has expired;
// PermissionDenied when it is none for that target.
func (k Key) Read(token string, t Target) (Token, error) {
	raw, err := encoding.Strict().DecodeString(token)
	const size = timeSize + numberSize
	if err != nil || len(raw) != size+macSize || !hmac.Equal(raw[size:], k.mac(t, raw[:size])) {
		return Token{}, fault.New(fault.PermissionDenied, "this address is not good for %s; ask for one with get_url", t)
	}
	var when [8]byte
	copy(when[8-timeSize:], raw[:timeSize])
	return Token{ID: hex.EncodeToString(raw[timeSize:size]), Until: time.Unix(int64(binary.BigEndian.Uint64(when[:])), 0)}, nil
}

// Check is Read that reports in addition when a token has expired.
func (k Key) Check(token string, t Target, now time.Time) (Token, error) {
	said, err := k.Read(token, t)
	if err != nil {
		return Token{}, err
	}
	if !now.Before(said.Until) {
		return Token{}, fault.New(fault.PermissionDenied, "this address of %s expired at %s; ask for another with get_url", t, said.Until.UTC().Format(time.RFC3339))
	}
	return said, nil
}
