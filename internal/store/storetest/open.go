// Package storetest has the suite that the store passes on every database, and
// opens databases for the tests of those who use it. It is for tests alone.
package storetest

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
)

// SQLite opens a new SQLite database with the projects root and root/demo; it
// is closed at the test's end.
func SQLite(t testing.TB) *store.DB {
	t.Helper()
	db := Open(t, "sqlite:"+filepath.Join(t.TempDir(), "test.db"))
	Projects(t, db, "root", "root/demo")
	return db
}

// Projects makes projects, those above first.
func Projects(t testing.TB, db *store.DB, paths ...sandbox.Project) {
	t.Helper()
	for _, p := range paths {
		Change(t, db, func(c *store.Change) error {
			return c.CreateProject(t.Context(), store.Project{Path: p, CreatedAt: time.Now()})
		})
	}
}

// Change runs a change that must succeed.
func Change(t testing.TB, db *store.DB, do func(*store.Change) error) {
	t.Helper()
	if err := db.Change(t.Context(), store.Audit{Time: time.Now(), Caller: "test", Action: "Prepare"}, do); err != nil {
		t.Fatal(err)
	}
}
