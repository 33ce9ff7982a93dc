// Package token makes and checks the bearer tokens of callers. A token is
// "ods_<id>_<secret>": the id may be shown and logged, the secret is known to
// its caller alone, and of it only a hash is kept. The secret's last six
// characters are a checksum of all before them, so that a mistyped token is
// told apart from one that is unknown, without asking a database. Who a token
// belongs to, and whether it still holds, is kept in package store.
package token

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"hash/crc32"
	"strings"

	"github.com/kernflux/opendsec/internal/fault"
)

const (
	prefix    = "ods_"
	idLen     = 12
	randomLen = 43 // base62 characters, 256 bits of chance
	sumLen    = 6  // base62 characters, enough for 32 bits
	secretLen = randomLen + sumLen

	alphabet = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
	idChars  = 36 // ids use the digits and the small letters
)

// Len is the length of every token in characters.
const Len = len(prefix) + idLen + 1 + secretLen

// New makes a token. It returns the whole token, which only its caller may
// learn, the id in it, and the hash of its secret, which is what is kept.
func New() (full, id string, hash []byte) {
	id = strings.ToLower(random(idLen, idChars))
	body := prefix + id + "_" + random(randomLen, len(alphabet))
	full = body + checksum(body)
	return full, id, hashOf(full[len(full)-secretLen:])
}

// Parse takes a token apart. Its errors are Unauthenticated and say what is
// wrong with the form, never what was given.
func Parse(full string) (id, secret string, err error) {
	rest, ok := strings.CutPrefix(full, prefix)
	if !ok {
		return "", "", fault.New(fault.Unauthenticated, "this is no token: one begins with %q", prefix)
	}
	if len(full) != Len || rest[idLen] != '_' {
		return "", "", fault.New(fault.Unauthenticated, "this token is not whole: it has %d characters, one has %d; copy all of it", len(full), Len)
	}
	id, secret = rest[:idLen], rest[idLen+1:]
	if !IsID(id) || !made(secret, isAlnum) {
		return "", "", fault.New(fault.Unauthenticated, "this token has characters that no token has; copy it anew")
	}
	body := full[:len(full)-sumLen]
	if subtle.ConstantTimeCompare([]byte(checksum(body)), []byte(full[len(body):])) != 1 {
		return "", "", fault.New(fault.Unauthenticated, "this token is mistyped: its checksum does not match; copy it anew")
	}
	return id, secret, nil
}

// IsID reports whether s has the form of a token's id.
func IsID(s string) bool {
	return len(s) == idLen && made(s, func(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' })
}

// Check reports whether the secret is the one whose hash was kept. It takes
// the same time whether they differ early or late.
func Check(secret string, hash []byte) bool {
	return subtle.ConstantTimeCompare(hashOf(secret), hash) == 1
}

func hashOf(secret string) []byte {
	sum := sha256.Sum256([]byte(secret))
	return sum[:]
}

// random returns n characters, each equally likely one of the alphabet's first
// chars ones.
func random(n, chars int) string {
	out := make([]byte, 0, n)
	buf := make([]byte, 64)
	limit := byte(256 / chars * chars)
	for {
		rand.Read(buf)
		for _, c := range buf {
			if c >= limit && limit != 0 {
				continue // would favour some characters
			}
			out = append(out, alphabet[int(c)%chars])
			if len(out) == n {
				return string(out)
			}
		}
	}
}

func checksum(body string) string {
	sum := crc32.ChecksumIEEE([]byte(body))
	out := make([]byte, sumLen)
	for i := sumLen - 1; i >= 0; i-- {
		out[i] = alphabet[sum%62]
		sum /= 62
	}
	return string(out)
}

func isAlnum(c byte) bool {
	return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z'
}

func made(s string, of func(byte) bool) bool {
	for i := range len(s) {
		if !of(s[i]) {
			return false
		}
	}
	return true
}
