// Package install makes, reads and runs an installation on one machine: its
// configuration, certificates, env files, and all its servers in one process.
package install

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/ca"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/edge"
	"github.com/kernflux/opendsec/internal/iam"
	"github.com/kernflux/opendsec/internal/mtls"
	"github.com/kernflux/opendsec/internal/program"
	"github.com/kernflux/opendsec/internal/program/runapi"
	"github.com/kernflux/opendsec/internal/program/runedge"
	"github.com/kernflux/opendsec/internal/program/runiam"
	"github.com/kernflux/opendsec/internal/program/runwatcher"
	"github.com/kernflux/opendsec/internal/store"
	"github.com/kernflux/opendsec/internal/watcher"
)

// Setup says what an installation on one machine is to look like.
type Setup struct {
	// Ops is the directory for the configuration, the authority and the env
	// files. Its owner alone can read it.
	Ops string
	// State is the directory for sandboxes, images and the database; "" keeps
	// the present one, or takes DefaultState.
	State string
	// Listen is the API's address; "" keeps the present one, or takes DefaultListen.
	Listen string
	// Programs is the directory that holds opendsec-agent and opendsec-sentry.
	Programs string
}

// DefaultOps is where quickstart keeps the configuration.
const DefaultOps = "/root/opendsec-ops"

// DefaultListen is the API's address unless another is asked for. It is on
// loopback: nobody else reaches a new installation until its admin says so.
const DefaultListen = "127.0.0.1:7300"

// DefaultState returns /data/opendsec where a file system is mounted at /data,
// else /var/lib/opendsec.
func DefaultState() string {
	var data, root unix.Stat_t
	if unix.Stat("/data", &data) == nil && unix.Stat("/", &root) == nil && data.Dev != root.Dev {
		return "/data/opendsec"
	}
	return "/var/lib/opendsec"
}

// Installation is an installation on one machine, as its files describe it.
type Installation struct {
	Ops       string
	IAM       runiam.Server
	APIServer runapi.Server
	Watcher   runwatcher.Server
	Edge      runedge.Server
}

// servers lists the installation's servers in the order in which they start.
func (in *Installation) servers() []program.Server {
	return []program.Server{&in.IAM, &in.Edge, &in.Watcher, &in.APIServer}
}

// EnvFile returns the path of the admin's env file.
func (in *Installation) EnvFile() string { return filepath.Join(in.Ops, "env") }

// StateDir returns the directory that holds the installation's state.
func (in *Installation) StateDir() string { return filepath.Dir(in.Edge.StateDir) }

func configFile(ops, component string) string { return filepath.Join(ops, component+".json") }

// Load reads the installation whose configuration is in the directory.
func Load(ops string) (*Installation, error) {
	in := &Installation{Ops: ops}
	for _, s := range in.servers() {
		path := configFile(ops, s.Component())
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%s is missing: there is no installation in %s; make one with: opendsec up --ops %s", path, ops, ops)
		}
		if err := daemon.LoadConfig(path, s); err != nil {
			return nil, err
		}
	}
	return in, nil
}

// Init makes an installation, or brings one up to date: the authority and its
// certificates, a configuration file for each server, the first callers with
// their env files. What is there and not asked for anew stays as it is.
func Init(ctx context.Context, s Setup) (*Installation, error) {
	for _, dir := range []string{s.Ops, s.State} {
		if dir != "" && !filepath.IsAbs(dir) {
			return nil, fmt.Errorf("directory %q: give an absolute path", dir)
		}
	}
	if err := os.MkdirAll(s.Ops, 0o700); err != nil {
		return nil, fmt.Errorf("make the configuration directory: %w", err)
	}
	in, err := Load(s.Ops)
	if err != nil {
		if _, serr := os.Stat(configFile(s.Ops, mtls.RoleEdge)); serr == nil {
			return nil, err // it is there and broken
		}
		if in, err = fresh(s); err != nil {
			return nil, err
		}
	}
	if s.State != "" && in.StateDir() != s.State {
		return nil, fmt.Errorf("the state is in %s, not in %s: it cannot be moved by asking; stop everything, move it, and change the files in %s", in.StateDir(), s.State, s.Ops)
	}
	if s.Listen != "" {
		in.APIServer.Listen = s.Listen
	}
	if s.Programs != "" {
		in.Edge.SetPrograms(s.Programs)
	}
	if err := in.save(); err != nil {
		return nil, err
	}
	if err := in.certificates(); err != nil {
		return nil, err
	}
	return in, in.callers(ctx)
}

