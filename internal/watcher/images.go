package watcher

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// dropUnused removes image content from nodes that no name stands for and no
// live sandbox uses: what is left by an API that died after a node had made an
// image or a snapshot and before it had a name, or by a node that could not be
// reached when the last name went. A node keeps what its machines, or other
// content, still need until they are gone.
//
// Content that is about to get its name is safe: a node lists it once it is
// whole, which is the last step of its making, and the name is recorded when
// that call has answered, a moment later and well within the time that is
// waited here. Only who makes the same content anew in the very moment in which
// it is removed finds that its name stands for nothing, and makes it once more.
func (w *Watcher) dropUnused(ctx context.Context, now time.Time) error {
	var failed []error
	still := map[finding]bool{}
	for name, v := range w.views(now) {
		for _, digest := range v.report.GetImages() {
			use, err := w.db.CountDigest(ctx, digest)
			if err != nil {
				failed = append(failed, err)
				continue
			}
			if use.Names > 0 || use.Sandboxes > 0 {
				continue
			}
			f := finding{"unused", name, digest}
			still[f] = true
			if w.since(f, now) < w.cfg.KeepImages {
				continue
			}
			w.log.Info("removing image content that nothing needs", "digest", digest, "node", name)
			if err := w.byName(name).deleteImage(ctx, digest); err != nil {
				failed = append(failed, fmt.Errorf("remove image content %s from node %s: %w", digest, name, err))
			}
		}
	}
	w.settle("unused", still)
	return errors.Join(failed...)
}
