// Package install makes, reads and runs an installation on one machine: its
// configuration, certificates, env files, and all its servers in one process.
package install

import (
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
	"github.com/kernflux/opendsec/internal/ingress"
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
	// DNS are the resolvers that sandboxes' names are asked of, "ADDR" or
	// "ADDR:PORT"; none keeps the present ones, or takes the machine's own.
	DNS []string
	// Programs is the directory that holds opendsec-agent and opendsec-sentry.
	Programs string
	// Domain is below which servers in sandboxes have names of their own; ""
	// keeps the present one, or takes none.
	Domain string
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

// lastSaved is the server whose file is written last, so that it is there when
// all are.
const lastSaved = mtls.RoleAPIServer

// stateNote is the file that says where the state is; it is written first.
const stateNote = "state"

// EnvFile returns the path of the admin's env file.
func (in *Installation) EnvFile() string { return filepath.Join(in.Ops, "env") }

// StateDir returns the directory that holds the installation's state.
func (in *Installation) StateDir() string { return filepath.Dir(in.Edge.StateDir) }

func configFile(ops, component string) string { return filepath.Join(ops, component+".json") }

// Load reads the installation whose configuration is in the directory.
func Load(ops string) (*Installation, error) {
	in := &Installation{Ops: ops}
	if !exists(ops) {
		return nil, fmt.Errorf("there is no installation in %s; make one with: opendsec up --ops %s", ops, ops)
	}
	for _, s := range in.servers() {
		path := configFile(ops, s.Component())
		if _, err := os.Stat(path); errors.Is(err, os.ErrNotExist) {
			return nil, fmt.Errorf("%s is missing, though other files of the installation are there: restore it", path)
		}
		if err := daemon.LoadConfig(path, s); err != nil {
			return nil, err
		}
	}
	return in, nil
}

// exists reports whether there is an installation in the directory: the file
// that save writes last is there.
func exists(ops string) bool {
	_, err := os.Stat(configFile(ops, lastSaved))
	return err == nil
}

// Init makes an installation, or brings one up to date: the authority and its
// certificates, a configuration file for each server, the first callers with
// their env files. What is there and not asked for anew stays as it is.
func Init(ctx context.Context, s Setup) (*Installation, error) {
	for _, dir := range []string{s.Ops, s.State, s.Programs} {
		if (dir != "" || dir == s.Ops) && !filepath.IsAbs(dir) {
			return nil, fmt.Errorf("directory %q: give an absolute path", dir)
		}
	}
	if err := os.MkdirAll(s.Ops, 0o700); err != nil {
		return nil, fmt.Errorf("make the configuration directory: %w", err)
	}
	in, err := describe(s)
	if err != nil {
		return nil, err
	}
	if s.Programs != "" {
		in.Edge.SetPrograms(s.Programs)
	}
	if len(s.DNS) > 0 {
		in.Edge.Network.DNS = s.DNS
	}
	if s.Domain != "" {
		in.APIServer.Domain = s.Domain
	}
	// What is wrong is found before anything is written.
	for _, server := range in.servers() {
		if err := server.Validate(); err != nil {
			return nil, fmt.Errorf("configuration of %s: %w", server.Component(), err)
		}
	}
	if err := os.MkdirAll(in.StateDir(), 0o700); err != nil {
		return nil, fmt.Errorf("make the state directory: %w", err)
	}
	if err := in.save(); err != nil {
		return nil, err
	}
	if err := in.certificates(); err != nil {
		return nil, err
	}
	return in, in.callers(ctx)
}

// describe returns the installation that is there, with what the setup changes
// of it, or else the new one that the setup asks for.
func describe(s Setup) (*Installation, error) {
	if !exists(s.Ops) {
		return fresh(s)
	}
	in, err := Load(s.Ops)
	if err != nil {
		return nil, err
	}
	if err := sameState(s, in.StateDir()); err != nil {
		return nil, err
	}
	if s.Listen != "" {
		return in, in.listenOn(s.Listen)
	}
	return in, nil
}

func sameState(s Setup, present string) error {
	if s.State == "" || filepath.Clean(s.State) == present {
		return nil
	}
	return fmt.Errorf("the state is in %s, not in %s: it cannot be moved by asking; stop everything, move it, and change the files in %s", present, s.State, s.Ops)
}

// fresh returns the description of a new installation, or of one whose first
// Init was cut short: that has noted where its state is to be.
func fresh(s Setup) (*Installation, error) {
	noted, err := os.ReadFile(filepath.Join(s.Ops, stateNote))
	switch present := strings.TrimSpace(string(noted)); {
	case err == nil && present != "":
		if err := sameState(s, present); err != nil {
			return nil, err
		}
		s.State = present
	case s.State == "":
		s.State = DefaultState()
	}
	if s.Listen == "" {
		s.Listen = DefaultListen
	}
	base := program.Base{PKI: filepath.Join(s.Ops, "ca")}
	db := "sqlite:" + filepath.Join(s.State, "opendsec.db")
	name := nodeName()
	in := &Installation{Ops: s.Ops}
	in.IAM = runiam.Server{Base: base, Database: db}
	in.APIServer = runapi.Server{Base: base, Database: db}
	in.Edge = runedge.Server{Base: base, Config: edge.Config{Name: name, StateDir: filepath.Join(s.State, "edge")}}
	in.Watcher = runwatcher.Server{Base: base, Database: db, Nodes: []watcher.Node{{Name: name}}}
	return in, in.listenOn(s.Listen)
}

// listenOn sets the API's address, and with it the ports of the inner servers,
// unless its admin has given those addresses of their own.
func (in *Installation) listenOn(addr string) error {
	host, n, err := hostPort(addr)
	if err != nil {
		return err
	}
	old := in.APIServer.Listen
	in.APIServer.Listen = net.JoinHostPort(host, strconv.Itoa(n))
	if was := inner(old, 1); in.IAM.Listen == was && in.APIServer.IAM == was {
		in.IAM.Listen, in.APIServer.IAM = inner(addr, 1), inner(addr, 1)
	}
	if was := inner(old, 2); in.Edge.Listen == was && len(in.Watcher.Nodes) == 1 && in.Watcher.Nodes[0].Address == was {
		in.Edge.Listen, in.Watcher.Nodes[0].Address = inner(addr, 2), inner(addr, 2)
	}
	return nil
}

// inner returns the address of an inner server of an installation whose API
// listens on api; "" when that is no address.
func inner(api string, add int) string {
	_, n, err := hostPort(api)
	if err != nil {
		return ""
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(n+add))
}

// hostPort takes a listen address apart.
func hostPort(addr string) (string, int, error) {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return "", 0, fmt.Errorf("listen address %q: want host:port", addr)
	}
	n, err := strconv.Atoi(port)
	if err != nil || n < 1 || n > 65500 {
		return "", 0, fmt.Errorf("listen address %q: the port must be 1 to 65500; the two after it are used too", addr)
	}
	return host, n, nil
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
	if err := replace(filepath.Join(in.Ops, stateNote), []byte(in.StateDir()+"\n")); err != nil {
		return err
	}
	for _, s := range in.servers() {
		b, err := json.MarshalIndent(s, "", "  ")
		if err != nil {
			return fmt.Errorf("configuration of %s: %w", s.Component(), err)
		}
		if err := replace(configFile(in.Ops, s.Component()), append(b, '\n')); err != nil {
			return err
		}
	}
	return nil
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
		public = append(public, machineNames(host)...)
	}
	if in.APIServer.Domain != "" {
		public = append(public, ingress.Wildcard(in.APIServer.Domain))
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

// machineNames returns by what others know this machine that listens on a
// host: nobody does on loopback, and all its addresses when it is "" or 0.0.0.0.
func machineNames(host string) []string {
	ip := net.ParseIP(host)
	if host == "localhost" || ip != nil && ip.IsLoopback() {
		return nil
	}
	var names []string
	if own, err := os.Hostname(); err == nil {
		names = append(names, own)
	}
	if host != "" && !(ip != nil && ip.IsUnspecified()) {
		return append(names, host)
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
		return errors.Join(
			setEnv(in.EnvFile(), map[string]string{"OPENDSEC_TOKEN": s.Admin}, nil),
			setEnv(demo, map[string]string{"OPENDSEC_TOKEN": s.Demo}, nil))
	}
	if _, err := iam.Bootstrap(ctx, db, iam.Names{}, secrets); err != nil {
		return err
	}
	place := map[string]string{"OPENDSEC_ADDR": in.address(), "OPENDSEC_CA": mtls.CAFile(in.IAM.PKI)}
	return errors.Join(
		setEnv(in.EnvFile(), place, map[string]string{"OPENDSEC_PROJECT": "root"}),
		setEnv(demo, place, map[string]string{"OPENDSEC_PROJECT": string(iam.Demo), "OPENDSEC_IMAGE": "root/py:latest"}))
}
