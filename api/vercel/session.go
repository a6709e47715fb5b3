package vercel

import (
	"context"

	"github.com/cloche-dev/cloche"
)

// listSessions answers one page of the sessions of a sandbox, or of all.
func (c *call) listSessions() error {
	q := c.r.URL.Query()
	p, err := page(q)
	if err != nil {
		return err
	}
	sessions, next, err := c.Service.ListSessions(c.r.Context(), c.who, cloche.ListSessions{Page: p, Sandbox: q.Get("name")})
	if err != nil {
		return err
	}
	out := sessionsAnswer{Sessions: make([]sessionBody, 0, len(sessions)), Page: pageOf(len(sessions), next)}
	for _, s := range sessions {
		out.Sessions = append(out.Sessions, sessionOf(s))
	}
	return c.answer(out)
}

// getSession is how clients before 3.4 wait for the end of a stop.
func (c *call) getSession() error {
	v, err := c.view()
	if err != nil {
		return err
	}
	return c.answer(sessionAnswer{Session: sessionOf(v.Session), Routes: []routeBody{}})
}

// view finds the session of the path, ended or not.
func (c *call) view() (cloche.SandboxView, error) {
	id, err := c.session()
	if err != nil {
		return cloche.SandboxView{}, err
	}
	return c.Service.GetSession(c.r.Context(), c.who, id)
}

// stopSession answers with the sandbox too: the client takes its totals from
// it.
func (c *call) stopSession() error {
	return c.stop(func(v cloche.SandboxView) any {
		sandbox := sandboxOf(v)
		return sessionAnswer{Session: sessionOf(v.Session), Sandbox: &sandbox}
	})
}

// stop ends the session and answers with what shape makes of it. Clients take
// the answer as final and never ask again, so it comes when all is over.
func (c *call) stop(shape func(cloche.SandboxView) any) error {
	id, err := c.session()
	if err != nil {
		return err
	}
	return c.slowly(false, nil, func(ctx context.Context) (any, error) {
		v, err := c.Service.StopSession(ctx, c.who, id)
		if err != nil {
			return nil, err
		}
		return shape(v), nil
	})
}

// extendTimeout adds to the life of a session.
func (c *call) extendTimeout() error {
	s, err := c.extend()
	if err != nil {
		return err
	}
	return c.answer(sessionAnswer{Session: sessionOf(s)})
}

// extend is extendTimeout without the answer.
func (c *call) extend() (cloche.Session, error) {
	id, err := c.session()
	if err != nil {
		return cloche.Session{}, err
	}
	var body struct {
		Duration *float64 `json:"duration"`
	}
	if err := c.decode(&body, maxBody); err != nil {
		return cloche.Session{}, err
	}
	if body.Duration == nil || *body.Duration <= 0 {
		return cloche.Session{}, cloche.Errorf(cloche.CodeInvalid, "the field \"duration\" must be a number of milliseconds above 0")
	}
	d, err := millis(*body.Duration)
	if err != nil {
		return cloche.Session{}, err
	}
	return c.Service.ExtendTimeout(c.r.Context(), c.who, id, d)
}

// setPolicy changes the policy of a live session.
func (c *call) setPolicy() error {
	v, err := c.policy()
	if err != nil {
		return err
	}
	return c.answer(sessionAnswer{Session: sessionOf(v.Session)})
}

// policy is setPolicy without the answer: there is one policy, which every
// session has.
func (c *call) policy() (cloche.SandboxView, error) {
	v, err := c.view()
	if err != nil {
		return v, err
	}
	switch s := v.Session.State; {
	case s.Final():
		return v, cloche.Errorf(cloche.CodeGone, "the session has ended")
	case s == cloche.Stopping, s == cloche.Snapshotting:
		return v, cloche.Errorf(cloche.CodeStopping, "the session is %s", s)
	}
	var body struct {
		Mode string `json:"mode"`
	}
	if err := c.decode(&body, maxBody); err != nil {
		return v, err
	}
	return v, checkMode(body.Mode)
}
