package ctl

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	"connectrpc.com/connect"
	"github.com/spf13/cobra"
	"google.golang.org/protobuf/types/known/durationpb"

	opendsecv1 "github.com/kernflux/opendsec/api/gen/opendsec/v1"
	"github.com/kernflux/opendsec/internal/fault"
	"github.com/kernflux/opendsec/internal/tunnel"
	"github.com/kernflux/opendsec/internal/tunnel/join"
)

// tunnel opens a connection to a port of a sandbox.
func (p *api) tunnel(ctx context.Context, id string, port int) (net.Conn, error) {
	to := p.addr + "/sandboxes/" + url.PathEscape(id) + "/tunnel/" + strconv.Itoa(port)
	return tunnel.Dial(ctx, p.http.Transport, to, http.Header{"Authorization": {"Bearer " + p.token}})
}

func (a *App) sandboxURLCommand() *cobra.Command {
	var ttl time.Duration
	c := &cobra.Command{
		Use: "url ID PORT", Short: "Print an address by which anybody who knows it reaches an HTTP server in a sandbox",
		Long: `Print an address of an HTTP server in a sandbox, for a browser or any other client.
It is a secret: who has it may use the port, until it expires or the sandbox ends.`,
		Args: cobra.ExactArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			port, err := tunnel.ParsePort(args[1])
			if err != nil {
				return usage(err)
			}
			res, err := api.sandboxes.GetURL(c.Context(), connect.NewRequest(&opendsecv1.GetURLRequest{
				Id: args[0], Port: uint32(port), Ttl: durationpb.New(ttl),
			}))
			if err != nil {
				return err
			}
			if a.output == "json" {
				return a.printJSON(res.Msg)
			}
			_, err = fmt.Fprintln(a.Stdout, res.Msg.GetUrl())
			return err
		}),
	}
	c.Flags().DurationVar(&ttl, "ttl", 24*time.Hour, "how long it is good for, up to 720h")
	return c
}

func (a *App) sandboxRevokeURLCommand() *cobra.Command {
	return &cobra.Command{
		Use: "revoke-url ID URL", Short: "Take back an address that sandbox url printed, and no other",
		Args: cobra.ExactArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.sandboxes.RevokeURL(c.Context(), connect.NewRequest(&opendsecv1.RevokeURLRequest{Id: args[0], Url: args[1]}))
			if err != nil {
				return err
			}
			return a.done(res.Msg, args[0])
		}),
	}
}

// forward is a local port and the sandbox's port that it leads to.
type forward struct {
	listener net.Listener
	port     int
}

func (a *App) sandboxForwardCommand() *cobra.Command {
	var host string
	c := &cobra.Command{
		Use: "forward ID [LOCAL:]PORT...", Short: "Lead local ports to servers in a sandbox, until interrupted",
		Long: `Listen on local ports, and lead each connection to a port of a sandbox, whichever
address the server there listens on: 8000, or 9000:8000 for another local port,
or 0:8000 for one that is free. A connection that breaks has a line on standard error.`,
		Args: cobra.MinimumNArgs(2),
		RunE: a.with(func(c *cobra.Command, api *api, args []string) error {
			res, err := api.sandboxes.GetSandbox(c.Context(), connect.NewRequest(&opendsecv1.GetSandboxRequest{Id: args[0]}))
			if err != nil {
				return err
			}
			if end := res.Msg.GetSandbox().GetEnd(); end != nil {
				return fault.New(fault.SandboxEnded, "sandbox %s has ended: %s", args[0], end.GetDetail())
			}
			forwards, err := listenAll(host, args[1:])
			if err != nil {
				return err
			}
			for _, f := range forwards {
				fmt.Fprintf(a.Stdout, "%s leads to port %d of %s\n", f.listener.Addr(), f.port, args[0])
			}
			return a.forward(c.Context(), api, args[0], forwards)
		}),
	}
	c.Flags().StringVar(&host, "address", "127.0.0.1", "local address to listen on")
	return c
}

// listenAll opens the local ports, or none.
func listenAll(host string, args []string) (all []forward, err error) {
	defer func() {
		if err != nil {
			closeAll(all)
		}
	}()
	for _, arg := range args {
		local, remote, ok := strings.Cut(arg, ":")
		if !ok {
			remote = local
		}
		port, err := tunnel.ParsePort(remote)
		if err != nil {
			return all, usage(fmt.Errorf("%q: %w", arg, err))
		}
		if _, err := strconv.ParseUint(local, 10, 16); err != nil {
			return all, usage(fmt.Errorf("%q: local port %q is not a number from 0 to 65535", arg, local))
		}
		l, err := net.Listen("tcp", net.JoinHostPort(host, local))
		if err != nil {
			return all, fmt.Errorf("%q: %w", arg, err)
		}
		all = append(all, forward{l, port})
	}
	return all, nil
}

func closeAll(all []forward) {
	for _, f := range all {
		f.listener.Close()
	}
}

// forward serves the local ports until the context or the sandbox ends.
func (a *App) forward(ctx context.Context, api *api, id string, forwards []forward) error {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(ctx, func() { closeAll(forwards) })()
	var said sync.Mutex
	say := func(port int, err error) {
		var f *fault.Error
		switch {
		case ctx.Err() != nil || !errors.As(err, &f):
			return // a local program that breaks off needs no telling
		case f.Kind == fault.SandboxEnded:
			stop(err)
			return
		}
		said.Lock()
		defer said.Unlock()
		fmt.Fprintf(a.Stderr, "opendsecctl: port %d: %s\n", port, printable(oneLine(err.Error())))
	}
	var work sync.WaitGroup
	for _, f := range forwards {
		work.Go(func() {
			for {
				local, err := f.listener.Accept()
				if err != nil {
					if !errors.Is(err, net.ErrClosed) {
						stop(fmt.Errorf("accept connections on %s: %w", f.listener.Addr(), err))
					}
					return
				}
				work.Go(func() {
					if err := lead(ctx, api, id, f.port, local); err != nil {
						say(f.port, err)
					}
				})
			}
		})
	}
	work.Wait()
	closeAll(forwards)
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil // interrupted, which is how it ends
}

// lead leads one local connection to a port of a sandbox until it is over.
func lead(ctx context.Context, api *api, id string, port int, local net.Conn) error {
	far, err := api.tunnel(ctx, id, port)
	if err != nil {
		join.Break(local)
		return err
	}
	return join.Conns(ctx, local, far)
}
