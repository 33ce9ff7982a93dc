package ingress

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/binary"
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
	timeSize = 5 // seconds since 1970, the highest byte first
	macSize  = 16
)

// encoding is made of letters that stay as they are in URLs.
var encoding = base64.RawURLEncoding

// Sign returns a token for a target that is good until a time, to the second.
func (k Key) Sign(t Target, until time.Time) string {
	var when [8]byte
	binary.BigEndian.PutUint64(when[:], uint64(until.Unix()))
	stamp := when[8-timeSize:]
	return encoding.EncodeToString(append(stamp[:timeSize:timeSize], k.mac(t, stamp)...))
}

func (k Key) mac(t Target, stamp []byte) []byte {
	h := hmac.New(sha256.New, k)
	fmt.Fprintf(h, "opendsec url 1\n%s\n%d\n%x", t.Sandbox, t.Port, stamp)
	return h.Sum(nil)[:macSize]
}

// Check reports why a token does not let one reach a target, PermissionDenied.
func (k Key) Check(token string, t Target, now time.Time) error {
	raw, err := encoding.Strict().DecodeString(token)
	if err != nil || len(raw) != timeSize+macSize || !hmac.Equal(raw[timeSize:], k.mac(t, raw[:timeSize])) {
		return fault.New(fault.PermissionDenied, "this address is not good for %s; ask for one with get_url", t)
	}
	var when [8]byte
	copy(when[8-timeSize:], raw[:timeSize])
	if until := time.Unix(int64(binary.BigEndian.Uint64(when[:])), 0); !now.Before(until) {
		return fault.New(fault.PermissionDenied, "this address of %s expired at %s; ask for another with get_url", t, until.UTC().Format(time.RFC3339))
	}
	return nil
}
