package archtest

import (
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	mdLink   = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	mdPath   = regexp.MustCompile("`((?:api|cmd|internal|sdk|deploy|docs|test|\\.ci)/[A-Za-z0-9_./-]*)`")
	lineCite = regexp.MustCompile(`[a-z_]+\.go:[0-9]+`)
)

// Documents point at files that exist, and never at a line, which moves.
func TestDocumentsPointAtWhatExists(t *testing.T) {
	top := root(t)
	exists := func(p string) bool {
		_, err := os.Stat(filepath.Join(top, filepath.FromSlash(p)))
		return err == nil
	}
	walk(t, ".md", func(file string, data []byte) {
		text := string(data)
		for _, m := range mdLink.FindAllStringSubmatch(text, -1) {
			target, _, _ := strings.Cut(m[1], "#")
			if target == "" || strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			p := path.Join(path.Dir(file), target)
			if strings.HasPrefix(target, "/") {
				p = target[1:]
			}
			if !exists(p) {
				t.Errorf("%s links to %s, which does not exist", file, m[1])
			}
		}
		for _, m := range mdPath.FindAllStringSubmatch(text, -1) {
			if !exists(m[1]) {
				t.Errorf("%s names %s, which does not exist", file, m[1])
			}
		}
		if m := lineCite.FindString(text); m != "" {
			t.Errorf("%s cites %s: name the function, lines move", file, m)
		}
	})
}
