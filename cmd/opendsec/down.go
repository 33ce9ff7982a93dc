package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/kernflux/opendsec/internal/program/install"
)

func downCommand() *cobra.Command {
	var ops string
	var sandboxes, all bool
	c := &cobra.Command{
		Use: "down", Short: "Stop the servers; sandboxes go on unless asked otherwise", Args: cobra.NoArgs,
		RunE: run(func(ctx context.Context) error {
			in, err := install.Load(ops)
			if err != nil {
				return err
			}
			if sandboxes || all {
				if err := endSandboxes(ctx, in); err != nil {
					return err
				}
			}
			if err := stopServers(ctx, in); err != nil || !all {
				return err
			}
			return in.Edge.RemoveFromHost()
		}),
	}
	c.Flags().StringVar(&ops, "ops", install.DefaultOps, "directory of the configuration")
	c.Flags().BoolVar(&sandboxes, "sandboxes", false, "end all sandboxes first")
	c.Flags().BoolVar(&all, "remove-all", false, "end all sandboxes, and remove what the servers keep on the machine outside the state directory: mounts, network slots, control groups")
	return c
}

// stopServers ends the process that runs the installation and waits for it.
func stopServers(ctx context.Context, in *install.Installation) error {
	pid, err := running(in)
	if err != nil || pid == 0 {
		return err
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("watch process %d: %w", pid, err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGTERM, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return fmt.Errorf("end process %d: %w", pid, err)
	}
	const grace = 30 * time.Second
	for deadline := time.Now().Add(grace); time.Now().Before(deadline); {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 500)
		if n > 0 {
			return nil
		}
		if err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("wait for process %d: %w", pid, err)
		}
		if err := ctx.Err(); err != nil {
			return err
		}
	}
	return fmt.Errorf("process %d did not end within %s; its log is %s", pid, grace, logFile(in))
}

// lockOrReach takes the installation's lock, or returns nil once the process
// that holds it answers: one that is just starting will, and one that was
// killed lets go of it when the kernel is done with it.
func lockOrReach(ctx context.Context, in *install.Installation, client *install.Admin) (unlock func(), err error) {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		unlock, err := lock(in)
		var other errRunning
		if !errors.As(err, &other) {
			return unlock, err
		}
		if client.Ping(ctx) == nil {
			return nil, nil
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("%w, and its API does not answer; its log is %s", err, logFile(in))
		case <-tick.C:
		}
	}
}

// endSandboxes ends all sandboxes, starting the servers for it if they are not
// running.
func endSandboxes(ctx context.Context, in *install.Installation) error {
	client, err := in.Admin()
	if err != nil {
		return err
	}
	defer client.Close()
	if client.Ping(ctx) == nil {
		return client.StopAll(ctx)
	}
	limit, stop := context.WithTimeout(ctx, 2*time.Minute)
	defer stop()
	unlock, err := lockOrReach(limit, in, client)
	if err != nil {
		return err
	}
	if unlock == nil {
		return client.StopAll(limit)
	}
	defer unlock()
	log, err := os.OpenFile(logFile(in), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("open the log: %w", err)
	}
	defer log.Close()
	own, cancel := context.WithCancel(limit)
	ended := make(chan error, 1)
	go func() {
		defer cancel() // nothing is waited for any more when the servers fail
		ended <- in.Run(own, log)
	}()
	if err = waitReady(own, in); err == nil {
		err = client.StopAll(own)
	}
	cancel()
	if failed := <-ended; failed != nil && !errors.Is(failed, context.Canceled) {
		return failed // it is why the rest failed, if that did
	}
	return err
}
