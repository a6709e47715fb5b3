package vercel

import "net/http"

// route is one line of the API.
type route struct {
	method string
	path   string // as a ServeMux pattern, without /api
	serve  func(*call) error
}

// name is the route as metrics and logs have it.
func (r route) name() string { return r.method + " " + r.path }

// routes is the whole API. A feature that comes later has its routes here
// already, so that it answers what it is and not 404.
func routes() []route {
	const (
		get, post, patch, del = http.MethodGet, http.MethodPost, http.MethodPatch, http.MethodDelete
		boxes                 = "/v2/sandboxes"
		box                   = boxes + "/{name}"
		session               = boxes + "/sessions/{sid}"
		command               = session + "/cmd/{cid}"
		v1                    = "/v1/sandboxes"
		v1box                 = v1 + "/{sid}"
	)
	snapshots, drives := later("snapshots"), later("drives")
	account := later("accounts; use a token of \"cloche token create\"")
	return []route{
		{post, "/v3/sandboxes", (*call).createSandbox},
		{post, boxes, (*call).createLegacySandbox},
		{get, boxes, (*call).listSandboxes},
		{get, box, (*call).getSandbox},
		{patch, box, (*call).updateSandbox},
		{del, box, (*call).deleteSandbox},
		// Fork, as a wildcard: a literal would be ambiguous with drives.
		{post, box + "/{action}", (*call).sandboxAction},

		{get, boxes + "/sessions", (*call).listSessions},
		{get, session, (*call).getSession},
		{post, session + "/stop", (*call).stopSession},
		{post, session + "/extend-timeout", (*call).extendTimeout},
		{post, session + "/network-policy", (*call).setPolicy},
		{post, session + "/snapshot", snapshots},
		{post, session + "/interactive", later("interactive sessions")},

		{post, session + "/cmd", (*call).runCommand},
		{get, session + "/cmd", (*call).listCommands},
		{get, command, (*call).getCommand},
		{get, command + "/logs", (*call).commandLogs},
		{post, command + "/kill", (*call).killCommand},

		{post, session + "/fs/mkdir", (*call).makeDir},
		{post, session + "/fs/write", (*call).writeFiles},
		{post, session + "/fs/read", (*call).readFile},

		{get, boxes + "/snapshots", snapshots},
		{get, boxes + "/snapshots/tree", snapshots},
		{get, boxes + "/snapshots/{id}", snapshots},
		{del, boxes + "/snapshots/{id}", snapshots},
		{get, boxes + "/drives", drives},
		{post, boxes + "/drives/{drive}", drives},
		{del, boxes + "/drives/{drive}", drives},

		{get, "/v2/user", account},
		{get, "/v2/teams", account},
		{get, "/v2/teams/{id}", account},
		{get, "/v2/projects/{id}", account},
		{post, "/v11/projects", account},

		// Version 1: a sandbox is one session, known by the session's id.
		{post, v1, (*call).createV1},
		{get, v1, (*call).listV1},
		{get, v1box, (*call).getV1},
		{post, v1box + "/stop", (*call).stopV1},
		{post, v1box + "/extend-timeout", (*call).extendV1},
		{post, v1box + "/network-policy", (*call).policyV1},
		{post, v1box + "/snapshot", snapshots},
		{post, v1box + "/cmd", (*call).runCommand},
		{get, v1box + "/cmd/{cid}", (*call).getCommand},
		{get, v1box + "/cmd/{cid}/logs", (*call).commandLogs},
		{post, v1box + "/{cid}/kill", (*call).killCommand},
		{post, v1box + "/fs/mkdir", (*call).makeDir},
		{post, v1box + "/fs/write", (*call).writeFiles},
		{post, v1box + "/fs/read", (*call).readFile},
		{get, v1 + "/snapshots", snapshots},
		{get, v1 + "/snapshots/{id}", snapshots},
		{del, v1 + "/snapshots/{id}", snapshots},
	}
}
