package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/cloche-dev/cloche"
)

// Millis is a moment (milliseconds since 1970) or a duration (milliseconds) as
// the wire has it. Zero is "not there".
type Millis int64

// Time reads m as a moment.
func (m Millis) Time() time.Time { return time.UnixMilli(int64(m)) }

// Duration reads m as a duration.
func (m Millis) Duration() time.Duration { return time.Duration(m) * time.Millisecond }

// Sandbox is a sandbox's record on the wire. Status is that of its latest
// session.
type Sandbox struct {
	Name              string              `json:"name"`
	Persistent        bool                `json:"persistent"`
	Status            cloche.SessionState `json:"status"`
	CurrentSessionID  cloche.SessionID    `json:"currentSessionId"`
	CreatedAt         Millis              `json:"createdAt"`
	UpdatedAt         Millis              `json:"updatedAt"`
	StatusUpdatedAt   Millis              `json:"statusUpdatedAt,omitempty"`
	ExpiresAt         Millis              `json:"expiresAt,omitempty"`
	Region            string              `json:"region,omitempty"`
	Image             string              `json:"image,omitempty"`
	Runtime           string              `json:"runtime,omitempty"`
	WorkDir           string              `json:"cwd,omitempty"`
	VCPUs             int                 `json:"vcpus,omitempty"`
	MemoryMiB         int                 `json:"memory,omitempty"`
	Timeout           Millis              `json:"timeout,omitempty"`
	NetworkPolicy     map[string]any      `json:"networkPolicy,omitempty"`
	Tags              map[string]string   `json:"tags,omitempty"`
	TotalActiveCPU    Millis              `json:"totalActiveCpuDurationMs,omitempty"`
	TotalDuration     Millis              `json:"totalDurationMs,omitempty"`
	TotalEgressBytes  int64               `json:"totalEgressBytes,omitempty"`
	TotalIngressBytes int64               `json:"totalIngressBytes,omitempty"`
}

// Session is one run of a sandbox on the wire.
type Session struct {
	ID              cloche.SessionID    `json:"id"`
	Status          cloche.SessionState `json:"status"`
	Region          string              `json:"region"`
	Runtime         string              `json:"runtime,omitempty"`
	WorkDir         string              `json:"cwd"` // absolute
	VCPUs           int                 `json:"vcpus"`
	MemoryMiB       int                 `json:"memory"`
	Timeout         Millis              `json:"timeout"`
	RequestedAt     Millis              `json:"requestedAt"`
	CreatedAt       Millis              `json:"createdAt"`
	UpdatedAt       Millis              `json:"updatedAt"`
	StartedAt       Millis              `json:"startedAt,omitempty"`
	RequestedStopAt Millis              `json:"requestedStopAt,omitempty"`
	StoppedAt       Millis              `json:"stoppedAt,omitempty"`
	AbortedAt       Millis              `json:"abortedAt,omitempty"`
	Duration        Millis              `json:"duration,omitempty"`
	ActiveCPU       Millis              `json:"activeCpuDurationMs,omitempty"`
	NetworkPolicy   map[string]any      `json:"networkPolicy,omitempty"`
	Cause           string              `json:"cause,omitempty"` // why it failed or was aborted, or CauseTimeout: an extra of ours
}

// CauseTimeout is the cause of a session that was stopped by its timeout.
const CauseTimeout = "timeout"

// Deadline is when the session stops by itself.
func (s *Session) Deadline() time.Time {
	start := s.StartedAt
	if start == 0 {
		start = s.CreatedAt
	}
	return (start + s.Timeout).Time()
}

// Route is one port of a session that can be reached from outside.
type Route struct {
	URL       string `json:"url"`
	Subdomain string `json:"subdomain"`
	Port      int    `json:"port"`
}

// View is a sandbox with its latest session.
type View struct {
	Sandbox Sandbox `json:"sandbox"`
	Session Session `json:"session"`
	Routes  []Route `json:"routes"`
	Resumed bool    `json:"resumed,omitempty"` // this request started the session
}

// Create is the request to make a sandbox. Zero fields take the server's
// defaults.
type Create struct {
	Name       string            // "" = the server makes one up
	Image      string            // excludes Runtime
	Runtime    string            // "node22", "node24", "python3.13"
	VCPUs      int               //
	Timeout    time.Duration     // of each session
	Ports      []int             //
	Env        map[string]string // of all commands
	Tags       map[string]string //
	Persistent *bool             // nil = the server's default
	Network    string            // "allow-all", "deny-all"; "" = the server's default
}

// createBody is Create on the wire.
type createBody struct {
	Name       string            `json:"name,omitempty"`
	Image      string            `json:"image,omitempty"`
	Runtime    string            `json:"runtime,omitempty"`
	Ports      []int             `json:"ports"`
	Timeout    int64             `json:"timeout,omitempty"`
	Resources  *resources        `json:"resources,omitempty"`
	Persistent *bool             `json:"persistent,omitempty"`
	Env        map[string]string `json:"env,omitempty"`
	Tags       map[string]string `json:"tags,omitempty"`
	Network    *policy           `json:"networkPolicy,omitempty"`
}

type resources struct {
	VCPUs int `json:"vcpus"`
}

type policy struct {
	Mode string `json:"mode"`
}

