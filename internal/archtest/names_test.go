package archtest

import (
	"go/ast"
	"path"
	"regexp"
	"slices"
	"strings"
	"testing"
)

func TestEveryPackageSaysWhatItIs(t *testing.T) {
	docs := map[string]string{}
	for _, s := range sources(t) {
		if s.test() || s.generated() {
			continue
		}
		if _, seen := docs[s.pkg]; !seen {
			docs[s.pkg] = ""
		}
		if s.file.Doc == nil {
			continue
		}
		text := s.file.Doc.Text()
		name := s.file.Name.Name
		if name != "main" && !strings.HasPrefix(text, "Package "+name+" ") {
			t.Errorf("%s: the comment must begin with \"Package %s\"", s.path, name)
		}
		if docs[s.pkg] != "" {
			t.Errorf("%s: the package has a second comment", s.path)
		}
		docs[s.pkg] = text
	}
	for pkg, text := range docs {
		if len(text) < 40 {
			t.Errorf("%s: its package comment does not say what it is and what not: %q", pkg, text)
		}
	}
}

// vague are names that say nothing of what a package holds.
var vague = []string{"util", "utils", "common", "helper", "helpers", "types", "models", "core", "base", "misc", "lib", "shared", "pkg"}

func TestNoVaguePackageNames(t *testing.T) {
	for _, s := range sources(t) {
		for _, name := range []string{path.Base(s.pkg), s.file.Name.Name} {
			if slices.Contains(vague, name) {
				t.Errorf("%s: a package named %q could hold anything; name it after what it does", s.path, name)
			}
		}
	}
}

const (
	maxLines  = 700
	maxParams = 6
)

func TestNothingGrowsTooLarge(t *testing.T) {
	for _, s := range sources(t) {
		if s.generated() {
			continue
		}
		if s.lines >= maxLines {
			t.Errorf("%s has %d lines: what does it hide?", s.path, s.lines)
		}
		for _, d := range s.file.Decls {
			f, ok := d.(*ast.FuncDecl)
			if !ok {
				continue
			}
			if n := f.Type.Params.NumFields(); n > maxParams {
				t.Errorf("%s: %s has %d parameters: a struct is missing", s.path, f.Name.Name, n)
			}
		}
	}
}

var unfinished = regexp.MustCompile(`\b(TODO|FIXME|XXX|HACK)\b`)

func TestNothingIsPutOff(t *testing.T) {
	for _, s := range sources(t) {
		if s.pkg == "internal/archtest" {
			continue
		}
		for _, group := range s.file.Comments {
			if m := unfinished.FindString(group.Text()); m != "" {
				t.Errorf("%s: %s: finish it, or file it", s.fset.Position(group.Pos()), m)
			}
		}
	}
}

// A test that sleeps is slow where it passes and fails where the machine is
// slower; it must wait for what it wants to see. Where no event announces that,
// a loop with a condition may look again after a moment.
func TestNoTestSleeps(t *testing.T) {
	for _, s := range sources(t) {
		if !s.test() || slices.Contains(s.imports(), "testing/synctest") { // sleeps in a bubble take no time
			continue
		}
		polls := map[ast.Node]bool{}
		ast.Inspect(s.file, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ForStmt:
				if n.Cond != nil {
					for _, stmt := range n.Body.List {
						if e, ok := stmt.(*ast.ExprStmt); ok {
							polls[e.X] = true
						}
					}
				}
			case *ast.CallExpr:
				sel, ok := n.Fun.(*ast.SelectorExpr)
				if !ok || sel.Sel.Name != "Sleep" || polls[n] {
					return true
				}
				if x, ok := sel.X.(*ast.Ident); ok && x.Name == "time" {
					t.Errorf("%s: time.Sleep in a test", s.fset.Position(n.Pos()))
				}
			}
			return true
		})
	}
}
