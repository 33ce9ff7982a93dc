package ctl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/daemon"
	"github.com/kernflux/opendsec/internal/fault"
)

func (a *App) statusCommand() *cobra.Command {
	return &cobra.Command{
		Use: "status", Short: "Show the cluster as the scheduler sees it", Args: cobra.NoArgs,
		RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
			res, err := api.cluster.GetStatus(c.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{}))
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(res.Msg)
			}
			if len(res.Msg.GetNodes()) == 0 && !a.quiet {
				fmt.Fprintln(a.Stdout, "no node has reported yet")
			}
			for i, n := range res.Msg.GetNodes() {
				if i > 0 && !a.quiet {
					fmt.Fprintln(a.Stdout)
				}
				a.printNode(n)
			}
			return nil
		}),
	}
}

func (a *App) printNode(n *opendsecv1.Node) {
	if a.quiet {
		fmt.Fprintln(a.Stdout, n.GetName())
		return
	}
	health := "healthy"
	if !n.GetHealthy() {
		health = "not healthy: " + n.GetReason()
	}
	if n.GetDrained() {
		health += ", drained"
	}
	fmt.Fprintf(a.Stdout, "node %s   %s", n.GetName(), health)
	if n.GetLastSeen() != nil { // a node that never reported has no version either
		fmt.Fprintf(a.Stdout, "   version %s, seen %s ago", n.GetVersion(), age(n.GetLastSeen()))
	}
	fmt.Fprintln(a.Stdout)
	var names []string
	for _, b := range n.GetBackends() {
		if b.GetAvailable() {
			names = append(names, b.GetName())
		}
	}
	fmt.Fprintf(a.Stdout, "  backends   %s\n", strings.Join(names, ", "))
	for _, b := range n.GetBackends() {
		if !b.GetAvailable() {
			fmt.Fprintf(a.Stdout, "    no %s: %s\n", b.GetName(), b.GetReason())
		}
	}
	c, u := n.GetCapacity(), n.GetUsed()
	fmt.Fprintf(a.Stdout, "  capacity   %s CPU cores, %s memory, %s disk, up to %d sandboxes\n",
		cores(c.GetCpuCores()), mib(c.GetMemoryMb()), mib(c.GetDiskMb()), c.GetSandboxes())
	fmt.Fprintf(a.Stdout, "  in use     %s CPU cores, %s memory, %s disk, %d sandboxes\n",
		cores(u.GetCpuCores()), mib(u.GetMemoryMb()), mib(u.GetDiskMb()), u.GetSandboxes())
	for _, w := range n.GetWarnings() {
		fmt.Fprintf(a.Stdout, "  warning    %s\n", w)
	}
}

func cores(n float64) string {
	return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.2f", n), "0"), ".")
}

func (a *App) leaksCommand() *cobra.Command {
	var repair bool
	c := &cobra.Command{
		Use: "leaks", Short: "Compare what should exist on the nodes with what does; exits 1 when something is left over", Args: cobra.NoArgs,
		RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
			res, err := api.cluster.FindLeaks(c.Context(), connect.NewRequest(&opendsecv1.FindLeaksRequest{Repair: repair}))
			if err != nil {
				return err
			}
			var rows [][]string
			left := 0
			for _, l := range res.Msg.GetLeaks() {
				fixed := ""
				if l.GetRepaired() {
					fixed = "removed"
				} else {
					left++
				}
				rows = append(rows, []string{l.GetName(), l.GetKind(), l.GetNode(), l.GetDetail(), fixed})
			}
			switch {
			case len(rows) > 0 || a.output == "json":
				if err := a.print(list{res.Msg, []string{"NAME", "KIND", "NODE", "WHAT", ""}, rows}); err != nil {
					return err
				}
			case !a.quiet:
				fmt.Fprintln(a.Stdout, "nothing is left over")
			}
			if left > 0 {
				return errFound
			}
			return nil
		}),
	}
	c.Flags().BoolVar(&repair, "repair", false, "remove what is found")
	return c
}

func (a *App) nodeCommand() *cobra.Command {
	node := &cobra.Command{Use: "node", Short: "List nodes and take them out of placement"}
	node.AddCommand(&cobra.Command{
		Use: "list", Short: "List the nodes", Args: cobra.NoArgs,
		RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
			res, err := api.cluster.GetStatus(c.Context(), connect.NewRequest(&opendsecv1.GetStatusRequest{}))
			if err != nil {
				return err
			}
			var rows [][]string
			for _, n := range res.Msg.GetNodes() {
				state := "healthy"
				if !n.GetHealthy() {
					state = "not healthy"
				}
				if n.GetDrained() {
					state += ", drained"
				}
				rows = append(rows, []string{n.GetName(), state,
					fmt.Sprintf("%s/%s", cores(n.GetUsed().GetCpuCores()), cores(n.GetCapacity().GetCpuCores())),
					fmt.Sprintf("%s/%s", mib(n.GetUsed().GetMemoryMb()), mib(n.GetCapacity().GetMemoryMb())),
					fmt.Sprintf("%d/%d", n.GetUsed().GetSandboxes(), n.GetCapacity().GetSandboxes()), n.GetReason()})
			}
			return a.print(list{res.Msg, []string{"NAME", "STATE", "CPU", "MEMORY", "SANDBOXES", "REASON"}, rows})
		}),
	}, a.drainCommand("drain", "Give a node no further sandboxes", true), a.drainCommand("undrain", "Give a node sandboxes again", false))
	return node
}

