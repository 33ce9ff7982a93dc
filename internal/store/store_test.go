package store_test

import (
	"path/filepath"
	"testing"

	"github.com/kernflux/opendsec/internal/store/storetest"
	"github.com/kernflux/opendsec/internal/testenv"
)

func TestSQLite(t *testing.T) {
	storetest.Run(t, func(t testing.TB) string { return "sqlite:" + filepath.Join(t.TempDir(), "test #?%.db") })
}

func TestPostgres(t *testing.T) {
	server := testenv.Postgres(t)
	storetest.Run(t, server.Database)
}
