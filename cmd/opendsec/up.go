package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
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
			in, err := install.Init(ctx, s)
			if err != nil {
				return err
			}
			if detach {
				return background(ctx, in)
			}
			if err := writePID(in); err != nil {
				return err
			}
			defer os.Remove(pidFile(in))
			return in.Run(ctx, os.Stderr)
		}),
	}
	setupFlags(c, &s)
	c.Flags().BoolVarP(&detach, "detach", "d", false, "go to the background when it is ready; the log is opendsec.log in the state directory")
	return c
}

func pidFile(in *install.Installation) string { return filepath.Join(in.StateDir(), "opendsec.pid") }
func logFile(in *install.Installation) string { return filepath.Join(in.StateDir(), "opendsec.log") }

// writePID notes this process as the one that runs the installation.
func writePID(in *install.Installation) error {
	if pid, ok := running(in); ok && pid != os.Getpid() {
		return fmt.Errorf("it is running already, as process %d; stop it with: opendsec down --ops %s", pid, in.Ops)
	}
	return os.WriteFile(pidFile(in), []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600)
}

// background starts "up" in a session of its own and waits until it is ready.
func background(ctx context.Context, in *install.Installation) error {
	if pid, ok := running(in); ok {
		return fmt.Errorf("it is running already, as process %d; stop it with: opendsec down --ops %s", pid, in.Ops)
	}
	log, err := os.OpenFile(logFile(in), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	defer log.Close()
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
		return err
	case err := <-gone:
		return fmt.Errorf("it ended at once (%w); the log says: %s", errors.Join(err), tail(logFile(in)))
	}
}

// tail returns the end of a file.
func tail(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(b[max(0, len(b)-2000):])
}
