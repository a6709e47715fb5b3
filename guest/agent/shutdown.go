package agent

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxGrace = time.Minute
	killWait = 10 * time.Second // for SIGKILL to end everything
	killGap  = 50 * time.Millisecond
)

// shutdown ends every process but this one and syncs. No command starts after
// it. It may be called again.
func (a *Agent) shutdown(ctx context.Context, grace time.Duration) error {
	a.mu.Lock()
	a.stopping = true
	a.mu.Unlock()
	if grace > 0 && !a.lonely(ctx, 0) {
		// Stopped processes must run to see the end.
		if err := everybody(unix.SIGTERM, unix.SIGCONT); err != nil {
			return err
		}
		a.lonely(ctx, min(grace, maxGrace))
	}
	deadline := time.Now().Add(killWait)
	for !a.lonely(ctx, 0) {
		if err := everybody(unix.SIGKILL); err != nil {
			return err
		}
		if !a.lonely(ctx, killGap) && (ctx.Err() != nil || time.Now().After(deadline)) {
			return errors.Join(errors.New("processes do not end"), ctx.Err())
		}
	}
	unix.Sync()
	return nil
}

// lonely waits up to d until there is no process but this one.
func (a *Agent) lonely(ctx context.Context, d time.Duration) bool {
	a.reaper.round()
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	return a.reaper.alone(ctx)
}

// everybody signals all processes: kill(-1) of process 1 spares only itself.
func everybody(sigs ...unix.Signal) error {
	for _, sig := range sigs {
		if err := unix.Kill(-1, sig); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("signal all processes: %w", err)
		}
	}
	return nil
}
