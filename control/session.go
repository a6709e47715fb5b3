package control

import (
	"context"
	"time"

	"github.com/cloche-dev/cloche"
)

// session returns the record of a session in p's project.
func (c *Control) session(ctx context.Context, p cloche.Principal, id cloche.SessionID) (cloche.Session, error) {
	if id.Valid() {
		s, err := c.store.Session(ctx, id)
		if err != nil && cloche.ErrorCode(err) != cloche.CodeNotFound {
			return cloche.Session{}, err
		}
		if err == nil && s.Team == p.Team && s.Project == p.Project {
			return s, nil
		}
	}
	return cloche.Session{}, cloche.Errorf(cloche.CodeNotFound, "there is no session %.40q in this project", id)
}

// maxRereads bounds how often an operation reads a record again because the
// session ended between two looks at it. Each look sees a later state.
const maxRereads = 10

func errConfused(id cloche.SessionID) error {
	return cloche.Errorf(cloche.CodeUnavailable, "the session %s changes too fast; try again", id)
}

func errStopping() error {
	return cloche.Errorf(cloche.CodeStopping, "the session is stopping; get the sandbox with resume to go on in a new one")
}

func errGone(s *cloche.Session) error {
	why := ""
	if s.Cause != "" {
		why = " (" + s.Cause + ")"
	}
	return cloche.Errorf(cloche.CodeGone, "the session has ended: %s%s; get the sandbox with resume to go on in a new one", s.State, why)
}

// live returns a session that runs. While it is pending it waits, until ctx
// ends; CodeGone for an ended one, CodeStopping for one that is ending.
func (c *Control) live(ctx context.Context, p cloche.Principal, id cloche.SessionID) (*life, cloche.Session, error) {
	for range maxRereads {
		s, err := c.session(ctx, p, id)
		if err != nil {
			return nil, s, err
		}
		if s.State.Final() {
			return nil, s, errGone(&s)
		}
		l := c.life(id)
		if l == nil {
			continue // it ended just now
		}
		switch l.phase() {
		case starting:
			if err := c.wait(ctx, l.ready, 2*c.cfg.StartTimeout); err != nil {
				return nil, s, err
			}
		case running:
			if s.State == cloche.Running {
				return l, s, nil
			}
		case ending:
			if l.failure() == nil {
				return nil, s, errStopping()
			}
			if err := c.wait(ctx, l.final, stopWait); err != nil {
				return nil, s, err
			}
		}
	}
	return nil, cloche.Session{}, errConfused(id)
}

// goneWait bounds how long the answer of a call waits for the record of an end
// that the node has noticed and is still cleaning up after.
const goneWait = 10 * time.Second

// settled is the error of a node's call on a running session. A client resumes
// on CodeGone and then repeats the call once: if the record still said running
// by then, it would be given the dead session again. So this one waits for it.
func (c *Control) settled(ctx context.Context, l *life, err error) error {
	if cloche.ErrorCode(err) == cloche.CodeGone {
		_ = c.wait(ctx, l.final, goneWait) // whatever comes of it, the call has failed
	}
	return err
}

// readable returns a session that commands and logs can be read of: a pending
// one is waited for, an ended one is fine.
func (c *Control) readable(ctx context.Context, p cloche.Principal, id cloche.SessionID) error {
	s, err := c.session(ctx, p, id)
	if err != nil {
		return err
	}
	if l := c.life(id); l != nil && s.State == cloche.Pending {
		return c.wait(ctx, l.ready, 2*c.cfg.StartTimeout)
	}
	return nil
}

// ListSessions returns one page of the project's sessions and the cursor of the
// next page.
func (c *Control) ListSessions(ctx context.Context, p cloche.Principal, l cloche.ListSessions) ([]cloche.Session, string, error) {
	return c.store.Sessions(ctx, p.Team, p.Project, l)
}

// GetSession returns a session, ended or not, with its sandbox.
func (c *Control) GetSession(ctx context.Context, p cloche.Principal, id cloche.SessionID) (cloche.SandboxView, error) {
	s, err := c.session(ctx, p, id)
	if err != nil {
		return cloche.SandboxView{}, err
	}
	b, err := c.store.SandboxByID(ctx, s.SandboxID)
	return cloche.SandboxView{Sandbox: b, Session: s}, err
}

// StopSession returns once the session is final. One that is final already is
// success, and so is one that somebody else is stopping.
func (c *Control) StopSession(ctx context.Context, p cloche.Principal, id cloche.SessionID) (cloche.SandboxView, error) {
	done, err := c.begin()
	if err != nil {
		return cloche.SandboxView{}, err
	}
	defer done()
	if _, err := c.session(ctx, p, id); err != nil {
		return cloche.SandboxView{}, err
	}
	if err := c.stop(ctx, id); err != nil {
		return cloche.SandboxView{}, err
	}
	return c.GetSession(ctx, p, id)
}

// stop ends a session unless it is ending, and waits for the end. The caller
// has called begin. The end goes on if the caller goes away.
func (c *Control) stop(ctx context.Context, id cloche.SessionID) error {
	l := c.life(id)
	if l == nil {
		return nil
	}
	if l.claim() {
		c.work.Go(func() {
			c.finish(context.WithoutCancel(ctx), l, end{state: cloche.Stopped, grace: c.cfg.StopGrace})
		})
	}
	return c.wait(ctx, l.final, stopWait)
}

// Ended is the node's word that a machine has ended without being asked to, and
// that nothing of it is left on the host. It returns at once.
func (c *Control) Ended(ctx context.Context, e cloche.SessionEnd) {
	done, err := c.begin()
	if err != nil {
		return // the next Recover finds it
	}
	defer done()
	l := c.life(e.ID)
	if l == nil {
		return
	}
	c.work.Go(func() {
		select {
		case <-l.ready: // a start has its own end
		case <-c.closing:
			return
		}
		if l.claim() {
			c.finish(context.WithoutCancel(ctx), l, end{state: cloche.Aborted, cause: e.Cause, gone: true, usage: e.Usage})
		}
	})
}
