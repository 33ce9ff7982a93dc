package ctl

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"google.golang.org/protobuf/types/known/durationpb"

	agentv1 "github.com/kernflux/opendsec/api/gen/agent/v1"
	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
)

func (a *App) sandboxCommand() *cobra.Command {
	sandbox := &cobra.Command{Use: "sandbox", Short: "Make, use and stop sandboxes"}
	sandbox.AddCommand(a.sandboxRunCommand(), a.sandboxListCommand(), a.sandboxShowCommand(), a.sandboxExecCommand(),
		a.sandboxLogsCommand(), a.sandboxPauseCommand(), a.sandboxResumeCommand(), a.sandboxForkCommand(), a.sandboxSnapshotCommand(),
		a.sandboxPackDiffCommand(), a.sandboxForwardCommand(), a.sandboxURLCommand(), a.sandboxRevokeURLCommand(), a.sandboxStopCommand())
	return sandbox
}

func sandboxRow(s *opendsecv1.Sandbox) []string {
	return []string{s.GetId(), word(s.GetState(), "STATE_"), s.GetSpec().GetBackend(), s.GetSpec().GetImage(),
		s.GetProject(), s.GetNode(), age(s.GetCreatedAt()), s.GetEnd().GetReason()}
}

var sandboxHead = []string{"ID", "STATE", "BACKEND", "IMAGE", "PROJECT", "NODE", "AGE", "END"}

func (a *App) printSandbox(s *opendsecv1.Sandbox) error {
	spec := s.GetSpec()
	end := ""
	if s.GetEnd() != nil {
		end = fmt.Sprintf("%s (%s): %s, at %s", s.GetEnd().GetReason(), strings.ToLower(word(s.GetEnd().GetDomain(), "DOMAIN_")), s.GetEnd().GetDetail(), stamp(s.GetEnd().GetTime()))
	}
	wakes := ""
	if spec.GetAutoResume() {
		wakes = "by any call"
	}
	return a.fields(s, s.GetId(), [][2]string{
		{"id", s.GetId()}, {"project", s.GetProject()}, {"caller", s.GetCaller()}, {"parent", s.GetParent()},
		{"state", word(s.GetState(), "STATE_")}, {"end", end}, {"node", s.GetNode()}, {"backend", spec.GetBackend()},
		{"image", spec.GetImage()}, {"digest", s.GetImageDigest()},
		{"limits", limits(spec.GetCpuCoresLimit(), spec.GetMemoryLimitMb(), spec.GetDiskLimitMb(), spec.GetPidsLimit())},
		{"idle", seconds(spec.GetTtlRunningStop(), word(spec.GetOnIdle(), "ON_IDLE_"))}, {"lifetime", seconds(spec.GetTtlLifetime(), "stop")}, {"wakes", wakes},
		{"labels", pairs(spec.GetLabels())}, {"created", stamp(s.GetCreatedAt())}, {"started", stamp(s.GetStartedAt())}, {"paused", stamp(s.GetPausedAt())},
		{"network", networkRules(spec.GetNetworkRules().GetRules())}, {"warnings", strings.Join(s.GetWarnings(), "; ")},
	})
}

// networkRules words rules, those that deny with a "!".
func networkRules(rules map[string]bool) string {
	var parts []string
	for _, key := range slices.Sorted(maps.Keys(rules)) {
		if !rules[key] {
			key = "!" + key
		}
		parts = append(parts, key)
	}
	return strings.Join(parts, " ")
}

func seconds(d *durationpb.Duration, what string) string {
	if d == nil {
		return ""
	}
	return fmt.Sprintf("%s after %s", strings.ToLower(what), d.AsDuration())
}

func pairs(m map[string]string) string {
	var parts []string
	for _, k := range slices.Sorted(maps.Keys(m)) {
		parts = append(parts, k+"="+m[k])
	}
	return strings.Join(parts, " ")
}

// parsePairs reads "NAME=value" arguments of a flag.
func parsePairs(flag string, args []string) (map[string]string, error) {
	out := map[string]string{}
	for _, s := range args {
		k, v, ok := strings.Cut(s, "=")
		if !ok || k == "" {
			return nil, usage(fmt.Errorf("--%s %q: want NAME=VALUE", flag, s))
		}
		out[k] = v
	}
	return out, nil
}

