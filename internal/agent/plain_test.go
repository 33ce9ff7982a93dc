package agent_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kernflux/opendsec/internal/agentclient"
)

// What a line does must not depend on whether the agent saw that it needs no
// shell.
func TestPlainLinesActAsInTheShell(t *testing.T) {
	r := start(t)
	dir := t.TempDir()
	for name, content := range map[string]string{
		"bare":     "echo no first line: $0 $1\n",
		"with":     "#!/bin/sh\necho with one: $1\nexit 3\n",
		"bad":      "#!/no/such/interpreter\n",
		"noaccess": "echo never\n",
	} {
		mode := os.FileMode(0o755)
		if name == "noaccess" {
			mode = 0o644
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), mode); err != nil {
			t.Fatal(err)
		}
	}
	for _, line := range []string{
		"true", "false", " true ", "true\n", "id -u", "uname -s", "ls /", "ls /no/such/file", "cat", "sleep 0",
		"nosuchprogram", "./bare arg", "./with arg", "./bad", "./noaccess", "./missing", "/", "/etc", "-x", "env -i",
		"python3 -V", "expr 1 + 1", "basename a/b=c", "readlink /proc/self/exe", "printenv PWD", "printenv SHLVL", "printenv _", "printenv A",
		"echo a", "pwd", "test 1 = 1", "type true", "exit 4", "X=1", "X=1 env", "a=b", ":", ".", "time true", "a;b", "'true'",
		"echo $HOME", "ls *", "true&", "true|false", "~", "#true", "true #x", "", " ", "\n", "!", "{", "[ 1 ]", "ulimit -n", "umask",
	} {
		direct := r.result(agentclient.Command{Args: []string{"-c", line}, Dir: dir, Env: map[string]string{"A": "1"}})
		shell := r.result(agentclient.Command{Path: "/bin/bash", Args: []string{"-c", line}, Dir: dir, Env: map[string]string{"A": "1"}})
		direct.PID, shell.PID = 0, 0
		// bash says how it was called.
		shell.Stderr = []byte(strings.ReplaceAll(string(shell.Stderr), "/bin/bash:", "bash:"))
		direct.Stderr = []byte(strings.ReplaceAll(string(direct.Stderr), "/bin/bash:", "bash:"))
		if diff := cmp.Diff(string(shell.Stdout), string(direct.Stdout)); diff != "" {
			t.Errorf("%q: standard output, shell (-) and direct (+):\n%s", line, diff)
		}
		if diff := cmp.Diff(string(shell.Stderr), string(direct.Stderr)); diff != "" {
			t.Errorf("%q: standard error, shell (-) and direct (+):\n%s", line, diff)
		}
		if shell.ExitCode != direct.ExitCode || shell.Signal != direct.Signal {
			t.Errorf("%q: shell ended with %d/%d, direct with %d/%d", line, shell.ExitCode, shell.Signal, direct.ExitCode, direct.Signal)
		}
	}
}

// A shell that is told to do something at its start must be given the chance.
func TestShellStartupIsKept(t *testing.T) {
	r := start(t)
	file := filepath.Join(t.TempDir(), "rc")
	if err := os.WriteFile(file, []byte("true() { echo mine; }\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	got := r.result(agentclient.Command{Args: []string{"-c", "true"}, Env: map[string]string{"BASH_ENV": file}})
	if string(got.Stdout) != "mine\n" {
		t.Errorf("BASH_ENV was not read: %q", got.Stdout)
	}
}

// A plain line has the environment that a shell gives to the program it becomes.
func TestPlainLinesHaveTheShellsEnvironment(t *testing.T) {
	r := start(t)
	lines := func(cmd agentclient.Command) []string {
		cmd.Dir = "/usr"
		got := strings.Split(strings.TrimSpace(string(r.result(cmd).Stdout)), "\n")
		slices.Sort(got)
		return got
	}
	shell := lines(agentclient.Command{Path: "/bin/bash", Args: []string{"-c", "env"}})
	direct := lines(agentclient.Command{Args: []string{"-c", "env"}})
	if diff := cmp.Diff(shell, direct); diff != "" {
		t.Errorf("shell (-), direct (+):\n%s", diff)
	}
}
