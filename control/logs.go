package control

import (
	"context"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// sessionsOf gives the id of every session of a sandbox.
func (c *Control) sessionsOf(ctx context.Context, b *cloche.Sandbox) (ids []cloche.SessionID, err error) {
	l := cloche.ListSessions{Sandbox: b.Name, Page: cloche.Page{Limit: cloche.MaxPageSize}}
	for {
		page, next, err := c.store.Sessions(ctx, b.Team, b.Project, l)
		if err != nil {
			return nil, err
		}
		for i := range page {
			ids = append(ids, page[i].ID)
		}
		if next == "" {
			return ids, nil
		}
		l.Cursor = next
	}
}

// dropLogs removes the logs of a deleted sandbox's sessions, which nobody can
// read any more, in the background. What a crash leaves, sweepLogs finds.
func (c *Control) dropLogs(ctx context.Context, ids []cloche.SessionID) {
	c.work.Go(func() {
		for _, id := range ids {
			failpoint.Here("control/delete/before-logs")
			if err := c.node.DropLogs(context.WithoutCancel(ctx), id); err != nil {
				c.log.ErrorContext(ctx, "removing logs", "session", id, "error", err)
			}
		}
	})
}

// sweepLogs removes the logs of sessions that the records do not show any more.
func (c *Control) sweepLogs(ctx context.Context) {
	ids, err := c.node.Logged(ctx)
	if err != nil {
		c.log.ErrorContext(ctx, "looking for logs", "error", err)
		return
	}
	var stray []cloche.SessionID
	for _, id := range ids {
		if ctx.Err() != nil {
			return
		}
		if _, err := c.store.Session(ctx, id); cloche.ErrorCode(err) == cloche.CodeNotFound {
			stray = append(stray, id)
		}
	}
	c.dropLogs(ctx, stray)
}
