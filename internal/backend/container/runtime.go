package container

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/sandbox"
)

// runtimes are the OCI runtimes in the order in which they are tried. crun
// starts a container in half of runc's time, and does not run everywhere.
var runtimes = []string{"crun", "runc"}

// ociRuntime is a program that starts containers. Ending and removing them
// needs none: they are processes, control groups and files.
type ociRuntime struct {
	name string
	path string
	root string // its records of containers, one directory each
	// filter is the compiled form of the system call filter that all containers
	// get, "" when the runtime shall compile it.
	filter string
	stops  bool // whether its containers can be stopped and go on
}

// filterAnnotation gives crun a compiled filter, in base64. Compiling takes
// it 10 ms, more than all else that it does.
const filterAnnotation = "run.oci.seccomp_bpf_data"

// keepFilter keeps the filter that crun has compiled for a container, for those
// that come after it. A crun that leaves none compiles each time.
func (r *ociRuntime) keepFilter(id string) {
	if r.name != "crun" {
		return
	}
	if b, err := os.ReadFile(filepath.Join(r.root, id, "seccomp.bpf")); err == nil && len(b) > 0 {
		r.filter = base64.StdEncoding.EncodeToString(b)
	}
}

// findRuntimes returns those on this machine.
func findRuntimes(stateDir string) []ociRuntime {
	var found []ociRuntime
	for _, name := range runtimes {
		if path, err := lookProgram(name); err == nil {
			found = append(found, ociRuntime{name: name, path: path, root: filepath.Join(stateDir, name)})
		}
	}
	return found
}

// lookProgram finds a program, also where only root's PATH looks.
func lookProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	if err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/local/sbin", "/usr/sbin", "/sbin"} {
		if path, lerr := exec.LookPath(filepath.Join(dir, name)); lerr == nil {
			return path, nil
		}
	}
	return "", fmt.Errorf("%s is not installed: %w", name, err)
}

// Files that a runtime writes into a container's directory.
const (
	pidFile = "pid"
	logFile = "runtime.log"
)

// run starts the container of a bundle and returns its first process. It must
// be called on a stage.
func (r ociRuntime) run(ctx context.Context, s stage, id, bundle string) (int, error) {
	if r.name == "crun" {
		if err := s.hideUnified(); err != nil {
			return 0, err
		}
	}
	cmd := exec.CommandContext(ctx, r.path, "--root", r.root,
		"--log", filepath.Join(bundle, logFile), "--log-format", "json",
		"run", "--detach", "--bundle", bundle, "--pid-file", filepath.Join(bundle, pidFile), id)
	// The container keeps the runtime's standard files. A file of ours there
	// would be a disk without a limit, and a pipe would end with us.
	cmd.Stdin, cmd.Stdout, cmd.Stderr = nil, nil, nil
	cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	// When we are killed, a container that is half made does not come to life.
	// The stage's thread does not end before Run returns.
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			return 0, ctx.Err()
		}
		return 0, fmt.Errorf("%s: %w%s", r.name, err, lastLog(filepath.Join(bundle, logFile)))
	}
	b, err := os.ReadFile(filepath.Join(bundle, pidFile))
	if err != nil {
		return 0, fmt.Errorf("%s started a container and did not say which: %w", r.name, err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil || pid < 2 {
		return 0, fmt.Errorf("%s gave %q as the container's process", r.name, b)
	}
	return pid, nil
}

// lastLog returns the last message of a runtime's log, ready to be appended.
func lastLog(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	lines := bytes.Split(bytes.TrimSpace(b), []byte("\n"))
	var entry struct{ Msg string }
	if json.Unmarshal(lines[len(lines)-1], &entry) != nil || entry.Msg == "" {
		return ""
	}
	return ": " + entry.Msg
}

// forget removes a runtime's record of a container.
func (r ociRuntime) forget(id string) error {
	if err := os.RemoveAll(filepath.Join(r.root, id)); err != nil {
		return fmt.Errorf("remove %s's record: %w", r.name, err)
	}
	return nil
}

// records returns the containers that a runtime has records of.
func (r ociRuntime) records() ([]string, error) {
	entries, err := os.ReadDir(r.root)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("list %s's records: %w", r.name, err)
	}
	var ids []string
	for _, e := range entries {
		if _, err := sandbox.ParseID(e.Name()); err == nil {
			ids = append(ids, e.Name())
		}
	}
	return ids, nil
}
