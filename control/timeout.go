package control

import (
	"context"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// causeTimeout is the cause of a session that was stopped by its timeout.
const causeTimeout = "timeout"

// maxSleep bounds one sleep towards a deadline. Deadlines are wall-clock times
// in the record; a timer stands still while the host is suspended and knows
// nothing of a clock that was set.
const maxSleep = time.Minute

// armLocked sets the timer of a running session to its deadline. It needs l.mu.
// A timer that Close has already stopped once finds begin closed.
func (c *Control) armLocked(l *life) {
	d := min(time.Until(l.deadline), maxSleep)
	if l.timer == nil {
		l.timer = time.AfterFunc(d, func() { c.expire(l) })
		return
	}
	l.timer.Reset(d)
}

// expire stops the session if its deadline has passed, and else sleeps on.
func (c *Control) expire(l *life) {
	done, err := c.begin()
	if err != nil {
		return // the record has the deadline
	}
	defer done()
	l.mu.Lock()
	if l.ended || time.Until(l.deadline) > 0 {
		if !l.ended {
			c.armLocked(l)
		}
		l.mu.Unlock()
		return
	}
	l.claimLocked()
	l.mu.Unlock()
	c.finish(c.ctx, l, end{state: cloche.Stopped, cause: causeTimeout, grace: c.cfg.StopGrace})
}

// ExtendTimeout adds d to the session's timeout. Past the maximum it is
// CodeTimeoutInvalid.
func (c *Control) ExtendTimeout(ctx context.Context, p cloche.Principal, id cloche.SessionID, d time.Duration) (cloche.Session, error) {
	done, err := c.begin()
	if err != nil {
		return cloche.Session{}, err
	}
	defer done()
	if d <= 0 {
		return cloche.Session{}, cloche.Errorf(cloche.CodeTimeoutInvalid, "a timeout is extended by more than 0 ms")
	}
	l, _, err := c.live(ctx, p, id)
	if err != nil {
		return cloche.Session{}, err
	}
	// Under l.mu, so that the session does not expire once this has succeeded.
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return cloche.Session{}, errStopping()
	}
	failpoint.Here("control/extend/before-record")
	s, err := c.store.UpdateSession(context.WithoutCancel(ctx), id, func(s *cloche.Session) error {
		if d > c.cfg.MaxTimeout-s.Timeout {
			return cloche.Errorf(cloche.CodeTimeoutInvalid,
				"the session's timeout is %s; extended by %s it would pass the maximum of %s", s.Timeout, d, c.cfg.MaxTimeout)
		}
		s.Timeout += d
		s.UpdatedAt = time.Now()
		return nil
	})
	if err != nil {
		return cloche.Session{}, err
	}
	failpoint.Here("control/extend/after-record")
	l.deadline = s.Deadline()
	c.armLocked(l)
	return s, nil
}
