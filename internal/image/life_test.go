package image

import (
	"errors"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/internal/fault"
)

// A life is a store with images by name: "base", and memory images on it.
type life struct {
	t      *testing.T
	s      *Store
	dir    string
	digest map[string]string
}

func newLife(t *testing.T) *life {
	l := &life{t: t, dir: t.TempDir(), digest: map[string]string{}}
	l.s = openLife(t, l.dir)
	// Whichever store is open at the end, nothing may be left of it.
	t.Cleanup(func() { closeStore(t, l.s) })
	return l
}

func openLife(t *testing.T, dir string) *Store {
	t.Helper()
	s, err := Open(slog.New(slog.DiscardHandler), dir)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// step does what a line of a test says: a word and an image's name.
func (l *life) step(line string) {
	l.t.Helper()
	verb, name, _ := strings.Cut(line, " ")
	digest := l.digest[name]
	var err error
	switch verb {
	case "import":
		l.digest[name] = importSimple(l.t, l.s, name).Digest
	case "commit":
		l.digest[name] = commit(l.t, l.s, l.digest["base"]).Digest
	case "acquire":
		_, _, err = l.s.Acquire(l.t.Context(), digest)
	case "missing":
		if _, _, err = l.s.Acquire(l.t.Context(), digest); fault.Is(err, fault.NotFound) {
			err = nil
		} else {
			err = errors.Join(err, errors.New("it is there"))
		}
	case "release":
		l.s.Release(digest)
	case "delete":
		err = l.s.Delete(digest)
	case "sweep":
		err = l.s.Sweep()
	case "restart":
		if err := l.s.Close(false); err != nil {
			l.t.Fatal(err)
		}
		l.s = openLife(l.t, l.dir)
	default:
		l.t.Fatalf("unknown step %q", line)
	}
	if err != nil {
		l.t.Fatalf("%s: %v", line, err)
	}
}

// names returns the names of the images with the given digests, in order.
func (l *life) names(digests []string) []string {
	names := []string{}
	for name, digest := range l.digest {
		if slices.Contains(digests, digest) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// check compares what is listed and what is on the disk.
func (l *life) check(listed, there []string) {
	l.t.Helper()
	all, err := l.s.List()
	if err != nil {
		l.t.Fatal(err)
	}
	var digests []string
	for _, a := range all {
		digests = append(digests, a.Digest)
	}
	if diff := cmp.Diff(listed, l.names(digests)); diff != "" {
		l.t.Errorf("listed (-want +got): %s", diff)
	}
	if digests, err = l.s.digests(); err != nil {
		l.t.Fatal(err)
	}
	if diff := cmp.Diff(there, l.names(digests)); diff != "" {
		l.t.Errorf("on the disk (-want +got): %s", diff)
	}
}

func TestLives(t *testing.T) {
	none, base, memory, both := []string{}, []string{"base"}, []string{"m"}, []string{"base", "m"}
	for name, test := range map[string]struct {
		steps         []string
		listed, there []string
	}{
		"deleted":                    {[]string{"import base", "delete base", "delete base", "missing base"}, none, none},
		"deleted while used":         {[]string{"import base", "acquire base", "delete base", "delete base"}, none, base},
		"used on after its deletion": {[]string{"import base", "acquire base", "delete base", "acquire base", "release base"}, none, base},
		"gone with its last user":    {[]string{"import base", "acquire base", "delete base", "release base", "missing base"}, none, none},
		"imported while marked":      {[]string{"import base", "acquire base", "delete base", "import base", "release base"}, base, base},
		"imported again":             {[]string{"import base", "delete base", "import base", "acquire base", "release base"}, base, base},
		"released too often":         {[]string{"import base", "commit m", "acquire base", "release m", "release m", "delete base", "delete m"}, none, base},

		"memory":                     {[]string{"import base", "commit m", "acquire m", "release m"}, both, both},
		"memory deleted":             {[]string{"import base", "commit m", "delete m", "missing m"}, base, base},
		"base deleted first":         {[]string{"import base", "commit m", "delete base", "missing base", "acquire m", "release m"}, memory, both},
		"base, then memory deleted":  {[]string{"import base", "commit m", "delete base", "delete m"}, none, none},
		"base wanted again":          {[]string{"import base", "commit m", "delete base", "import base", "delete m"}, base, base},
		"base of a user of memory":   {[]string{"import base", "commit m", "acquire m", "delete base", "acquire base", "release base"}, memory, both},
		"memory deleted while used":  {[]string{"import base", "commit m", "acquire m", "delete m", "acquire m", "release m"}, base, both},
		"both deleted while used":    {[]string{"import base", "commit m", "acquire m", "delete base", "delete m"}, none, both},
		"both gone with the user":    {[]string{"import base", "commit m", "acquire m", "delete base", "delete m", "release m", "missing m"}, none, none},
		"memory gone, base used":     {[]string{"import base", "commit m", "acquire base", "delete base", "delete m"}, none, base},
		"one of two memories":        {[]string{"import base", "commit m", "commit n", "delete base", "delete n", "missing base"}, memory, both},
		"snapshot of a deleted base": {[]string{"import base", "acquire base", "delete base", "commit m", "release base"}, memory, both},

		"restart":                      {[]string{"import base", "commit m", "restart", "delete base"}, memory, both},
		"restart of a deletion":        {[]string{"import base", "acquire base", "delete base", "restart"}, none, base},
		"its users come back":          {[]string{"import base", "acquire base", "delete base", "restart", "acquire base", "sweep"}, none, base},
		"one comes and goes early":     {[]string{"import base", "acquire base", "delete base", "restart", "acquire base", "release base", "acquire base"}, none, base},
		"its users do not come back":   {[]string{"import base", "acquire base", "delete base", "restart", "sweep", "missing base"}, none, none},
		"its user comes back and ends": {[]string{"import base", "acquire base", "delete base", "restart", "acquire base", "sweep", "release base"}, none, none},
		"deleted again at a restart":   {[]string{"import base", "acquire base", "delete base", "restart", "delete base", "acquire base"}, none, base},
		"imported at a restart":        {[]string{"import base", "acquire base", "delete base", "restart", "import base", "sweep"}, base, base},
		"restart of a memory's base":   {[]string{"import base", "commit m", "delete base", "restart", "sweep", "missing base", "acquire m", "release m"}, memory, both},
		"restart, then both deleted":   {[]string{"import base", "commit m", "delete base", "restart", "sweep", "delete m"}, none, none},
		"restart of both deletions":    {[]string{"import base", "commit m", "acquire m", "delete base", "delete m", "restart", "acquire m", "sweep"}, none, both},
		"both swept":                   {[]string{"import base", "commit m", "acquire m", "delete m", "delete base", "restart", "sweep"}, none, none},
		"two restarts":                 {[]string{"import base", "commit m", "acquire m", "delete m", "restart", "restart", "acquire m", "sweep", "delete base"}, none, both},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLife(t)
			for _, step := range test.steps {
				l.step(step)
			}
			l.check(test.listed, test.there)
			for digest := range maps.Keys(l.s.users) { // so that the end finds all unmounted
				for l.s.usersOf(digest) > 0 {
					l.s.Release(digest)
				}
			}
		})
	}
}

// A deletion that was killed between two steps goes on.
func TestDeletionKilled(t *testing.T) {
	for name, test := range map[string]struct {
		// between brings the store's directory into the state between two steps.
		between func(t *testing.T, dir, image string)
		there   []string
	}{
		"marked": {func(t *testing.T, _, image string) {
			if err := os.WriteFile(filepath.Join(image, deletedName), nil, 0o600); err != nil {
				t.Fatal(err)
			}
		}, []string{"base"}},
		"moved into staging": {func(t *testing.T, dir, image string) {
			if err := os.Rename(image, filepath.Join(dir, stagingName, "delete-"+filepath.Base(image))); err != nil {
				t.Fatal(err)
			}
		}, []string{"base"}},
		"removed in part": {func(t *testing.T, dir, image string) {
			gone := filepath.Join(dir, stagingName, "delete-"+filepath.Base(image))
			if err := errors.Join(os.Rename(image, gone), os.Remove(filepath.Join(gone, artifactName)), os.Remove(filepath.Join(gone, snapshotName, "state"))); err != nil {
				t.Fatal(err)
			}
		}, []string{"base"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLife(t)
			l.step("import base")
			l.step("commit m")
			image, err := l.s.path(l.digest["m"])
			if err != nil {
				t.Fatal(err)
			}
			test.between(t, l.dir, image)
			l.step("restart")
			l.step("sweep")
			l.check(test.there, test.there)
			noStaging(t, l.s)
			l.step("delete base")
			l.check([]string{}, []string{})
		})
	}
}

// What could not be removed from staging does not keep an image of the same
// digest from being deleted.
func TestDeleteOverLeftovers(t *testing.T) {
	s := openStore(t, t.TempDir())
	a := importSimple(t, s, "a")
	left := filepath.Join(s.dir, stagingName, "delete-"+strings.TrimPrefix(a.Digest, "sha256:"))
	if err := os.MkdirAll(filepath.Join(left, "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(a.Digest); err != nil {
		t.Error(err)
	}
	noStaging(t, s)
}

// An image whose description is damaged keeps neither the store from being
// opened nor itself from being deleted.
func TestDamagedDescription(t *testing.T) {
	l := newLife(t)
	l.step("import base")
	l.step("commit m")
	dir, err := l.s.path(l.digest["m"])
	if err != nil {
		t.Fatal(err)
	}
	change(t, filepath.Join(dir, artifactName), func(b []byte) []byte { return b[:len(b)/2] })
	l.step("restart")
	l.step("acquire base")
	l.step("release base")
	if _, err := l.s.Agents(); err == nil {
		t.Errorf("Agents says nothing of an image that cannot be read")
	}
	l.step("delete m")
	l.check([]string{"base"}, []string{"base"})
}

// Users come and go side by side with deletions; what is acquired is whole, and
// in the end nothing is left.
func TestUsedAndDeletedSideBySide(t *testing.T) {
	s := openStore(t, t.TempDir())
	base := importSimple(t, s, "a")
	source := "oci:" + writeLayout(t, simpleImage(t, "a"))
	made := []string{base.Digest}
	for range 3 {
		made = append(made, commit(t, s, base.Digest).Digest)
	}
	var work sync.WaitGroup
	for i := range 4 {
		for _, digest := range made {
			work.Go(func() {
				for range 5 {
					useOnce(t, s, digest)
				}
				if i%2 == 0 {
					if err := s.Delete(digest); err != nil {
						t.Errorf("Delete = %v", err)
					}
				}
			})
		}
	}
	work.Go(func() {
		for range 5 {
			if _, err := s.Import(t.Context(), ImportOptions{Source: source}, nil); err != nil {
				t.Errorf("Import = %v", err)
			}
		}
	})
	work.Go(func() {
		for range 5 {
			if _, err := s.List(); err != nil {
				t.Errorf("List = %v", err)
			}
			if err := s.Sweep(); err != nil {
				t.Errorf("Sweep = %v", err)
			}
			if _, err := s.Agents(); err != nil {
				t.Errorf("Agents = %v", err)
			}
		}
	})
	work.Wait()
	if err := s.Delete(base.Digest); err != nil {
		t.Error(err)
	}
	if left, err := s.digests(); err != nil || len(left) > 0 || len(s.users)+len(s.bases)+len(s.marked) > 0 {
		t.Errorf("left: %v, users %v, bases %v, marks %v, %v", left, s.users, s.bases, s.marked, err)
	}
}

// useOnce acquires an image, unless it is gone, and looks at its files.
func useOnce(t *testing.T, s *Store, digest string) {
	t.Helper()
	root, a, err := s.Acquire(t.Context(), digest)
	if fault.Is(err, fault.NotFound) {
		return
	}
	if err != nil {
		t.Errorf("Acquire = %v", err)
		return
	}
	defer s.Release(digest)
	if b, err := os.ReadFile(filepath.Join(root.Tree, "f")); err != nil || string(b) != "a" {
		t.Errorf("its file is %q, %v", b, err)
	}
	if a.Memory == nil {
		return
	}
	if _, err := os.Stat(filepath.Join(a.Memory.Snapshot.Dir, "state")); err != nil {
		t.Error(err)
	}
}
