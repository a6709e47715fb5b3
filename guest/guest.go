// Package guest is the contract between the host and the agent, which is
// process 1 of every machine: the types and the framing of the wire protocol.
// It is used on both sides, imports nothing but the standard library and the
// nouns, and does no I/O but on the readers and writers that it is handed.
//
// # Channel
//
// A driver gives the host a byte stream (driver.Machine.Dial). Each new one
// begins with a line of JSON in each direction:
//
//	host  -> agent: cloche {"nonce":"…","token":"…","min":1,"max":1}\n
//	agent -> host:  cloche {"nonce":"…","version":1,"agent":"…"}\n
//
// Bytes before the agent's line with the host's nonce are stale (a virtio-serial
// port keeps what was written while nobody listened) and are dropped by the
// host, up to MaxStale. The nonce is fresh for each connection. The token is the
// session's: the first connection sets it and later ones must repeat it; it
// tells this session's host from an older one and protects nothing from root in
// the machine. If the ranges of versions do not meet, the agent's line carries
// an error of code "version" and the range it has, and the host reports that at
// once: neither side ever hangs on it. A peer that sends no line within
// HelloTimeout, or one longer than MaxHello, is cut off.
//
// After the two lines the stream carries HTTP/2 without TLS (prior knowledge),
// host as client. An error answer has a JSON body, Failure.
//
// # Requests
//
//	POST /v1/configure            Config -> Identity. Once; again with the same
//	                              Config it only answers (a daemon restart).
//	GET  /v1/ping                 -> Ping
//	POST /v1/clock                Clock -> Ping. Sets the guest's clock.
//	POST /v1/commands/{id}        command stream (below), starting with FrameStart
//	POST /v1/commands/{id}/attach command stream of a command that exists
//	GET  /v1/commands             -> []Status, running or not yet forgotten
//	POST /v1/commands/{id}/signal Signal -> Status
//	DELETE /v1/commands/{id}      forget a command that has ended and been read
//	POST /v1/files/read           FileRequest -> the bytes; headers HeaderSize and
//	                              HeaderMode; trailer HeaderError on a failure midway
//	POST /v1/files/mkdir          FileRequest -> {}
//	POST /v1/files/write?q        body: tar, q = FileRequest as base64url JSON -> Written
//	POST /v1/shutdown             Shutdown -> {} once every command has ended and
//	                              file systems are synced. The agent stays.
//
// # Command streams
//
// The request body and the response body are both sequences of frames, open at
// the same time: type (1 byte), length (4 bytes, big endian, at most MaxFrame),
// payload. Host to agent: FrameStart first (not on attach, which sends
// FrameAck first: the offset it has), then FrameStdin…, FrameStdinEOF,
// FrameResize, FrameAck. Agent to host: FrameStarted, then FrameStdout and
// FrameStderr in order of arrival with FrameStdinAck between them, then
// FrameExit, or FrameFailure if it could not start, which ends the stream.
//
// Output is counted: the offset of a byte is the number of bytes of both
// streams before it. The agent keeps bytes until a FrameAck passes them, up to
// Window; then it stops reading from the process, which blocks in write(2). A
// new attach for the same command replaces the old one and goes on from the
// offset of its FrameAck, or from the oldest byte that the agent still has if
// that is later; FrameStarted says which. So a host that crashed loses nothing
// and gets nothing twice.
//
// Input is counted too, because acknowledgements travel behind it on the same
// stream: the host keeps at most StdinWindow bytes of FrameStdin ahead of the
// last FrameStdinAck, so the agent never stops reading frames. On attach
// Started.Stdin says how much of the input the agent has had.
//
// A command has ended when its first process has. What then is in its pipes is
// sent; processes that it left behind live on, and their further output is
// dropped. A stream that ends without FrameExit or FrameFailure broke.
package guest

import (
	"time"

	"github.com/cloche-dev/cloche"
)

// Protocol versions that this code speaks.
const (
	MinVersion = 1
	MaxVersion = 1
)

// Bounds. A peer that exceeds one is cut off.
const (
	MaxHello     = 4 << 10
	MaxStale     = 32 << 20
	MaxFrame     = 64 << 10
	MaxStart     = 4 << 20 // FrameStart alone: it carries argv and environment
	MaxJSON      = 4 << 20 // any JSON body
	Window       = 1 << 20 // unacknowledged output of one command
	StdinWindow  = 1 << 18 // input of one command sent ahead of its FrameStdinAck
	MaxCommands  = 1024    // running or not forgotten, in one machine
	HelloTimeout = 10 * time.Second
)

// HelloPrefix begins both lines of the handshake.
const HelloPrefix = "cloche "

// Hello is the host's line.
type Hello struct {
	Nonce string `json:"nonce"`
	Token string `json:"token"`
	Min   int    `json:"min"`
	Max   int    `json:"max"`
}

