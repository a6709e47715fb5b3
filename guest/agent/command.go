package agent

import (
	"os"
	"sort"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// command is one command from its start until it is forgotten.
type command struct {
	id      cloche.CommandID
	started bool // guarded by Agent.mu: false while it is being started
	group   group
	out     *output
	in      *input
	pty     *os.File // master side; nil with pipes
	info    guest.Started

	// mu guards what is below.
	mu       sync.Mutex
	exit     *cloche.Exit // once the kernel said so
	timedOut bool
	oom      bool        // the guard killed a process of it
	timer    *time.Timer // of its timeout; nil = none
	kick     *kicker     // of the stream that is attached; nil = none
}

// status is the state for the host.
func (c *command) status() guest.Status {
	c.mu.Lock()
	defer c.mu.Unlock()
	return guest.Status{ID: c.id, Started: c.info, Exit: c.exit, Output: c.out.produced()}
}

// statuses lists all commands, oldest first.
func (a *Agent) statuses() []guest.Status {
	a.mu.Lock()
	var all []*command
	for _, c := range a.commands {
		if c.started {
			all = append(all, c)
		}
	}
	a.mu.Unlock()
	out := make([]guest.Status, 0, len(all))
	for _, c := range all {
		out = append(out, c.status())
	}
	sort.Slice(out, func(i, j int) bool { return out[i].ID < out[j].ID })
	return out
}

// signal sends sig to every process of the command.
func (a *Agent) signal(c *command, sig int) (guest.Status, error) {
	if sig < 1 || sig > 64 {
		return guest.Status{}, cloche.Errorf(cloche.CodeInvalid, "no signal %d: they are 1 to 64", sig)
	}
	err := signalGroup(c.group, syscall.Signal(sig))
	return c.status(), err
}

// expire ends a command whose timeout has passed.
func (a *Agent) expire(c *command) {
	c.mu.Lock()
	ended := c.exit != nil
	c.timedOut = c.timedOut || !ended
	c.mu.Unlock()
	if ended {
		return
	}
	if err := c.group.kill(); err != nil {
		a.log.Error("kill after timeout", "command", c.id, "error", err)
	}
}

// markOOM notes that the guard killed a process of the command.
func (a *Agent) markOOM(id cloche.CommandID) {
	a.mu.Lock()
	c := a.commands[id]
	a.mu.Unlock()
	if c == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.exit == nil {
		c.oom = true
	}
}

// ended turns what the kernel said into the Exit.
func (c *command) ended(ws syscall.WaitStatus, at time.Time) cloche.Exit {
	c.mu.Lock()
	defer c.mu.Unlock()
	e := cloche.Exit{Code: ws.ExitStatus(), Duration: at.Sub(c.info.StartedAt)}
	if ws.Signaled() {
		e.Signal = int(ws.Signal())
		e.Code = 128 + e.Signal
	}
	switch {
	case c.timedOut && e.Signal == int(unix.SIGKILL):
		e.Cause = cloche.CauseTimeout
	case c.oom && e.Code != 0:
		e.Cause = cloche.CauseOOM
	}
	if c.timer != nil {
		c.timer.Stop()
	}
	c.exit = &e
	return e
}

// attach makes the caller's stream the one of the command and ends the one
// before it by its kick. The caller must call detach before its kick becomes
// invalid.
func (c *command) attach(kick func()) (detach func()) {
	mine := &kicker{kick}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.kick != nil {
		c.kick.end()
	}
	c.kick = mine
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.kick == mine {
			c.kick = nil
		}
	}
}

// kicker ends a stream.
type kicker struct{ end func() }

// forget drops a command that has ended, with the output that nobody read.
func (a *Agent) forget(id string) error {
	c, err := a.command(id)
	if err != nil {
		return err
	}
	if c.status().Exit == nil {
		return cloche.Errorf(cloche.CodeConflict, "the command still runs")
	}
	a.mu.Lock()
	delete(a.commands, c.id)
	a.mu.Unlock()
	c.out.drop()
	return nil
}
