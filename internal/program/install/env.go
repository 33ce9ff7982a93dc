package install

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"
)

// setEnv sets variables in a file of "export NAME=value" lines, those in
// missing only where the file does not have them. A value of "" leaves the
// file's. All other lines stay as they are.
func setEnv(path string, set, missing map[string]string) error {
	data, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("read env file: %w", err)
	}
	var lines []string
	has := map[string]bool{}
	for line := range strings.Lines(string(data)) {
		line = strings.TrimRight(line, "\r\n")
		if name, _, ok := assignment(line); ok {
			has[name] = true
			if v := set[name]; v != "" {
				line = "export " + name + "=" + v
			}
		}
		lines = append(lines, line)
	}
	for _, vars := range []map[string]string{set, missing} {
		for _, name := range slices.Sorted(maps.Keys(vars)) {
			if v := vars[name]; v != "" && !has[name] {
				lines = append(lines, "export "+name+"="+v)
			}
		}
	}
	if len(lines) == 0 {
		return nil
	}
	return replace(path, []byte(strings.Join(lines, "\n")+"\n"))
}

// assignment reads a line that sets a variable.
func assignment(line string) (name, value string, ok bool) {
	line = strings.TrimSpace(line)
	name, value, ok = strings.Cut(strings.TrimSpace(strings.TrimPrefix(line, "export ")), "=")
	if !ok || strings.HasPrefix(line, "#") {
		return "", "", false
	}
	for _, quote := range []string{`"`, "'"} {
		if len(value) > 1 && strings.HasPrefix(value, quote) && strings.HasSuffix(value, quote) {
			value = value[1 : len(value)-1]
		}
	}
	return name, value, true
}

// ReadEnv reads the names and values of an env file, in its order.
func ReadEnv(path string) ([][2]string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read env file: %w", err)
	}
	var vars [][2]string
	for line := range strings.Lines(string(data)) {
		if name, value, ok := assignment(line); ok {
			vars = append(vars, [2]string{name, value})
		}
	}
	return vars, nil
}
