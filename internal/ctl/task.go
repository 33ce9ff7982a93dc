package ctl

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
)

// taskLabel is the label whose value says to which task a sandbox belongs.
const taskLabel = "task"

func (a *App) taskCommand() *cobra.Command {
	task := &cobra.Command{Use: "task", Short: `Look after tasks: the sandboxes with the same "task" label`}
	task.AddCommand(a.taskListCommand(), a.taskStateCommand("pause TASK", "Pause all sandboxes of a task that run", opendsecv1.State_STATE_RUNNING, pauseVerb),
		a.taskStateCommand("resume TASK", "Resume all sandboxes of a task that are paused", opendsecv1.State_STATE_PAUSED, resumeVerb), a.taskStopCommand())
	return task
}

func (a *App) taskListCommand() *cobra.Command {
	var project string
	c := &cobra.Command{
		Use: "list", Short: "List the tasks that have sandboxes", Args: cobra.NoArgs,
		RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
			project, err := a.project(project)
			if err != nil {
				return err
			}
			all, err := listSandboxes(c.Context(), api, &opendsecv1.ListSandboxesRequest{Project: project})
			if err != nil {
				return err
			}
			states := map[string]map[string]int{}
			labelled := &opendsecv1.ListSandboxesResponse{}
			for _, s := range all.GetSandboxes() {
				name, ok := s.GetSpec().GetLabels()[taskLabel]
				if !ok {
					continue
				}
				labelled.Sandboxes = append(labelled.Sandboxes, s)
				if states[name] == nil {
					states[name] = map[string]int{}
				}
				states[name][word(s.GetState(), "STATE_")]++
			}
			var rows [][]string
			for name, counts := range states {
				var parts []string
				total := 0
				for state, n := range counts {
					parts = append(parts, fmt.Sprintf("%d %s", n, state))
					total += n
				}
				slices.Sort(parts)
				rows = append(rows, []string{name, fmt.Sprint(total), strings.Join(parts, ", ")})
			}
			slices.SortFunc(rows, func(x, y []string) int { return strings.Compare(x[0], y[0]) })
			return a.print(list{labelled, []string{"TASK", "SANDBOXES", "STATES"}, rows})
		}),
	}
	projectFlag(c, &project)
	return c
}

func (a *App) taskStopCommand() *cobra.Command {
	var project string
	var yes bool
	c := &cobra.Command{
		Use: "stop TASK", Short: "Stop all sandboxes of a task", Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			project, err := a.project(project)
			if err != nil {
				return err
			}
			found, err := listSandboxes(c.Context(), api, &opendsecv1.ListSandboxesRequest{Project: project, Labels: map[string]string{taskLabel: args[0]}})
			if err != nil {
				return err
			}
			return a.stopFound(c.Context(), api, found, yes)
		}),
	}
	projectFlag(c, &project)
	c.Flags().BoolVar(&yes, "yes", false, "really stop all of them")
	return c
}

// taskStateCommand does something to the sandboxes of a task that are in a state.
func (a *App) taskStateCommand(use, short string, from opendsecv1.State, v verb) *cobra.Command {
	var project string
	c := &cobra.Command{
		Use: use, Short: short, Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			project, err := a.project(project)
			if err != nil {
				return err
			}
			found, err := listSandboxes(c.Context(), api, &opendsecv1.ListSandboxesRequest{
				Project: project, Labels: map[string]string{taskLabel: args[0]}, States: []opendsecv1.State{from},
			})
			if err != nil {
				return err
			}
			return a.forAll(c.Context(), api, v, idsOf(found))
		}),
	}
	projectFlag(c, &project)
	return c
}
