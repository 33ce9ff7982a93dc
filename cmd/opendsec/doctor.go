package main

import (
	"context"
	"errors"
	"fmt"

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
			for _, f := range machine.Look(state) {
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
				fmt.Printf("%s %s: %s\n", mark, f.Name, f.Detail)
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
