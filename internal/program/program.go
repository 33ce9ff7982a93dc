// Package program is what the programs that run one server each have in
// common. The packages below it wire the servers: for each, a configuration
// file, and a Run that opens what the server works with, starts it, and ends it
// in reverse. "opendsec up" runs all in one process (package install), with the
// same files, listeners and certificates.
package program

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"

	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/mtls"
)

// Server is one server's configuration file, with all that it takes to run it.
type Server interface {
	daemon.Config
	// Component returns the server's name, which is also its role.
	Component() string
	// Level returns the level of its log.
	Level() string
	// Run serves until the context ends.
	Run(ctx context.Context, log *slog.Logger) error
}

// Base is what the file of every server has.
type Base struct {
	// PKI is the directory with the authority's certificate, and this role's
	// certificate and key.
	PKI string `json:"pki"`
	// LogLevel is "debug", "info" (the default), "warn" or "error".
	LogLevel string `json:"log_level,omitempty"`
}

// Level returns the level of the server's log.
func (b Base) Level() string { return b.LogLevel }

// Faults reports what is wrong with the part that all files have.
func (b Base) Faults() []error {
	if b.PKI == "" {
		return []error{errors.New("pki: name the directory with the certificates")}
	}
	return nil
}

// ListenFaults reports whether a listen address is wrong.
func ListenFaults(addr string) []error {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return []error{fmt.Errorf("listen: want host:port, not %q", addr)}
	}
	return nil
}

// Main is the main function of a program that runs one server: it reads the
// file that -config names, and runs the server until a signal comes.
func Main(server Server, args []string) int {
	if err := run(server, args); err != nil {
		if errors.Is(err, flag.ErrHelp) {
			return 0
		}
		fmt.Fprintf(os.Stderr, "opendsec-%s: %v\n", server.Component(), err)
		return 1
	}
	return 0
}

func run(server Server, args []string) error {
	flags := flag.NewFlagSet("opendsec-"+server.Component(), flag.ContinueOnError)
	path := flags.String("config", "", "configuration file, as opendsec init writes it")
	version := flags.Bool("version", false, "print the version")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if *version {
		fmt.Println(daemon.Version)
		return nil
	}
	if *path == "" {
		return errors.New("-config is missing: name the file that opendsec init wrote")
	}
	if err := daemon.LoadConfig(*path, server); err != nil {
		return err
	}
	if err := daemon.KeepFiles(); err != nil {
		return fmt.Errorf("keep inherited files from children: %w", err)
	}
	log, err := daemon.Logger(os.Stderr, server.Component(), server.Level())
	if err != nil {
		return err
	}
	ctx, stop := daemon.Context()
	defer stop()
	return server.Run(ctx, log)
}

// Open loads a server's identity and opens its port.
func Open(pki, role, addr string) (*mtls.Identity, net.Listener, error) {
	id, err := mtls.Load(pki, role)
	if err != nil {
		return nil, nil, err
	}
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, nil, fmt.Errorf("listen on %s: %w; is it running already?", addr, err)
	}
	return id, ln, nil
}
