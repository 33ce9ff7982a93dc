package upper

import (
	"os"
	"path/filepath"
	"testing"
)

// A file with very many holes has a list that readers accept, and all its data.
func TestManyHoles(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "f"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const parts, step = 2*maxExtents + 100, 16 << 10
	for n := range int64(parts) {
		if _, err := f.WriteAt([]byte{1}, n*step); err != nil {
			t.Fatal(err)
		}
	}
	const size = parts * step
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	data, err := dataOf(f, size)
	if err != nil {
		t.Fatal(err)
	}
	if len(data) >= 2*maxExtents {
		t.Errorf("%d parts", len(data))
	}
	at := int64(0)
	for n := range int64(parts) {
		for at < int64(len(data)) && data[at].end() <= n*step {
			at++
		}
		if at == int64(len(data)) || data[at].start > n*step {
			t.Fatalf("the byte at %d is in no part", n*step)
		}
	}
}
