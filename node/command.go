package node

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// command is a running command of a live session.
type command struct {
	log *commandLog
}

// add registers a command, unless the session is ending or has too many.
func (s *session) add(c *command) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping {
		return cloche.Errorf(cloche.CodeGone, "session %s has ended", s.id)
	}
	if len(s.commands) >= guest.MaxCommands {
		return cloche.Errorf(cloche.CodeExhausted, "session %s has %d running commands, which is the most; wait for some or kill them", s.id, guest.MaxCommands)
	}
	s.commands[c.log.header.ID] = c
	s.pumps.Add(1)
	return nil
}

func (s *session) drop(id cloche.CommandID) {
	s.mu.Lock()
	delete(s.commands, id)
	s.mu.Unlock()
	s.pumps.Done()
}

// Run starts a command and returns once it runs. Its output goes to its log,
// whoever reads or goes away. A missing executable is a command that ends with
// 127; what cannot be tried at all (no such directory or user, arguments over
// the kernel's bound) is CodeInvalid and leaves no command.
func (n *Node) Run(ctx context.Context, id cloche.SessionID, r cloche.RunCommand) (cloche.Command, error) {
	s, err := n.session(id)
	if err != nil {
		return cloche.Command{}, err
	}
	args := r.Args
	if args == nil {
		args = []string{}
	}
	log, err := n.createLog(logHeader{ID: cloche.NewCommandID(), SessionID: id, Name: r.Name, Args: args, WorkDir: r.WorkDir})
	if err != nil {
		return cloche.Command{}, err
	}
	if err := s.add(&command{log: log}); err != nil {
		return cloche.Command{}, errors.Join(err, log.discard())
	}
	failpoint.Here("node/run/before-start")
	start := guest.Start{
		Argv: append([]string{r.Name}, args...), Env: r.Env, WorkDir: r.WorkDir, User: r.User,
		Sudo: r.Sudo, Stdin: r.Stdin != nil, PTY: r.PTY, Timeout: r.Timeout,
	}
	// The stream lives as long as the command, not as long as the request; the
	// request's values (its id) go with it into the agent's log.
	life, cancel := context.WithCancel(context.WithoutCancel(ctx))
	unlink := context.AfterFunc(n.life, cancel)
	stream, err := s.guest.Run(life, log.header.ID, start, r.Stdin)
	if err == nil {
		failpoint.Here("node/run/after-start")
		err = log.started(stream.Started())
	}
	if err != nil {
		unlink()
		cancel()
		s.drop(log.header.ID)
		return cloche.Command{}, errors.Join(err, log.discard())
	}
	n.pump(s, log, stream)
	c, _, _ := log.snapshot()
	context.AfterFunc(life, func() { unlink() })
	return c, nil
}

// pump copies a command's output into its log until it has ended. stream is nil
// to attach first. The caller has called session.add.
func (n *Node) pump(s *session, l *commandLog, stream Stream) {
	n.wg.Go(func() {
		defer s.drop(l.header.ID)
		err := n.copyOutput(s, l, stream)
		switch {
		case err == nil:
			if err := l.f.Close(); err != nil {
				n.log.Error("closing a command log", "session", s.id, "command", l.header.ID, "error", err)
			}
		case n.life.Err() != nil:
			// This process is closing; the next one goes on from the file.
			_ = l.f.Close()
		default:
			n.log.Warn("command without an observed end", "session", s.id, "command", l.header.ID, "error", err)
			if err := l.lose(); err != nil {
				n.log.Error("closing a command log", "session", s.id, "command", l.header.ID, "error", err)
			}
		}
	})
}

// copyOutput returns nil once the exit is in the log, and an error when the
// machine ended first or this process is closing. A stream that breaks while
// the machine lives is attached again at the offset of the log: soon, but ever
// later for an agent that breaks one after the other.
func (n *Node) copyOutput(s *session, l *commandLog, stream Stream) error {
	pause := minPause
	for {
		if stream == nil {
			var err error
			stream, err = retry(n.life, s.machine, func() (Stream, error) {
				return s.guest.Attach(n.life, l.header.ID, l.offset)
			})
			if err != nil {
				return err
			}
			if err := l.resume(stream.Started()); err != nil {
				return err
			}
		}
		since := time.Now()
		exit, err := copyStream(l, stream)
		closeErr := stream.Close()
		stream = nil
		if exit != nil {
			return errors.Join(n.finish(s, l, *exit), closeErr)
		}
		if n.life.Err() != nil {
			return n.life.Err()
		}
		var fault *logFault
		if errors.As(err, &fault) {
			return err
		}
		n.log.Debug("command stream broke", "session", s.id, "command", l.header.ID, "error", err)
		if time.Since(since) > calm {
			pause = minPause
		}
		// An end of the machine meanwhile is Attach's to meet.
		_, _ = waitEnd(n.life, s.machine, pause)
		pause = min(2*pause, maxPause)
	}
}

