package edge

import (
	"context"
	"fmt"
	"sync"
)

// undo holds what one sandbox has taken and how each thing is given back. A
// create that fails, a stop and a recovered sandbox's stop all end by running
// it, so there is one way in which things are removed.
type undo struct {
	mu    sync.Mutex // guards steps; the steps themselves run outside of it
	steps []undoStep
}

type undoStep struct {
	name string
	do   func(context.Context) error
}

// add puts a step on top. It must be safe to repeat after it failed.
func (u *undo) add(name string, do func(context.Context) error) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.steps = append(u.steps, undoStep{name, do})
}

// run takes the steps from the top. One that fails stays, and those under it
// too, since what failed may still use them; run can be called again. Only one
// goroutine runs it at a time.
func (u *undo) run(ctx context.Context) error {
	for {
		u.mu.Lock()
		n := len(u.steps)
		if n == 0 {
			u.mu.Unlock()
			return nil
		}
		step := u.steps[n-1]
		u.mu.Unlock()
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
		u.mu.Lock()
		u.steps = u.steps[:n-1]
		u.mu.Unlock()
	}
}
