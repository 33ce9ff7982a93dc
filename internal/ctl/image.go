package ctl

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"connectrpc.com/connect"
	"github.com/schollz/progressbar/v3"
	"github.com/spf13/cobra"
	"golang.org/x/term"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
)

func (a *App) imageCommand() *cobra.Command {
	image := &cobra.Command{Use: "image", Short: "Bring images into the cluster and look after them"}
	image.AddCommand(a.imageImportCommand(), a.imageBootstrapCommand(), a.imageListCommand(),
		&cobra.Command{
			Use: "show NAME", Short: "Show an image", Args: cobra.ExactArgs(1),
			RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
				res, err := api.images.GetImage(c.Context(), connect.NewRequest(&opendsecv1.GetImageRequest{Name: args[0]}))
				if err != nil {
					return err
				}
				return a.printImage(res.Msg.GetImage())
			}),
		},
		&cobra.Command{
			Use: "tag NAME NEW-NAME", Short: "Give an image a further name", Args: cobra.ExactArgs(2),
			RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
				res, err := api.images.TagImage(c.Context(), connect.NewRequest(&opendsecv1.TagImageRequest{Name: args[0], NewName: args[1]}))
				if err != nil {
					return err
				}
				return a.printImage(res.Msg.GetImage())
			}),
		},
		&cobra.Command{
			Use: "delete NAME", Short: "Take an image's name away; its content goes with its last name", Args: cobra.ExactArgs(1),
			RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
				res, err := api.images.DeleteImage(c.Context(), connect.NewRequest(&opendsecv1.DeleteImageRequest{Name: args[0]}))
				if err != nil {
					return err
				}
				return a.done(res.Msg, args[0])
			}),
		})
	return image
}

func (a *App) printImage(m *opendsecv1.Image) error {
	cfg := m.GetConfig()
	fields := [][2]string{
		{"name", m.GetName()}, {"digest", m.GetDigest()}, {"kind", m.GetKind()}, {"size", mib(m.GetSize() >> 20)},
		{"architecture", m.GetArchitecture()}, {"source", m.GetSource()}, {"created", stamp(m.GetCreatedAt())},
		{"user", cfg.GetUser()}, {"workdir", cfg.GetWorkdir()}, {"entrypoint", strings.Join(cfg.GetEntrypoint(), " ")},
		{"command", strings.Join(cfg.GetCmd(), " ")}, {"environment", strings.Join(cfg.GetEnv(), "\n")},
		{"network", networkRules(m.GetNetworkRules().GetRules())},
	}
	return a.fields(m, m.GetName(), append(fields, snapshotFields(m.GetSnapshot())...))
}

func (a *App) imageListCommand() *cobra.Command {
	var project string
	c := &cobra.Command{
		Use: "list", Short: "List the images visible in a project", Args: cobra.NoArgs,
		RunE: a.with(func(c *cobra.Command, api *api, _ []string) error {
			project, err := a.project(project)
			if err != nil {
				return err
			}
			res, err := api.images.ListImages(c.Context(), connect.NewRequest(&opendsecv1.ListImagesRequest{Project: project}))
			if err != nil {
				return err
			}
			var rows [][]string
			for _, m := range res.Msg.GetImages() {
				rows = append(rows, []string{m.GetName(), m.GetKind(), mib(m.GetSize() >> 20), short(m.GetDigest()), age(m.GetCreatedAt()), m.GetSource()})
			}
			return a.print(list{res.Msg, []string{"NAME", "KIND", "SIZE", "DIGEST", "AGE", "SOURCE"}, rows})
		}),
	}
	projectFlag(c, &project)
	return c
}

func short(digest string) string {
	_, hex, ok := strings.Cut(digest, ":")
	if ok && len(hex) > 12 {
		return hex[:12]
	}
	return digest
}

// absolute makes the path of an archive or layout source absolute, since the
// node, not this command, opens it.
func absolute(source string) (string, error) {
	for _, scheme := range []string{"docker-archive:", "oci:", "oci-archive:"} {
		rest, ok := strings.CutPrefix(source, scheme)
		if !ok {
			continue
		}
		if rest == "" {
			return "", usage(fmt.Errorf("source %q: say which file or directory", source))
		}
		path, err := filepath.Abs(rest)
		if err != nil {
			return "", fmt.Errorf("make %q absolute: %w", rest, err)
		}
		return scheme + path, nil
	}
	return source, nil
}