// runFlags are the flags of sandbox run.
type runFlags struct {
	project, backend, user, workdir, hostname string
	cpu                                       float64
	memory, disk, pids                        int64
	idle, lifetime                            time.Duration
	env, labels                               []string
	onIdle                                    string
	autoResume, remove                        bool
	network                                   ruleFlags
	closed                                    bool
}

func (f *runFlags) spec(image string) (*opendsecv1.SandboxSpec, error) {
	env, err := parsePairs("env", f.env)
	if err != nil {
		return nil, err
	}
	labels, err := parsePairs("label", f.labels)
	if err != nil {
		return nil, err
	}
	rules, err := f.networkRules()
	if err != nil {
		return nil, err
	}
	onIdle, ok := map[string]opendsecv1.OnIdle{"stop": opendsecv1.OnIdle_ON_IDLE_STOP, "pause": opendsecv1.OnIdle_ON_IDLE_PAUSE}[f.onIdle]
	if !ok {
		return nil, usage(fmt.Errorf("--on-idle %q: want stop or pause", f.onIdle))
	}
	spec := &opendsecv1.SandboxSpec{
		Image: image, Backend: f.backend, CpuCoresLimit: f.cpu, MemoryLimitMb: f.memory, DiskLimitMb: f.disk, PidsLimit: f.pids,
		Env: env, Labels: labels, User: f.user, Workdir: f.workdir, Hostname: f.hostname,
		OnIdle: onIdle, AutoResume: f.autoResume, NetworkRules: rules,
	}
	if f.idle != 0 {
		spec.TtlRunningStop = durationpb.New(f.idle)
	}
	if f.lifetime != 0 {
		spec.TtlLifetime = durationpb.New(f.lifetime)
	}
	return spec, nil
}

func (a *App) sandboxRunCommand() *cobra.Command {
	var f runFlags
	c := &cobra.Command{
		Use: "run IMAGE [-- COMMAND [ARG...]]", Short: "Make a sandbox, and run a command in it if one is given",
		Long: `Make a sandbox and print its id. With a command, run it there, with its output and
exit code as one's own; --rm stops the sandbox afterwards.`,
		Args: cobra.MinimumNArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			project, err := a.project(f.project)
			if err != nil {
				return err
			}
			spec, err := f.spec(args[0])
			if err != nil {
				return err
			}
			res, err := api.sandboxes.CreateSandbox(c.Context(), connect.NewRequest(&opendsecv1.CreateSandboxRequest{Project: project, Spec: spec}))
			if err != nil {
				return err
			}
			for _, w := range res.Msg.GetSandbox().GetWarnings() {
				fmt.Fprintf(a.Stderr, "warning: %s\n", printable(w))
			}
			return a.runIn(c.Context(), api, res.Msg.GetSandbox(), args[1:], f.remove)
		}),
	}
	fl := c.Flags()
	projectFlag(c, &f.project)
	fl.StringVar(&f.backend, "backend", "auto", "auto, gvisor, container or sim")
	fl.Float64Var(&f.cpu, "cpu", 0, "cores (default 1, or the snapshot's)")
	fl.Int64Var(&f.memory, "memory-mb", 0, "memory in MiB (default 512, or the snapshot's)")
	fl.Int64Var(&f.disk, "disk-mb", 0, "what may be written, in MiB (default 10240, or the snapshot's)")
	fl.Int64Var(&f.pids, "pids", 0, "processes and threads (default 1024, or the snapshot's)")
	fl.DurationVar(&f.idle, "idle", 0, "stop when idle for so long, such as 10m; never unless given")
	fl.StringVar(&f.onIdle, "on-idle", "stop", "what happens when it is idle for so long: stop or pause")
	fl.BoolVar(&f.autoResume, "auto-resume", false, "let any call wake it when it is paused")
	fl.DurationVar(&f.lifetime, "lifetime", 0, "stop after so long; never unless given")
	fl.StringArrayVarP(&f.env, "env", "e", nil, "variable as NAME=VALUE (repeatable)")
	fl.StringArrayVarP(&f.labels, "label", "l", nil, "label as NAME=VALUE (repeatable)")
	f.network.register(c)
	fl.BoolVar(&f.closed, "no-network", false, "open nothing; without it and without rules a snapshot opens what its sandbox could reach, in that one's project")
	fl.StringVarP(&f.user, "user", "u", "", "user of its processes; the image's unless given")
	fl.StringVarP(&f.workdir, "workdir", "w", "", "directory of its processes; the image's unless given")
	fl.StringVar(&f.hostname, "hostname", "", "host name; the sandbox's id unless given")
	fl.BoolVar(&f.remove, "rm", false, "stop the sandbox when the command has ended")
	return c
}