// logFault is a failure to write the log, as opposed to one of the stream.
type logFault struct{ error }

// Unwrap returns the cause.
func (f *logFault) Unwrap() error { return f.error }

// copyStream copies one stream until it ends or breaks.
func copyStream(l *commandLog, stream Stream) (*cloche.Exit, error) {
	acked := l.offset
	for {
		entry, exit, err := stream.Next()
		if err != nil || exit != nil {
			return exit, err
		}
		if err := l.append(entry); err != nil {
			return nil, &logFault{err}
		}
		if l.offset-acked >= ackEvery {
			acked = l.offset
			if err := stream.Ack(acked); err != nil {
				return nil, err
			}
		}
	}
}

// finish records the exit and lets the agent forget the command, later.
func (n *Node) finish(s *session, l *commandLog, exit cloche.Exit) error {
	failpoint.Here("node/run/before-exit")
	if err := l.exit(exit); err != nil {
		return err
	}
	failpoint.Here("node/run/after-exit")
	n.forget(s, l.header.ID)
	return nil
}

// forget lets the agent drop what it keeps of an ended command. It waits until
// there is more of that or a moment has passed, so that the calls do not stand
// in the way of the next command. What a crash leaves is forgotten by Recover.
func (n *Node) forget(s *session, id cloche.CommandID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = append(s.ended, id)
	if s.forgetting {
		return
	}
	s.forgetting = true
	n.wg.Go(func() {
		select {
		case <-time.After(forgetDelay):
		case <-n.life.Done():
			return
		}
		s.mu.Lock()
		ended := s.ended
		s.ended, s.forgetting = nil, false
		s.mu.Unlock()
		ctx, cancel := context.WithTimeout(n.life, forgetLimit)
		defer cancel()
		for _, id := range ended {
			if err := s.guest.Forget(ctx, id); err != nil {
				// The exit is on disk; the agent keeps a small record until it ends.
				n.log.Debug("forgetting a command", "session", s.id, "command", id, "error", err)
				return
			}
		}
	})
}

const (
	// forgetDelay bounds how many ended commands an agent holds: at 300 a
	// second, which is more than gVisor starts, far less than guest.MaxCommands.
	forgetDelay = 200 * time.Millisecond
	forgetLimit = 5 * time.Second
)

// maxGaps bounds the notices of gaps that one process writes into one log.
const maxGaps = 16

// resume records where a new stream begins. A gap can only be output that an
// earlier process acknowledged beyond what it kept, or a lie of the agent's.
func (l *commandLog) resume(st guest.Started) error {
	starting := l.starting()
	l.mu.Lock()
	gap := st.Offset - l.offset
	if gap > 0 && !l.status.Truncated && l.gaps < maxGaps {
		l.gaps++
		err := l.recordLocked(cloche.StreamNotice, fmt.Appendf(nil, "\n[cloche: %d bytes of output are missing here]\n", gap))
		if err != nil {
			l.mu.Unlock()
			return err
		}
	}
	l.offset = max(l.offset, st.Offset)
	l.mu.Unlock()
	if starting {
		return l.started(st)
	}
	return nil
}

// Command returns a command of a session, live or ended.
func (n *Node) Command(_ context.Context, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error) {
	if l := n.live(id, cmd); l != nil {
		c, _, _ := l.snapshot()
		return c, nil
	}
	path, err := n.logPath(id, cmd)
	if err != nil {
		return cloche.Command{}, err
	}
	f, err := os.Open(path)
	if err != nil {
		return cloche.Command{}, missing(id, cmd, err)
	}
	defer f.Close() // opened for reading: nothing to lose
	s, h, err := readLogHead(f)
	if err != nil {
		return cloche.Command{}, cloche.Internal("command log", err)
	}
	if s.State == logStarting {
		return cloche.Command{}, missing(id, cmd, os.ErrNotExist)
	}
	return s.command(h), nil
}

func missing(id cloche.SessionID, cmd cloche.CommandID, err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return cloche.Errorf(cloche.CodeNotFound, "no command %s in session %s", cmd, id)
	}
	return cloche.Internal("command log", err)
}

