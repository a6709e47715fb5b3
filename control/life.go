package control

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// life is this process's side of a session that is not final. It is in
// Control.lives before the record exists and until the record is final.
type life struct {
	id    cloche.SessionID
	box   cloche.SandboxID
	ready chan struct{} // closed once the start has come to its end, either way
	final chan struct{} // closed once the record is final

	mu       sync.Mutex
	ended    bool               // somebody has taken on the end; see claim
	err      error              // why the start failed; set before ready is closed
	cancel   context.CancelFunc // ends the start; nil before and after it
	deadline time.Time          // zero until it runs
	timer    *time.Timer        // nil until it runs
}

func newLife(s *cloche.Session) *life {
	return &life{id: s.ID, box: s.SandboxID, ready: make(chan struct{}), final: make(chan struct{})}
}

// phase is where a life is.
type phase int

const (
	starting phase = iota
	running
	ending
)

func (l *life) phase() phase {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return ending
	}
	select {
	case <-l.ready:
		return running
	default:
		return starting
	}
}

// failure is why the start failed, nil if it did not.
func (l *life) failure() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.err
}

// claim makes the caller the one who takes the life to its end. A start in
// progress is cut off. It is false if somebody has claimed it before.
func (l *life) claim() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.claimLocked()
}

func (l *life) claimLocked() bool {
	if l.ended {
		return false
	}
	l.ended = true
	if l.cancel != nil {
		l.cancel()
	}
	if l.timer != nil {
		l.timer.Stop()
	}
	return true
}

// starting registers what cuts the start off. It is false if the end has been
// claimed already.
func (l *life) starting(cancel context.CancelFunc) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cancel = cancel
	return !l.ended
}

// disarm stops the timer of the timeout.
func (l *life) disarm() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer != nil {
		l.timer.Stop()
	}
}

// admit makes a place for one more session, or says which limit is in the way.
func (c *Control) admit(s *cloche.Session) (*life, error) {
	if err := c.checkDisk(); err != nil {
		c.count.refused.Add(1)
		return nil, err
	}
	l := newLife(s)
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.lives) >= c.cfg.MaxSessions {
		c.count.refused.Add(1)
		return nil, cloche.Errorf(cloche.CodeExhausted,
			"%d sessions are live, which is this server's limit; stop one and try again", len(c.lives))
	}
	c.lives[l.id] = l
	return l, nil
}

func (c *Control) checkDisk() error {
	if c.cfg.Disk == nil {
		return nil
	}
	free, total, err := c.cfg.Disk()
	if err != nil {
		return cloche.Internal("disk space", err)
	}
	if free < c.cfg.MinFreeBytes || free < total/100*int64(c.cfg.MinFreePercent) {
		return cloche.Errorf(cloche.CodeExhausted,
			"the server's disk is nearly full (%d MiB free); nothing new starts until there is room", free>>20)
	}
	return nil
}

// release takes back what admit gave, for a session whose record was not made.
func (c *Control) release(l *life) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.lives, l.id)
}

// life returns the life of a session, nil if it is final.
func (c *Control) life(id cloche.SessionID) *life {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.lives[id]
}

// everyLife returns all lives, so that their own locks are not taken under c.mu.
func (c *Control) everyLife() []*life {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Values(c.lives))
}

// end is how a session is to end.
type end struct {
	state   cloche.SessionState // Stopped, Failed or Aborted
	cause   string
	gone    bool         // there is no machine any more, and usage is final
	usage   cloche.Usage // filled in by the steps unless gone
	discard bool         // the sandbox goes too: its creation is undone
	grace   time.Duration
}

// bring starts the machine of a pending session and writes that it runs. If it
// fails, the session has become final when it returns (with discard the name is
// free), unless somebody else had claimed the end: then nothing is decided here
// and both results are nil and false.
func (c *Control) bring(ctx context.Context, l *life, s cloche.Session, env map[string]string, discard bool) (up bool, err error) {
	machine, err := c.start(ctx, l, s, env)
	l.mu.Lock()
	l.cancel = nil
	claimed := l.ended
	if err != nil && !claimed {
		l.ended, l.err = true, err
	}
	if err == nil && !claimed {
		c.armLocked(l)
	}
	l.mu.Unlock()
	close(l.ready)
	if claimed {
		return false, nil
	}
	if err == nil {
		return true, nil
	}
	c.work.Go(func() {
		c.finish(context.WithoutCancel(ctx), l, end{state: cloche.Failed, cause: publicCause(err), gone: !machine, discard: discard})
	})
	if werr := c.wait(context.WithoutCancel(ctx), l.final, stopWait); werr != nil {
		c.log.ErrorContext(ctx, "undo of a start is not finished", "session", l.id, "error", werr)
	}
	return false, err
}

// start is bring without the end of a failure. machine tells whether there may
// be a machine after an error.
func (c *Control) start(ctx context.Context, l *life, s cloche.Session, env map[string]string) (machine bool, err error) {
	sctx, cancel := context.WithTimeout(ctx, c.cfg.StartTimeout)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	if !l.starting(cancel) {
		return false, context.Canceled
	}
	failpoint.Here("control/start/before-machine")
	if err := c.node.Start(sctx, s, env); err != nil {
		return false, startError(ctx, sctx, err)
	}
	failpoint.Here("control/start/after-machine")
	v, err := c.store.UpdateSession(context.WithoutCancel(ctx), s.ID, func(s *cloche.Session) (err error) {
		s.State, err = s.State.To(cloche.Running)
		s.StartedAt = time.Now()
		s.UpdatedAt = s.StartedAt
		return err
	})
	if err != nil {
		return true, err
	}
	failpoint.Here("control/start/after-running")
	l.mu.Lock()
	l.deadline = v.Deadline()
	l.mu.Unlock()
	c.log.InfoContext(ctx, "session runs", "session", s.ID, "sandbox", s.SandboxID,
		"after", v.StartedAt.Sub(v.RequestedAt).Round(time.Millisecond))
	return true, nil
}