// networkRules returns the rules that are given, nil for the image's.
func (f *runFlags) networkRules() (*opendsecv1.NetworkRules, error) {
	rules, err := f.network.rules()
	if err != nil {
		return nil, err
	}
	switch {
	case f.closed && len(rules) > 0:
		return nil, usage(errors.New("--no-network goes with neither --allow nor --deny"))
	case !f.closed && len(rules) == 0:
		return nil, nil
	}
	return &opendsecv1.NetworkRules{Rules: rules}, nil
}

// runIn runs a command in a new sandbox, if there is one, and stops the sandbox
// afterwards if that is asked for.
func (a *App) runIn(ctx context.Context, api *api, sb *opendsecv1.Sandbox, command []string, remove bool) error {
	var err error
	switch {
	case len(command) > 0:
		if !remove {
			fmt.Fprintln(a.Stderr, sb.GetId())
		}
		err = a.exec(ctx, api, sb.GetId(), connect.NewRequest(execRequest(command)))
	case a.output == "json":
		err = a.printJSON(sb)
	default:
		_, err = fmt.Fprintln(a.Stdout, sb.GetId())
	}
	if remove {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
		defer cancel()
		_, serr := api.sandboxes.StopSandbox(ctx, connect.NewRequest(&opendsecv1.StopSandboxRequest{Id: sb.GetId()}))
		err = errors.Join(err, serr)
	}
	return err
}

// listSandboxes fetches all pages.
func listSandboxes(ctx context.Context, api *api, req *opendsecv1.ListSandboxesRequest) (*opendsecv1.ListSandboxesResponse, error) {
	req.PageSize = 1000
	all := &opendsecv1.ListSandboxesResponse{}
	for {
		res, err := api.sandboxes.ListSandboxes(ctx, connect.NewRequest(req))
		if err != nil {
			return nil, err
		}
		all.Sandboxes = append(all.Sandboxes, res.Msg.GetSandboxes()...)
		if req.PageToken = res.Msg.GetNextPageToken(); req.PageToken == "" {
			return all, nil
		}
	}
}

func (a *App) sandboxListCommand() *cobra.Command {
	var project string
	var labels, states []string
	var ended bool
	c := &cobra.Command{
		Use: "list", Short: "List a project's sandboxes and those of the projects below it", Args: cobra.NoArgs,
		RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
			project, err := a.project(project)
			if err != nil {
				return err
			}
			wanted, err := parsePairs("label", labels)
			if err != nil {
				return err
			}
			req := &opendsecv1.ListSandboxesRequest{Project: project, Labels: wanted, Ended: ended}
			if req.States, err = parseStates(states); err != nil {
				return err
			}
			all, err := listSandboxes(c.Context(), api, req)
			if err != nil {
				return err
			}
			var rows [][]string
			for _, s := range all.GetSandboxes() {
				rows = append(rows, sandboxRow(s))
			}
			return a.print(list{all, sandboxHead, rows})
		}),
	}
	projectFlag(c, &project)
	c.Flags().StringArrayVarP(&labels, "label", "l", nil, "only with this label, as NAME=VALUE (repeatable)")
	c.Flags().StringArrayVar(&states, "state", nil, "only in this state, such as paused (repeatable)")
	c.Flags().BoolVarP(&ended, "all", "a", false, "include ended ones")
	return c
}

