package daemon

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"
)

// Config is a component's configuration. Validate reports all faults at once,
// each naming its field; errors.Join puts them together.
type Config interface {
	Validate() error
}

// LoadConfig reads a JSON file over what cfg, a pointer to a struct with its
// defaults, holds already, refuses keys that cfg does not have, and validates
// the result. The path "" reads nothing and validates the defaults.
func LoadConfig(path string, cfg Config) error {
	if path != "" {
		data, err := os.ReadFile(path)
		if err != nil {
			return fmt.Errorf("read the configuration: %w", err)
		}
		if err := decode(data, cfg); err != nil {
			return fmt.Errorf("configuration %s: %w", path, err)
		}
	}
	if err := cfg.Validate(); err != nil {
		return fmt.Errorf("configuration %s:\n%w", path, err)
	}
	return nil
}

func decode(data []byte, cfg Config) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(cfg); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			return fmt.Errorf("line %d: %w", 1+bytes.Count(data[:syntax.Offset], []byte("\n")), err)
		}
		return err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is more after the closing brace")
	}
	return nil
}

// Duration is a time.Duration that a configuration writes as "1m30s".
type Duration time.Duration

// UnmarshalJSON reads a string such as "1m30s".
func (d *Duration) UnmarshalJSON(data []byte) error {
	var s string
	if err := json.Unmarshal(data, &s); err != nil {
		return fmt.Errorf("duration %s: want a string such as \"1m30s\"", data)
	}
	v, err := time.ParseDuration(s)
	if err != nil {
		return fmt.Errorf("duration %q: want a string such as \"1m30s\"", s)
	}
	*d = Duration(v)
	return nil
}

// MarshalJSON writes the string that UnmarshalJSON reads.
func (d Duration) MarshalJSON() ([]byte, error) {
	return json.Marshal(time.Duration(d).String())
}
