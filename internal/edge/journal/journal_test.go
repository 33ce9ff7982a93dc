package journal

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/sandbox"
)

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
