package ctl_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/ctl"
)

// TestScripts runs the scripts in testdata against one installation, one after
// the other. A script has a project of its own, $OPENDSEC_PROJECT, and besides
// testscript's commands these:
//
//	opendsecctl ARG...       runs it in this process; "!" wants a failure
//	code N                   the exit code of the last run was N
//	input FILE               the next run's standard input
//	id NAME                  $NAME becomes what the last run printed
//	row TEXT...              the last run printed a line with these words in this order
//	lines N                  the last run printed N lines to standard output
//	aligned                  the last run's table has each column at its place
//	json PATH VALUE          the last run's JSON has the value, as in json nodes.0.name x
//	eventually N ARG...      runs opendsecctl until its exit code is N, up to 20 s
func TestScripts(t *testing.T) {
	in := start(t)
	testscript.RunT(serial{t}, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			for _, v := range in.env() {
				env.Setenv(v[0], v[1])
			}
			name := strings.TrimPrefix(filepath.Base(env.WorkDir), "script-")
			env.Setenv("OPENDSEC_PROJECT", "root/"+name)
			env.Setenv("TZ", "UTC")
			r := &run{in: in}
			env.Values[runKey{}] = r
			if code := r.main(env.Getenv, "project", "create", "root/"+name); code != 0 {
				return fmt.Errorf("make the script's project: exit code %d: %s", code, r.stderr.String())
			}
			env.Defer(func() {
				if code := r.main(env.Getenv, "sandbox", "stop", "--all", "--yes"); code != 0 {
					t.Errorf("stop what %s left: %s", name, r.stderr.String())
				}
			})
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"opendsecctl": cmdRun, "code": cmdCode, "input": cmdInput, "id": cmdID, "row": cmdRow, "lines": cmdLines,
			"aligned": cmdAligned, "json": cmdJSON, "eventually": cmdEventually,
		},
	})
	t.Run("terminal", func(t *testing.T) { barOnTerminal(t, in) })
}

// barOnTerminal imports an image with a terminal as standard error: it shows a
// bar that is gone at the end, where others get lines.
func barOnTerminal(t *testing.T, in *installation) {
	terminal, screen := openTerminal(t)
	shown := make(chan string, 1)
	go func() {
		b, _ := io.ReadAll(screen) // ends with an error once the terminal is closed
		shown <- string(b)
	}()
	ctx, cancel := in.context()
	defer cancel()
	var out bytes.Buffer
	app := &ctl.App{Env: in.get, Stdout: &out, Stderr: terminal}
	code := app.Main(ctx, []string{"image", "import", "docker-archive:" + in.get("SMALL"), "root/bar"})
	terminal.Close()
	text := <-shown
	if code != 0 || !strings.Contains(out.String(), "root/bar:latest") || strings.Contains(out.String(), "\r") {
		t.Errorf("exit code %d, %q", code, out.String())
	}
	if strings.Count(text, "\r") < 2 || strings.Contains(text, "\n") {
		t.Errorf("the terminal shows %q; want a line that is painted over", text)
	}
}