func (a *App) sandboxShowCommand() *cobra.Command {
	return &cobra.Command{
		Use: "show ID", Short: "Show a sandbox", Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.sandboxes.GetSandbox(c.Context(), connect.NewRequest(&opendsecv1.GetSandboxRequest{Id: args[0]}))
			if err != nil {
				return err
			}
			return a.printSandbox(res.Msg.GetSandbox())
		}),
	}
}

// forAll does something to sandboxes, eight at a time, prints which, and returns
// all failures.
func (a *App) forAll(ctx context.Context, api *api, v verb, ids []string) error {
	g := new(errgroup.Group)
	g.SetLimit(8)
	errs := make([]error, len(ids)+1)
	done := make([]*opendsecv1.Sandbox, len(ids))
	for i, id := range ids {
		g.Go(func() error {
			done[i], errs[i] = v.call(ctx, api, id)
			return nil
		})
	}
	_ = g.Wait() // the functions return nil; errs has what happened
	errs[len(ids)] = a.printDone(v.done, slices.DeleteFunc(done, func(s *opendsecv1.Sandbox) bool { return s == nil }))
	return errors.Join(errs...)
}

func (a *App) printDone(word string, done []*opendsecv1.Sandbox) error {
	switch {
	case a.output == "json":
		return a.printJSON(&opendsecv1.ListSandboxesResponse{Sandboxes: done})
	case a.quiet:
		for _, s := range done {
			fmt.Fprintln(a.Stdout, s.GetId())
		}
	default:
		fmt.Fprintf(a.Stdout, "%s %d\n", word, len(done))
	}
	return nil
}

func (a *App) sandboxStopCommand() *cobra.Command {
	var all, yes bool
	var project string
	c := &cobra.Command{
		Use: "stop ID...", Short: "End sandboxes and delete what belongs to them",
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			switch {
			case all && len(args) > 0:
				return usage(fmt.Errorf("give either ids or --all"))
			case !all && len(args) == 0:
				return usage(fmt.Errorf("which? give ids, or --all"))
			case !all:
				return a.forAll(c.Context(), api, stopVerb, args)
			}
			project, err := a.project(project)
			if err != nil {
				return err
			}
			found, err := listSandboxes(c.Context(), api, &opendsecv1.ListSandboxesRequest{Project: project})
			if err != nil {
				return err
			}
			return a.stopFound(c.Context(), api, found, yes)
		}),
	}
	c.Flags().BoolVar(&all, "all", false, "all of the project and of those below it")
	c.Flags().BoolVar(&yes, "yes", false, "really stop all of them")
	c.Flags().StringVarP(&project, "project", "p", "", "project for --all; OPENDSEC_PROJECT unless given")
	return c
}

func idsOf(found *opendsecv1.ListSandboxesResponse) []string {
	var ids []string
	for _, s := range found.GetSandboxes() {
		ids = append(ids, s.GetId())
	}
	return ids
}

// stopFound stops what a search found, once that was confirmed.
func (a *App) stopFound(ctx context.Context, api *api, found *opendsecv1.ListSandboxesResponse, yes bool) error {
	ids := idsOf(found)
	if !yes && len(ids) > 0 {
		return usage(fmt.Errorf("this would stop %d sandboxes; say --yes to do it", len(ids)))
	}
	return a.forAll(ctx, api, stopVerb, ids)
}

func (a *App) sandboxLogsCommand() *cobra.Command {
	var follow bool
	c := &cobra.Command{
		Use: "logs ID PROCESS", Short: "Print the output of a background process, by its pid or id", Args: cobra.ExactArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			req := &agentv1.AttachRequest{NoFollow: !follow, Process: &agentv1.AttachRequest_Tag{Tag: args[1]}}
			if pid, err := strconv.ParseUint(args[1], 10, 32); err == nil {
				req.Process = &agentv1.AttachRequest_Pid{Pid: uint32(pid)}
			}
			stream, err := api.agent(args[0]).Attach(c.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			defer stream.Close()
			for stream.Receive() {
				if err := a.write(stream.Msg().GetStdout().GetData(), stream.Msg().GetStderr().GetData()); err != nil {
					return err
				}
			}
			return stream.Err()
		}),
	}
	c.Flags().BoolVarP(&follow, "follow", "f", false, "go on until it ends")
	return c
}
