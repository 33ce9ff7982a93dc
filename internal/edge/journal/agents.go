package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"slices"
)

// Agents returns the IDs of the agents that the sandboxes of the journal in dir
// have in their machines or saved states, in order. It fails when an entry does
// not name its agent, as those of earlier versions: then any may be needed. No
// journal is one without sandboxes.
func Agents(dir string) ([]string, error) {
	entries, _, err := (&Journal{dir: dir}).Load()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var ids []string
	for _, e := range entries {
		switch {
		case e.Phase == Ended: // has none any more
		case e.Agent == "":
			return nil, fmt.Errorf("sandbox %s is of a version that did not write down its agent", e.ID)
		default:
			ids = append(ids, e.Agent)
		}
	}
	slices.Sort(ids)
	return slices.Compact(ids), nil
}
