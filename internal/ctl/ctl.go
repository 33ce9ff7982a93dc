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
	"github.com/spf13/pflag"

	"github.com/kernflux/opendsec/internal/fault"
)

// Exit codes beyond those of fault.ExitCode.
const (
	exitFailed = 1
	exitFound  = 1 // leaks or doctor found something
	exitUsage  = 2
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
// exit code: 0 done, 1 failed, 2 used wrongly, 3 not found, 4 refused; that of
// the command for one that ran in a sandbox. When several things went wrong,
// each has its line, and the code is theirs where all have the same, else 1.
func (a *App) Main(ctx context.Context, args []string) int {
	root := a.root()
	root.SetArgs(args)
	code, said := 0, map[string]bool{}
	for i, err := range split(root.ExecuteContext(ctx)) {
		c, text := a.verdict(err)
		if text != "" && !said[text] {
			fmt.Fprintf(a.Stderr, "opendsecctl: %s\n", text)
		}
		said[text] = true
		if i == 0 {
			code = c
		} else if c != code {
			code = exitFailed
		}
	}
	return code
}

// split takes joined errors apart.
func split(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, split(e)...)
	}
	return all
}

// verdict returns the exit code of an error and the line that tells it, "" for
// one that needs no telling.
func (a *App) verdict(err error) (int, string) {
	var status exitStatus
	var usage usageError
	switch {
	case errors.Is(err, errFound):
		return exitFound, ""
	case errors.As(err, &status):
		return int(status), ""
	case errors.As(err, &usage):
		return exitUsage, oneLine(usage.Error())
	}
	err = fault.FromConnect(err)
	if errors.Is(err, context.Canceled) {
		return exitFailed, "interrupted"
	}
	return fault.ExitCode(err), oneLine(a.describe(err))
}

// oneLine keeps a message that came with line breaks on one line.
func oneLine(text string) string {
	return strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '\n' || r == '\r' }), "; ")
}

// describe adds to an error what a person needs to act on it.
func (a *App) describe(err error) string {
	e := fault.Of(err)
	text := err.Error()
	if e.Kind == fault.Unavailable && e.RequestID == "" && a.api != nil {
		return fmt.Sprintf("cannot reach %s: %s; see that it runs, and that OPENDSEC_ADDR and OPENDSEC_CA are its own", a.api.addr, text)
	}
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
	root.SetOut(a.Stdout)
	root.SetErr(a.Stderr)
	root.SetIn(a.Stdin)
	root.SetFlagErrorFunc(flagError)
	root.PersistentFlags().StringVarP(&a.output, "output", "o", "table", "how to print: table or json")
	root.PersistentFlags().BoolVarP(&a.quiet, "quiet", "q", false, "print ids or names only")
	root.PersistentPreRunE = func(*cobra.Command, []string) error {
		if a.output != "table" && a.output != "json" {
			return usage(fmt.Errorf("-o %q: want table or json", a.output))
		}
		return nil
	}
	root.AddCommand(a.statusCommand(), a.doctorCommand(), a.leaksCommand(), a.nodeCommand(), a.versionCommand(),
		a.sandboxCommand(), a.taskCommand(), a.networkCommand(), a.imageCommand(), a.projectCommand(), a.callerCommand(), a.tokenCommand())
	root.SetHelpCommand(helpCommand(root))
	root.InitDefaultHelpCmd()
	root.InitDefaultCompletionCmd()
	forEach(root, strict)
	return root
}

// strict makes a command refuse what it does not know as a wrong use, with
// what was perhaps meant.
func strict(c *cobra.Command) {
	c.DisableFlagsInUseLine = true
	if c.HasSubCommands() {
		c.SuggestionsMinimumDistance = 2
		c.Args = nil
		if c == c.Root() {
			c.Args = cobra.ArbitraryArgs // else cobra finds the words for it
		}
		c.RunE = func(c *cobra.Command, args []string) error {
			if len(args) == 0 {
				return c.Help()
			}
			return usage(unknownCommand(c, args[0]))
		}
		return
	}
	if check := c.Args; check != nil {
		c.Args = func(c *cobra.Command, args []string) error {
			if err := check(c, args); err != nil {
				return usage(fmt.Errorf("%d arguments are not what it wants: %s; see %s --help", len(args), c.UseLine(), c.CommandPath()))
			}
			return nil
		}
	}
}

func unknownCommand(c *cobra.Command, name string) error {
	return fmt.Errorf("%s has no command %q%s; see %s --help", c.CommandPath(), name, perhaps(c.SuggestionsFor(name)), c.CommandPath())
}

// flagError explains a flag that was not understood.
func flagError(c *cobra.Command, err error) error {
	meant := ""
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) && unknown.GetSpecifiedShortnames() == "" {
		// cobra knows how to find names that are alike among commands.
		flags := &cobra.Command{SuggestionsMinimumDistance: 2}
		c.Flags().VisitAll(func(f *pflag.Flag) {
			flags.AddCommand(&cobra.Command{Use: "--" + f.Name, Run: func(*cobra.Command, []string) {}})
		})
		meant = perhaps(flags.SuggestionsFor("--" + unknown.GetSpecifiedName()))
	}
	return usage(fmt.Errorf("%w%s; see %s --help", err, meant, c.CommandPath()))
}

// perhaps words suggestions, "" for none.
func perhaps(names []string) string {
	if len(names) == 0 {
		return ""
	}
	return "; perhaps " + strings.Join(names, " or ")
}

// helpCommand is cobra's, but that an unknown topic is a wrong use.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use: "help [COMMAND...]", Short: "Help about a command",
		RunE: func(_ *cobra.Command, args []string) error {
			c, rest, err := root.Find(args)
			if err != nil || len(rest) > 0 {
				return usage(unknownCommand(c, rest[0]))
			}
			return c.Help()
		},
	}
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
