// Opendsecctl is the admin's command of an OpenDsec cluster.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"

	"github.com/kernflux/opendsec/internal/ctl"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := ctl.FromOS().Main(ctx, os.Args[1:])
	stop()
	os.Exit(code)
}
