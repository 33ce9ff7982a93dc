package archtest

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
)

const module = "github.com/kernflux/opendsec"

// source is one parsed Go file.
type source struct {
	path  string // from the root, with slashes
	pkg   string // directory of path
	file  *ast.File
	fset  *token.FileSet
	lines int
}

func (s source) test() bool      { return strings.HasSuffix(s.path, "_test.go") }
func (s source) generated() bool { return strings.HasPrefix(s.path, "api/gen/") }

// imports returns the imports of a file; those of ours without the module's path.
func (s source) imports() []string {
	var out []string
	for _, spec := range s.file.Imports {
		p, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			continue // the parser has seen to it
		}
		out = append(out, strings.TrimPrefix(p, module+"/"))
	}
	return out
}

// root returns the directory of go.mod.
func root(t *testing.T) string {
	t.Helper()
	dir, err := os.Getwd()
	if err != nil {
		t.Fatal(err)
	}
	for ; dir != "/"; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
	}
	t.Fatal("no go.mod above the test")
	return ""
}

// skipped are directories that hold no source of ours.
var skipped = map[string]bool{".git": true, "node_modules": true, "bin": true, "dist": true, ".venv": true, "testdata": true}

// walk calls each for the files of the tree with the extension.
func walk(t *testing.T, ext string, each func(path string, data []byte)) {
	t.Helper()
	top := root(t)
	err := filepath.WalkDir(top, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() && (skipped[d.Name()] || path == filepath.Join(top, "build")) { // made, and not the project's text
			return filepath.SkipDir
		}
		if d.IsDir() || filepath.Ext(path) != ext {
			return nil
		}
		data, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(top, path)
		if err != nil {
			return err
		}
		each(filepath.ToSlash(rel), data)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
}

var (
	parsing sync.Once
	parsed  []source
)

// sources returns all Go files of the project.
func sources(t *testing.T) []source {
	t.Helper()
	parsing.Do(func() {
		fset := token.NewFileSet()
		walk(t, ".go", func(path string, data []byte) {
			f, err := parser.ParseFile(fset, path, data, parser.ParseComments|parser.SkipObjectResolution)
			if err != nil {
				t.Fatalf("%s: %v", path, err)
			}
			dir := filepath.ToSlash(filepath.Dir(path))
			parsed = append(parsed, source{path, dir, f, fset, strings.Count(string(data), "\n")})
		})
	})
	return parsed
}