// startError turns what the node said into what the caller of a start is told.
func startError(caller, start context.Context, err error) error {
	switch {
	case caller.Err() != nil:
		return caller.Err()
	case start.Err() != nil:
		return &cloche.Error{Code: cloche.CodeUnavailable, Op: "session start", Message: "the machine did not start in time; try again", Err: err}
	case cloche.ErrorCode(err) == cloche.CodeNotFound:
		// A client that asked for a sandbox would take this for "no such sandbox".
		return &cloche.Error{Code: cloche.CodeInvalid, Op: "session start", Message: "the sandbox's image is not on this server any more", Err: err}
	}
	return err
}

// finish takes a claimed life to its end, however often it must try. Only the
// end of this process stops it, and then Recover goes on.
func (c *Control) finish(ctx context.Context, l *life, e end) {
	<-l.ready
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(c.ctx, cancel)()
	const firstDelay, lastDelay = 100 * time.Millisecond, 10 * time.Second
	for delay := firstDelay; ; delay = min(2*delay, lastDelay) {
		err := c.steps(ctx, l, &e)
		if err == nil {
			return
		}
		c.log.ErrorContext(ctx, "session end", "session", l.id, "sandbox", l.box, "error", err, "again in", delay)
		t := time.NewTimer(delay)
		select {
		case <-t.C:
		case <-c.closing:
			t.Stop()
			return
		}
	}
}

// stopLimit bounds one try to stop a machine, beyond the grace.
const stopLimit = time.Minute

// steps does what is left of an end. Each step finds out whether it has been
// done, so that after an error or a crash they are simply done again.
func (c *Control) steps(ctx context.Context, l *life, e *end) error {
	if e.discard {
		// First of all: a crash after it leaves no trace of the creation, since
		// Recover ends the sessions of deleted sandboxes. CodeConflict: the
		// sandbox went on without this session, and stays.
		failpoint.Here("control/end/before-name")
		err := c.store.DeleteSandbox(ctx, l.box, l.id)
		if code := cloche.ErrorCode(err); err != nil && code != cloche.CodeNotFound && code != cloche.CodeConflict {
			return err
		}
		failpoint.Here("control/end/after-name")
	}
	if e.state == cloche.Stopped {
		failpoint.Here("control/end/before-stopping")
		_, err := c.store.UpdateSession(ctx, l.id, func(s *cloche.Session) error { return toStopping(s, e.cause) })
		switch {
		case cloche.ErrorCode(err) == cloche.CodeExhausted:
			// The disk is full, perhaps of this session's files: its end gives
			// them back, and the record is made then. After a crash in between
			// the session is found without a machine.
			c.log.WarnContext(ctx, "the record of a stop waits for room on the disk", "session", l.id, "error", err)
		case err != nil:
			return err
		}
		failpoint.Here("control/end/after-stopping")
	}
	if !e.gone {
		sctx, cancel := context.WithTimeout(ctx, e.grace+stopLimit)
		usage, err := c.node.Stop(sctx, l.id, e.grace)
		cancel()
		if err != nil {
			return err
		}
		e.usage, e.gone = usage, true
		failpoint.Here("control/end/after-machine")
	}
	v, err := c.store.UpdateSession(ctx, l.id, func(s *cloche.Session) error { return toFinal(s, e) })
	if err != nil {
		return err
	}
	failpoint.Here("control/end/after-final")
	c.countEnd(&v)
	c.release(l)
	close(l.final)
	c.log.InfoContext(ctx, "session ended", "session", v.ID, "sandbox", v.SandboxID, "state", v.State, "cause", v.Cause)
	return nil
}

func toStopping(s *cloche.Session, cause string) (err error) {
	if s.State != cloche.Pending && s.State != cloche.Running {
		return nil
	}
	s.State, err = s.State.To(cloche.Stopping)
	s.StopRequestedAt = time.Now()
	s.UpdatedAt = s.StopRequestedAt
	s.Cause = cause
	return err
}

func toFinal(s *cloche.Session, e *end) (err error) {
	if s.State.Final() {
		return nil
	}
	next := e.state
	if next == cloche.Stopped { // if there was no room for that record before
		if err := toStopping(s, e.cause); err != nil {
			return err
		}
	}
	if next == cloche.Failed && s.State != cloche.Pending {
		next = cloche.Aborted // it was up for a moment
	}
	s.State, err = s.State.To(next)
	if e.cause != "" {
		s.Cause = e.cause
	}
	s.EndedAt = time.Now()
	s.UpdatedAt = s.EndedAt
	s.Usage = e.usage
	s.Usage.Duration = 0
	if !s.StartedAt.IsZero() {
		s.Usage.Duration = s.EndedAt.Sub(s.StartedAt)
	}
	return err
}

func (c *Control) countEnd(s *cloche.Session) {
	switch {
	case s.State == cloche.Stopped && s.Cause == causeTimeout:
		c.count.timedOut.Add(1)
	case s.State == cloche.Stopped:
		c.count.stopped.Add(1)
	case s.State == cloche.Aborted:
		c.count.aborted.Add(1)
	}
}

// publicCause is what a record says of an error: the part for users.
func publicCause(err error) string {
	var e *cloche.Error
	switch {
	case errors.As(err, &e):
		return e.Message
	case errors.Is(err, context.Canceled):
		return "the client went away"
	}
	return "internal error"
}
