package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kernflux/opendsec/internal/machine"
	"github.com/kernflux/opendsec/internal/program/install"
)

func doctorCommand() *cobra.Command {
	var state, only string
	c := &cobra.Command{
		Use: "doctor", Short: "Say what this machine can do, found by trying; fails when something needed is missing", Args: cobra.NoArgs,
		RunE: run(func(context.Context) error {
			if state == "" {
				state = install.DefaultState()
			}
			missing := false
			var names []string
			for _, f := range machine.Look(state) {
				names = append(names, f.Name)
				if only != "" && f.Name != only {
					continue
				}
				mark := "[ok]"
				switch {
				case !f.OK && f.Needed:
					mark, missing = "[no]", true
				case !f.OK:
					mark = "[--]"
				}
				line := mark + " " + f.Name
				if f.Detail != "" {
					line += ": " + f.Detail
				}
				fmt.Println(line)
			}
			if only != "" && !slices.Contains(names, only) {
				return fmt.Errorf("--only %q: want one of %s", only, strings.Join(names, ", "))
			}
			if missing {
				return errors.New("this machine lacks what is marked [no]")
			}
			return nil
		}),
	}
	c.Flags().StringVar(&state, "state", "", "directory that is to hold the state")
	c.Flags().StringVar(&only, "only", "", "look at this one thing, such as kvm")
	return c
}
