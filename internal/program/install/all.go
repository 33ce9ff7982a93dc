package install

import (
	"context"
	"errors"
	"fmt"
	"io"

	"golang.org/x/sync/errgroup"

	"github.com/kernflux/opendsec/internal/daemon"
)

// Run runs all servers of the installation in this process until the context
// ends, or until one of them fails, which ends the others.
func (in *Installation) Run(ctx context.Context, logTo io.Writer) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, s := range in.servers() {
		log, err := daemon.Logger(logTo, s.Component(), s.Level())
		if err != nil {
			return err
		}
		g.Go(func() error {
			err := s.Run(ctx, log)
			switch {
			case err != nil && !errors.Is(err, context.Canceled):
				return fmt.Errorf("%s: %w", s.Component(), err)
			case ctx.Err() == nil:
				return fmt.Errorf("%s ended by itself", s.Component())
			}
			return nil
		})
	}
	return g.Wait()
}
