package store_test

import (
	"database/sql"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/pressly/goose/v3"

	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
	"github.com/kernflux/opendsec/internal/store/storetest"
	"github.com/kernflux/opendsec/internal/testenv"
)

// What an earlier version recorded is there after the tables were changed,
// counts as it did, and is there still when they are changed back.
func TestMigrationKeepsRows(t *testing.T) {
	t.Run("sqlite", func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "test.db")
		testMigration(t, goose.DialectSQLite3, "sqlite", "file:"+path+"?_foreign_keys=1", "sqlite:"+path)
	})
	t.Run("postgres", func(t *testing.T) {
		address := testenv.Postgres(t).Database(t)
		testMigration(t, goose.DialectPostgres, "pgx", address, address)
	})
}

// oldRows is what the first version's tables hold.
var oldRows = []string{
	`INSERT INTO projects (path, created_at) VALUES ('root', 1)`,
	`INSERT INTO nodes VALUES ('n1', 'https://n1', '{}', 1, FALSE)`,
	`INSERT INTO sandboxes VALUES ('sb-aaaaaaaaaaaa', 'root', 'ann', 'running', 'n1', 'sha256:aa',
		'{"backend":"gvisor","limits":{"cpu":0.5,"memory_mb":512,"disk_mb":1024,"pids":100}}',
		0.5, 512, 1024, 1000000, 2000000, 0, '', '', '', 3)`,
	`INSERT INTO sandboxes VALUES ('sb-bbbbbbbbbbbb', 'root', 'ann', 'stopped', 'n1', 'sha256:aa', '{}',
		2, 64, 64, 1000000, 0, 5000000, 'stopped', 'user', 'by a call', 2)`,
	`INSERT INTO sandbox_labels VALUES ('sb-aaaaaaaaaaaa', 'k', 'v')`,
	`INSERT INTO images VALUES ('root', 'py', '1', 'sha256:aa', 'oci', 42, 'amd64', 'x', '{}', 1000000)`,
}

func testMigration(t *testing.T, dialect goose.Dialect, driver, dsn, address string) {
	raw, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	tables, err := goose.NewProvider(dialect, raw, os.DirFS("migrations"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tables.UpTo(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	for _, row := range oldRows {
		if _, err := raw.ExecContext(t.Context(), row); err != nil {
			t.Fatalf("%s: %v", row, err)
		}
	}
	db := storetest.Open(t, address)
	checkMigrated(t, db)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}

	if _, err := tables.DownTo(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	var cpu float64
	var memory, disk, labels, images int64
	err = raw.QueryRowContext(t.Context(), `SELECT cpu, memory_mb, disk_mb, (SELECT COUNT(*) FROM sandbox_labels),
		(SELECT COUNT(*) FROM images) FROM sandboxes WHERE id = 'sb-aaaaaaaaaaaa'`).Scan(&cpu, &memory, &disk, &labels, &images)
	if err != nil || cpu != 0.5 || memory != 512 || disk != 1024 || labels != 1 || images != 1 {
		t.Errorf("changed back: %v cores, %d MiB, %d MiB, %d labels, %d images, %v", cpu, memory, disk, labels, images, err)
	}
	checkMigrated(t, storetest.Open(t, address))
}

// checkMigrated checks the old rows, and that new ones go beside them.
func checkMigrated(t *testing.T, db *store.DB) {
	t.Helper()
	got, err := db.GetSandbox(t.Context(), "sb-aaaaaaaaaaaa")
	if err != nil {
		t.Fatal(err)
	}
	want := &sandbox.Sandbox{
		ID: "sb-aaaaaaaaaaaa", Project: "root", Caller: "ann", State: sandbox.Running, Node: "n1", ImageDigest: "sha256:aa",
		Spec:      sandbox.Spec{Backend: sandbox.GVisor, Limits: sandbox.Limits{CPU: 0.5, MemoryMB: 512, DiskMB: 1024, PIDs: 100}},
		CreatedAt: time.Unix(1, 0).UTC(), StartedAt: time.Unix(2, 0).UTC(), Version: 3,
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("an old sandbox (-want +got):\n%s", d)
	}
	usages, err := db.NodeUsages(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if len(usages) != 1 || usages[0].Used != want.Holds() {
		t.Errorf("old sandboxes hold %+v", usages)
	}
	if page, err := db.ListSandboxes(t.Context(), store.SandboxFilter{Labels: map[string]string{"k": "v"}}); err != nil || len(page.Sandboxes) != 1 {
		t.Errorf("by its label: %v, %v", page, err)
	}
	if ended, err := db.GetSandbox(t.Context(), "sb-bbbbbbbbbbbb"); err != nil || ended.End == nil || ended.Parent != "" {
		t.Errorf("an old ended sandbox: %+v, %v", ended, err)
	}
	images, err := db.ListImages(t.Context())
	if err != nil || len(images) != 1 || images[0].Snapshot != nil || images[0].Network != nil || images[0].Digest != "sha256:aa" {
		t.Errorf("old images: %+v, %v", images, err)
	}
	sb := storetest.Sandbox("root")
	sb.State, sb.Parent, sb.PausedAt = sandbox.Paused, "sb-aaaaaaaaaaaa", time.Unix(9, 0).UTC()
	if _, err := db.CreateSandbox(t.Context(), sb, store.Idempotency{}, storetest.On("n1")); err != nil {
		t.Fatal(err)
	}
	if got, err := db.GetSandbox(t.Context(), sb.ID); err != nil || !cmp.Equal(got, sb) {
		t.Errorf("a new sandbox: %s, %v", cmp.Diff(sb, got), err)
	}
	_, err = db.UpdateSandbox(t.Context(), sb.ID, func(sb *sandbox.Sandbox) error {
		return sb.Finish(sandbox.End{Reason: sandbox.ReasonStopped, Domain: sandbox.User, Time: time.Unix(10, 0)})
	})
	if err != nil {
		t.Fatal(err)
	}
}
