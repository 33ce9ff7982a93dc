package apiserver

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// However many visits come and go, one goroutine looks after them, once a
// routeFresh, until there are none: the bubble waits for its end.
func TestVisitsHaveOneFollower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var looked atomic.Int64
		var revoked atomic.Pointer[[]sandbox.RevokedURL]
		revoked.Store(&[]sandbox.RevokedURL{})
		vs := newVisits(func(context.Context, sandbox.ID) ([]sandbox.RevokedURL, error) {
			if looked.Add(1) == 1 {
				return nil, errors.New("try again")
			}
			return *revoked.Load(), nil
		})
		for range 100 {
			_, end := vs.begin(t.Context(), "sb-a", "one")
			end()
		}
		one, end := vs.begin(t.Context(), "sb-a", "one")
		two, endTwo := vs.begin(t.Context(), "sb-a", "two")
		time.Sleep(3*routeFresh + routeFresh/2)
		if n := looked.Load(); n != 3 {
			t.Errorf("looked %d times in three rounds", n)
		}
		revoked.Store(&[]sandbox.RevokedURL{{ID: "one"}})
		time.Sleep(routeFresh)
		if one.Err() == nil || two.Err() != nil {
			t.Errorf("of two visits, the first by an address that was taken back: %v, %v", one.Err(), two.Err())
		}
		end()
		endTwo()
		time.Sleep(2 * routeFresh)
		_, end = vs.begin(t.Context(), "sb-a", "three")
		time.Sleep(routeFresh + routeFresh/2)
		if n := looked.Load(); n != 5 {
			t.Errorf("looked %d times for a later visit", n-4)
		}
		end()
		vs.mu.Lock()
		left := len(vs.open)
		vs.mu.Unlock()
		if left != 0 {
			t.Errorf("after the last visit %d sandboxes are visited", left)
		}
		time.Sleep(2 * routeFresh) // its follower ends
	})
}
