package ctl

import (
	"fmt"
	"strings"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/timestamppb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
)

// quotaFlags are the flags that give a quota.
type quotaFlags struct {
	sandboxes, memory int64
	cpu               float64
}

func (q *quotaFlags) register(c *cobra.Command) {
	c.Flags().Int64Var(&q.sandboxes, "sandboxes", 0, "most sandboxes at once")
	c.Flags().Float64Var(&q.cpu, "cpu", 0, "most cores together")
	c.Flags().Int64Var(&q.memory, "memory-mb", 0, "most memory together, in MiB")
}

// quota returns the limits whose flags were given.
func (q *quotaFlags) quota(c *cobra.Command) *opendsecv1.Quota {
	out := &opendsecv1.Quota{}
	if c.Flags().Changed("sandboxes") {
		out.Sandboxes = &q.sandboxes
	}
	if c.Flags().Changed("cpu") {
		out.CpuCores = &q.cpu
	}
	if c.Flags().Changed("memory-mb") {
		out.MemoryMb = &q.memory
	}
	return out
}

func quotaText(q *opendsecv1.Quota) string {
	var parts []string
	if q != nil && q.Sandboxes != nil {
		parts = append(parts, fmt.Sprintf("%d sandboxes", q.GetSandboxes()))
	}
	if q != nil && q.CpuCores != nil {
		parts = append(parts, cores(q.GetCpuCores())+" cores")
	}
	if q != nil && q.MemoryMb != nil {
		parts = append(parts, mib(q.GetMemoryMb()))
	}
	if len(parts) == 0 {
		return "no limit"
	}
	return strings.Join(parts, ", ")
}

func (a *App) printProject(p *opendsecv1.Project) error {
	return a.fields(p, p.GetPath(), [][2]string{{"path", p.GetPath()}, {"quota", quotaText(p.GetQuota())}, {"created", stamp(p.GetCreatedAt())}})
}

func (a *App) projectCommand() *cobra.Command {
	project := &cobra.Command{Use: "project", Short: "Manage projects and their quotas"}
	var createQuota, setQuota quotaFlags
	create := &cobra.Command{
		Use: "create PATH", Short: "Make a project below an existing one", Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.identity.CreateProject(c.Context(), connect.NewRequest(&opendsecv1.CreateProjectRequest{Path: args[0], Quota: createQuota.quota(c)}))
			if err != nil {
				return err
			}
			return a.printProject(res.Msg.GetProject())
		}),
	}
	createQuota.register(create)
	quota := &cobra.Command{
		Use: "quota PATH", Short: "Set what a project's sandboxes may use together; a limit not given is lifted", Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.identity.SetQuota(c.Context(), connect.NewRequest(&opendsecv1.SetQuotaRequest{Path: args[0], Quota: setQuota.quota(c)}))
			if err != nil {
				return err
			}
			return a.printProject(res.Msg.GetProject())
		}),
	}
	setQuota.register(quota)
	project.AddCommand(create, quota,
		&cobra.Command{
			Use: "list", Short: "List projects", Args: cobra.NoArgs,
			RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
				res, err := api.identity.ListProjects(c.Context(), connect.NewRequest(&opendsecv1.ListProjectsRequest{}))
				if err != nil {
					return err
				}
				var rows [][]string
				for _, p := range res.Msg.GetProjects() {
					rows = append(rows, []string{p.GetPath(), quotaText(p.GetQuota()), stamp(p.GetCreatedAt())})
				}
				return a.print(list{res.Msg, []string{"PATH", "QUOTA", "CREATED"}, rows})
			}),
		},
		&cobra.Command{
			Use: "show PATH", Short: "Show a project", Args: cobra.ExactArgs(1),
			RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
				res, err := api.identity.GetProject(c.Context(), connect.NewRequest(&opendsecv1.GetProjectRequest{Path: args[0]}))
				if err != nil {
					return err
				}
				return a.printProject(res.Msg.GetProject())
			}),
		},
		&cobra.Command{
			Use: "delete PATH", Short: "Delete an empty project", Args: cobra.ExactArgs(1),
			RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
				res, err := api.identity.DeleteProject(c.Context(), connect.NewRequest(&opendsecv1.DeleteProjectRequest{Path: args[0]}))
				if err != nil {
					return err
				}
				return a.done(res.Msg, args[0])
			}),
		})
	return project
}

func grantsText(grants []*opendsecv1.RoleGrant) string {
	var parts []string
	for _, g := range grants {
		parts = append(parts, g.GetRole()+" on "+g.GetProject())
	}
	return strings.Join(parts, ", ")
}

func (a *App) printCaller(p *opendsecv1.Caller) error {
	return a.fields(p, p.GetName(), [][2]string{{"name", p.GetName()}, {"roles", grantsText(p.GetGrants())}, {"created", stamp(p.GetCreatedAt())}})
}

