package layer_test

import (
	"archive/tar"
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/image/imagetest"
	"github.com/kernflux/opendsec/internal/image/layer"
)

// FuzzApply lays two archives over each other and looks at what is beside the
// tree, and whether the tree can be removed.
func FuzzApply(f *testing.F) {
	f.Add(
		imagetest.Tar(f, dir("d"), file("d/a", "x"), symlink("l", ".."), symlink("m", "/proc/self/root"), link("h", "d/a")),
		imagetest.Tar(f, file("l/witness", "x"), file("d/.wh.a", ""), file("d/.wh..wh..opq", ""), file("m/x", ""), file("../y", "")),
	)
	f.Add(
		imagetest.Tar(f, dir("d"), symlink("d", "../.."), imagetest.Device(tar.TypeChar, "c", 1, 3), file("f", "").Xattr("user.a", "b")),
		imagetest.Tar(f, link("h", "../../witness"), file("d/e/f", ""), dir("f"), file("f/g", "")),
	)
	f.Fuzz(func(t *testing.T, lower, upper []byte) {
		tree := newTree(t)
		witness := filepath.Join(filepath.Dir(tree), "witness")
		if err := os.WriteFile(witness, []byte("w"), 0o600); err != nil {
			t.Fatal(err)
		}
		a, err := layer.New(tree, layer.Limits{Bytes: 1 << 16, Entries: 100}, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, l := range [][]byte{lower, upper} {
			if err := a.Apply(t.Context(), bytes.NewReader(l)); err != nil {
				if k := fault.Of(err).Kind; k != fault.InvalidArgument && k != fault.Internal {
					t.Errorf("Apply = %v", err)
				}
				break
			}
		}
		if err := a.Close(); err != nil {
			t.Fatal(err)
		}
		around, err := os.ReadDir(filepath.Dir(tree))
		if err != nil || len(around) != 2 {
			t.Errorf("beside the tree there is %v, %v", around, err)
		}
		if b, err := os.ReadFile(witness); err != nil || string(b) != "w" {
			t.Errorf("a file beside the tree changed: %q, %v", b, err)
		}
		if err := os.RemoveAll(tree); err != nil {
			t.Errorf("the tree cannot be removed: %v", err)
		}
	})
}
