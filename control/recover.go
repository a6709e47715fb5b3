package control

import (
	"context"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// Recover makes records and machines agree after the process before this one
// has ended, at whatever point: machines of running sessions are adopted, ends
// that had begun are finished, starts that had not come to their end are undone
// (a creation wholly: its name is free again), and what has no record is
// removed. It is called once, before anything else.
func (c *Control) Recover(ctx context.Context) error {
	done, err := c.begin()
	if err != nil {
		return err
	}
	defer done()
	live, err := c.store.LiveSessions(ctx)
	if err != nil {
		return err
	}
	// The lives come first: the node may report an end as soon as it adopts.
	lives := make([]*life, len(live))
	var keep []cloche.Session
	c.mu.Lock()
	for i := range live {
		lives[i] = newLife(&live[i])
		c.lives[live[i].ID] = lives[i]
		if live[i].State != cloche.Pending {
			keep = append(keep, live[i])
		}
	}
	c.mu.Unlock()
	failpoint.Here("control/recover/before-node")
	gone, err := c.node.Recover(ctx, keep)
	if err != nil {
		return err
	}
	failpoint.Here("control/recover/after-node")
	ends := make(map[cloche.SessionID]cloche.SessionEnd, len(gone))
	for _, e := range gone {
		ends[e.ID] = e
	}
	for i, l := range lives {
		e, isGone := ends[l.id]
		if err := c.recoverOne(ctx, l, &live[i], e, isGone); err != nil {
			return err
		}
	}
	c.work.Go(func() { c.sweepLogs(c.ctx) })
	return nil
}

// recoverOne decides about one session. gone has what the node knows of a
// machine that is not there any more.
func (c *Control) recoverOne(ctx context.Context, l *life, s *cloche.Session, gone cloche.SessionEnd, isGone bool) error {
	e := end{gone: isGone, usage: gone.Usage, grace: c.cfg.StopGrace}
	deleted, first, err := c.history(ctx, s)
	if err != nil {
		return err
	}
	switch {
	case s.State == cloche.Pending:
		// The node was not told of it and has removed what there was.
		e = end{state: cloche.Failed, cause: "the server ended while the session started", gone: true, discard: first}
	case s.State != cloche.Running || deleted: // stopping, snapshotting; or a creation undone to there
		e.state = cloche.Stopped
	case isGone:
		e.state, e.cause = cloche.Aborted, gone.Cause
	default:
		l.mu.Lock()
		l.deadline = s.Deadline()
		c.armLocked(l) // at once, if the deadline has passed meanwhile
		l.mu.Unlock()
		close(l.ready)
		c.log.InfoContext(ctx, "session adopted", "session", s.ID, "sandbox", s.SandboxID)
		return nil
	}
	claimed := l.claim()
	close(l.ready)
	switch {
	case !claimed:
		return nil
	case e.gone:
		return c.steps(ctx, l, &e)
	}
	// Commands get their grace: the server does not wait for it to listen.
	c.work.Go(func() { c.finish(context.WithoutCancel(ctx), l, e) })
	return nil
}

// history tells whether the session's sandbox is deleted, and whether it has
// never had another session, which means for a pending one that the sandbox is
// being created.
func (c *Control) history(ctx context.Context, s *cloche.Session) (deleted, first bool, err error) {
	b, err := c.store.SandboxByID(ctx, s.SandboxID)
	if cloche.ErrorCode(err) == cloche.CodeNotFound {
		return true, false, nil
	}
	if err != nil {
		return false, false, err
	}
	all, _, err := c.store.Sessions(ctx, s.Team, s.Project,
		cloche.ListSessions{Sandbox: b.Name, Page: cloche.Page{Limit: 2}})
	return false, len(all) == 1, err
}
