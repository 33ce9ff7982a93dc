package agent

import (
	"context"
	"crypto/sha256"
	"crypto/subtle"
	"net/http"
	"time"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
)

// identity is what the last Hello said. It does not change.
type identity struct {
	token      [sha256.Size]byte // of the token, so that comparing takes the same time
	env        map[string]string
	user       string
	workdir    string
	generation string

	valid  context.Context // ends when another token counts
	revoke context.CancelFunc
}

// next returns the identity that a Hello gives after the present one, which
// is nil before the first.
func (id *identity) next(msg *agentv1.HelloRequest) *identity {
	n := &identity{
		token: sha256.Sum256([]byte(msg.GetToken())), env: msg.GetEnv(),
		user: msg.GetDefaultUser(), workdir: msg.GetDefaultWorkdir(), generation: msg.GetGeneration(),
	}
	if n.env == nil {
		n.env = map[string]string{}
	}
	if id != nil && n.generation == "" {
		n.generation = id.generation
	}
	if id != nil && n.token == id.token {
		n.valid, n.revoke = id.valid, id.revoke
	} else {
		n.valid, n.revoke = context.WithCancel(context.Background())
	}
	return n
}

// admits reports whether a call shows the token.
func (id *identity) admits(h http.Header) bool { return id.knows(h.Get("X-Access-Token")) }

func (id *identity) knows(token string) bool {
	sum := sha256.Sum256([]byte(token))
	return subtle.ConstantTimeCompare(sum[:], id.token[:]) == 1
}

// bind makes a call end when its token does not count any more: its context
// ends, and so does what waits for its caller to send or to take something.
// done is to be called at its end.
func (id *identity) bind(w http.ResponseWriter, r *http.Request) (bound *http.Request, done func()) {
	ctx, cancel := context.WithCancel(context.WithValue(r.Context(), identityKey{}, id))
	revoked := make(chan struct{})
	stop := context.AfterFunc(id.valid, func() {
		defer close(revoked)
		cancel()
		c := http.NewResponseController(w)
		past := time.Unix(1, 0)
		_ = c.SetReadDeadline(past) // fails only where there are none
		_ = c.SetWriteDeadline(past)
	})
	return r.WithContext(ctx), func() {
		if !stop() {
			<-revoked // it may use w only as long as the call lasts
		}
		cancel()
	}
}

type identityKey struct{}

// comesBack reports whether a call was broken off by something that its caller
// had no part in, so that the caller may call again.
func comesBack(call context.Context) bool {
	id, ok := call.Value(identityKey{}).(*identity)
	return ok && id.valid.Err() == nil && brokenOff(call)
}