// live returns the log of a command that has been started and whose end is not
// on disk yet, or nil.
func (n *Node) live(id cloche.SessionID, cmd cloche.CommandID) *commandLog {
	s, err := n.session(id)
	if err != nil {
		return nil
	}
	s.mu.Lock()
	c := s.commands[cmd]
	s.mu.Unlock()
	if c == nil || c.log.starting() {
		return nil
	}
	return c.log
}

// Commands returns every command of a session, oldest first.
func (n *Node) Commands(ctx context.Context, id cloche.SessionID) ([]cloche.Command, error) {
	if !id.Valid() {
		return nil, cloche.Errorf(cloche.CodeNotFound, "no session %s", id)
	}
	entries, err := os.ReadDir(filepath.Join(n.cfg.LogDir, string(id)))
	if errors.Is(err, os.ErrNotExist) {
		return []cloche.Command{}, nil
	}
	if err != nil {
		return nil, cloche.Internal("command logs", err)
	}
	list := make([]cloche.Command, 0, len(entries))
	for _, e := range entries {
		c, err := n.Command(ctx, id, cloche.CommandID(e.Name()))
		if cloche.ErrorCode(err) == cloche.CodeNotFound {
			continue // it could not be started and is just being removed
		}
		if err != nil {
			return nil, err
		}
		list = append(list, c)
	}
	slices.SortFunc(list, func(a, b cloche.Command) int { return cmp.Compare(a.ID, b.ID) })
	return list, nil
}

// Wait blocks until a command has ended and returns it with its Exit. An end
// that nobody saw is CodeGone.
func (n *Node) Wait(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error) {
	c, err := n.Command(ctx, id, cmd)
	for err == nil && c.Exit == nil {
		l := n.live(id, cmd)
		if l == nil {
			if c, err = n.Command(ctx, id, cmd); err == nil && c.Exit == nil {
				return c, cloche.Errorf(cloche.CodeGone, "the session ended before the command did")
			}
			break
		}
		var ended bool
		var changed <-chan struct{}
		c, ended, changed = l.snapshot()
		if ended {
			continue // the next look at the file or at live decides
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return c, ctx.Err()
		}
	}
	return c, err
}

// Logs opens a command's log for reading from its start.
func (n *Node) Logs(_ context.Context, id cloche.SessionID, cmd cloche.CommandID) (cloche.LogReader, error) {
	path, err := n.logPath(id, cmd)
	if err != nil {
		return nil, err
	}
	live := n.live(id, cmd) // before the open: what is not live is whole on disk
	f, err := os.Open(path)
	if err != nil {
		return nil, missing(id, cmd, err)
	}
	s, _, err := readLogHead(f)
	if err == nil && s.State == logStarting {
		return nil, errors.Join(missing(id, cmd, os.ErrNotExist), f.Close())
	}
	if err != nil {
		return nil, errors.Join(cloche.Internal("command log", err), f.Close())
	}
	first := statusLen + int64(s.HeaderLen)
	return &logReader{f: f, live: live, pos: first}, nil
}

// Signal sends a signal to every process of a command. One that has ended is
// success.
func (n *Node) Signal(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID, signal int) (cloche.Command, error) {
	c, err := n.Command(ctx, id, cmd)
	if err != nil || c.Exit != nil || c.Lost {
		return c, err
	}
	s, err := n.session(id)
	if err != nil {
		return c, err
	}
	if err := s.guest.Signal(ctx, cmd, signal); err != nil && cloche.ErrorCode(err) != cloche.CodeNotFound {
		return c, err
	}
	return n.Command(ctx, id, cmd)
}

// Logged gives the id of every session that has logs on the host.
func (n *Node) Logged(context.Context) ([]cloche.SessionID, error) {
	entries, err := os.ReadDir(n.cfg.LogDir)
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, cloche.Internal("command logs", err)
	}
	var ids []cloche.SessionID
	for _, e := range entries {
		if id := cloche.SessionID(e.Name()); id.Valid() {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// DropLogs removes the logs of a session that has ended. None is success.
// Whoever reads one reads on to its end.
func (n *Node) DropLogs(_ context.Context, id cloche.SessionID) error {
	if !id.Valid() {
		return cloche.Errorf(cloche.CodeInvalid, "%q is not a session id", id)
	}
	if _, err := n.session(id); err == nil {
		return cloche.Errorf(cloche.CodeConflict, "session %s is running", id)
	}
	if err := os.RemoveAll(filepath.Join(n.cfg.LogDir, string(id))); err != nil {
		return cloche.Internal("command logs", err)
	}
	return nil
}
