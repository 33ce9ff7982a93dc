package source

import (
	"crypto/sha256"
	"crypto/sha512"
	"encoding/hex"
	"hash"
	"io"
	"strings"

	"github.com/kernflux/opendsec/internal/fault"
)

// Verify returns a reader of r that ends with io.EOF only when r had the given
// digest and size; otherwise with a fault that says what was wrong. size -1
// means unknown, an empty digest is not checked. what names the thing to a
// person.
func Verify(r io.Reader, what, digest string, size int64) io.Reader {
	v := &verifier{r: r, what: what, digest: digest, size: size}
	switch {
	case strings.HasPrefix(digest, "sha256:"):
		v.sum = sha256.New()
	case strings.HasPrefix(digest, "sha512:"):
		v.sum = sha512.New()
	case digest != "":
		v.err = fault.Invalid("source", "%s has the digest %q, of a kind that is not supported", what, digest)
	}
	return v
}

type verifier struct {
	r      io.Reader
	what   string
	digest string
	size   int64
	sum    hash.Hash
	n      int64
	err    error
}

func (v *verifier) Read(p []byte) (int, error) {
	if v.err != nil {
		return 0, v.err
	}
	n, err := v.r.Read(p)
	v.n += int64(n)
	if v.sum != nil {
		v.sum.Write(p[:n])
	}
	if v.size >= 0 && v.n > v.size {
		v.err = fault.Invalid("source", "%s %s is longer than the %d bytes its manifest names", v.what, v.digest, v.size)
		return 0, v.err
	}
	switch err {
	case nil:
	case io.EOF:
		v.err = v.check()
	default:
		// A registry's client that checks by itself says less.
		if v.err = err; v.n == v.size {
			if bad := v.check(); bad != io.EOF {
				v.err = bad
			}
		}
	}
	return n, v.err
}

func (v *verifier) check() error {
	if v.size >= 0 && v.n < v.size {
		return fault.Invalid("source", "%s %s is truncated: %d of %d bytes", v.what, v.digest, v.n, v.size)
	}
	if v.sum == nil {
		return io.EOF
	}
	kind, want, _ := strings.Cut(v.digest, ":")
	if got := hex.EncodeToString(v.sum.Sum(nil)); got != want {
		return fault.Invalid("source", "the digest of %s does not match: want %s, got %s:%s", v.what, v.digest, kind, got)
	}
	return io.EOF
}

// checkDigest checks a document that is in memory.
func checkDigest(b []byte, what, digest string) error {
	_, err := io.Copy(io.Discard, Verify(strings.NewReader(string(b)), what, digest, -1))
	return err
}

// digestOf returns the sha256 digest of b.
func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}
