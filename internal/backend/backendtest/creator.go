package backendtest

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/kernflux/opendsec/internal/backend"
)

// jobVariable tells a process that it is a creator: another process that makes
// machines and then is killed.
const jobVariable = "OPENDSEC_BACKENDTEST_JOB"

// job is what a creator does.
type job struct {
	Place   Place
	Configs []backend.Config
	Pause   bool // whether it pauses each machine
	// Snapshots is a directory where it then writes snapshots of the last
	// machine, one after another without an end; "" for none.
	Snapshots string
	Memory    bool // whether they are with memory
}

// Lines that a creator writes begin with one of these.
const (
	creating = "BACKENDTEST-CREATING "
	created  = "BACKENDTEST-CREATED "
	writing  = "BACKENDTEST-SNAPSHOT "
)

// create is the creator's side: it makes the machines one after another, does
// with them what it is told, says so, and waits to be killed.
func create(t *testing.T, k Kind, text string) {
	var j job
	if err := json.Unmarshal([]byte(text), &j); err != nil {
		t.Fatal(err)
	}
	j.Place.Log = slog.New(slog.NewTextHandler(os.Stderr, nil))
	b := k.Open(t, j.Place)
	if _, err := b.Probe(context.Background()); err != nil {
		t.Fatal(err)
	}
	var i backend.Instance
	for _, cfg := range j.Configs {
		fmt.Println(creating + string(cfg.ID))
		var err error
		if i, err = b.Create(context.Background(), cfg); err != nil {
			t.Fatal(err)
		}
		if j.Pause {
			if err := i.(backend.Pauser).Pause(context.Background()); err != nil {
				t.Fatal(err)
			}
		}
		h, err := json.Marshal(i.Handle())
		if err != nil {
			t.Fatal(err)
		}
		fmt.Println(created + string(h))
	}
	for n := 0; j.Snapshots != ""; n++ {
		dir := filepath.Join(j.Snapshots, strconv.Itoa(n))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		fmt.Println(writing + dir)
		if _, err := i.(backend.Snapshotter).Snapshot(context.Background(), backend.SnapshotOptions{Dir: dir, Memory: j.Memory}); err != nil {
			t.Fatal(err)
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Fatal(err)
		}
	}
	select {}
}

// creator is a running creator, seen from the test.
type creator struct {
	env   *env
	cmd   *exec.Cmd
	lines *bufio.Scanner
}

// startCreator starts this test's program again as a creator.
func (e *env) startCreator(configs ...backend.Config) *creator {
	e.Helper()
	return e.startJob(job{Configs: configs})
}

// startJob starts a creator at the test's place.
func (e *env) startJob(j job) *creator {
	e.Helper()
	j.Place = e.place
	j.Place.Log = nil
	text, err := json.Marshal(j)
	if err != nil {
		e.Fatal(err)
	}
	top, _, _ := strings.Cut(e.Name(), "/")
	cmd := exec.Command(os.Args[0], "-test.run=^"+top+"$", "-test.v")
	cmd.Env = append(os.Environ(), jobVariable+"="+string(text))
	cmd.Stderr = e.logs
	out, err := cmd.StdoutPipe()
	if err != nil {
		e.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		e.Fatal(err)
	}
	c := &creator{env: e, cmd: cmd, lines: bufio.NewScanner(out)}
	e.Cleanup(c.kill)
	return c
}

// next returns the rest of the creator's next line with a beginning.
func (c *creator) next(beginning string) string {
	c.env.Helper()
	for c.lines.Scan() {
		if _, rest, ok := strings.Cut(c.lines.Text(), beginning); ok {
			return rest
		}
	}
	c.env.Fatalf("the creator ended: %v", c.lines.Err())
	return ""
}

// handle waits until a machine is made and returns its handle.
func (c *creator) handle() backend.Handle {
	c.env.Helper()
	var h backend.Handle
	if err := json.Unmarshal([]byte(c.next(created)), &h); err != nil {
		c.env.Fatal(err)
	}
	return h
}

// kill ends the creator without a chance to do anything about it.
func (c *creator) kill() {
	if c.cmd.ProcessState != nil {
		return
	}
	if err := c.cmd.Process.Kill(); err != nil {
		c.env.Errorf("kill the creator: %v", err)
	}
	_ = c.cmd.Wait() // says that it was killed
}
