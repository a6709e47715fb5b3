package node

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/guest"
)

// recoverers bounds how many machines are adopted at the same time. One that
// takes longer than slotTime goes on without a place: agents that root inside has
// silenced must not hold up the start of the server one after the other.
const (
	recoverers = 16
	slotTime   = 250 * time.Millisecond
)

// Recover adopts the machines of the given sessions, which were live when the
// process before this one ended, goes on reading their commands' output where
// it stopped, and removes machines, tops and tokens that belong to none of
// them. It returns the sessions that have no machine any more; nothing of them
// is left but their logs, in which commands without an exit are marked lost.
// Call it once, before any other method.
func (n *Node) Recover(ctx context.Context, live []cloche.Session) ([]cloche.SessionEnd, error) {
	want := map[cloche.SessionID]bool{}
	for _, s := range live {
		want[s.ID] = true
	}
	if err := n.sweep(ctx, want); err != nil {
		return nil, err
	}
	var (
		mu   sync.Mutex
		gone []cloche.SessionEnd
		errs []error
		wg   sync.WaitGroup
		slot = make(chan struct{}, recoverers)
	)
	for id := range want {
		slot <- struct{}{}
		free := sync.OnceFunc(func() { <-slot })
		late := time.AfterFunc(slotTime, free)
		wg.Go(func() {
			defer free()
			defer late.Stop()
			end, err := n.recoverOne(ctx, id)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				errs = append(errs, fmt.Errorf("recover %s: %w", id, err))
			}
			if end != nil {
				gone = append(gone, *end)
			}
		})
	}
	wg.Wait()
	return gone, errors.Join(errs...)
}

// sweep removes everything on the host that belongs to no wanted session.
func (n *Node) sweep(ctx context.Context, want map[cloche.SessionID]bool) error {
	machines, err := n.cfg.Driver.List(ctx)
	if err != nil {
		return fmt.Errorf("list machines: %w", err)
	}
	tops, err := n.cfg.Tops.List(ctx)
	if err != nil {
		return fmt.Errorf("list tops: %w", err)
	}
	stray := map[cloche.SessionID]bool{}
	for _, id := range append(append(machines, tops...), n.tokens()...) {
		if !want[id] {
			stray[id] = true
		}
	}
	var errs []error
	for id := range stray {
		n.log.InfoContext(ctx, "removing what a session left behind", "session", id)
		errs = append(errs, n.remove(ctx, id), n.loseCommands(id))
	}
	return errors.Join(errs...)
}

// ended says how a machine ended, if it has.
func ended(ctx context.Context, s *session) (driver.Exit, bool) {
	ctx, cancel := context.WithTimeout(ctx, 100*time.Millisecond)
	defer cancel()
	exit, err := s.machine.Wait(ctx)
	return exit, err == nil
}

func (n *Node) tokens() []cloche.SessionID {
	names, _ := filepath.Glob(filepath.Join(n.cfg.RunDir, "*.token")) // the pattern is fixed and valid
	var ids []cloche.SessionID
	for _, name := range names {
		id := cloche.SessionID(strings.TrimSuffix(filepath.Base(name), ".token"))
		if id.Valid() {
			ids = append(ids, id)
		}
	}
	return ids
}

// recoverOne adopts one session, or removes it and says how it ended.
func (n *Node) recoverOne(ctx context.Context, id cloche.SessionID) (*cloche.SessionEnd, error) {
	m, err := n.cfg.Driver.Recover(ctx, id)
	if cloche.ErrorCode(err) == cloche.CodeNotFound {
		return &cloche.SessionEnd{ID: id, Cause: "the machine is gone"}, errors.Join(n.loseCommands(id), n.discard(ctx, id))
	}
	if err != nil {
		return nil, err
	}
	token, err := os.ReadFile(n.tokenPath(id))
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	s := n.newSession(m, string(token))
	if err = n.reattach(ctx, s); err == nil {
		n.adopt(s)
		return nil, nil
	}
	// Ended, or silent: there is nothing to go on with.
	n.log.WarnContext(ctx, "session cannot go on", "session", id, "error", err)
	cause := "the agent does not answer"
	if exit, ok := ended(ctx, s); ok {
		cause = endCause(exit)
	}
	usage, err := n.end(ctx, s)
	return &cloche.SessionEnd{ID: id, Cause: cause, Usage: usage}, errors.Join(err, n.loseCommands(id))
}

// reattach goes on reading the output of every command that still runs.
func (n *Node) reattach(ctx context.Context, s *session) error {
	ctx, cancel := context.WithTimeout(ctx, adoptTimeout)
	defer cancel()
	list, err := retry(ctx, s.machine, func() ([]guest.Status, error) { return s.guest.Commands(ctx) })
	if err != nil {
		return err
	}
	inside := map[cloche.CommandID]bool{}
	for _, st := range list {
		if len(inside) < guest.MaxCommands && st.ID.Valid() { // the list is the agent's word
			inside[st.ID] = true
		}
	}
	open, err := n.openLogs(s.id)
	if err != nil {
		return err
	}
	for _, l := range open {
		id := l.command.ID
		if !inside[id] { // it was never started, or its exit was never read
			if err := l.lose(); err != nil {
				return err
			}
			continue
		}
		delete(inside, id)
		if err := s.add(&command{log: l}); err != nil {
			return err
		}
		n.pump(s, l, nil)
	}
	for id := range inside { // ended and recorded, but not yet forgotten inside
		if err := s.guest.Forget(ctx, id); err != nil {
			n.log.WarnContext(ctx, "forgetting a command", "session", s.id, "command", id, "error", err)
			break // the agent keeps small records until it ends
		}
	}
	return nil
}
