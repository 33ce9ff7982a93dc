package storetest

import (
	"bytes"
	"sync"
	"testing"

	"github.com/kernflux/opendsec/internal/store"
)

// testSecret checks that all who ask at once get the same secret, and others
// another.
func testSecret(t *testing.T, db *store.DB) {
	got := make([][]byte, 8)
	var all sync.WaitGroup
	for i := range got {
		all.Go(func() {
			var err error
			if got[i], err = db.Secret(t.Context(), "one"); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	for _, s := range got {
		if len(s) != 32 || !bytes.Equal(s, got[0]) {
			t.Errorf("got %x and %x", s, got[0])
		}
	}
	if other, err := db.Secret(t.Context(), "other"); err != nil || bytes.Equal(other, got[0]) {
		t.Errorf("another secret is %x, %v", other, err)
	}
}
