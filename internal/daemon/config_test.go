package daemon_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kernflux/opendsec/internal/daemon"
)

type config struct {
	Name string          `json:"name"`
	Wait daemon.Duration `json:"wait"`
	Port int             `json:"port"`
}

func (c *config) Validate() error {
	var all []error
	if c.Name == "" {
		all = append(all, errors.New("name: must be given"))
	}
	if c.Port < 0 {
		all = append(all, errors.New("port: must not be negative"))
	}
	return errors.Join(all...)
}

func TestLoadConfig(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		want config
		errs []string
	}{
		"whole":           {`{"name": "a", "wait": "1m30s", "port": 7}`, config{"a", daemon.Duration(90 * time.Second), 7}, nil},
		"over defaults":   {`{"name": "a"}`, config{"a", daemon.Duration(time.Second), 0}, nil},
		"unknown key":     {`{"name": "a", "prot": 7}`, config{}, []string{"prot"}},
		"all faults":      {`{"port": -1}`, config{}, []string{"name: must be given", "port: must not be negative"}},
		"bad duration":    {`{"name": "a", "wait": "soon"}`, config{}, []string{`"soon"`}},
		"number duration": {`{"name": "a", "wait": 5}`, config{}, []string{"5", "1m30s"}},
		"broken":          {"{\n\"name\": }", config{}, []string{"line 2"}},
		"more after":      {`{"name": "a"} {}`, config{}, []string{"after the closing brace"}},
		"cut":             {`{"name": "a"`, config{}, []string{"EOF"}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "c.json")
			if err := os.WriteFile(path, []byte(c.file), 0o600); err != nil {
				t.Fatal(err)
			}
			got := config{Wait: daemon.Duration(time.Second)}
			err := daemon.LoadConfig(path, &got)
			if len(c.errs) == 0 {
				if err != nil || got != c.want {
					t.Errorf("got %+v, %v; want %+v", got, err, c.want)
				}
				return
			}
			for _, want := range append(c.errs, path) {
				if err == nil || !strings.Contains(err.Error(), want) {
					t.Errorf("got %v, want %q in it", err, want)
				}
			}
		})
	}
	if err := daemon.LoadConfig("", &config{Name: "a"}); err != nil {
		t.Errorf("defaults alone: %v", err)
	}
	if err := daemon.LoadConfig("", &config{}); err == nil {
		t.Error("faulty defaults were accepted")
	}
	if err := daemon.LoadConfig("/nonexistent/c.json", &config{Name: "a"}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that is not there: %v", err)
	}
}

func TestLogger(t *testing.T) {
	var out bytes.Buffer
	log, err := daemon.Logger(&out, "edge", "warn")
	if err != nil {
		t.Fatal(err)
	}
	log.Info("unheard")
	log.Warn("heard", "n", 1)
	if got := out.String(); strings.Contains(got, "unheard") || !strings.Contains(got, "component=edge n=1") || !strings.Contains(got, "Z level=WARN") {
		t.Errorf("got %q", got)
	}
	if _, err := daemon.Logger(&out, "edge", "loud"); err == nil {
		t.Error("a level that does not exist was accepted")
	}
}
