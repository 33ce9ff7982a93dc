package ctl

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
)

// verb is something that is done to each of several sandboxes.
type verb struct {
	done string // the word that tells it: "stopped"
	call func(ctx context.Context, api *api, id string) (*opendsecv1.Sandbox, error)
}

var (
	stopVerb = verb{"stopped", func(ctx context.Context, api *api, id string) (*opendsecv1.Sandbox, error) {
		res, err := api.sandboxes.StopSandbox(ctx, connect.NewRequest(&opendsecv1.StopSandboxRequest{Id: id}))
		if err != nil {
			return nil, err
		}
		return res.Msg.GetSandbox(), nil
	}}
	pauseVerb = verb{"paused", func(ctx context.Context, api *api, id string) (*opendsecv1.Sandbox, error) {
		res, err := api.sandboxes.PauseSandbox(ctx, connect.NewRequest(&opendsecv1.PauseSandboxRequest{Id: id}))
		if err != nil {
			return nil, err
		}
		return res.Msg.GetSandbox(), nil
	}}
	resumeVerb = verb{"resumed", func(ctx context.Context, api *api, id string) (*opendsecv1.Sandbox, error) {
		res, err := api.sandboxes.ResumeSandbox(ctx, connect.NewRequest(&opendsecv1.ResumeSandboxRequest{Id: id}))
		if err != nil {
			return nil, err
		}
		return res.Msg.GetSandbox(), nil
	}}
)

func (a *App) sandboxPauseCommand() *cobra.Command {
	return &cobra.Command{
		Use: "pause ID...", Short: "Stop all that runs in sandboxes and keep it; on a backend that can, on the disk",
		Args: cobra.MinimumNArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			return a.forAll(c.Context(), api, pauseVerb, args)
		}),
	}
}

func (a *App) sandboxResumeCommand() *cobra.Command {
	return &cobra.Command{
		Use: "resume ID...", Short: "Let paused sandboxes go on where they were", Args: cobra.MinimumNArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			return a.forAll(c.Context(), api, resumeVerb, args)
		}),
	}
}

func (a *App) sandboxForkCommand() *cobra.Command {
	var req opendsecv1.ForkSandboxRequest
	c := &cobra.Command{
		Use: "fork ID", Short: "Make copies of a sandbox, which goes on, and print their ids",
		Long: `Make copies of a sandbox that runs or is paused, and print their ids. Memory,
processes and files are copied; with --files-only, files alone. The sandbox goes on.
A copy that could not be made has its line on standard error.`,
		Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			if req.Count == 0 {
				return usage(errors.New("-n 0: want at least one copy"))
			}
			req.Id = args[0]
			res, err := api.sandboxes.ForkSandbox(c.Context(), connect.NewRequest(&req))
			if err != nil {
				return err
			}
			return a.printCopies(res.Msg)
		}),
	}
	c.Flags().Uint32VarP(&req.Count, "count", "n", 1, "how many, up to 100")
	c.Flags().BoolVar(&req.FilesOnly, "files-only", false, "copy no memory and no processes")
	c.Flags().BoolVar(&req.AllOrNone, "all-or-none", false, "make none when one cannot be made")
	return c
}

// printCopies prints what was made, and returns why the others were not.
func (a *App) printCopies(res *opendsecv1.ForkSandboxResponse) error {
	var errs []error
	if a.output == "json" {
		errs = append(errs, a.printJSON(res))
	}
	for _, r := range res.GetResults() {
		switch {
		case r.GetError() != nil:
			errs = append(errs, fault.FromInfo(r.GetError()))
		case a.output != "json":
			fmt.Fprintln(a.Stdout, r.GetSandbox().GetId())
		}
	}
	return errors.Join(errs...)
}

func (a *App) sandboxSnapshotCommand() *cobra.Command {
	var req opendsecv1.CreateSnapshotRequest
	c := &cobra.Command{
		Use: "snapshot ID NAME", Short: "Make an image of a sandbox, which goes on, for others to start from",
		Long: `Make an image of a sandbox that runs or is paused, with the name "project/name:tag".
One with memory goes on where the sandbox was, on the same backend and with the
same limits; with --files-only it is of the files, for every backend.`,
		Args: cobra.ExactArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			req.Id, req.Name = args[0], args[1]
			res, err := api.sandboxes.CreateSnapshot(c.Context(), connect.NewRequest(&req))
			if err != nil {
				return err
			}
			return a.printImage(res.Msg.GetImage())
		}),
	}
	c.Flags().BoolVar(&req.FilesOnly, "files-only", false, "leave out memory and processes")
	return c
}

func (a *App) sandboxPackDiffCommand() *cobra.Command {
	return &cobra.Command{
		Use: "pack-diff ID NAME", Short: "Make an image of a sandbox's image and the files that were changed since",
		Args: cobra.ExactArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.sandboxes.PackDiff(c.Context(), connect.NewRequest(&opendsecv1.PackDiffRequest{Id: args[0], Name: args[1]}))
			if err != nil {
				return err
			}
			return a.printImage(res.Msg.GetImage())
		}),
	}
}

// parseStates reads names of states as people write them.
func parseStates(names []string) ([]opendsecv1.State, error) {
	var out []opendsecv1.State
	for _, name := range names {
		n, ok := opendsecv1.State_value["STATE_"+strings.ToUpper(name)]
		if !ok || n == 0 {
			return nil, usage(fmt.Errorf("--state %q: want pending, starting, running, paused, stopping, stopped or failed", name))
		}
		out = append(out, opendsecv1.State(n))
	}
	return out, nil
}

// snapshotFields are the properties that only a snapshot with memory has.
func snapshotFields(s *opendsecv1.SnapshotInfo) [][2]string {
	if s == nil {
		return nil
	}
	return [][2]string{
		{"backend", s.GetBackend()}, {"nodes", strings.Join(s.GetNodes(), " ")},
		{"limits", limits(s.GetCpuCoresLimit(), s.GetMemoryLimitMb(), s.GetDiskLimitMb(), s.GetPidsLimit())},
		{"virtualization", s.GetVirtualization()}, {"runtime", s.GetRuntime()}, {"kernel", s.GetKernel()}, {"agent", s.GetAgent()},
		{"cpu features", strings.Join(s.GetCpuFeatures(), " ")},
	}
}

func limits(cpu float64, memory, disk, pids int64) string {
	return fmt.Sprintf("%s cores, %s memory, %s disk, %d pids", cores(cpu), mib(memory), mib(disk), pids)
}