// Create makes a sandbox and returns once its first session runs. A name that
// is taken is CodeConflict. It is never repeated: an answer that was lost
// leaves a sandbox if c has a name, and GetSandbox finds it.
func (c *Client) Create(ctx context.Context, r Create) (View, error) {
	body := createBody{
		Name: r.Name, Image: r.Image, Runtime: r.Runtime, Ports: r.Ports,
		Timeout: r.Timeout.Milliseconds(), Persistent: r.Persistent, Env: r.Env, Tags: r.Tags,
	}
	if body.Ports == nil {
		body.Ports = []int{}
	}
	if r.VCPUs != 0 {
		body.Resources = &resources{VCPUs: r.VCPUs}
	}
	if r.Network != "" {
		body.Network = &policy{Mode: r.Network}
	}
	path := "/v3/sandboxes"
	if r.Runtime != "" {
		path = "/v2/sandboxes" // the wire's way to ask for a runtime
	}
	var v View
	err := c.do(ctx, call{method: http.MethodPost, path: path, body: body}, &v)
	return v, err
}

// GetSandbox returns a sandbox with its latest session. With resume, one that
// has no live session gets a new one.
func (c *Client) GetSandbox(ctx context.Context, name string, resume bool) (View, error) {
	var v View
	err := c.do(ctx, call{
		method: http.MethodGet, path: sandboxPath(name), repeat: true,
		query: url.Values{"resume": {strconv.FormatBool(resume)}},
	}, &v)
	return v, err
}

// DeleteSandbox stops a live session and removes the sandbox. One that is not
// there is CodeNotFound.
func (c *Client) DeleteSandbox(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: sandboxPath(name)}, nil)
}

// Fork makes a new sandbox from what another one keeps. newName may be "".
func (c *Client) Fork(ctx context.Context, source, newName string) (View, error) {
	body := map[string]any{}
	if newName != "" {
		body["name"] = newName
	}
	var v View
	err := c.do(ctx, call{method: http.MethodPost, path: sandboxPath(source) + "/fork", body: body}, &v)
	return v, err
}

// List selects sandboxes or sessions. Zero fields take the server's defaults.
type List struct {
	NamePrefix string // sandboxes only
	Sandbox    string // sessions only: the sandbox's name
	Tag        string // sandboxes only: "key:value"
	SortBy     string // sandboxes only: createdAt, name, statusUpdatedAt
	Ascending  bool   //
	Cursor     string // of the page before
	Limit      int    // of one page
}

func (l List) query() url.Values {
	q := url.Values{}
	for key, value := range map[string]string{
		"namePrefix": l.NamePrefix, "name": l.Sandbox, "tags": l.Tag, "sortBy": l.SortBy, "cursor": l.Cursor,
	} {
		if value != "" {
			q.Set(key, value)
		}
	}
	if l.Limit != 0 {
		q.Set("limit", strconv.Itoa(l.Limit))
	}
	if l.Ascending {
		q.Set("sortOrder", "asc")
	}
	return q
}

type pagination struct {
	Next *string `json:"next"`
}

func (p pagination) cursor() string {
	if p.Next == nil {
		return ""
	}
	return *p.Next
}

// Sandboxes returns one page of sandboxes and the cursor of the next page, ""
// after the last.
func (c *Client) Sandboxes(ctx context.Context, l List) ([]Sandbox, string, error) {
	var page struct {
		Sandboxes  []Sandbox  `json:"sandboxes"`
		Pagination pagination `json:"pagination"`
	}
	err := c.do(ctx, call{method: http.MethodGet, path: "/v2/sandboxes", query: l.query(), repeat: true}, &page)
	return page.Sandboxes, page.Pagination.cursor(), err
}

// Sessions returns one page of sessions, latest first, and the cursor of the
// next page, "" after the last.
func (c *Client) Sessions(ctx context.Context, l List) ([]Session, string, error) {
	var page struct {
		Sessions   []Session  `json:"sessions"`
		Pagination pagination `json:"pagination"`
	}
	err := c.do(ctx, call{method: http.MethodGet, path: "/v2/sandboxes/sessions", query: l.query(), repeat: true}, &page)
	return page.Sessions, page.Pagination.cursor(), err
}

// GetSession returns a session, ended or not.
func (c *Client) GetSession(ctx context.Context, id cloche.SessionID) (Session, error) {
	var v View
	err := c.do(ctx, call{method: http.MethodGet, path: sessionPath(id), repeat: true}, &v)
	return v.Session, err
}

// StopSession returns once the session has ended. One that had ended already is
// success.
func (c *Client) StopSession(ctx context.Context, id cloche.SessionID) (Session, error) {
	var v View
	err := c.do(ctx, call{method: http.MethodPost, path: sessionPath(id) + "/stop", repeat: true}, &v)
	return v.Session, err
}

// Snapshot keeps what the session wrote, and ends it.
func (c *Client) Snapshot(ctx context.Context, id cloche.SessionID) error {
	return c.do(ctx, call{method: http.MethodPost, path: sessionPath(id) + "/snapshot"}, nil)
}

// ExtendTimeout adds d to the session's timeout. Past the server's maximum it
// is CodeTimeoutInvalid.
func (c *Client) ExtendTimeout(ctx context.Context, id cloche.SessionID, d time.Duration) (Session, error) {
	var v View
	err := c.do(ctx, call{
		method: http.MethodPost, path: sessionPath(id) + "/extend-timeout",
		body: map[string]int64{"duration": d.Milliseconds()},
	}, &v)
	return v.Session, err
}

func sandboxPath(name string) string { return "/v2/sandboxes/" + url.PathEscape(name) }

func sessionPath(id cloche.SessionID) string {
	return "/v2/sandboxes/sessions/" + url.PathEscape(string(id))
}
