package patch

import (
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/google/go-cmp/cmp"
)

// TestApplies fails when go.mod has another version of the module than the
// diffs are for, or one that they do not fit.
func TestApplies(t *testing.T) {
	top, err := project()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := source(top)
	if err != nil {
		t.Fatal(err)
	}
	changed, err := apply(os.DirFS(dir))
	if err != nil {
		t.Fatalf("the diffs do not fit the module any more: %v", err)
	}
	if len(changed) == 0 {
		t.Error("the diffs change nothing")
	}
	for name, text := range changed {
		if _, err := parser.ParseFile(token.NewFileSet(), name, text, 0); strings.HasSuffix(name, ".go") && err != nil {
			t.Errorf("%s is no Go any more: %v", name, err)
		}
	}
}

// TestStateCodec saves and loads random graphs of objects with the codec that the
// diffs change; see testdata/roundtrip.
func TestStateCodec(t *testing.T) {
	top, err := project()
	if err != nil {
		t.Fatal(err)
	}
	modfile, err := prepare(top)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("go", "run", "-modfile="+modfile, "./internal/backend/gvisor/patch/testdata/roundtrip",
		strconv.FormatInt(time.Now().UnixNano()>>20, 10), "30", "40")
	cmd.Dir = top
	if said, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v: %v\n%s", cmd.Args, err, said)
	}
}

func TestVersion(t *testing.T) {
	for version, want := range map[string]bool{
		Version():                    true,
		Version() + "+opendsec.1":    true,
		Pinned:                       false,
		Pinned + "+opendsec.1":       false,
		"VERSION_MISSING+opendsec.1": false,
	} {
		if got := Has(version); got != want {
			t.Errorf("Has(%q) = %t; want %t", version, got, want)
		}
	}
}

const someDiff = `What it is for.

diff --git a/x b/x
--- a/x
+++ b/x
@@ -1,2 +1,3 @@ about
 one
+one and a half
 two
@@ -4,2 +5,1 @@
-four
 five
diff --git a/new b/new
--- /dev/null
+++ b/new
@@ -0,0 +1,2 @@
+a
+b
`

func TestApplyDiff(t *testing.T) {
	module := fstest.MapFS{"x": {Data: []byte("one\ntwo\nthree\nfour\nfive\nsix")}}
	got := map[string][]byte{}
	if err := applyDiff(module, got, someDiff); err != nil {
		t.Fatal(err)
	}
	want := map[string][]byte{
		"x":   []byte("one\none and a half\ntwo\nthree\nfive\nsix"),
		"new": []byte("a\nb\n"),
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("applied (-want +got):\n%s", d)
	}
}

func TestApplyDiffThatDoesNotFit(t *testing.T) {
	module := fstest.MapFS{"x": {Data: []byte("one\ntwo\nfour\nfive\n")}}
	for name, diff := range map[string]string{
		"other lines":     someDiff,
		"another file":    strings.ReplaceAll(someDiff, "/x", "/y"),
		"two names":       strings.Replace(someDiff, "--- a/x", "--- a/y", 1),
		"outside":         strings.Replace(someDiff, "+++ b/x", "+++ b/../x", 1),
		"cut off":         "--- a/x\n",
		"too few lines":   "--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n one\n",
		"a head's number": "--- a/x\n+++ b/x\n@@ -a,3 +1,3 @@\n one\n",
		"behind the end":  "--- a/x\n+++ b/x\n@@ -9,1 +9,1 @@\n-one\n+two\n",
	} {
		if err := applyDiff(module, map[string][]byte{}, diff); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
}
