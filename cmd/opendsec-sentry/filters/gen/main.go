// Command gen writes the Go file with the sentry's compiled seccomp program:
//
//	gen FILE
package main

import (
	"fmt"
	"os"

	"github.com/kernflux/opendsec/cmd/opendsec-sentry/filters"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 1 {
		return fmt.Errorf("usage: gen FILE")
	}
	p, err := filters.Compile()
	if err != nil {
		return err
	}
	src, err := filters.Source(p)
	if err != nil {
		return err
	}
	return os.WriteFile(args[0], src, 0o644)
}
