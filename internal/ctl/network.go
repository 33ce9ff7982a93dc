package ctl

import (
	"fmt"
	"net"
	"strconv"
	"strings"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/netpolicy"
)

func (a *App) networkCommand() *cobra.Command {
	network := &cobra.Command{Use: "network", Short: "Say and change what sandboxes may reach"}
	network.AddCommand(a.networkExplainCommand(), a.networkUpdateCommand(), a.networkDeniedCommand(), a.networkPresetsCommand())
	return network
}

func (a *App) networkExplainCommand() *cobra.Command {
	return &cobra.Command{
		Use: "explain SANDBOX HOST[:PORT][/PROTO]", Short: "Say whether a sandbox may reach something, and by which rule",
		Long: `Say whether a sandbox may reach a name or an address now, and by which rule. The
answer is that of the code which decides on its connections. It is a result, not a
failure, that something is denied. Without a port: whether any is open.`,
		Args: cobra.ExactArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.sandboxes.ExplainNetwork(c.Context(), connect.NewRequest(&opendsecv1.ExplainNetworkRequest{Id: args[0], Target: args[1]}))
			if err != nil {
				return err
			}
			d := res.Msg.GetDecision()
			answer := "deny"
			if d.GetAllow() {
				answer = "allow"
			}
			return a.fields(d, answer, [][2]string{{"answer", answer}, {"rule", d.GetRule()}, {"why", d.GetWhy()}})
		}),
	}
}

// ruleFlags are the rules of a command.
type ruleFlags struct{ allow, deny []string }

func (f *ruleFlags) register(c *cobra.Command) {
	c.Flags().StringArrayVar(&f.allow, "allow", nil, "what may be reached: a preset (pypi), a name (github.com:443, *.example.com), a CIDR, or * (repeatable)")
	c.Flags().StringArrayVar(&f.deny, "deny", nil, "what may not (repeatable)")
}

func (f *ruleFlags) rules() (map[string]bool, error) {
	rules := map[string]bool{}
	for _, key := range f.allow {
		rules[key] = true
	}
	for _, key := range f.deny {
		if rules[key] {
			return nil, usage(fmt.Errorf("--deny %s: it is allowed by --allow too", key))
		}
		rules[key] = false
	}
	return rules, nil
}

func (a *App) networkUpdateCommand() *cobra.Command {
	var f ruleFlags
	c := &cobra.Command{
		Use: "update SANDBOX", Short: "Replace a sandbox's network rules; without rules all is closed",
		Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			rules, err := f.rules()
			if err != nil {
				return err
			}
			res, err := api.sandboxes.UpdateNetwork(c.Context(), connect.NewRequest(&opendsecv1.UpdateNetworkRequest{Id: args[0], NetworkRules: rules}))
			if err != nil {
				return err
			}
			return a.done(res.Msg.GetSandbox(), args[0])
		}),
	}
	f.register(c)
	return c
}

func (a *App) networkDeniedCommand() *cobra.Command {
	return &cobra.Command{
		Use: "denied SANDBOX", Short: "List what a sandbox was denied on the network lately, the newest last",
		Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.sandboxes.ListDenied(c.Context(), connect.NewRequest(&opendsecv1.ListDeniedRequest{Id: args[0]}))
			if err != nil {
				return err
			}
			var rows [][]string
			for _, d := range res.Msg.GetDenials() {
				rows = append(rows, []string{deniedTarget(d), d.GetKind(), d.GetRule(), fmt.Sprint(d.GetCount()), stamp(d.GetTime()), d.GetWhy()})
			}
			return a.print(list{message: res.Msg, head: []string{"WHAT", "KIND", "RULE", "TIMES", "LAST", "WHY"}, rows: rows})
		}),
	}
}

// deniedTarget words what was denied: "example.com 192.0.2.1:443/tcp".
func deniedTarget(d *opendsecv1.Denial) string {
	var parts []string
	if d.GetName() != "" {
		parts = append(parts, d.GetName())
	}
	if addr := d.GetAddress(); addr != "" {
		if d.GetPort() != 0 {
			addr = net.JoinHostPort(addr, strconv.Itoa(int(d.GetPort()))) + "/" + d.GetProtocol()
		}
		parts = append(parts, addr)
	}
	return strings.Join(parts, " ")
}

func (a *App) networkPresetsCommand() *cobra.Command {
	return &cobra.Command{
		Use: "presets [NAME]", Short: "List the presets of network rules, or the rules of one", Args: cobra.MaximumNArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			presets := netpolicy.Presets()
			if len(args) == 1 {
				return a.printPreset(presets, args[0])
			}
			if a.output == "json" {
				return a.writeJSON(presets)
			}
			var rows [][]string
			for _, p := range presets {
				rows = append(rows, []string{p.Name, fmt.Sprint(len(p.Rules)), p.About})
			}
			return a.print(list{head: []string{"NAME", "RULES", "FOR"}, rows: rows})
		},
	}
}

func (a *App) printPreset(presets []netpolicy.Preset, name string) error {
	for _, p := range presets {
		if p.Name != name {
			continue
		}
		if a.output == "json" {
			return a.writeJSON(p)
		}
		fmt.Fprintln(a.Stdout, strings.Join(p.Rules, "\n"))
		return nil
	}
	return fault.New(fault.NotFound, "there is no preset %q; see opendsecctl network presets", name)
}
