package cloche

import (
	"regexp"
	"strings"
	"time"
	"unicode/utf8"
)

// Limits and defaults of a sandbox. The numbers that the wire protocol fixes
// are spec section 9.1's; the others are ours.
const (
	DefaultTimeout = 5 * time.Minute
	MaxTimeout     = 24 * time.Hour // unless the server's configuration says less
	MinTimeout     = time.Second

	DefaultVCPUs     = 2
	MaxVCPUs         = 32
	MemoryMiBPerVCPU = 2048

	MaxNameLen     = 128       // bytes
	MaxTags        = 5         // per sandbox
	MaxTagLen      = 256       // bytes, key and value each
	MaxPorts       = 15        // per sandbox
	MaxEnvKeysLen  = 4 << 10   // bytes, all keys together
	MaxEnvLen      = 64 << 10  // bytes, keys and values together
	MaxArgsLen     = 2 << 20   // bytes, all arguments together; the kernel's own bound is ARG_MAX
	MaxPathLen     = 4096      // bytes, PATH_MAX of Linux
	MaxLogLen      = 256 << 20 // bytes of output kept for one command, unless configured
	DefaultWorkDir = "/vercel/sandbox"
)

// Sandbox is the named, long-lived record: settings and history. It is
// persisted; nothing in it is secret except Env.
type Sandbox struct {
	ID      SandboxID
	Team    string
	Project string
	Name    string // unique in the project

	Persistent bool
	Image      string // reference as asked for, digest-pinned once resolved
	ImageID    ImageID
	Runtime    string // "node24" and the like on legacy clients, else ""
	User       string // default user of commands and files
	WorkDir    string // absolute

	VCPUs     int
	MemoryMiB int
	Timeout   time.Duration // of each new session
	Ports     []int
	Env       map[string]string // base environment of all commands; never returned
	Tags      map[string]string
	Region    string // recorded, without effect
	Policy    Policy

	SessionID SessionID // the latest session, ended or not
	CreatedAt time.Time
	UpdatedAt time.Time

	Total Usage // over all ended sessions
}

// Session is one run of a machine. It is persisted.
type Session struct {
	ID        SessionID
	SandboxID SandboxID
	Team      string
	Project   string
	State     SessionState
	Cause     string // why it failed or was aborted, or "timeout" if that stopped it; else ""

	ImageID   ImageID
	Runtime   string
	User      string
	WorkDir   string
	VCPUs     int
	MemoryMiB int
	Timeout   time.Duration // total allowed lifetime, grows by extension
	Region    string
	Policy    Policy

	RequestedAt     time.Time
	StartedAt       time.Time // zero until running
	UpdatedAt       time.Time
	StopRequestedAt time.Time // zero unless asked to stop
	EndedAt         time.Time // zero until final

	Usage Usage // complete once final
}

// Deadline is when the session stops by itself.
func (s *Session) Deadline() time.Time {
	if s.StartedAt.IsZero() {
		return s.RequestedAt.Add(s.Timeout)
	}
	return s.StartedAt.Add(s.Timeout)
}

// StateAt is when the session came into its present state.
func (s *Session) StateAt() time.Time {
	at := s.RequestedAt
	for _, t := range []time.Time{s.StartedAt, s.StopRequestedAt, s.EndedAt} {
		if t.After(at) {
			at = t
		}
	}
	return at
}

// Usage is what sessions used.
type Usage struct {
	ActiveCPU    time.Duration // CPU time, as the cgroup counted it
	Duration     time.Duration // wall time from start to end
	EgressBytes  int64
	IngressBytes int64
}

// Policy is what a session may reach. The zero value denies everything.
type Policy struct {
	Mode PolicyMode
}

// PolicyMode is the kind of a Policy.
type PolicyMode string

// DenyAll is the only mode until sandboxes have a network: loopback only.
const DenyAll PolicyMode = "deny-all"

// CreateSandbox is the request to make a sandbox and start its first session.
// Zero fields take the server's defaults.
type CreateSandbox struct {
	Name      string // "" = the server makes one up
	Image     string // "" = the default image
	Runtime   string // "node22", "node24", "python3.13"; excludes Image
	VCPUs     int
	Timeout   time.Duration
	Ports     []int
	Env       map[string]string
	Tags      map[string]string
	Region    string
	Ephemeral bool // the caller asked for persistent:false
}

// UpdateSandbox changes the settings of a sandbox; nil fields stay. VCPUs,
// Timeout and Region take effect with the next session.
type UpdateSandbox struct {
	VCPUs   *int
	Timeout *time.Duration
	Ports   *[]int
	Tags    *map[string]string
	Region  *string
}

// SortField says by what a list of sandboxes is sorted.
type SortField string

// The sort fields of the wire. The zero value is SortCreatedAt.
const (
	SortCreatedAt       SortField = "createdAt"
	SortName            SortField = "name"
	SortStatusUpdatedAt SortField = "statusUpdatedAt"
)

// ListSandboxes selects sandboxes of the caller's project.
type ListSandboxes struct {
	Page
	Sort       SortField
	NamePrefix string
	TagKey     string // "" = any
	TagValue   string
}

// ListSessions selects sessions of the caller's project, latest first unless
// Page.Ascending.
type ListSessions struct {
	Page
	Sandbox string // name; "" = all
}

// Page is one page of a list.
type Page struct {
	Limit     int    // 0 = 50; at most 100
	Cursor    string // opaque, from the page before; "" = the first page
	Ascending bool   // default: descending
}

// Sizes of a page.
const (
	DefaultPageSize = 50
	MaxPageSize     = 100
)

// reservedNames would collide with sub-paths of /v2/sandboxes.
var reservedNames = []string{"sessions", "snapshots", "drives"}

var nameForm = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$`)

// CheckName returns an *Error of CodeInvalid unless name may name a sandbox.
func CheckName(name string) error {
	switch {
	case !utf8.ValidString(name):
		return Errorf(CodeInvalid, "the sandbox name is not valid UTF-8")
	case name == "" || len(name) > MaxNameLen:
		return Errorf(CodeInvalid, "a sandbox name has 1 to %d characters", MaxNameLen)
	case !nameForm.MatchString(name):
		return Errorf(CodeInvalid, "a sandbox name has letters, digits, '.', '_' and '-', and begins and ends with a letter or digit")
	}
	for _, r := range reservedNames {
		if strings.EqualFold(name, r) {
			return Errorf(CodeInvalid, "the sandbox name %q is reserved; choose another", name)
		}
	}
	return nil
}

// CheckEnv returns an *Error of CodeInvalid or CodeTooLarge unless env may be
// the environment of a command.
func CheckEnv(env map[string]string) error {
	keys, all := 0, 0
	for k, v := range env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return Errorf(CodeInvalid, "an environment variable has a name without '=' and no NUL byte in name or value")
		}
		keys += len(k)
		all += len(k) + len(v)
	}
	if keys > MaxEnvKeysLen {
		return Errorf(CodeTooLarge, "the names of environment variables have %d bytes together; at most %d are allowed", keys, MaxEnvKeysLen)
	}
	if all > MaxEnvLen {
		return Errorf(CodeTooLarge, "the environment has %d bytes; at most %d are allowed", all, MaxEnvLen)
	}
	return nil
}

// SandboxView is a sandbox with its latest session.
type SandboxView struct {
	Sandbox Sandbox
	Session Session
}

// SessionEnd says how a session ended that nobody had asked to end.
type SessionEnd struct {
	ID    SessionID
	Cause string // for people: "out of memory", "the machine crashed"
	Usage Usage
}
