package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/kernflux/opendsec/internal/program/install"
)

// setupFlags registers the flags that describe an installation.
func setupFlags(c *cobra.Command, s *install.Setup) {
	c.Flags().StringVar(&s.Ops, "ops", install.DefaultOps, "directory of the configuration, the CA's key and the tokens")
	c.Flags().StringVar(&s.State, "state", "", "directory of sandboxes, images and the database (default /data/opendsec where something is mounted at /data, else /var/lib/opendsec)")
	c.Flags().StringVar(&s.Listen, "listen", "", "where the API listens (default "+install.DefaultListen+"); the two ports after it are used too")
	c.Flags().StringArrayVar(&s.DNS, "dns", nil, "resolver that sandboxes' names are asked of, ADDR or ADDR:PORT; may be repeated (default those of /etc/resolv.conf)")
	c.Flags().StringVar(&s.Domain, "domain", "", "domain whose names PORT-SANDBOX.DOMAIN all lead to the API, for addresses of servers in sandboxes (default none: they are below the API's own)")
	c.Flags().StringVar(&s.Programs, "programs", ownDirectory(), "directory that holds opendsec-agent and opendsec-sentry")
}

// ownDirectory returns the directory that this program is in.
func ownDirectory() string {
	exe, err := os.Executable()
	if err != nil {
		return ""
	}
	return filepath.Dir(exe)
}

func initCommand() *cobra.Command {
	var s install.Setup
	c := &cobra.Command{
		Use: "init", Short: "Write the configuration, certificates and env files of an installation, and start nothing", Args: cobra.NoArgs,
		RunE: run(func(ctx context.Context) error {
			_, err := install.Init(ctx, s)
			return err
		}),
	}
	setupFlags(c, &s)
	return c
}

func upCommand() *cobra.Command {
	var s install.Setup
	var detach bool
	c := &cobra.Command{
		Use: "up", Short: "Run all servers in one process, after what init does",
		Long: `Run all servers in one process until a signal comes. Sandboxes outlive it: the next
"up" finds them again. With --detach it goes to the background once a node is healthy.`,
		Args: cobra.NoArgs,
		RunE: run(func(ctx context.Context) error {
			if err := idle(s.Ops); err != nil { // before anything is changed
				return err
			}
			in, err := install.Init(ctx, s)
			if err != nil {
				return err
			}
			if detach {
				return background(ctx, in)
			}
			unlock, err := lock(in)
			if err != nil {
				return err
			}
			defer unlock()
			return in.Run(ctx, os.Stderr)
		}),
	}
	setupFlags(c, &s)
	c.Flags().BoolVarP(&detach, "detach", "d", false, "go to the background when it is ready; the log is opendsec.log in the state directory")
	return c
}

// idle reports an installation that is there and runs. One that cannot be read
// is Init's to explain.
func idle(ops string) error {
	in, err := install.Load(ops)
	if err != nil {
		return nil
	}
	return busy(in)
}

// background starts "up" in a session of its own and waits until it is ready.
func background(ctx context.Context, in *install.Installation) error {
	log, err := os.OpenFile(logFile(in), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	defer log.Close()
	before, err := log.Seek(0, io.SeekEnd)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	exe, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	child := exec.Command(exe, "up", "--ops", in.Ops)
	child.Dir, child.Stdout, child.Stderr = "/", log, log
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return fmt.Errorf("start in the background: %w", err)
	}
	gone := make(chan error, 1)
	go func() { gone <- child.Wait() }()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	ready := make(chan error, 1)
	go func() { ready <- waitReady(ctx, in) }()
	select {
	case err := <-ready:
		if err != nil {
			return fmt.Errorf("%w; it goes on in the background, and its log is %s", err, logFile(in))
		}
		return nil
	case err := <-gone:
		reason := lastLine(logFile(in), before)
		if reason == "" {
			reason = fmt.Sprintf("%v; it left no word in %s", err, logFile(in))
		}
		return fmt.Errorf("it did not start: %s", reason)
	}
}

// lastLine returns the last line that was added to a log after an offset,
// without the program's name, "" for none.
func lastLine(path string, after int64) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(b[min(after, int64(len(b))):])), "\n")
	return strings.TrimPrefix(lines[len(lines)-1], "opendsec: ")
}
