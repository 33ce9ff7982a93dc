// Opendsec runs an installation on one machine: all servers in one process,
// with the certificates, the database and the configuration that they need.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/kernflux/opendsec/internal/daemon"
)

func main() {
	ctx, stop := daemon.Context()
	err := daemon.KeepFiles()
	if err == nil {
		err = command().ExecuteContext(ctx)
	}
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "opendsec: %v\n", err)
		os.Exit(1)
	}
}

func command() *cobra.Command {
	root := &cobra.Command{
		Use: "opendsec", Short: "Sandboxes for agents, on your own machine",
		SilenceErrors: true, SilenceUsage: true, CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
	}
	root.AddCommand(initCommand(), upCommand(), downCommand(), waitCommand(), doctorCommand(), &cobra.Command{
		Use: "version", Short: "Print the version", Args: cobra.NoArgs,
		Run: func(c *cobra.Command, _ []string) { fmt.Fprintln(c.OutOrStdout(), daemon.Version) },
	})
	return root
}

// run makes a RunE of a function without arguments.
func run(f func(context.Context) error) func(*cobra.Command, []string) error {
	return func(c *cobra.Command, _ []string) error { return f(c.Context()) }
}
