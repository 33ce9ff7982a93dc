package netpolicy

import (
	"embed"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

// Each file of presets is a preset, named after it: its comment says what it is
// for, and each further line is a rule that it stands for.
//
//go:embed presets/*.txt
var presetFiles embed.FS

// Preset is a named list of rules.
type Preset struct {
	Name  string   `json:"name"`
	About string   `json:"about"` // a sentence
	Rules []string `json:"rules"` // in the form that Parse reads

	entries []rule
}

// Presets returns all presets by name.
func Presets() []Preset {
	var all []Preset
	for _, name := range slices.Sorted(maps.Keys(presets())) {
		p := presets()[name]
		p.Rules, p.entries = slices.Clone(p.Rules), nil
		all = append(all, p)
	}
	return all
}

// presets reads the files once. They are a part of the program, so one that is
// wrong is a defect; a test reads them all.
var presets = sync.OnceValue(func() map[string]Preset {
	files, err := presetFiles.ReadDir("presets")
	if err != nil {
		panic(err)
	}
	all := map[string]Preset{}
	for _, f := range files {
		data, err := presetFiles.ReadFile("presets/" + f.Name())
		if err != nil {
			panic(err)
		}
		p, err := readPreset(strings.TrimSuffix(f.Name(), ".txt"), string(data))
		if err != nil {
			panic(err)
		}
		all[p.Name] = p
	}
	return all
})

// readPreset reads a preset's file.
func readPreset(name, text string) (Preset, error) {
	p := Preset{Name: name}
	var about []string
	for line := range strings.Lines(text) {
		line = strings.TrimSpace(line)
		if comment, ok := strings.CutPrefix(line, "#"); ok {
			about = append(about, strings.TrimSpace(comment))
			continue
		}
		if line == "" {
			continue
		}
		r, err := parseRule(line, true)
		if err != nil {
			return Preset{}, fmt.Errorf("preset %s: %w", name, err)
		}
		if r.kind != aName && r.kind != below {
			return Preset{}, fmt.Errorf("preset %s: %q: a preset is of domains", name, line)
		}
		p.Rules = append(p.Rules, line)
		p.entries = append(p.entries, *r)
	}
	p.About = strings.Join(about, " ")
	if p.About == "" || len(p.Rules) == 0 {
		return Preset{}, fmt.Errorf("preset %s: want a comment that says what it is for, and rules", name)
	}
	return p, nil
}