// Welcome is the agent's line.
type Welcome struct {
	Nonce   string   `json:"nonce"`
	Version int      `json:"version,omitempty"`
	Agent   string   `json:"agent"`           // build, for the log
	Min     int      `json:"min,omitempty"`   // with an error
	Max     int      `json:"max,omitempty"`   // with an error
	Error   *Failure `json:"error,omitempty"` // code "version" or "unauthorized"
}

// CodeVersion is the code of a Failure for protocol versions that do not meet.
const CodeVersion cloche.Code = "version"

// Failure is an error on the wire.
type Failure struct {
	Code    cloche.Code `json:"code"`
	Message string      `json:"message"`
}

// Header and trailer names of /v1/files/read, and the request id that every
// request may carry into the agent's log.
const (
	HeaderSize      = "Cloche-Size"  // decimal; absent = unknown
	HeaderMode      = "Cloche-Mode"  // octal permission bits
	HeaderError     = "Cloche-Error" // trailer: Failure as JSON
	HeaderRequestID = "Cloche-Request-Id"
)

// Config is what the agent needs to know about the machine it is in.
type Config struct {
	Hostname string `json:"hostname"`

	// User is the default user of commands and files, by name; "" = root.
	User string `json:"user"`

	// WorkDir is made, owned by User, if it does not exist. Absolute.
	WorkDir string `json:"workDir"`

	// Env is the base environment of every command: the image's, then the
	// sandbox's over it.
	Env map[string]string `json:"env"`

	// MemoryBytes is the machine's memory, for the memory guard and sizes of
	// tmpfs; PIDs bounds all commands together.
	MemoryBytes int64 `json:"memoryBytes"`
	PIDs        int   `json:"pids"`

	// SetClock: the machine's clock is its own; /v1/clock will follow.
	SetClock bool `json:"setClock"`
}

// Identity answers /v1/configure.
type Identity struct {
	UID     int    `json:"uid"` // of the default user
	GID     int    `json:"gid"`
	Home    string `json:"home"`
	WorkDir string `json:"workDir"`
}

// Ping is the agent's heartbeat.
type Ping struct {
	Time       time.Time `json:"time"` // the guest's clock
	Commands   int       `json:"commands"`
	AgentBytes int64     `json:"agentBytes"` // memory of the agent itself
	OOMKills   int       `json:"oomKills"`
}

// Clock sets the guest's wall clock.
type Clock struct {
	Time time.Time `json:"time"`
}

// Signal is sent to every process of a command, those that left its process
// group or session included. SIGKILL reaches all of them in one step.
type Signal struct {
	Signal int `json:"signal"` // 1 to 64
}

// Shutdown ends all commands: SIGTERM, Grace, SIGKILL, then sync.
type Shutdown struct {
	Grace time.Duration `json:"grace"`
}

// Start is a command to be started.
type Start struct {
	Argv    []string           `json:"argv"`    // Argv[0] is looked up in the PATH it will have
	Env     map[string]string  `json:"env"`     // over Config.Env
	WorkDir string             `json:"workDir"` // relative to Config.WorkDir; "" = that
	User    string             `json:"user"`    // name or number; "" = Config.User
	Sudo    bool               `json:"sudo"`    // as root, HOME=/root, SUDO_USER = the user
	Stdin   bool               `json:"stdin"`   // FrameStdin will follow; false = EOF at once
	PTY     *cloche.WindowSize `json:"pty,omitempty"`
	Timeout time.Duration      `json:"timeout"` // then SIGKILL to all of it; 0 = none
}

// Started answers Start and attach.
type Started struct {
	PID       int       `json:"pid"` // in the machine
	StartedAt time.Time `json:"startedAt"`
	WorkDir   string    `json:"workDir"` // absolute
	Offset    int64     `json:"offset"`  // of the next output byte
	Stdin     int64     `json:"stdin"`   // bytes of input received so far
}

// Status is the state of a command.
type Status struct {
	ID      cloche.CommandID `json:"id"`
	Started Started          `json:"started"`
	Exit    *cloche.Exit     `json:"exit,omitempty"` // nil while it runs
	Output  int64            `json:"output"`         // bytes produced so far
}

// FileRequest is a file operation. Path and WorkDir are any bytes but NUL, in
// base64 on the wire because JSON has only Unicode.
type FileRequest struct {
	Path    []byte `json:"path,omitempty"`    // not for write
	WorkDir []byte `json:"workDir,omitempty"` // "" = Config.WorkDir
	User    string `json:"user,omitempty"`    // "" = Config.User
	Gzip    bool   `json:"gzip,omitempty"`    // write only
}

// Written answers a write.
type Written struct {
	Files int   `json:"files"`
	Bytes int64 `json:"bytes"`
}

// Bounds on one tar stream. Content is bounded by the disk.
const (
	MaxTarEntries = 100_000
	MaxTarName    = 4096
)
