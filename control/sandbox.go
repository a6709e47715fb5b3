package control

import (
	"context"
	"maps"
	"slices"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// view returns a sandbox of p's project with its latest session.
func (c *Control) view(ctx context.Context, p cloche.Principal, name string) (v cloche.SandboxView, err error) {
	if v.Sandbox, err = c.store.Sandbox(ctx, p.Team, p.Project, name); err != nil {
		return v, err
	}
	v.Session, err = c.store.Session(ctx, v.Sandbox.SessionID)
	return v, err
}

// GetSandbox returns the sandbox with its latest session. With resume, one
// without a live session gets a new one, and resumed is true for the one caller
// that caused it; the others wait for that session, as they do for one that is
// pending or stopping.
func (c *Control) GetSandbox(ctx context.Context, p cloche.Principal, name string, resume bool) (v cloche.SandboxView, resumed bool, err error) {
	if !resume {
		v, err = c.view(ctx, p, name)
		return v, false, err
	}
	done, err := c.begin()
	if err != nil {
		return v, false, err
	}
	defer done()
	for range maxRereads {
		if v, err = c.view(ctx, p, name); err != nil {
			return v, false, err
		}
		if v.Session.State.Final() {
			lost, err := c.resume(ctx, &v)
			if lost {
				continue // somebody else resumed or deleted it
			}
			return v, err == nil, err
		}
		l := c.life(v.Session.ID)
		if l == nil {
			continue // it ended just now
		}
		switch l.phase() {
		case starting:
			err = c.wait(ctx, l.ready, 2*c.cfg.StartTimeout)
		case running:
			if v.Session.State == cloche.Running {
				return v, false, nil
			}
		case ending:
			if err = c.wait(ctx, l.final, stopWait); err == nil && l.failure() != nil {
				return v, false, c.startFailure(ctx, p, name, l)
			}
		}
		if err != nil {
			return v, false, err
		}
	}
	return v, false, errConfused(v.Session.ID)
}

// resume starts a new session of a sandbox whose latest has ended. It goes on
// if the caller goes away, since others may wait for the same session.
// lost: it did not start any, since the sandbox has another latest session.
func (c *Control) resume(ctx context.Context, v *cloche.SandboxView) (lost bool, err error) {
	s := newSession(&v.Sandbox)
	s.Timeout = min(s.Timeout, c.cfg.MaxTimeout) // it may be less than it was
	l, err := c.admit(&s)
	if err != nil {
		return false, err
	}
	ctx = context.WithoutCancel(ctx)
	failpoint.Here("control/resume/before-record")
	if err := c.store.AddSession(ctx, s, v.Session.ID); err != nil {
		c.release(l)
		return cloche.ErrorCode(err) == cloche.CodeConflict, err
	}
	failpoint.Here("control/resume/after-record")
	up, err := c.bring(ctx, l, s, v.Sandbox.Env, false)
	if err != nil {
		c.count.resumeFailed.Add(1)
		return false, err
	}
	if !up {
		if err := c.wait(ctx, l.final, stopWait); err != nil {
			return false, err
		}
	}
	c.count.resumed.Add(1)
	v.Sandbox.SessionID = s.ID
	v.Session, err = c.store.Session(ctx, s.ID)
	return false, err
}

// startFailure is the answer to those who waited for somebody else's start, and
// do not try it again each: why it failed, or that the sandbox went with it.
func (c *Control) startFailure(ctx context.Context, p cloche.Principal, name string, l *life) error {
	if _, err := c.store.Sandbox(ctx, p.Team, p.Project, name); err != nil {
		return err
	}
	return l.failure()
}

// ListSandboxes returns one page of the project's sandboxes and the cursor of
// the next page.
func (c *Control) ListSandboxes(ctx context.Context, p cloche.Principal, l cloche.ListSandboxes) ([]cloche.SandboxView, string, error) {
	return c.store.Sandboxes(ctx, p.Team, p.Project, l)
}

// UpdateSandbox changes settings. A live session keeps those that it began with.
func (c *Control) UpdateSandbox(ctx context.Context, p cloche.Principal, name string, u cloche.UpdateSandbox) (v cloche.SandboxView, err error) {
	done, err := c.begin()
	if err != nil {
		return v, err
	}
	defer done()
	if err := c.checkUpdate(&u); err != nil {
		return v, err
	}
	b, err := c.store.Sandbox(ctx, p.Team, p.Project, name)
	if err != nil {
		return v, err
	}
	failpoint.Here("control/update/before-record")
	v.Sandbox, err = c.store.UpdateSandbox(context.WithoutCancel(ctx), b.ID, func(b *cloche.Sandbox) error {
		if u.VCPUs != nil {
			b.VCPUs, b.MemoryMiB = *u.VCPUs, *u.VCPUs*cloche.MemoryMiBPerVCPU
		}
		if u.Timeout != nil {
			b.Timeout = *u.Timeout
		}
		if u.Ports != nil {
			b.Ports = slices.Clone(*u.Ports)
		}
		if u.Tags != nil {
			b.Tags = maps.Clone(*u.Tags)
		}
		if u.Region != nil {
			b.Region = *u.Region
		}
		b.UpdatedAt = time.Now()
		return nil
	})
	if err != nil {
		return v, err
	}
	failpoint.Here("control/update/after-record")
	v.Session, err = c.store.Session(ctx, v.Sandbox.SessionID)
	return v, err
}

func (c *Control) checkUpdate(u *cloche.UpdateSandbox) (err error) {
	if u.VCPUs != nil {
		err = c.checkVCPUs(*u.VCPUs)
	}
	if err == nil && u.Timeout != nil {
		err = c.checkTimeout(*u.Timeout)
	}
	if err == nil && u.Ports != nil {
		err = checkPorts(*u.Ports)
	}
	if err == nil && u.Tags != nil {
		err = checkTags(*u.Tags)
	}
	if err == nil && u.Region != nil {
		err = checkRegion(*u.Region)
	}
	return err
}

// DeleteSandbox stops a live session, removes the sandbox and returns it as it
// was last. The name is free when it returns.
func (c *Control) DeleteSandbox(ctx context.Context, p cloche.Principal, name string) (v cloche.SandboxView, err error) {
	done, err := c.begin()
	if err != nil {
		return v, err
	}
	defer done()
	if v, err = c.view(ctx, p, name); err != nil {
		return v, err
	}
	id := v.Sandbox.ID
	for range maxRereads {
		if !v.Session.State.Final() {
			if err := c.stop(ctx, v.Session.ID); err != nil {
				return v, err
			}
		} else {
			sessions, err := c.sessionsOf(ctx, &v.Sandbox)
			if err != nil {
				return v, err
			}
			failpoint.Here("control/delete/before-record")
			err = c.store.DeleteSandbox(context.WithoutCancel(ctx), id, v.Session.ID)
			failpoint.Here("control/delete/after-record")
			if err == nil {
				c.dropLogs(ctx, sessions)
			}
			if cloche.ErrorCode(err) != cloche.CodeConflict {
				return v, err
			}
		}
		// The sandbox is this one, not another that has its name by now.
		if v.Sandbox, err = c.store.SandboxByID(ctx, id); err != nil {
			return v, err
		}
		if v.Session, err = c.store.Session(ctx, v.Sandbox.SessionID); err != nil {
			return v, err
		}
	}
	return v, errConfused(v.Session.ID)
}
