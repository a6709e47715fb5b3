package vercel

import (
	"net/url"
	"strconv"
	"time"

	"github.com/cloche-dev/cloche"
)

// v1Of is what create and get answer.
func v1Of(v cloche.SandboxView) any {
	return v1Answer{Sandbox: sessionOf(v.Session), Routes: []routeBody{}}
}

// v1SandboxOf is what the other calls answer: without routes.
func v1SandboxOf(s cloche.Session) v1Answer { return v1Answer{Sandbox: sessionOf(s)} }

// createV1 makes a sandbox with a name that the client never learns.
func (c *call) createV1() error { return c.create(v1Of, legacyRuntime) }

// getV1 finds a session by its id, ended or not.
func (c *call) getV1() error {
	v, err := c.view()
	if err != nil {
		return err
	}
	return c.answer(v1Of(v))
}

func (c *call) stopV1() error {
	return c.stop(func(v cloche.SandboxView) any { return v1SandboxOf(v.Session) })
}

func (c *call) extendV1() error {
	s, err := c.extend()
	if err != nil {
		return err
	}
	return c.answer(v1SandboxOf(s))
}

func (c *call) policyV1() error {
	v, err := c.policy()
	if err != nil {
		return err
	}
	return c.answer(v1SandboxOf(v.Session))
}

// listV1 lists sessions, latest first, by windows of time: next is the "until"
// of the page after. Sessions of the same millisecond are never divided between
// two pages, so a page may be longer than its limit.
func (c *call) listV1() error {
	q := c.r.URL.Query()
	p, err := page(url.Values{"limit": q["limit"]})
	if err != nil {
		return err
	}
	since, err := instant(q, "since")
	if err != nil {
		return err
	}
	until, err := instant(q, "until")
	if err != nil {
		return err
	}
	limit := p.Limit
	if limit == 0 {
		limit = cloche.DefaultPageSize
	}
	out := v1ListAnswer{Sandboxes: []sessionBody{}}
	l := cloche.ListSessions{Page: cloche.Page{Limit: cloche.MaxPageSize}}
	for {
		sessions, next, err := c.Service.ListSessions(c.r.Context(), c.who, l)
		if err != nil {
			return err
		}
		for _, s := range sessions {
			at := s.RequestedAt.UnixMilli()
			if !until.IsZero() && at >= until.UnixMilli() {
				continue
			}
			if !since.IsZero() && at < since.UnixMilli() {
				return c.answerV1List(out, 0)
			}
			if n := len(out.Sandboxes); n >= limit && out.Sandboxes[n-1].CreatedAt != at {
				return c.answerV1List(out, out.Sandboxes[n-1].CreatedAt)
			}
			out.Sandboxes = append(out.Sandboxes, sessionOf(s))
		}
		if next == "" {
			return c.answerV1List(out, 0)
		}
		l.Cursor = next
	}
}

// answerV1List answers a page; next 0 is the last one. No client uses prev.
func (c *call) answerV1List(out v1ListAnswer, next int64) error {
	out.Page.Count = len(out.Sandboxes)
	if next != 0 {
		out.Page.Next = &next
	}
	return c.answer(out)
}

// instant reads a time in epoch milliseconds; absent is the zero time.
func instant(q url.Values, key string) (time.Time, error) {
	s := q.Get(key)
	if s == "" {
		return time.Time{}, nil
	}
	ms, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return time.Time{}, cloche.Errorf(cloche.CodeInvalid, "%s=%s is not a time in milliseconds", key, clip(s))
	}
	return time.UnixMilli(ms), nil
}
