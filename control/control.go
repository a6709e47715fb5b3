// Package control turns what was asked for into what is: names, sessions,
// timeouts, retention and limits. It decides and remembers; a Node does. It
// knows neither HTTP nor machines, and nothing in it assumes that the machine is
// on this host.
package control

import (
	"context"
	"io"
	"time"

	"github.com/cloche-dev/cloche"
)

// Node runs sessions on one host. Errors are *cloche.Error where the caller may
// act on them: CodeGone for a session that has no machine, CodeNotFound for a
// command that is not there.
type Node interface {
	// Start makes the session's file system and machine, and returns once the
	// agent has answered. On an error nothing is left behind.
	Start(ctx context.Context, s cloche.Session, env map[string]string) error

	// Stop ends all commands (SIGTERM, grace, SIGKILL), then the machine, and
	// discards its files. It returns the usage of the whole session. A session
	// that has no machine any more is success.
	Stop(ctx context.Context, id cloche.SessionID, grace time.Duration) (cloche.Usage, error)

	// Usage reads what the session has used so far.
	Usage(ctx context.Context, id cloche.SessionID) (cloche.Usage, error)

	// Recover adopts the machines of the given sessions, which were live when
	// the process before this one ended, removes whatever belongs to none of
	// them, and returns those that have no machine any more.
	Recover(ctx context.Context, live []cloche.Session) (gone []SessionEnd, err error)

	Run(ctx context.Context, id cloche.SessionID, cmd cloche.RunCommand) (cloche.Command, error)
	Command(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error)
	Commands(ctx context.Context, id cloche.SessionID) ([]cloche.Command, error)
	// Wait blocks until the command has ended. An end that nobody saw is an
	// *Error of CodeGone.
	Wait(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error)
	Signal(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID, signal int) (cloche.Command, error)
	// Logs works for every command whose log is on the host, also after the
	// session has ended.
	Logs(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID) (cloche.LogReader, error)

	// Logged gives the id of every session that has logs on the host.
	Logged(ctx context.Context) ([]cloche.SessionID, error)
	// DropLogs removes the logs of an ended session. None is success.
	DropLogs(ctx context.Context, id cloche.SessionID) error

	MakeDir(ctx context.Context, id cloche.SessionID, d cloche.MakeDir) error
	WriteFiles(ctx context.Context, id cloche.SessionID, w cloche.WriteFiles, tar io.Reader) error
	// ReadFile fails with CodeNotFound for no such file and CodeInvalid for a
	// directory. A failure midway is an error of the reader, never a short
	// success.
	ReadFile(ctx context.Context, id cloche.SessionID, f cloche.ReadFile) (cloche.FileInfo, io.ReadCloser, error)
}

// SessionEnd is a session whose machine ended without being asked to.
type SessionEnd = cloche.SessionEnd

// Store remembers sandboxes and sessions durably: a method that returned nil
// survives a power cut. A missing record is an *Error of CodeNotFound.
type Store interface {
	// CreateSandbox adds a sandbox and its first session in one step. A name
	// that is taken in the project is CodeConflict.
	CreateSandbox(ctx context.Context, b cloche.Sandbox, s cloche.Session) error
	// AddSession adds a session and makes it the sandbox's latest, in one
	// step, provided that the sandbox's latest is still prev; else CodeConflict.
	AddSession(ctx context.Context, s cloche.Session, prev cloche.SessionID) error
	Sandbox(ctx context.Context, team, project, name string) (cloche.Sandbox, error)
	SandboxByID(ctx context.Context, id cloche.SandboxID) (cloche.Sandbox, error)
	// Sandboxes returns one page with each one's latest session, and the
	// cursor of the next page, "" after the last. The sandboxes come without
	// their Env. A cursor that is not of this list and order is CodeInvalid.
	Sandboxes(ctx context.Context, team, project string, l cloche.ListSandboxes) ([]cloche.SandboxView, string, error)
	// UpdateSandbox applies change to the record in one transaction.
	UpdateSandbox(ctx context.Context, id cloche.SandboxID, change func(*cloche.Sandbox) error) (cloche.Sandbox, error)
	// DeleteSandbox removes the sandbox, provided that its latest session is
	// still latest, and else is CodeConflict. The name is free at once. The
	// sessions stay for accounting: LiveSessions and UpdateSession still know
	// them, Session and Sessions do not.
	DeleteSandbox(ctx context.Context, id cloche.SandboxID, latest cloche.SessionID) error
	Session(ctx context.Context, id cloche.SessionID) (cloche.Session, error)
	Sessions(ctx context.Context, team, project string, l cloche.ListSessions) ([]cloche.Session, string, error)
	// UpdateSession applies change in one transaction. A session that becomes
	// final adds its usage to its sandbox's total in the same one. A state that
	// may not follow the present one is CodeConflict.
	UpdateSession(ctx context.Context, id cloche.SessionID, change func(*cloche.Session) error) (cloche.Session, error)
	// LiveSessions returns every session that is not final.
	LiveSessions(ctx context.Context) ([]cloche.Session, error)
}

// Images finds images that are complete on this host.
type Images interface {
	// Image resolves a name, "name@sha256:…" or "" (the default image). An
	// unknown one is CodeNotFound and the message says how to get it.
	Image(ctx context.Context, ref string) (cloche.Image, error)
}
