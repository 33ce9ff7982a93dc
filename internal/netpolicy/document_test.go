package netpolicy

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const document = "../../docs/concepts/network.md"

// table is a table of the document.
type table struct {
	line int // of its head
	head string
	rows [][]string
}

// tables reads the document's tables. A cell is returned without the backticks
// around it.
func tables(t *testing.T) []table {
	t.Helper()
	data, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	var all []table
	inside := false
	for i, line := range strings.Split(string(data), "\n") {
		if !strings.HasPrefix(line, "|") {
			inside = false
			continue
		}
		if !inside {
			all = append(all, table{line: i + 1, head: line})
			inside = true
			continue
		}
		if strings.HasPrefix(line, "|---") {
			continue
		}
		var cells []string
		for cell := range strings.SplitSeq(strings.Trim(line, "|"), "|") {
			cells = append(cells, strings.Trim(strings.TrimSpace(cell), "`"))
		}
		last := &all[len(all)-1]
		last.rows = append(last.rows, cells)
	}
	return all
}

// ask answers a query in the words of the document.
func ask(t *testing.T, p *Policy, asked string) Decision {
	t.Helper()
	if name, ok := strings.CutPrefix(asked, "dns "); ok {
		return p.Resolve(name)
	}
	if name, ok := strings.CutPrefix(asked, "link "); ok {
		d := p.Link(name)
		if d.Allow && d.Rule != "" {
			t.Errorf("a link is allowed by rule %q: only what denies names one", d.Rule)
		}
		return d
	}
	name, at, both := strings.Cut(asked, " at ")
	if !both {
		at = asked
	}
	q, err := ParseQuery(at)
	if err != nil {
		t.Fatal(err)
	}
	if both {
		q.Name = name
	}
	return p.Decide(q)
}

// The tables of precedence in the document are what Decide does.
func TestTruthTables(t *testing.T) {
	cases, used := 0, 0
	for _, tab := range tables(t) {
		if tab.head != "| rules | asked | answer | by |" {
			continue
		}
		used++
		var p *Policy
		var written string
		for i, row := range tab.rows {
			where := fmt.Sprintf("line %d", tab.line+2+i)
			if row[0] != "" {
				var rules map[string]bool
				if err := json.Unmarshal([]byte(row[0]), &rules); err != nil {
					t.Fatalf("%s: %v", where, err)
				}
				var err error
				if p, err = Parse(rules); err != nil {
					t.Fatalf("%s: %v", where, err)
				}
				written = row[0]
			}
			cases++
			d := ask(t, p, row[1])
			answer, by := "deny", d.Rule
			if d.Allow {
				answer = "allow"
			}
			if by == "" {
				by = "–"
			}
			if got := []string{answer, by}; !slices.Equal(got, row[2:4]) {
				t.Errorf("%s: %s, %s: got %v, the document says %v (%s)", where, written, row[1], got, row[2:4], d.Why)
			}
			if d.Why == "" {
				t.Errorf("%s: no reason is given", where)
			}
		}
	}
	if cases < 150 || used < 5 {
		t.Errorf("the document has %d cases in %d tables: want at least 150 in 5", cases, used)
	}
}

func TestDocumentListsPresets(t *testing.T) {
	want := map[string]string{}
	for _, p := range Presets() {
		want[p.Name] = p.About
	}
	if diff := cmp.Diff(want, listed(t, "| preset | is for |")); diff != "" {
		t.Errorf("presets (-program +document):\n%s", diff)
	}
}

func TestDocumentListsRanges(t *testing.T) {
	want := map[string]string{}
	for _, r := range Ranges() {
		want[r.Prefix.String()] = r.What
	}
	if diff := cmp.Diff(want, listed(t, "| range | what |")); diff != "" {
		t.Errorf("ranges (-program +document):\n%s", diff)
	}
}

// What no rule opens is listed, refused when a rule is for nothing else, and
// nowhere in the tables of what rules mean.
func TestDocumentListsClosed(t *testing.T) {
	want := map[string]string{}
	for _, r := range closed {
		want[r.Prefix.String()] = r.What
	}
	if diff := cmp.Diff(want, listed(t, "| opened by no rule | what |")); diff != "" {
		t.Errorf("closed ranges (-program +document):\n%s", diff)
	}
	for _, tab := range tables(t) {
		if tab.head != "| rules | asked | answer | by |" {
			continue
		}
		for _, row := range tab.rows {
			rules := map[string]bool{}
			if row[0] != "" && json.Unmarshal([]byte(row[0]), &rules) == nil {
				if err := Check(rules); err != nil {
					t.Errorf("the document shows what is refused: %v", err)
				}
			}
		}
	}
}

// listed returns a table of two columns.
func listed(t *testing.T, head string) map[string]string {
	t.Helper()
	got := map[string]string{}
	for _, tab := range tables(t) {
		if tab.head != head {
			continue
		}
		for _, row := range tab.rows {
			got[row[0]] = row[1]
		}
	}
	if len(got) == 0 {
		t.Fatalf("the document has no table %q", head)
	}
	return got
}

// The forms that the document's table of rules shows are accepted.
func TestDocumentRuleForms(t *testing.T) {
	for _, forms := range slices.Collect(maps.Keys(listed(t, "| rule | is for |"))) {
		for form := range strings.SplitSeq(forms, "`, `") {
			if _, err := Parse(map[string]bool{form: true}); err != nil {
				t.Error(err)
			}
		}
	}
}