// parseGrant reads "ROLE@PROJECT".
func parseGrant(s string) (*opendsecv1.RoleGrant, error) {
	role, project, ok := strings.Cut(s, "@")
	if !ok || role == "" || project == "" {
		return nil, usage(fmt.Errorf("--grant %q: want ROLE@PROJECT, such as developer@root/demo", s))
	}
	return &opendsecv1.RoleGrant{Role: role, Project: project}, nil
}

func (a *App) callerCommand() *cobra.Command {
	caller := &cobra.Command{Use: "caller", Short: "Manage callers and their roles"}
	var grants []string
	create := &cobra.Command{
		Use: "create NAME", Short: "Make a caller", Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			req := &opendsecv1.CreateCallerRequest{Name: args[0]}
			for _, s := range grants {
				g, err := parseGrant(s)
				if err != nil {
					return err
				}
				req.Grants = append(req.Grants, g)
			}
			res, err := api.identity.CreateCaller(c.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.printCaller(res.Msg.GetCaller())
		}),
	}
	create.Flags().StringArrayVar(&grants, "grant", nil, "a role on a project, as ROLE@PROJECT; roles are viewer, developer, admin (repeatable)")
	caller.AddCommand(create,
		&cobra.Command{
			Use: "list", Short: "List callers", Args: cobra.NoArgs,
			RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
				res, err := api.identity.ListCallers(c.Context(), connect.NewRequest(&opendsecv1.ListCallersRequest{}))
				if err != nil {
					return err
				}
				var rows [][]string
				for _, p := range res.Msg.GetCallers() {
					rows = append(rows, []string{p.GetName(), grantsText(p.GetGrants()), stamp(p.GetCreatedAt())})
				}
				return a.print(list{res.Msg, []string{"NAME", "ROLES", "CREATED"}, rows})
			}),
		},
		&cobra.Command{
			Use: "delete NAME", Short: "Delete a caller with its tokens", Args: cobra.ExactArgs(1),
			RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
				res, err := api.identity.DeleteCaller(c.Context(), connect.NewRequest(&opendsecv1.DeleteCallerRequest{Name: args[0]}))
				if err != nil {
					return err
				}
				return a.done(res.Msg, args[0])
			}),
		},
		a.grantCommand())
	return caller
}

func (a *App) grantCommand() *cobra.Command {
	var revoke bool
	grant := &cobra.Command{
		Use: "grant NAME PROJECT [ROLE]", Short: "Give a caller a role on a project and all below it", Args: cobra.RangeArgs(2, 3),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			if revoke == (len(args) == 3) {
				return usage(fmt.Errorf("give either a role or --revoke"))
			}
			req := &opendsecv1.GrantRequest{Caller: args[0], Project: args[1]}
			if len(args) == 3 {
				req.Role = args[2]
			}
			res, err := api.identity.Grant(c.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			return a.printCaller(res.Msg.GetCaller())
		}),
	}
	grant.Flags().BoolVar(&revoke, "revoke", false, "take the caller's role on the project away")
	return grant
}

func (a *App) tokenCommand() *cobra.Command {
	token := &cobra.Command{Use: "token", Short: "Manage tokens"}
	var description string
	var expires time.Duration
	create := &cobra.Command{
		Use: "create CALLER", Short: "Make a token and print it; it is shown this once", Args: cobra.ExactArgs(1),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			req := &opendsecv1.CreateTokenRequest{Caller: args[0], Description: description}
			if c.Flags().Changed("expires") {
				req.ExpiresAt = timestamppb.New(time.Now().Add(expires))
			}
			res, err := api.identity.CreateToken(c.Context(), connect.NewRequest(req))
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(res.Msg)
			}
			_, err = fmt.Fprintln(a.Stdout, res.Msg.GetSecret())
			return err
		}),
	}
	create.Flags().StringVar(&description, "description", "", "what it is for")
	create.Flags().DurationVar(&expires, "expires", 0, "when it ends, from now, such as 720h; never unless given")
	token.AddCommand(create,
		&cobra.Command{
			Use: "list [CALLER]", Short: "List tokens, one's own unless a caller is named", Args: cobra.MaximumNArgs(1),
			RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
				req := &opendsecv1.ListTokensRequest{}
				if len(args) == 1 {
					req.Caller = args[0]
				}
				res, err := api.identity.ListTokens(c.Context(), connect.NewRequest(req))
				if err != nil {
					return err
				}
				var rows [][]string
				for _, t := range res.Msg.GetTokens() {
					rows = append(rows, []string{t.GetId(), t.GetCaller(), t.GetDescription(), stamp(t.GetCreatedAt()), stamp(t.GetExpiresAt())})
				}
				return a.print(list{res.Msg, []string{"ID", "CALLER", "DESCRIPTION", "CREATED", "EXPIRES"}, rows})
			}),
		},
		&cobra.Command{
			Use: "revoke ID", Short: "End a token", Args: cobra.ExactArgs(1),
			RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
				res, err := api.identity.RevokeToken(c.Context(), connect.NewRequest(&opendsecv1.RevokeTokenRequest{Id: args[0]}))
				if err != nil {
					return err
				}
				return a.done(res.Msg, args[0])
			}),
		})
	return token
}
