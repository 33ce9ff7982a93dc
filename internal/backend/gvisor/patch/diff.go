package patch

import (
	"errors"
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// A diff is in the unified form, with paths that begin with "a/" and "b/". What
// precedes a file's "---" line is for people. Files are changed or added. A
// diff applies at the very lines that it names, or not at all.

// applyDiff applies a diff to files of the module, as changed has them or the
// module, and leaves them in changed.
func applyDiff(module fs.FS, changed map[string][]byte, diff string) error {
	lines := strings.SplitAfter(diff, "\n")
	for n := 0; n < len(lines); {
		if !strings.HasPrefix(lines[n], "--- ") {
			n++
			continue
		}
		if n+1 == len(lines) {
			return errors.New("it ends in a file's head")
		}
		name, isNew, err := fileOf(lines[n], lines[n+1])
		if err != nil {
			return fmt.Errorf("line %d: %w", n+1, err)
		}
		old, ok := changed[name]
		if !ok && !isNew {
			if old, err = fs.ReadFile(module, name); err != nil {
				return err
			}
		}
		e := editor{old: strings.SplitAfter(string(old), "\n")}
		for n += 2; n < len(lines) && strings.HasPrefix(lines[n], "@@ "); {
			used, err := e.hunk(lines[n:])
			if err != nil {
				return fmt.Errorf("%s: the hunk of line %d: %w", name, n+1, err)
			}
			n += used
		}
		changed[name] = []byte(e.text())
	}
	return nil
}

// fileOf reads a file's head.
func fileOf(from, to string) (name string, isNew bool, err error) {
	word := func(line, prefix string) string {
		s, _, _ := strings.Cut(strings.TrimSpace(strings.TrimPrefix(line, prefix)), "\t")
		return s
	}
	name, ok := strings.CutPrefix(word(to, "+++ "), "b/")
	if !ok || !fs.ValidPath(name) || path.Clean(name) != name {
		return "", false, fmt.Errorf("%q names no file", to)
	}
	old := word(from, "--- ")
	if old != "/dev/null" && old != "a/"+name {
		return "", false, fmt.Errorf("%q is not the file %s", from, name)
	}
	return name, old == "/dev/null", nil
}

// editor makes a new text of an old one, from its beginning to its end.
type editor struct {
	old  []string // its lines, with their ends
	done int      // lines of old that were dealt with
	out  strings.Builder
}

// hunk applies the hunk at the beginning of lines and returns how many of them
// it takes.
func (e *editor) hunk(lines []string) (used int, err error) {
	start, count, err := position(lines[0])
	if err != nil {
		return 0, err
	}
	if count > 0 {
		start-- // lines count from 1
	}
	if start < e.done || start > len(e.old) {
		return 0, fmt.Errorf("it begins at line %d, outside of the text", start+1)
	}
	for ; e.done < start; e.done++ {
		e.out.WriteString(e.old[e.done])
	}
	end := start + count
	for used = 1; used < len(lines); used++ {
		line := lines[used]
		if line == "" || strings.HasPrefix(line, "@@ ") || strings.HasPrefix(line, "diff ") || e.done == end && strings.HasPrefix(line, "--- ") {
			break
		}
		switch line[0] {
		case '+':
			e.out.WriteString(line[1:])
			continue
		case ' ', '-':
		default:
			return 0, fmt.Errorf("line %q is of no kind", line)
		}
		if e.done == len(e.old) || e.old[e.done] != line[1:] {
			return 0, fmt.Errorf("line %d is not %q", e.done+1, line[1:])
		}
		if line[0] == ' ' {
			e.out.WriteString(line[1:])
		}
		e.done++
	}
	if e.done != end {
		return 0, fmt.Errorf("it covers %d lines and says %d", e.done-start, count)
	}
	return used, nil
}

// position reads where a hunk is in the old text: "@@ -START,COUNT +…".
func position(line string) (start, count int, err error) {
	fields := strings.Fields(line)
	if len(fields) < 3 || !strings.HasPrefix(fields[1], "-") {
		return 0, 0, fmt.Errorf("%q is no hunk's head", line)
	}
	first, second, ok := strings.Cut(fields[1][1:], ",")
	if start, err = strconv.Atoi(first); err != nil {
		return 0, 0, fmt.Errorf("%q is no hunk's head", line)
	}
	if !ok {
		return start, 1, nil
	}
	if count, err = strconv.Atoi(second); err != nil {
		return 0, 0, fmt.Errorf("%q is no hunk's head", line)
	}
	return start, count, nil
}

// text returns the new text, once all hunks are applied.
func (e *editor) text() string {
	for ; e.done < len(e.old); e.done++ {
		e.out.WriteString(e.old[e.done])
	}
	return e.out.String()
}
