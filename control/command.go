package control

import (
	"context"
	"strings"

	"github.com/cloche-dev/cloche"
)

// RunCommand starts a command in a live session.
func (c *Control) RunCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, r cloche.RunCommand) (cloche.Command, error) {
	if err := checkCommand(&r); err != nil {
		return cloche.Command{}, err
	}
	l, _, err := c.live(ctx, p, id)
	if err != nil {
		return cloche.Command{}, err
	}
	cmd, err := c.node.Run(ctx, id, r)
	return cmd, c.settled(ctx, l, err)
}

func checkCommand(r *cloche.RunCommand) error {
	if r.Name == "" {
		return cloche.Errorf(cloche.CodeInvalid, "there is no command to run")
	}
	size := len(r.Name) + 1
	nul := strings.ContainsRune(r.Name, 0) || strings.ContainsRune(r.User, 0)
	for _, a := range r.Args {
		size += len(a) + 1
		nul = nul || strings.ContainsRune(a, 0)
	}
	if nul {
		return cloche.Errorf(cloche.CodeInvalid, "a command, its arguments and its user have no NUL byte")
	}
	if size > cloche.MaxArgsLen {
		return cloche.Errorf(cloche.CodeTooLarge, "the arguments have %d bytes; at most %d are allowed; write them to a file", size, cloche.MaxArgsLen)
	}
	if r.Timeout < 0 {
		return cloche.Errorf(cloche.CodeInvalid, "the timeout of a command is not negative")
	}
	if err := checkPath("working directory", r.WorkDir); err != nil {
		return err
	}
	return cloche.CheckEnv(r.Env)
}

// checkCommandID refuses what cannot name a command before it becomes part of
// anything.
func checkCommandID(cmd cloche.CommandID) error {
	if !cmd.Valid() {
		return cloche.Errorf(cloche.CodeNotFound, "there is no command %.40q in this session", cmd)
	}
	return nil
}

// GetCommand returns a command of a session, ended or not.
func (c *Control) GetCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error) {
	if err := c.readable(ctx, p, id); err != nil {
		return cloche.Command{}, err
	}
	if err := checkCommandID(cmd); err != nil {
		return cloche.Command{}, err
	}
	return c.node.Command(ctx, id, cmd)
}

// ListCommands returns the commands of a session, ended or not.
func (c *Control) ListCommands(ctx context.Context, p cloche.Principal, id cloche.SessionID) ([]cloche.Command, error) {
	if err := c.readable(ctx, p, id); err != nil {
		return nil, err
	}
	return c.node.Commands(ctx, id)
}

// WaitCommand blocks until the command has ended. An end that nobody saw is
// CodeGone.
func (c *Control) WaitCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error) {
	if err := c.readable(ctx, p, id); err != nil {
		return cloche.Command{}, err
	}
	if err := checkCommandID(cmd); err != nil {
		return cloche.Command{}, err
	}
	return c.node.Wait(ctx, id, cmd)
}

// SignalCommand sends a signal to a command of a live session. One that has
// ended is success.
func (c *Control) SignalCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID, signal int) (cloche.Command, error) {
	const maxSignal = 64 // SIGRTMAX of Linux
	if signal < 1 || signal > maxSignal {
		return cloche.Command{}, cloche.Errorf(cloche.CodeInvalid, "a signal is between 1 and %d", maxSignal)
	}
	l, _, err := c.live(ctx, p, id)
	if err != nil {
		return cloche.Command{}, err
	}
	if err := checkCommandID(cmd); err != nil {
		return cloche.Command{}, err
	}
	v, err := c.node.Signal(ctx, id, cmd, signal)
	return v, c.settled(ctx, l, err)
}

// CommandLogs reads the log of a command from its start, also after the session
// has ended.
func (c *Control) CommandLogs(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.LogReader, error) {
	if err := c.readable(ctx, p, id); err != nil {
		return nil, err
	}
	if err := checkCommandID(cmd); err != nil {
		return nil, err
	}
	return c.node.Logs(ctx, id, cmd)
}
