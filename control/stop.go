package control

import (
	"context"
	"errors"
	"fmt"
	"sync"
)

// StopAll stops every session of this server, all at the same time, and waits
// for their ends. It is for a server that is to leave nothing running.
func (c *Control) StopAll(ctx context.Context) error {
	done, err := c.begin()
	if err != nil {
		return err
	}
	defer done()
	var (
		mu   sync.Mutex
		errs []error
		wg   sync.WaitGroup
	)
	for _, l := range c.everyLife() {
		wg.Go(func() {
			if err := c.stop(ctx, l.id); err != nil {
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, fmt.Errorf("stop %s: %w", l.id, err))
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