func (a *App) imageImportCommand() *cobra.Command {
	var req opendsecv1.ImportImageRequest
	var username, passwordFile, caFile string
	c := &cobra.Command{
		Use: "import SOURCE NAME", Short: "Fetch an image and give it a name",
		Long: `Fetch an image and give it the name "project/name:tag". SOURCE is a registry
reference such as docker.io/library/python:3.12, or docker-archive:FILE[:TAG],
oci:DIRECTORY[:TAG] or oci-archive:FILE[:TAG], which the node's edge opens.`,
		Args: cobra.ExactArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			var err error
			if req.Source, err = absolute(args[0]); err != nil {
				return err
			}
			req.Name = args[1]
			if caFile != "" {
				if req.CaPem, err = os.ReadFile(caFile); err != nil {
					return usage(fmt.Errorf("--ca: %w", err))
				}
			}
			if (username == "") != (passwordFile == "") {
				return usage(errors.New("--username and --password-file go together"))
			}
			if username != "" {
				password, err := os.ReadFile(passwordFile)
				if err != nil {
					return usage(fmt.Errorf("--password-file: %w", err))
				}
				req.Auth = &opendsecv1.RegistryAuth{Username: username, Password: strings.TrimRight(string(password), "\r\n")}
			}
			stream, err := api.images.ImportImage(c.Context(), connect.NewRequest(&req))
			if err != nil {
				return err
			}
			return a.progress(stream)
		}),
	}
	c.Flags().StringVar(&username, "username", "", "user name at the registry")
	c.Flags().StringVar(&passwordFile, "password-file", "", "file that holds the password at the registry")
	c.Flags().StringVar(&caFile, "ca", "", "file of certificate authorities to trust for the registry, PEM")
	c.Flags().BoolVar(&req.Insecure, "insecure", false, "allow plain HTTP")
	c.Flags().StringVar(&req.Architecture, "architecture", "amd64", "which of a multi-platform image")
	return c
}

func (a *App) imageBootstrapCommand() *cobra.Command {
	var req opendsecv1.BootstrapImageRequest
	c := &cobra.Command{
		Use: "bootstrap DISTRIBUTION NAME", Short: "Build a base image from the node's own package mirror; DISTRIBUTION is debian",
		Args: cobra.ExactArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			req.Distribution, req.Name = args[0], args[1]
			stream, err := api.images.BootstrapImage(c.Context(), connect.NewRequest(&req))
			if err != nil {
				return err
			}
			return a.progress(stream)
		}),
	}
	c.Flags().StringArrayVar(&req.Packages, "package", nil, "a further package (repeatable)")
	return c
}

// progress follows an import: a bar on a terminal, a line a step elsewhere.
func (a *App) progress(stream *connect.ServerStreamForClient[opendsecv1.ImportImageResponse]) error {
	defer stream.Close()
	f, ok := a.Stderr.(*os.File)
	terminal := ok && term.IsTerminal(int(f.Fd())) && !a.quiet
	var bar *progressbar.ProgressBar
	var step string
	for stream.Receive() {
		m := stream.Msg()
		if m.GetImage() != nil {
			if bar != nil {
				_ = bar.Finish() // only paint on a terminal
			}
			return a.printImage(m.GetImage())
		}
		if m.GetStep() != step {
			step = m.GetStep()
			if terminal {
				bar = newBar(a.Stderr, step, m.GetTotal())
			} else if !a.quiet {
				fmt.Fprintf(a.Stderr, "%s: %s\n", step, m.GetDetail())
			}
		}
		if bar != nil {
			paint(bar, m)
		}
	}
	if err := stream.Err(); err != nil {
		return err
	}
	return fmt.Errorf("the server ended the import without an image; look at its log")
}

func newBar(w io.Writer, step string, total int64) *progressbar.ProgressBar {
	if total <= 0 {
		total = -1
	}
	return progressbar.NewOptions64(total, progressbar.OptionSetWriter(w), progressbar.OptionSetDescription(step),
		progressbar.OptionShowBytes(true), progressbar.OptionClearOnFinish(), progressbar.OptionThrottle(65e6))
}

func paint(bar *progressbar.ProgressBar, m *opendsecv1.ImportImageResponse) {
	if m.GetTotal() > 0 {
		bar.ChangeMax64(m.GetTotal())
	}
	bar.Describe(m.GetStep() + " " + m.GetDetail())
	_ = bar.Set64(m.GetDone()) // only paint on a terminal
}
