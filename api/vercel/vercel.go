// Package vercel serves the HTTP API that the @vercel/sandbox SDK and the
// sandbox command speak (v1, v2, v3), and the few extras of ours on it. It
// parses, authorizes and shapes answers; what happens is the Service's.
package vercel

import (
	"context"
	"io"
	"time"

	"github.com/cloche-dev/cloche"
)

// Service is what the API serves. Every method sees only the principal's
// project: a thing of another one is CodeNotFound.
type Service interface {
	CreateSandbox(ctx context.Context, p cloche.Principal, c cloche.CreateSandbox) (cloche.SandboxView, error)
	// GetSandbox returns the sandbox with its latest session. With resume, a
	// sandbox without a live session gets a new one, and resumed is true for
	// the one caller that caused it.
	GetSandbox(ctx context.Context, p cloche.Principal, name string, resume bool) (v cloche.SandboxView, resumed bool, err error)
	ListSandboxes(ctx context.Context, p cloche.Principal, l cloche.ListSandboxes) ([]cloche.SandboxView, string, error)
	UpdateSandbox(ctx context.Context, p cloche.Principal, name string, u cloche.UpdateSandbox) (cloche.SandboxView, error)
	// DeleteSandbox stops a live session first.
	DeleteSandbox(ctx context.Context, p cloche.Principal, name string) (cloche.SandboxView, error)

	ListSessions(ctx context.Context, p cloche.Principal, l cloche.ListSessions) ([]cloche.Session, string, error)
	// GetSession returns a session, ended or not, with its sandbox.
	GetSession(ctx context.Context, p cloche.Principal, id cloche.SessionID) (cloche.SandboxView, error)
	// StopSession returns once the session is final; one that is final already
	// is success.
	StopSession(ctx context.Context, p cloche.Principal, id cloche.SessionID) (cloche.SandboxView, error)
	// ExtendTimeout adds d to the session's timeout. Past the maximum it is
	// CodeTimeoutInvalid.
	ExtendTimeout(ctx context.Context, p cloche.Principal, id cloche.SessionID, d time.Duration) (cloche.Session, error)

	// The calls below need a live session: CodeGone for an ended one,
	// CodeStopping for one that is ending. While it is pending they wait.
	// Reads of commands and logs also work on ended sessions.

	RunCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, r cloche.RunCommand) (cloche.Command, error)
	GetCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error)
	ListCommands(ctx context.Context, p cloche.Principal, id cloche.SessionID) ([]cloche.Command, error)
	WaitCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error)
	SignalCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID, signal int) (cloche.Command, error)
	CommandLogs(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.LogReader, error)

	MakeDir(ctx context.Context, p cloche.Principal, id cloche.SessionID, d cloche.MakeDir) error
	WriteFiles(ctx context.Context, p cloche.Principal, id cloche.SessionID, w cloche.WriteFiles, tar io.Reader) error
	ReadFile(ctx context.Context, p cloche.Principal, id cloche.SessionID, f cloche.ReadFile) (cloche.FileInfo, io.ReadCloser, error)
}

// Authenticator turns a bearer token into a principal. A bad token is
// CodeUnauthorized.
type Authenticator interface {
	Authenticate(ctx context.Context, bearer string) (cloche.Principal, error)
}