// fresh returns the description of a new installation.
func fresh(s Setup) (*Installation, error) {
	if s.State == "" {
		s.State = DefaultState()
	}
	if s.Listen == "" {
		s.Listen = DefaultListen
	}
	host, port, err := net.SplitHostPort(s.Listen)
	if err != nil {
		return nil, fmt.Errorf("listen address %q: want host:port", s.Listen)
	}
	n, err := strconv.Atoi(port)
	if err != nil || n < 1 || n > 65500 {
		return nil, fmt.Errorf("listen address %q: the port must be 1 to 65500; the two after it are used too", s.Listen)
	}
	if err := os.MkdirAll(s.State, 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	base := program.Base{PKI: filepath.Join(s.Ops, "ca")}
	db := "sqlite:" + filepath.Join(s.State, "opendsec.db")
	inner := func(add int) string { return net.JoinHostPort("127.0.0.1", strconv.Itoa(n+add)) }
	name := nodeName()
	in := &Installation{Ops: s.Ops}
	in.IAM = runiam.Server{Base: base, Listen: inner(1), Database: db}
	in.APIServer = runapi.Server{Base: base, Listen: net.JoinHostPort(host, port), Database: db, IAM: inner(1)}
	in.Edge = runedge.Server{Base: base, Listen: inner(2), Config: edge.Config{Name: name, StateDir: filepath.Join(s.State, "edge")}}
	in.Watcher = runwatcher.Server{Base: base, Database: db, Nodes: []watcher.Node{{Name: name, Address: inner(2)}}}
	return in, nil
}

var notNodeName = regexp.MustCompile(`[^a-z0-9.-]+`)

// nodeName makes a node's name of the host's.
func nodeName() string {
	host, err := os.Hostname()
	if err != nil {
		return "node"
	}
	name := strings.Trim(notNodeName.ReplaceAllString(strings.ToLower(host), "-"), "-.")
	if name == "" {
		return "node"
	}
	return name[:min(len(name), 63)]
}

// save writes the servers' configuration files.
func (in *Installation) save() error {
	for _, s := range in.servers() {
		if err := s.Validate(); err != nil {
			return fmt.Errorf("configuration of %s: %w", s.Component(), err)
		}
		b, err := json.MarshalIndent(s, "", "  ")
		if err != nil {
			return fmt.Errorf("configuration of %s: %w", s.Component(), err)
		}
		if err := replace(configFile(in.Ops, s.Component()), append(b, '\n')); err != nil {
			return err
		}
	}
	return replace(filepath.Join(in.Ops, "state"), []byte(in.StateDir()+"\n"))
}

// replace writes a file that only its owner can read, whole or not at all.
func replace(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*")
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	defer os.Remove(f.Name()) // gone already when all went well
	_, err = f.Write(data)
	err = errors.Join(err, f.Sync(), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}

// certificates makes or renews what the servers show each other.
func (in *Installation) certificates() error {
	authority, err := ca.Init(in.IAM.PKI)
	if err != nil {
		return err
	}
	hosts := []string{"localhost", "127.0.0.1", "::1"}
	public := hosts
	if host, _, err := net.SplitHostPort(in.APIServer.Listen); err == nil {
		if ip := net.ParseIP(host); ip != nil && !ip.IsLoopback() {
			public = append(public, machineNames(ip)...)
		}
	}
	for _, s := range in.servers() {
		names := hosts
		if s.Component() == mtls.RoleAPIServer {
			names = public
		}
		if err := authority.Ensure(s.Component(), names); err != nil {
			return err
		}
	}
	return nil
}

// machineNames returns by what others know this machine that listens on ip:
// all its addresses, when it listens on all.
func machineNames(ip net.IP) []string {
	var names []string
	if host, err := os.Hostname(); err == nil {
		names = append(names, host)
	}
	if !ip.IsUnspecified() {
		return append(names, ip.String())
	}
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return names
	}
	for _, a := range addrs {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLoopback() && !n.IP.IsLinkLocalUnicast() {
			names = append(names, n.IP.String())
		}
	}
	return names
}

// address returns where callers on this machine find the API.
func (in *Installation) address() string {
	host, port, _ := net.SplitHostPort(in.APIServer.Listen) // Validate has seen it
	if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return "https://" + net.JoinHostPort(host, port)
}

// callers sees to the first callers and their env files.
func (in *Installation) callers(ctx context.Context) error {
	db, err := store.Open(ctx, in.IAM.Database)
	if err != nil {
		return err
	}
	defer db.Close()
	demo := filepath.Join(in.Ops, "demo.env")
	secrets := func(s iam.Secrets) error {
		return errors.Join(setEnv(in.EnvFile(), "OPENDSEC_TOKEN", s.Admin), setEnv(demo, "OPENDSEC_TOKEN", s.Demo))
	}
	if _, err := iam.Bootstrap(ctx, db, iam.Names{}, secrets); err != nil {
		return err
	}
	return errors.Join(
		in.env(in.EnvFile(), "root"),
		in.env(demo, string(iam.Demo)),
		setEnv(demo, "OPENDSEC_IMAGE", "root/py:latest"))
}

// env writes what a caller needs besides its token.
func (in *Installation) env(path, project string) error {
	return errors.Join(
		setEnv(path, "OPENDSEC_ADDR", in.address()),
		setEnv(path, "OPENDSEC_PROJECT", project),
		setEnv(path, "OPENDSEC_CA", mtls.CAFile(in.IAM.PKI)))
}

// setEnv sets one variable in a file of "export NAME=value" lines; "" leaves
// the file as it is.
func setEnv(path, name, value string) error {
	if value == "" {
		return nil
	}
	vars, err := ReadEnv(path)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	var lines []string
	found := false
	for _, v := range vars {
		if v[0] == name {
			v[1], found = value, true
		}
		lines = append(lines, "export "+v[0]+"="+v[1])
	}
	if !found {
		lines = append(lines, "export "+name+"="+value)
	}
	return replace(path, []byte(strings.Join(lines, "\n")+"\n"))
}

// ReadEnv reads the names and values of an env file, in its order.
func ReadEnv(path string) ([][2]string, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("read env file: %w", err)
	}
	defer f.Close()
	var vars [][2]string
	scan := bufio.NewScanner(f)
	for scan.Scan() {
		name, value, ok := strings.Cut(strings.TrimPrefix(scan.Text(), "export "), "=")
		if ok {
			vars = append(vars, [2]string{name, value})
		}
	}
	if err := scan.Err(); err != nil {
		return nil, fmt.Errorf("read env file %s: %w", path, err)
	}
	return vars, nil
}
