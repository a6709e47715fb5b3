package vercel

import (
	"time"

	"github.com/cloche-dev/cloche"
)

// The objects of the wire. Optional fields are left out and never null, arrays
// are never null, times are epoch milliseconds, durations milliseconds, memory
// is MiB: one null breaks the client's whole call. What is ours beside the
// protocol is marked "extra"; clients drop it.

// defaultRegion stands where the protocol requires a region and none was given.
const defaultRegion = "local"

// sandboxBody is a sandbox. Its status is that of its latest session.
type sandboxBody struct {
	Name             string            `json:"name"`
	Persistent       bool              `json:"persistent"`
	CreatedAt        int64             `json:"createdAt"`
	UpdatedAt        int64             `json:"updatedAt"`
	CurrentSessionID cloche.SessionID  `json:"currentSessionId"`
	Status           string            `json:"status"`
	StatusUpdatedAt  int64             `json:"statusUpdatedAt"`
	Region           string            `json:"region,omitempty"`
	VCPUs            int               `json:"vcpus"`
	Memory           int               `json:"memory"`
	Runtime          string            `json:"runtime,omitempty"`
	Image            string            `json:"image,omitempty"`
	Timeout          int64             `json:"timeout"`
	NetworkPolicy    policyBody        `json:"networkPolicy"`
	EgressBytes      int64             `json:"totalEgressBytes"`
	IngressBytes     int64             `json:"totalIngressBytes"`
	ActiveCPU        int64             `json:"totalActiveCpuDurationMs"`
	Duration         int64             `json:"totalDurationMs"`
	ExpiresAt        int64             `json:"expiresAt,omitempty"`
	Cwd              string            `json:"cwd"`
	Tags             map[string]string `json:"tags,omitempty"`
	User             string            `json:"user,omitempty"` // extra
}

// sessionBody is a session, and in version 1 a sandbox. What is a pointer is
// there, even if zero, once the session has ended.
type sessionBody struct {
	ID            cloche.SessionID `json:"id"`
	Memory        int              `json:"memory"`
	VCPUs         int              `json:"vcpus"`
	Region        string           `json:"region"`
	Timeout       int64            `json:"timeout"`
	Status        string           `json:"status"`
	RequestedAt   int64            `json:"requestedAt"`
	CreatedAt     int64            `json:"createdAt"`
	UpdatedAt     int64            `json:"updatedAt"`
	Cwd           string           `json:"cwd"`
	Runtime       string           `json:"runtime"` // required by 1.x and 2.x; "" = the image has none
	StartedAt     int64            `json:"startedAt,omitempty"`
	StopAskedAt   int64            `json:"requestedStopAt,omitempty"`
	StoppedAt     int64            `json:"stoppedAt,omitempty"`
	AbortedAt     int64            `json:"abortedAt,omitempty"`
	Duration      *int64           `json:"duration,omitempty"`
	NetworkPolicy policyBody       `json:"networkPolicy"`
	ActiveCPU     *int64           `json:"activeCpuDurationMs,omitempty"`
	Transfer      *transferBody    `json:"networkTransfer,omitempty"`
	Cause         string           `json:"cause,omitempty"` // extra
}

// transferBody is in bytes.
type transferBody struct {
	Ingress int64 `json:"ingress"`
	Egress  int64 `json:"egress"`
}

// policyBody is the answer's form of a policy, which is not the request's.
type policyBody struct {
	Mode string `json:"mode"`
}

// routeBody is a port that can be reached. There are none yet, but no answer may
// leave out the list.
type routeBody struct {
	URL       string `json:"url"`
	Subdomain string `json:"subdomain"`
	Port      int    `json:"port"`
}

// commandBody is a command.
type commandBody struct {
	ID        cloche.CommandID `json:"id"`
	Name      string           `json:"name"`
	Args      []string         `json:"args"`
	Cwd       string           `json:"cwd"`
	SessionID cloche.SessionID `json:"sessionId"`
	SandboxID cloche.SessionID `json:"sandboxId"` // what 1.x calls the same
	ExitCode  *int             `json:"exitCode"`  // null = it runs, or nobody saw its end
	StartedAt int64            `json:"startedAt"`
	Duration  *int64           `json:"durationMs,omitempty"`
	Signal    int              `json:"signal,omitempty"` // extra
	Cause     cloche.ExitCause `json:"cause,omitempty"`  // extra
	Lost      bool             `json:"lost,omitempty"`   // extra
}

// pageBody has a cursor, or null after the last page.
type pageBody struct {
	Count int     `json:"count"`
	Next  *string `json:"next"`
}

