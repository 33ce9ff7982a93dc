package journal

import (
	"encoding/json"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/netgate"
	"github.com/kernflux/opendsec/internal/sandbox"
)

// What was denied lies beside the entry, goes with the files, and never makes a
// directory of a sandbox that has none.
func TestDenied(t *testing.T) {
	j, err := Open(filepath.Join(t.TempDir(), "sandboxes"))
	if err != nil {
		t.Fatal(err)
	}
	const id = sandbox.ID("sb-aaaaaaaaaaaa")
	want := netgate.Denied{Newest: []netgate.Denial{{Time: time.Unix(5, 0).UTC(), Count: 2, Kind: netgate.DeniedName, Name: "example.com"}}, Total: 9}
	if err := j.WriteDenied(id, want); err == nil {
		t.Error("written for a sandbox that is not there")
	}
	if err := j.Write(&Entry{ID: id, Phase: Running}, Lazy); err != nil {
		t.Fatal(err)
	}
	if got, err := j.ReadDenied(id); err != nil || got.Total != 0 {
		t.Errorf("before: %v, %v", got, err)
	}
	if err := j.WriteDenied(id, want); err != nil {
		t.Fatal(err)
	}
	got, err := j.ReadDenied(id)
	if diff := cmp.Diff(want, got, cmpopts.EquateComparable(netip.Addr{})); diff != "" || err != nil {
		t.Errorf("%v (-want +got):\n%s", err, diff)
	}
	if err := os.WriteFile(filepath.Join(j.Dir(id), deniedName), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := j.ReadDenied(id); err == nil || len(got.Newest) > 0 {
		t.Errorf("half a file: %v, %v", got, err)
	}
	if err := j.RemoveFiles(id); err != nil {
		t.Fatal(err)
	}
	left, err := os.ReadDir(j.Dir(id))
	if err != nil || len(left) != 1 || left[0].Name() != fileName {
		t.Errorf("left %v, %v", left, err)
	}
}

func TestWriteAndLoad(t *testing.T) {
	j, err := Open(filepath.Join(t.TempDir(), "sandboxes"))
	if err != nil {
		t.Fatal(err)
	}
	want := &Entry{
		ID: "sb-aaaaaaaaaaaa", Project: "root/demo", Phase: Creating, ImageDigest: "sha256:1",
		Spec:      sandbox.Spec{Backend: sandbox.Container, Env: map[string]string{"A": "ü\n"}},
		CreatedAt: time.Unix(5, 7).UTC(),
	}
	if err := j.Write(want, Lazy); err != nil {
		t.Fatal(err)
	}
	want.Phase, want.StartedAt = Running, time.Unix(6, 0).UTC()
	want.Handle = &backend.Handle{Backend: sandbox.Container, Data: json.RawMessage(`{"pid":1}`)}
	want.Slot = &backend.Slot{Name: "od000000-1"}
	if err := j.Write(want, Durable); err != nil {
		t.Fatal(err)
	}
	got, strays, err := j.Load()
	if err != nil || len(strays) != 0 {
		t.Fatalf("strays %v, error %v", strays, err)
	}
	if diff := cmp.Diff([]*Entry{want}, got); diff != "" {
		t.Error(diff)
	}
	info, err := os.Stat(filepath.Join(j.Dir(want.ID), fileName))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file holds a token and has mode %v, error %v", info.Mode(), err)
	}
	if err := j.Remove(want.ID); err != nil {
		t.Fatal(err)
	}
	if names, _ := j.Names(); len(names) != 0 {
		t.Errorf("left behind: %v", names)
	}
}

func TestLoadTellsStraysApart(t *testing.T) {
	dir := t.TempDir()
	j, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range map[string]string{
		"sb-bbbbbbbbbbbb/journal.json.new": `{"id":"sb-bbbbbbbbbbbb"}`, // died before the rename
		"sb-cccccccccccc/journal.json":     "",                         // the host went down
		"sb-dddddddddddd/journal.json":     `{"id":"sb-eeeeeeeeeeee"}`,
		"else/x":                           "",
	} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	entries, strays, err := j.Load()
	if err != nil || len(entries) != 0 || len(strays) != 4 {
		t.Fatalf("got %v, %v, %v", entries, strays, err)
	}
	for _, s := range strays {
		if err := j.RemoveStray(s); err != nil {
			t.Fatal(err)
		}
	}
	if names, _ := j.Names(); len(names) != 0 {
		t.Errorf("left behind: %v", names)
	}
}
