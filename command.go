package cloche

import (
	"context"
	"io"
	"time"
)

// Command is one process tree started in a session. Its record is the header
// of its log file on the host, which outlives the session.
type Command struct {
	ID        CommandID
	SessionID SessionID
	Name      string // executable, as asked for
	Args      []string
	WorkDir   string // absolute
	StartedAt time.Time
	Exit      *Exit // nil while it runs, and for ever if Lost
	Lost      bool  // the machine ended first, and nobody saw how this ended
}

// Exit is how a command ended. It exists only if the kernel said so to the
// agent: a command whose machine ended under it has none.
type Exit struct {
	Code     int           `json:"code"`             // 128+n for signal n
	Signal   int           `json:"signal,omitempty"` // 0 = it exited by itself
	Cause    ExitCause     `json:"cause,omitempty"`
	Duration time.Duration `json:"duration"`
}

// ExitCause says who ended a command that did not end by itself.
type ExitCause string

// The causes; "" is a command that ended by itself or by a signal that
// somebody inside or a Kill call sent.
const (
	CauseOOM     ExitCause = "oom"     // the memory guard or the kernel, for memory
	CauseTimeout ExitCause = "timeout" // its own timeout
)

// RunCommand is the request to start a command.
type RunCommand struct {
	Name    string
	Args    []string
	WorkDir string            // relative to the session's; "" = the session's
	Env     map[string]string // over the sandbox's
	User    string            // "" = the sandbox's default user
	Sudo    bool              // run as root, as sudo would
	Timeout time.Duration     // 0 = none
	PTY     *WindowSize       // nil = pipes
	// Stdin, if not nil, is copied to the command until its EOF. It is read
	// from another goroutine; a nil Stdin is EOF at once.
	Stdin io.Reader
}

// WindowSize is the size of a terminal in characters.
type WindowSize struct {
	Cols uint16 `json:"cols"`
	Rows uint16 `json:"rows"`
}

// Stream says where a piece of output came from.
type Stream string

// The streams. A PTY has only Stdout. StreamNotice is a line of ours, such as
// the mark where a log reached its bound.
const (
	Stdout       Stream = "stdout"
	Stderr       Stream = "stderr"
	StreamNotice Stream = "notice"
)

// LogEntry is a piece of a command's output as it arrived: any bytes, of any
// length up to 64 KiB, not cut at lines or characters.
type LogEntry struct {
	Stream Stream
	Data   []byte
}

// LogReader reads one command's log from its start. Readers do not disturb one
// another. It is not safe for concurrent use.
type LogReader interface {
	// Next blocks until there is an entry and returns io.EOF after the last
	// one of a command that has ended. The data is valid until the next call.
	// An end that nobody observed is an *Error of CodeGone, not an io.EOF.
	// With a ctx that has ended it does not block: what is there, an entry or
	// the end, is returned as ever, and ctx.Err() only if nothing is.
	Next(ctx context.Context) (LogEntry, error)
	// Cut makes the log of a command that runs end, for this reader, with what
	// is in it now: then comes io.EOF, however much the command still prints.
	// It does nothing to the log of a command that has ended, or if called again.
	Cut()
	Close() error
}

// FileInfo describes a file that is about to be read.
type FileInfo struct {
	Size int64 // -1 = not known before it is read
	Mode uint32
}

// ReadFile names a file to read.
type ReadFile struct {
	Path    string // any bytes but NUL
	WorkDir string // base of a relative Path; "" = the session's
}

// MakeDir names a directory to make, one level.
type MakeDir struct {
	Path    string
	WorkDir string
}

// WriteFiles says how a tar stream is unpacked.
type WriteFiles struct {
	WorkDir string // names in the archive are relative to it; "" = the session's
	Gzip    bool   // the stream is gzip-compressed
}