// The answers.
type (
	sandboxAnswer struct {
		Sandbox sandboxBody  `json:"sandbox"`
		Session *sessionBody `json:"session,omitempty"`
		Routes  []routeBody  `json:"routes,omitzero"`
		Resumed bool         `json:"resumed,omitempty"`
	}
	sessionAnswer struct {
		Session sessionBody  `json:"session"`
		Sandbox *sandboxBody `json:"sandbox,omitempty"`
		Routes  []routeBody  `json:"routes,omitzero"`
	}
	sandboxesAnswer struct {
		Sandboxes []sandboxBody `json:"sandboxes"`
		Page      pageBody      `json:"pagination"`
	}
	sessionsAnswer struct {
		Sessions []sessionBody `json:"sessions"`
		Page     pageBody      `json:"pagination"`
	}
	commandAnswer struct {
		Command commandBody `json:"command"`
	}
	commandsAnswer struct {
		Commands []commandBody `json:"commands"`
	}
	// v1Answer has a session under the name of a sandbox.
	v1Answer struct {
		Sandbox sessionBody `json:"sandbox"`
		Routes  []routeBody `json:"routes,omitzero"`
	}
	v1ListAnswer struct {
		Sandboxes []sessionBody `json:"sandboxes"`
		Page      v1PageBody    `json:"pagination"`
	}
	v1PageBody struct {
		Count int    `json:"count"`
		Next  *int64 `json:"next"`
		Prev  *int64 `json:"prev"`
	}
)

// sandboxOf shapes a sandbox. Its environment stays here.
func sandboxOf(v cloche.SandboxView) sandboxBody {
	b, s := v.Sandbox, v.Session
	out := sandboxBody{
		Name:             b.Name,
		Persistent:       b.Persistent,
		CreatedAt:        b.CreatedAt.UnixMilli(),
		UpdatedAt:        b.UpdatedAt.UnixMilli(),
		CurrentSessionID: b.SessionID,
		Status:           string(s.State),
		StatusUpdatedAt:  s.UpdatedAt.UnixMilli(),
		Region:           b.Region,
		VCPUs:            b.VCPUs,
		Memory:           b.MemoryMiB,
		Runtime:          b.Runtime,
		Image:            b.Image,
		Timeout:          b.Timeout.Milliseconds(),
		NetworkPolicy:    policyOf(b.Policy),
		EgressBytes:      b.Total.EgressBytes,
		IngressBytes:     b.Total.IngressBytes,
		ActiveCPU:        b.Total.ActiveCPU.Milliseconds(),
		Duration:         b.Total.Duration.Milliseconds(),
		Cwd:              workDir(b.WorkDir),
		Tags:             b.Tags,
		User:             b.User,
	}
	if !s.State.Final() {
		out.ExpiresAt = s.Deadline().UnixMilli()
	}
	return out
}

// sessionOf shapes a session.
func sessionOf(s cloche.Session) sessionBody {
	out := sessionBody{
		ID:            s.ID,
		Memory:        s.MemoryMiB,
		VCPUs:         s.VCPUs,
		Region:        s.Region,
		Timeout:       s.Timeout.Milliseconds(),
		Status:        string(s.State),
		RequestedAt:   s.RequestedAt.UnixMilli(),
		CreatedAt:     s.RequestedAt.UnixMilli(),
		UpdatedAt:     s.UpdatedAt.UnixMilli(),
		Cwd:           workDir(s.WorkDir),
		Runtime:       s.Runtime,
		StartedAt:     epoch(s.StartedAt),
		StopAskedAt:   epoch(s.StopRequestedAt),
		NetworkPolicy: policyOf(s.Policy),
		Cause:         s.Cause,
	}
	if out.Region == "" {
		out.Region = defaultRegion
	}
	if !s.State.Final() {
		return out
	}
	if s.State == cloche.Aborted {
		out.AbortedAt = epoch(s.EndedAt)
	} else {
		out.StoppedAt = epoch(s.EndedAt)
	}
	duration, cpu := s.Usage.Duration.Milliseconds(), s.Usage.ActiveCPU.Milliseconds()
	out.Duration, out.ActiveCPU = &duration, &cpu
	out.Transfer = &transferBody{Ingress: s.Usage.IngressBytes, Egress: s.Usage.EgressBytes}
	return out
}

// commandOf shapes a command.
func commandOf(c cloche.Command) commandBody {
	out := commandBody{
		ID:        c.ID,
		Name:      c.Name,
		Args:      c.Args,
		Cwd:       c.WorkDir,
		SessionID: c.SessionID,
		SandboxID: c.SessionID,
		StartedAt: c.StartedAt.UnixMilli(),
		Lost:      c.Lost,
	}
	if out.Args == nil {
		out.Args = []string{}
	}
	if e := c.Exit; e != nil {
		duration := e.Duration.Milliseconds()
		out.ExitCode, out.Duration = &e.Code, &duration
		out.Signal, out.Cause = e.Signal, e.Cause
	}
	return out
}

// createdOf is the answer of all calls that give a sandbox with its session.
func createdOf(v cloche.SandboxView) sandboxAnswer {
	session := sessionOf(v.Session)
	return sandboxAnswer{Sandbox: sandboxOf(v), Session: &session, Routes: []routeBody{}}
}

func policyOf(p cloche.Policy) policyBody {
	if p.Mode == "" {
		return policyBody{string(cloche.DenyAll)}
	}
	return policyBody{string(p.Mode)}
}

// pageOf shapes a page of count items.
func pageOf(count int, next string) pageBody {
	p := pageBody{Count: count}
	if next != "" {
		p.Next = &next
	}
	return p
}

// workDir is never relative or empty on the wire: clients resolve paths by it.
func workDir(dir string) string {
	if dir == "" {
		return "/"
	}
	return dir
}

// epoch is 0, which is left out, for a time that has not come.
func epoch(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMilli()
}
