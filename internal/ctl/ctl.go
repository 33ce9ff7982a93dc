// Package ctl is opendsecctl, the admin's command: it turns words into calls
// of the public API and answers into tables. It holds no rule of its own; what
// a caller may do is decided by the servers.
package ctl

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kernflux/opendsec/internal/fault"
)

// Exit codes beyond those of fault.ExitCode.
const (
	exitUsage = 2
	exitFound = 1 // leaks or doctor found something
)

// errFound ends a command whose finding is its result, printed already.
var errFound = errors.New("something was found")

// exitStatus ends opendsecctl with the exit code of a command that ran in a sandbox.
type exitStatus int

func (e exitStatus) Error() string { return fmt.Sprintf("exit status %d", int(e)) }

// App is one run of opendsecctl.
type App struct {
	Env    func(string) string
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer

	output string
	quiet  bool
	api    *api // made on first use
}

// Main runs opendsecctl with the arguments after its name and returns the
// exit code: 0 done, 1 failed, 2 used wrongly, 3 not found, 4 refused.
func (a *App) Main(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SetIn(a.Stdin)
	err := root.ExecuteContext(ctx)
	var status exitStatus
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.Is(err, errFound):
		return exitFound
	case errors.As(err, &status):
		return int(status)
	case errors.As(err, &usage):
		fmt.Fprintf(a.Stderr, "opendsecctl: %s\n", usage)
		return exitUsage
	}
	err = fault.FromConnect(err)
	fmt.Fprintf(a.Stderr, "opendsecctl: %s\n", describe(err))
	return fault.ExitCode(err)
}

// describe adds to an error what a person needs to act on it.
func describe(err error) string {
	e := fault.Of(err)
	text := err.Error()
	if e.Field != "" && !strings.Contains(text, e.Field) {
		text = e.Field + ": " + text
	}
	if len(e.Backends) > 0 {
		var names []string
		for _, b := range e.Backends {
			names = append(names, string(b))
		}
		text += " (backends that can: " + strings.Join(names, ", ") + ")"
	}
	if e.RequestID != "" && e.Kind == fault.Internal {
		text += " (request " + e.RequestID + " in the server's log)"
	}
	return text
}

// usageError says that the command line was wrong.
type usageError struct{ error }

func usage(err error) error {
	if err == nil {
		return nil
	}
	return usageError{err}
}

func (a *App) root() *cobra.Command {
	root := &cobra.Command{
		Use:   "opendsecctl",
		Short: "Look after an OpenDsec cluster",
		Long: `opendsecctl talks to the API at OPENDSEC_ADDR with the token in OPENDSEC_TOKEN,
trusting the certificate authority in the file OPENDSEC_CA. OPENDSEC_PROJECT is
the project where a command names none. quickstart writes all four to an "env" file.

Exit codes: 0 done, 1 failed, 2 used wrongly, 3 not found, 4 refused.`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usage(err) })
	root.PersistentFlags().StringVarP(&a.output, "output", "o", "table", "how to print: table or json")
	root.PersistentFlags().BoolVarP(&a.quiet, "quiet", "q", false, "print ids or names only")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		if a.output != "table" && a.output != "json" {
			return usage(fmt.Errorf("-o %q: want table or json", a.output))
		}
		return nil
	}
	root.AddCommand(a.statusCommand(), a.doctorCommand(), a.leaksCommand(), a.nodeCommand(), a.versionCommand(),
		a.sandboxCommand(), a.taskCommand(), a.imageCommand(), a.projectCommand(), a.callerCommand(), a.tokenCommand())
	forEach(root, func(c *cobra.Command) {
		if c.Args != nil {
			check := c.Args
			c.Args = func(c *cobra.Command, args []string) error { return usage(check(c, args)) }
		}
		if c.HasSubCommands() && c.RunE == nil && c != root {
			c.RunE = func(c *cobra.Command, args []string) error {
				if len(args) == 0 {
					return c.Help()
				}
				return usage(fmt.Errorf("%s: unknown command %q; see %s --help", c.CommandPath(), args[0], c.CommandPath()))
			}
			c.Args = nil
		}
	})
	root.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		return usage(fmt.Errorf("unknown command %q; see opendsecctl --help", args[0]))
	}
	root.Args = cobra.ArbitraryArgs
	return root
}

func forEach(c *cobra.Command, f func(*cobra.Command)) {
	f(c)
	for _, sub := range c.Commands() {
		forEach(sub, f)
	}
}

// FromOS returns the App of this process.
func FromOS() *App {
	return &App{Env: os.Getenv, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
}
