package store_test

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/sandbox"
	"github.com/kernflux/opendsec/internal/store"
	"github.com/kernflux/opendsec/internal/store/storetest"
)

// writerEnv tells this test program to write to a database until it is killed.
const writerEnv = "OPENDSEC_STORE_TEST_WRITER"

func TestMain(m *testing.M) {
	if path := os.Getenv(writerEnv); path != "" {
		if err := write(path); err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
		os.Exit(1) // it ends by being killed, or not well
	}
	os.Exit(m.Run())
}

// write makes sandboxes, brings each to running, and prints its id then.
func write(path string) error {
	ctx := context.Background()
	db, err := store.Open(ctx, "sqlite:"+path)
	if err != nil {
		return err
	}
	for {
		sb := storetest.Sandbox("root/demo")
		sb.Spec.Labels = map[string]string{"a": "b"}
		if _, err := db.CreateSandbox(ctx, sb, store.Idempotency{Caller: "ann", Key: string(sb.ID)}, storetest.On("n1")); err != nil {
			return err
		}
		_, err := db.UpdateSandbox(ctx, sb.ID, func(sb *sandbox.Sandbox) error { return sb.MoveTo(sandbox.Running) })
		if err != nil {
			return err
		}
		fmt.Println(sb.ID)
	}
}

// What was acknowledged is there after the writer was killed, the file is
// whole, and the next program can write at once.
func TestSQLiteSurvivesKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "test.db")
	db, err := store.Open(t.Context(), "sqlite:"+path)
	if err != nil {
		t.Fatal(err)
	}
	storetest.Projects(t, db, "root", "root/demo")
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for round := range 5 {
		ids := writeAndKill(t, path, 40+37*round)
		db := storetest.Open(t, "sqlite:"+path)
		for _, id := range ids {
			sb, err := db.GetSandbox(t.Context(), id)
			if err != nil || sb.State != sandbox.Running {
				t.Errorf("round %d: %s was acknowledged as running; got %+v, %v", round, id, sb, err)
			}
		}
		seen += len(ids)
		if live, err := db.LiveOnNode(t.Context(), "n1"); err != nil || len(live) < seen || len(live) > seen+round+1 {
			t.Errorf("round %d: %d records for %d acknowledged, %v", round, len(live), seen, err)
		}
	}
	checkWhole(t, path)
}

// writeAndKill kills a writer in the middle of its work, once it has
// acknowledged n sandboxes, and returns those that it acknowledged.
func writeAndKill(t *testing.T, path string, n int) []sandbox.ID {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), writerEnv+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var ids []sandbox.ID
	for lines := bufio.NewScanner(out); lines.Scan(); {
		id, err := sandbox.ParseID(lines.Text())
		if err != nil {
			t.Errorf("the writer said %q", lines.Text())
			continue
		}
		if ids = append(ids, id); len(ids) == n {
			if err := cmd.Process.Kill(); err != nil {
				t.Fatal(err)
			}
		}
	}
	_ = cmd.Wait() // killed
	if len(ids) < n {
		t.Fatalf("the writer ended after %d sandboxes, before it was killed", len(ids))
	}
	return ids
}

func checkWhole(t *testing.T, path string) {
	t.Helper()
	db, err := sql.Open("sqlite", path)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	var verdict string
	if err := db.QueryRowContext(t.Context(), `PRAGMA integrity_check`).Scan(&verdict); err != nil || verdict != "ok" {
		t.Errorf("the file's check says %q, %v", verdict, err)
	}
	info, err := os.Stat(path)
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file's mode is %v, %v; want 0600", info.Mode(), err)
	}
}

// BenchmarkLife is a sandbox's record from creation to end, with many others
// alive.
func BenchmarkLife(b *testing.B) {
	for _, alive := range []int{0, 1000, 10000} {
		b.Run(fmt.Sprintf("sqlite/alive=%d", alive), func(b *testing.B) { benchmarkLife(b, alive) })
	}
}

func benchmarkLife(b *testing.B, alive int) {
	ctx, db := b.Context(), storetest.SQLite(b)
	for _, n := range []string{"n1", "n2", "n3"} {
		if err := db.PutNode(ctx, store.Node{Name: n, LastSeen: time.Now()}); err != nil {
			b.Fatal(err)
		}
	}
	for left := alive; left > 0; left -= 500 {
		var sbs []*sandbox.Sandbox
		for range 500 {
			sbs = append(sbs, storetest.Sandbox("root/demo"))
		}
		if _, err := db.CreateSandboxes(ctx, sbs, store.Idempotency{}, storetest.On("n2")); err != nil {
			b.Fatal(err)
		}
	}
	var creating time.Duration
	for b.Loop() {
		sb := storetest.Sandbox("root/demo")
		start := time.Now()
		if _, err := db.CreateSandbox(ctx, sb, store.Idempotency{Caller: "ann", Key: string(sb.ID)}, storetest.On("n1")); err != nil {
			b.Fatal(err)
		}
		creating += time.Since(start)
		for _, s := range []sandbox.State{sandbox.Running, sandbox.Stopping, sandbox.Stopped} {
			_, err := db.UpdateSandbox(ctx, sb.ID, func(sb *sandbox.Sandbox) error { return sb.MoveTo(s) })
			if err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(creating.Microseconds())/float64(b.N), "µs/create")
}
