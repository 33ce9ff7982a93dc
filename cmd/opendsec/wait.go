package main

import (
	"context"
	"fmt"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/program/install"
)

func waitCommand() *cobra.Command {
	var ops string
	var limit time.Duration
	c := &cobra.Command{
		Use: "wait", Short: "Wait until the API answers and a node takes sandboxes", Args: cobra.NoArgs,
		RunE: run(func(ctx context.Context) error {
			in, err := install.Load(ops)
			if err != nil {
				return err
			}
			ctx, cancel := context.WithTimeout(ctx, limit)
			defer cancel()
			return waitReady(ctx, in)
		}),
	}
	c.Flags().StringVar(&ops, "ops", install.DefaultOps, "directory of the configuration")
	c.Flags().DurationVar(&limit, "timeout", time.Minute, "how long at most")
	return c
}

// waitReady returns when a node takes sandboxes; at the context's end it says
// what was missing last.
func waitReady(ctx context.Context, in *install.Installation) error {
	client, err := in.Admin()
	if err != nil {
		return err
	}
	defer client.Close()
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		res, err := client.Cluster.GetStatus(ctx, connect.NewRequest(&opendsecv1.GetStatusRequest{}))
		missing := "no node has reported"
		if err != nil {
			missing = err.Error()
		} else {
			for _, n := range res.Msg.GetNodes() {
				if n.GetHealthy() {
					return nil
				}
				missing = "node " + n.GetName() + ": " + n.GetReason()
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("it is not ready: %s", missing)
		case <-tick.C:
		}
	}
}
