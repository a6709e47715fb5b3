package node

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// Stop ends all commands (SIGTERM, grace, SIGKILL), then the machine, and
// discards the session's files; logs stay. A session that has no machine is
// success with no usage. Concurrent calls for one session are the caller's to
// avoid: the second finds none and returns at once.
func (n *Node) Stop(ctx context.Context, id cloche.SessionID, grace time.Duration) (cloche.Usage, error) {
	s := n.claim(id)
	if s == nil {
		return cloche.Usage{}, n.remove(ctx, id)
	}
	failpoint.Here("node/stop/before-shutdown")
	bound, cancel := context.WithTimeout(ctx, grace+shutdownMargin)
	defer cancel()
	if err := s.guest.Shutdown(bound, grace); err != nil {
		// What the agent could not do, the end of the machine does.
		n.log.WarnContext(ctx, "agent did not shut down", "session", id, "error", err)
	} else {
		s.drain(bound)
	}
	failpoint.Here("node/stop/after-shutdown")
	return n.end(ctx, s)
}

// claim takes the session out of the map, so that exactly one caller ends it.
func (n *Node) claim(id cloche.SessionID) *session {
	n.mu.Lock()
	defer n.mu.Unlock()
	s := n.sessions[id]
	if s == nil {
		return nil
	}
	delete(n.sessions, id)
	s.mu.Lock()
	s.stopping = true
	s.mu.Unlock()
	return s
}

// drain waits until the logs have every command's last output and exit.
func (s *session) drain(ctx context.Context) {
	done := make(chan struct{})
	go func() { s.pumps.Wait(); close(done) }() // ends with the pumps, which end with the channel
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// end ends the machine of a claimed session and removes all that it had.
func (n *Node) end(ctx context.Context, s *session) (cloche.Usage, error) {
	// From here on the caller's cancellation would only leave things behind.
	ctx = context.WithoutCancel(ctx)
	killErr := s.machine.Kill(ctx)
	failpoint.Here("node/stop/after-kill")
	usage := n.usage(ctx, s.machine)
	closeErr := s.guest.Close()
	s.pumps.Wait()
	if err := errors.Join(killErr, closeErr); err != nil {
		n.log.WarnContext(ctx, "ending a machine", "session", s.id, "error", err)
	}
	if err := s.machine.Release(ctx); err != nil {
		return usage, fmt.Errorf("release machine: %w", err)
	}
	failpoint.Here("node/stop/after-release")
	return usage, n.discard(ctx, s.id)
}

// remove takes away whatever a session without a live machine left.
func (n *Node) remove(ctx context.Context, id cloche.SessionID) error {
	if err := n.cfg.Driver.Remove(ctx, id); err != nil {
		return fmt.Errorf("remove machine: %w", err)
	}
	return n.discard(ctx, id)
}

// discard removes what the node itself keeps for a session, but its logs.
func (n *Node) discard(ctx context.Context, id cloche.SessionID) error {
	if err := n.cfg.Tops.Remove(ctx, id); err != nil {
		return fmt.Errorf("remove top: %w", err)
	}
	failpoint.Here("node/stop/after-top")
	return n.removeToken(id)
}

// watch waits for the end of a machine and, if nobody asked for it, cleans up
// and reports it.
func (n *Node) watch(s *session) {
	exit, err := s.machine.Wait(n.life)
	if err != nil { // the process is closing; the machine goes on
		return
	}
	if n.claim(s.id) == nil {
		return // Stop is at it
	}
	cause := endCause(exit)
	n.log.Warn("machine ended by itself", "session", s.id, "cause", exit.Cause, "detail", exit.Detail)
	usage, err := n.end(n.life, s)
	if err != nil {
		n.log.Error("removing an ended machine", "session", s.id, "error", err)
	}
	n.cfg.Ended(n.life, cloche.SessionEnd{ID: s.id, Cause: cause, Usage: usage})
}

// endCause is the cause in words for users.
func endCause(e driver.Exit) string {
	switch e.Cause {
	case driver.ExitOOM:
		return "the machine ran out of memory"
	case driver.ExitStopped:
		return "process 1 of the machine was ended from inside"
	case driver.ExitKilled:
		return "the machine was killed from outside"
	default:
		return "the machine crashed"
	}
}

// Usage reads what a live session has used so far.
func (n *Node) Usage(ctx context.Context, id cloche.SessionID) (cloche.Usage, error) {
	s, err := n.session(id)
	if err != nil {
		return cloche.Usage{}, err
	}
	return n.usage(ctx, s.machine), nil
}

// usage reads the accounting; what the host cannot tell any more counts as
// nothing, and the log says so.
func (n *Node) usage(ctx context.Context, m driver.Machine) cloche.Usage {
	stats, err := m.Stats(ctx)
	if err != nil {
		n.log.WarnContext(ctx, "reading a machine's accounting", "session", m.ID(), "error", err)
	}
	return cloche.Usage{ActiveCPU: stats.CPU}
}
