package image

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/internal/backend"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/sandbox"
)

func memoryOf(base string) Memory {
	return Memory{
		Base: base, AgentToken: "secret", SandboxID: "sb-aaaaaaaaaaaa",
		Snapshot: backend.Snapshot{
			Backend: sandbox.GVisor, Memory: true, Limits: sandbox.Limits{MemoryMB: 64}, Data: []byte(`{"pages":1}`),
			Stamp: backend.Stamp{Virtualization: "systrap", Runtime: "r1", CPUFeatures: []string{"avx"}, Agent: "agent-1"},
		},
	}
}

// draft begins one and writes some files.
func draft(t testing.TB, s *Store) *Draft {
	t.Helper()
	d, err := s.Begin()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(filepath.Join(d.Dir(), "pages"), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, size := range map[string]int{"state": 5000, "pages/0": 100_000, "pages/1": 0} {
		if err := os.WriteFile(filepath.Join(d.Dir(), name), []byte(strings.Repeat("s", size)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return d
}

// commit makes a memory image that runs on base.
func commit(t testing.TB, s *Store, base string) Artifact {
	t.Helper()
	d := draft(t, s)
	a, err := d.CommitMemory(memoryOf(base), Config{Workdir: "/srv"}, "sandbox:sb-aaaaaaaaaaaa")
	if err := errors.Join(err, d.Abort()); err != nil {
		t.Fatal(err)
	}
	return a
}

func TestCommitMemory(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := importSimple(t, s, "a")
	a := commit(t, s, base.Digest)
	noStaging(t, s)
	dir, err := s.path(a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	m := memoryOf(base.Digest)
	m.Snapshot.Dir, m.Snapshot.Size = filepath.Join(dir, "snapshot"), 8192+102400
	want := Artifact{
		Digest: a.Digest, Kind: KindMemory, Size: m.Snapshot.Size, Architecture: "amd64", Source: "sandbox:sb-aaaaaaaaaaaa",
		Config: Config{Workdir: "/srv"}, Memory: &m,
	}
	if diff := cmp.Diff(want, a); diff != "" {
		t.Error(diff)
	}
	info, err := os.Stat(filepath.Join(dir, artifactName))
	if err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the file holds a token and has mode %v, %v", info.Mode(), err)
	}
	if other := commit(t, s, base.Digest); other.Digest == a.Digest {
		t.Errorf("two snapshots are one image")
	}
	root, got, err := s.Acquire(t.Context(), a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release(a.Digest)
	if diff := cmp.Diff(want, got); diff != "" || root.Digest != base.Digest {
		t.Error(root, diff)
	}
	if b, err := os.ReadFile(filepath.Join(root.Tree, "f")); err != nil || string(b) != "a" {
		t.Errorf("the base's file is %q, %v", b, err)
	}
	if b, err := os.ReadFile(filepath.Join(got.Memory.Snapshot.Dir, "state")); err != nil || len(b) != 5000 {
		t.Errorf("the snapshot's file has %d bytes, %v", len(b), err)
	}
	// One that was taken of a start of it runs on the same base.
	if second := commit(t, s, a.Digest); second.Memory.Base != base.Digest {
		t.Errorf("its base is %s, want %s", second.Memory.Base, base.Digest)
	}
	all, err := s.List()
	if err != nil || len(all) != 4 {
		t.Errorf("List = %v, %v", all, err)
	}
	for _, i := range all {
		if kind := map[bool]string{true: KindOCI, false: KindMemory}[i.Digest == base.Digest]; i.Kind != kind || i.Size == 0 {
			t.Errorf("%s has kind %q and size %d, want %q", i.Digest, i.Kind, i.Size, kind)
		}
	}
}

func TestAbort(t *testing.T) {
	s := openStore(t, t.TempDir())
	d := draft(t, s)
	for range 2 {
		if err := d.Abort(); err != nil {
			t.Error(err)
		}
	}
	noStaging(t, s)
	if all, err := s.List(); err != nil || len(all) != 0 {
		t.Errorf("List = %v, %v", all, err)
	}
}

func TestCommitMemoryRefuses(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := importSimple(t, s, "a")
	for name, test := range map[string]struct {
		base    string
		reserve int64
		kind    fault.Kind
	}{
		"no base":    {"sha256:" + strings.Repeat("0", 64), 0, fault.NotFound},
		"no digest":  {"", 0, fault.InvalidArgument},
		"no reserve": {base.Digest, 1 << 60, fault.Capacity},
	} {
		t.Run(name, func(t *testing.T) {
			d := draft(t, s)
			s.reserve = test.reserve
			defer func() { s.reserve = 0 }()
			if _, err := d.CommitMemory(memoryOf(test.base), Config{}, ""); !fault.Is(err, test.kind) {
				t.Errorf("CommitMemory = %v, want %s", err, test.kind)
			}
			if _, err := os.Stat(filepath.Join(d.Dir(), "state")); err != nil {
				t.Errorf("the draft is gone: %v", err)
			}
			if err := d.Abort(); err != nil {
				t.Error(err)
			}
			noStaging(t, s)
			if test.reserve == 0 {
				return
			}
			if _, err := s.Begin(); !fault.Is(err, fault.Capacity) {
				t.Errorf("Begin = %v, want a Capacity fault", err)
			}
		})
	}
	if all, err := s.List(); err != nil || len(all) != 1 {
		t.Errorf("List = %v, %v; want the base", all, err)
	}
	if err := s.Delete(base.Digest); err != nil {
		t.Error(err)
	}
	if all, err := s.digests(); err != nil || len(all) != 0 {
		t.Errorf("a refused commit holds its base: %v, %v", all, err)
	}
}

// A description of an earlier version has no kind.
func TestKindOfOldImages(t *testing.T) {
	s := openStore(t, t.TempDir())
	a := importSimple(t, s, "a")
	dir, err := s.path(a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	change(t, filepath.Join(dir, artifactName), func(b []byte) []byte {
		return []byte(strings.Replace(string(b), `"kind":"oci",`, "", 1))
	})
	if got, err := s.Get(a.Digest); err != nil || got.Kind != KindOCI {
		t.Errorf("Get = %+v, %v", got, err)
	}
}

func TestAgentsOfImages(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := importSimple(t, s, "a")
	if ids, err := s.Agents(); err != nil || len(ids) != 0 {
		t.Errorf("Agents = %v, %v", ids, err)
	}
	var made []Artifact
	for _, agent := range []string{"agent-2", "agent-1", "agent-2"} {
		d, m := draft(t, s), memoryOf(base.Digest)
		m.Snapshot.Stamp.Agent = agent
		a, err := d.CommitMemory(m, Config{}, "")
		if err := errors.Join(err, d.Abort()); err != nil {
			t.Fatal(err)
		}
		made = append(made, a)
	}
	ids, err := s.Agents()
	if diff := cmp.Diff([]string{"agent-1", "agent-2"}, ids); diff != "" || err != nil {
		t.Error(err, diff)
	}
	// One that is still in use needs its agent, though it was deleted.
	if _, _, err := s.Acquire(t.Context(), made[1].Digest); err != nil {
		t.Fatal(err)
	}
	for _, a := range made {
		if err := s.Delete(a.Digest); err != nil {
			t.Fatal(err)
		}
	}
	ids, err = s.Agents()
	if diff := cmp.Diff([]string{"agent-1"}, ids); diff != "" || err != nil {
		t.Error(err, diff)
	}
	s.Release(made[1].Digest)
	if ids, err := s.Agents(); err != nil || len(ids) != 0 {
		t.Errorf("Agents = %v, %v", ids, err)
	}
}

// A draft that was not committed is gone after a restart, whatever was done.
func TestDraftOfAKilledProgram(t *testing.T) {
	for name, step := range map[string]func(*testing.T, *Draft){
		"begun":     func(*testing.T, *Draft) {},
		"described": func(t *testing.T, d *Draft) { writeDescription(t, d) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s, err := Open(slog.New(slog.DiscardHandler), dir)
			if err != nil {
				t.Fatal(err)
			}
			base := importSimple(t, s, "a")
			step(t, draft(t, s))
			if err := s.Close(false); err != nil {
				t.Fatal(err)
			}
			s = openStore(t, dir)
			noStaging(t, s)
			if all, err := s.List(); err != nil || len(all) != 1 || all[0].Digest != base.Digest {
				t.Errorf("List = %v, %v; want the base", all, err)
			}
		})
	}
}

func writeDescription(t *testing.T, d *Draft) {
	t.Helper()
	m := memoryOf("sha256:" + strings.Repeat("0", 64))
	if err := writeArtifact(d.image, Artifact{Kind: KindMemory, Memory: &m}); err != nil {
		t.Fatal(err)
	}
}
