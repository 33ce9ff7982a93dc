package journal

import (
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAgents(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "sandboxes")
	if got, err := Agents(dir); err != nil || len(got) != 0 {
		t.Errorf("without a journal: %v, %v", got, err)
	}
	j, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	write := func(e Entry) {
		t.Helper()
		if err := j.Write(&e, Lazy); err != nil {
			t.Fatal(err)
		}
	}
	write(Entry{ID: "sb-aaaaaaaaaaaa", Phase: Running, Agent: "agent-2"})
	write(Entry{ID: "sb-bbbbbbbbbbbb", Phase: Stopping, Agent: "agent-1"})
	write(Entry{ID: "sb-cccccccccccc", Phase: Creating, Agent: "agent-2"})
	write(Entry{ID: "sb-dddddddddddd", Phase: Ended, Agent: "agent-3"})
	got, err := Agents(dir)
	if diff := cmp.Diff([]string{"agent-1", "agent-2"}, got); diff != "" || err != nil {
		t.Error(err, diff)
	}
	write(Entry{ID: "sb-eeeeeeeeeeee", Phase: Running})
	if got, err := Agents(dir); err == nil {
		t.Errorf("with an entry that names no agent: %v", got)
	}
}