// openTerminal returns a terminal, and what reads its screen.
func openTerminal(t *testing.T) (terminal, screen *os.File) {
	screen, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { screen.Close() })
	if err := unix.IoctlSetPointerInt(int(screen.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(screen.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	terminal, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	return terminal, screen
}

// serial runs scripts one after the other: some of them change the node.
type serial struct{ *testing.T }

func (serial) Parallel()     {}
func (serial) Verbose() bool { return testing.Verbose() }
func (s serial) Run(name string, f func(testscript.T)) {
	s.T.Run(name, func(t *testing.T) { f(serial{t}) })
}

type runKey struct{}

// run is a script's last run of opendsecctl.
type run struct {
	in             *installation
	input          []byte
	code           int
	stdout, stderr bytes.Buffer
}

func of(ts *testscript.TestScript) *run { return ts.Value(runKey{}).(*run) }

func (r *run) main(env func(string) string, args ...string) int {
	r.stdout.Reset()
	r.stderr.Reset()
	ctx, cancel := r.in.context()
	defer cancel()
	app := &ctl.App{Env: env, Stdin: bytes.NewReader(r.input), Stdout: &r.stdout, Stderr: &r.stderr}
	r.code = app.Main(ctx, args)
	r.input = nil
	return r.code
}

// manners reports what no run of opendsecctl may do: show a secret, or fail
// without a line that says why.
func (r *run) manners(args []string) error {
	if !slices.Contains(args, "token") || !slices.Contains(args, "create") {
		for _, s := range r.in.secrets() {
			if strings.Contains(r.stdout.String()+r.stderr.String(), s) {
				return fmt.Errorf("%v prints a token", args)
			}
		}
	} else if s := strings.TrimSpace(r.stdout.String()); strings.HasPrefix(s, "ods_") {
		r.in.secret(s)
	}
	if slices.Contains(args, "exec") || slices.Contains(args, "run") && slices.Contains(args, "--") {
		return nil // what a command in a sandbox prints is its own affair
	}
	for line := range strings.Lines(r.stderr.String()) {
		if r.code != 0 && !strings.HasPrefix(line, "opendsecctl: ") && !strings.HasPrefix(line, "warning: ") && !slices.Contains(args, "import") {
			return fmt.Errorf("%v: this is no whole message: %q", args, line)
		}
	}
	found := slices.Contains(args, "leaks") || slices.Contains(args, "doctor")
	if r.code != 0 && r.stderr.Len() == 0 && !found {
		return fmt.Errorf("%v: exit code %d and not a word why", args, r.code)
	}
	return nil
}

func cmdRun(ts *testscript.TestScript, neg bool, args []string) {
	r := of(ts)
	r.main(ts.Getenv, args...)
	fmt.Fprint(ts.Stdout(), r.stdout.String())
	fmt.Fprint(ts.Stderr(), r.stderr.String())
	ts.Check(r.manners(args))
	if neg != (r.code != 0) {
		ts.Fatalf("exit code %d\n%s%s", r.code, r.stdout.String(), r.stderr.String())
	}
}

func number(ts *testscript.TestScript, s string) int {
	n, err := strconv.Atoi(s)
	ts.Check(err)
	return n
}

func cmdCode(ts *testscript.TestScript, _ bool, args []string) {
	if want := number(ts, args[0]); of(ts).code != want {
		ts.Fatalf("exit code %d, want %d", of(ts).code, want)
	}
}

func cmdInput(ts *testscript.TestScript, _ bool, args []string) {
	of(ts).input = []byte(ts.ReadFile(args[0]))
}

func cmdID(ts *testscript.TestScript, _ bool, args []string) {
	text := strings.TrimSpace(of(ts).stdout.String())
	if text == "" {
		text = strings.TrimSpace(of(ts).stderr.String()) // run with a command prints its id there
	}
	ts.Setenv(args[0], text)
}

func cmdRow(ts *testscript.TestScript, neg bool, args []string) {
	has := func(line string) bool {
		for _, word := range args {
			_, rest, ok := strings.Cut(line, word)
			if !ok {
				return false
			}
			line = rest
		}
		return true
	}
	if slices.ContainsFunc(strings.Split(of(ts).stdout.String(), "\n"), has) == neg {
		ts.Fatalf("a line with %q: %v, in\n%s", args, !neg, of(ts).stdout.String())
	}
}

func cmdLines(ts *testscript.TestScript, _ bool, args []string) {
	if n, want := strings.Count(of(ts).stdout.String(), "\n"), number(ts, args[0]); n != want {
		ts.Fatalf("%d lines, want %d:\n%s", n, want, of(ts).stdout.String())
	}
}

// cmdAligned checks that each row has what stands before each column's
// heading blank: no cell runs into the next.
func cmdAligned(ts *testscript.TestScript, _ bool, _ []string) {
	lines := strings.Split(strings.TrimSuffix(of(ts).stdout.String(), "\n"), "\n")
	head := lines[0]
	for col := 3; col < len(head); col++ {
		if head[col-3:col] != "   " || head[col] == ' ' {
			continue
		}
		for _, line := range lines[1:] {
			if len(line) > col && line[col-3:col] != "   " {
				ts.Fatalf("column %d is crooked:\n%s", col, of(ts).stdout.String())
			}
		}
	}
	for _, line := range lines {
		if strings.HasSuffix(line, " ") {
			ts.Fatalf("a line ends with a space: %q", line)
		}
	}
}

func cmdJSON(ts *testscript.TestScript, neg bool, args []string) {
	var v any
	ts.Check(json.Unmarshal(of(ts).stdout.Bytes(), &v))
	for _, key := range strings.Split(args[0], ".") {
		switch x := v.(type) {
		case map[string]any:
			v = x[key]
		case []any:
			if n := number(ts, key); n < len(x) {
				v = x[n]
			} else {
				v = nil
			}
		default:
			v = nil
		}
	}
	if got := fmt.Sprint(v); (got == args[1]) == neg {
		ts.Fatalf("%s is %s, want %s (%v)", args[0], got, args[1], !neg)
	}
}

func cmdEventually(ts *testscript.TestScript, _ bool, args []string) {
	r, want := of(ts), number(ts, args[0])
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(20 * time.Second); r.main(ts.Getenv, args[1:]...) != want; <-tick.C {
		if time.Now().After(end) {
			ts.Fatalf("exit code %d, want %d\n%s%s", r.code, want, r.stdout.String(), r.stderr.String())
		}
	}
	fmt.Fprint(ts.Stdout(), r.stdout.String())
	fmt.Fprint(ts.Stderr(), r.stderr.String())
	ts.Check(r.manners(args[1:]))
}

// buildPrograms builds programs into a directory once for all tests.
var buildPrograms = sync.OnceValues(func() (string, error) {
	if dir := os.Getenv("OPENDSEC_BIN"); dir != "" {
		return dir, nil
	}
	build := exec.Command("go", "build", "-o", programs+"/", "../../cmd/opendsec-agent")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build the agent: %w\n%s", err, out)
	}
	return programs, nil
})

var programs string // directory

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "opendsec-ctl-")
	if err != nil {
		panic(err)
	}
	programs = dir
	code := m.Run()
	_ = os.RemoveAll(dir) // a temporary directory of the machine's
	os.Exit(code)
}