func (a *App) drainCommand(name, short string, drain bool) *cobra.Command {
	return &cobra.Command{
		Use: name + " NODE", Short: short, Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.cluster.SetNodeDrain(c.Context(), connect.NewRequest(&opendsecv1.SetNodeDrainRequest{Node: args[0], Drain: drain}))
			if err != nil {
				return err
			}
			return a.done(res.Msg, args[0])
		}),
	}
}

func (a *App) versionCommand() *cobra.Command {
	return &cobra.Command{
		Use: "version", Short: "Print the versions of this command and of the server, if OPENDSEC_ADDR names one", Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			var v struct {
				Opendsecctl string `json:"opendsecctl"`
				Server      string `json:"server,omitempty"`
			}
			v.Opendsecctl = daemon.Version
			var err error
			if a.Env("OPENDSEC_ADDR") != "" {
				v.Server, err = a.serverVersion(c.Context())
			}
			switch {
			case a.output == "json":
				return errors.Join(a.writeJSON(v), err)
			case a.quiet:
				fmt.Fprintln(a.Stdout, v.Opendsecctl)
				return err
			}
			fmt.Fprintf(a.Stdout, "opendsecctl %s\n", v.Opendsecctl)
			if v.Server != "" {
				fmt.Fprintf(a.Stdout, "server      %s\n", v.Server)
			}
			return err
		},
	}
}

func (a *App) serverVersion(ctx context.Context) (string, error) {
	api, err := a.connect()
	if err != nil {
		return "", err
	}
	res, err := api.cluster.GetVersion(ctx, connect.NewRequest(&opendsecv1.GetVersionRequest{}))
	if err != nil {
		return "", err
	}
	return res.Msg.GetVersion(), nil
}

// check is one line of doctor.
type check struct {
	name string
	run  func(context.Context, *api) (string, error)
}

var checks = []check{
	{"the API answers", func(ctx context.Context, p *api) (string, error) {
		start := time.Now()
		res, err := p.cluster.GetVersion(ctx, connect.NewRequest(&opendsecv1.GetVersionRequest{}))
		if fault.Is(err, fault.Unauthenticated) {
			return "", nil // an answer; the next check says what is wrong
		}
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("version %s, in %.1f ms", res.Msg.GetVersion(), float64(time.Since(start).Microseconds())/1000), nil
	}},
	{"the token is good", func(ctx context.Context, p *api) (string, error) {
		res, err := p.identity.WhoAmI(ctx, connect.NewRequest(&opendsecv1.WhoAmIRequest{}))
		if err != nil {
			return "", err
		}
		var roles []string
		for _, g := range res.Msg.GetCaller().GetGrants() {
			roles = append(roles, g.GetRole()+" on "+g.GetProject())
		}
		return fmt.Sprintf("caller %s, %s", res.Msg.GetCaller().GetName(), strings.Join(roles, ", ")), nil
	}},
	{"a node is healthy", func(ctx context.Context, p *api) (string, error) {
		res, err := p.cluster.GetStatus(ctx, connect.NewRequest(&opendsecv1.GetStatusRequest{}))
		if err != nil {
			return "", err
		}
		var good, bad []string
		for _, n := range res.Msg.GetNodes() {
			if n.GetHealthy() {
				good = append(good, n.GetName())
			} else {
				bad = append(bad, n.GetName()+" ("+n.GetReason()+")")
			}
		}
		if len(good) == 0 {
			return "", fmt.Errorf("none of %d: %s", len(bad), strings.Join(bad, ", "))
		}
		return fmt.Sprintf("%d of %d", len(good), len(good)+len(bad)), nil
	}},
	{"nothing is left over", func(ctx context.Context, p *api) (string, error) {
		res, err := p.cluster.FindLeaks(ctx, connect.NewRequest(&opendsecv1.FindLeaksRequest{}))
		if err != nil {
			return "", err
		}
		if n := len(res.Msg.GetLeaks()); n > 0 {
			return "", fmt.Errorf("%d things; see opendsecctl leaks", n)
		}
		return "", nil
	}},
}

// checked is what doctor found out about one step.
type checked struct {
	Name   string `json:"name"`
	OK     bool   `json:"ok"`
	Detail string `json:"detail,omitempty"`
}

func (a *App) doctorCommand() *cobra.Command {
	return &cobra.Command{
		Use: "doctor", Short: "Check the way from here to the nodes, step by step; exits 1 when one fails", Args: cobra.NoArgs,
		RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
			var all []checked
			failed := false
			for _, k := range checks {
				detail, err := k.run(c.Context(), api)
				if err != nil {
					_, detail = a.verdict(err)
				}
				all = append(all, checked{k.name, err == nil, detail})
				failed = failed || err != nil
				if fault.Is(err, fault.Unavailable) || fault.Is(err, fault.Unauthenticated) || errors.Is(err, context.Canceled) {
					break // the rest would say the same
				}
			}
			if err := a.printChecks(all); err != nil {
				return err
			}
			if failed {
				return errFound
			}
			return nil
		}),
	}
}

// printChecks prints what doctor found; with -q, what failed only.
func (a *App) printChecks(all []checked) error {
	if a.output == "json" {
		return a.writeJSON(map[string][]checked{"checks": all})
	}
	for _, k := range all {
		line := "[ok] " + k.Name
		if !k.OK {
			line = "[no] " + k.Name
		}
		if k.Detail != "" {
			line += ": " + k.Detail
		}
		if !k.OK || !a.quiet {
			fmt.Fprintln(a.Stdout, line)
		}
	}
	return nil
}
