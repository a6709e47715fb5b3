// Package node runs sessions on one host: it gives each a file system and a
// machine, speaks with the agent inside, keeps every command's log on the host,
// and takes over what an earlier process left running. It knows nothing of
// names, tenants, limits or HTTP; whoever calls it has decided that already.
package node

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/guest"
)

// Images gives the tree of an image that is complete on this host.
type Images interface {
	// Tree returns the absolute path of the image's root directory. An
	// unknown image is CodeNotFound.
	Tree(ctx context.Context, id cloche.ImageID) (string, error)
	// Config says how to run in it.
	Config(ctx context.Context, id cloche.ImageID) (cloche.ImageConfig, error)
}

// Tops keeps the directories that take what sessions write.
type Tops interface {
	// Make makes an empty top and returns its absolute path. One that exists
	// is CodeConflict.
	Make(ctx context.Context, id cloche.SessionID) (string, error)
	// Remove discards a top. None is success.
	Remove(ctx context.Context, id cloche.SessionID) error
	// List gives the id of every top on this host.
	List(ctx context.Context) ([]cloche.SessionID, error)
}

// Guest is the host's end of the channel to one agent. A failure of the channel
// itself is CodeUnavailable; the next call dials again.
type Guest interface {
	Configure(ctx context.Context, c guest.Config) (guest.Identity, error)
	Ping(ctx context.Context) (guest.Ping, error)
	// Run starts a command; stdin, if not nil, is copied to it by the stream.
	// ctx bounds the stream's whole life.
	Run(ctx context.Context, id cloche.CommandID, s guest.Start, stdin io.Reader) (Stream, error)
	// Attach goes on with a command from an output offset.
	Attach(ctx context.Context, id cloche.CommandID, offset int64) (Stream, error)
	Commands(ctx context.Context) ([]guest.Status, error)
	Signal(ctx context.Context, id cloche.CommandID, signal int) error
	Forget(ctx context.Context, id cloche.CommandID) error
	ReadFile(ctx context.Context, f guest.FileRequest) (cloche.FileInfo, io.ReadCloser, error)
	MakeDir(ctx context.Context, f guest.FileRequest) error
	WriteFiles(ctx context.Context, f guest.FileRequest, tar io.Reader) error
	Shutdown(ctx context.Context, grace time.Duration) error
	Close() error
}

// Stream is the output of one command. It is not safe for concurrent use,
// except that Ack and Close may be called beside Next.
type Stream interface {
	Started() guest.Started
	// Next returns the next piece of output, or, as the last thing, the exit.
	// Any error means that the stream broke. The data is valid until the next
	// call.
	Next() (cloche.LogEntry, *cloche.Exit, error)
	// Ack says that all output before the offset is kept.
	Ack(offset int64) error
	Close() error
}

// Config is what a Node needs. All fields but Ended and Log are required.
type Config struct {
	Driver driver.Driver
	Images Images
	Tops   Tops
	// Dial returns the host's end of the channel that open opens. It does not
	// connect yet. token is the session's.
	Dial func(open func(context.Context) (net.Conn, error), token string) Guest

	LogDir string // logs/SESSION/COMMAND
	RunDir string // what may vanish at a reboot: sessions' channel tokens

	// MaxLog bounds the output kept for one command, in bytes. 0 =
	// cloche.MaxLogLen.
	MaxLog int64
	// PIDs bounds processes and threads of all commands of a session. 0 =
	// DefaultPIDs.
	PIDs int

	// Ended is told of each session whose machine ended although nobody had
	// called Stop, after everything of it has been removed.
	Ended func(context.Context, cloche.SessionEnd)
	Log   *slog.Logger // nil = slog.Default()
}

const (
	// DefaultPIDs is generous for builds and small enough that a fork bomb
	// leaves the host alone.
	DefaultPIDs = 4096

	// helloTimeout bounds the wait for a new machine's agent. A machine
	// answers in under 0.2 s; on a loaded host that starts many at once it
	// takes seconds.
	helloTimeout = 60 * time.Second

	// adoptTimeout bounds the wait for the agent of a machine that was found
	// running. One that does not answer is useless and is ended.
	adoptTimeout = 15 * time.Second

	// shutdownMargin is what an agent gets beyond the grace period before the
	// machine is ended without its help.
	shutdownMargin = 10 * time.Second
)

// Node runs sessions. All methods may be called concurrently.
type Node struct {
	cfg Config
	log *slog.Logger

	life   context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup // watchers and pumps

	mu       sync.Mutex
	sessions map[cloche.SessionID]*session
}

// New returns a Node without sessions; Recover finds those that run.
func New(cfg Config) *Node {
	if cfg.MaxLog == 0 {
		cfg.MaxLog = cloche.MaxLogLen
	}
	if cfg.PIDs == 0 {
		cfg.PIDs = DefaultPIDs
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Ended == nil {
		cfg.Ended = func(context.Context, cloche.SessionEnd) {}
	}
	life, cancel := context.WithCancel(context.Background())
	return &Node{cfg: cfg, log: cfg.Log, life: life, cancel: cancel, sessions: map[cloche.SessionID]*session{}}
}

// Close lets go of every session without ending it: machines and commands go
// on, and the agents keep what the commands write. It waits for what it owns.
func (n *Node) Close() error {
	n.cancel()
	n.mu.Lock()
	var errs []error
	for _, s := range n.sessions {
		errs = append(errs, s.guest.Close())
	}
	n.mu.Unlock()
	n.wg.Wait()
	return errors.Join(errs...)
}

// Running is the number of sessions that have a machine.
func (n *Node) Running() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.sessions)
}

// session returns the live session, or CodeGone.
func (n *Node) session(id cloche.SessionID) (*session, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.sessions[id]
	if s == nil {
		return nil, cloche.Errorf(cloche.CodeGone, "session %s has ended", id)
	}
	return s, nil
}
