package vercel

import (
	"context"
	"errors"
	"io"
	"strings"
	"syscall"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/frames"
)

// killTimeout bounds the kill of a command whose client has gone.
const killTimeout = 10 * time.Second

// runBody is a command to be run.
type runBody struct {
	Command string    `json:"command"`
	Args    []*string `json:"args"`
	Cwd     string    `json:"cwd"`
	Env     stringMap `json:"env"`
	Sudo    bool      `json:"sudo"`
	Timeout *float64  `json:"timeout"`
	Wait    bool      `json:"wait"`
	Logs    bool      `json:"logs"`
	User    string    `json:"user"` // extra
}

// request turns the body into what the Service takes.
func (b *runBody) request() (cloche.RunCommand, error) {
	r := cloche.RunCommand{Name: b.Command, WorkDir: b.Cwd, User: b.User, Sudo: b.Sudo, Args: make([]string, 0, len(b.Args))}
	if b.Command == "" {
		return r, cloche.Errorf(cloche.CodeInvalid, "the field \"command\" is missing")
	}
	for _, a := range b.Args {
		if a == nil {
			return r, cloche.Errorf(cloche.CodeInvalid, "the field \"args\" holds a null; it is an array of strings")
		}
		r.Args = append(r.Args, *a)
	}
	for _, s := range append([]string{b.Command, b.Cwd}, r.Args...) {
		if strings.ContainsRune(s, 0) {
			return r, cloche.Errorf(cloche.CodeInvalid, "a command, its arguments and its cwd have no NUL byte")
		}
	}
	var err error
	if r.Env, err = b.Env.check("env"); err != nil {
		return r, err
	}
	if b.Timeout != nil { // 0 is none, as in Node
		if r.Timeout, err = millis(*b.Timeout); err != nil {
			return r, cloche.Errorf(cloche.CodeInvalid, "the field \"timeout\" is not a number of milliseconds")
		}
	}
	return r, nil
}

// runCommand starts a command and, if the client waits, answers with a stream
// that ends with the command.
func (c *call) runCommand() error {
	id, err := c.session()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancelCause(c.r.Context())
	defer cancel(nil)
	var body runBody
	var in *stdin
	if c.r.Header.Get(frames.StdinHeader) == frames.StdinStream {
		if in, err = c.openStdin(&body, func(err error) { cancel(err) }); err != nil {
			return err
		}
		defer in.close()
	} else if err := c.decode(&body, maxCommandBody); err != nil {
		return err
	}
	req, err := body.request()
	if err != nil {
		return err
	}
	if in != nil {
		if !body.Wait {
			return cloche.Errorf(cloche.CodeInvalid, "a command with standard input must have wait: true")
		}
		req.Stdin = in
	}
	cmd, err := c.Service.RunCommand(ctx, c.who, id, req)
	if err != nil {
		return err
	}
	if !body.Wait {
		return c.answer(commandAnswer{commandOf(cmd)})
	}
	out := c.open(func() { cancel(errClientGone) })
	err = c.follow(ctx, out, cmd, body.Logs)
	if err == nil || ctx.Err() == nil {
		out.close()
		return nil
	}
	if errors.Is(context.Cause(c.r.Context()), ErrShutdown) {
		// The command lives on; the client can find it again.
		_ = out.failure(failure{cloche.CodeUnavailable, ErrShutdown.Error()})
		out.close()
		return nil
	}
	out.close()
	c.kill(cmd)
	c.w.cut = true
	return nil
}

// errClientGone is why a command is killed: nobody waits for it any more.
var errClientGone = errors.New("the client went away")

// follow writes a command's stream to its end. It returns an error only if the
// end was not reached: of the client, or of the server. Any other failure is
// told in the stream.
func (c *call) follow(ctx context.Context, out *stream, cmd cloche.Command, logs bool) error {
	if err := out.command(cmd, false); err != nil {
		return err
	}
	err := error(nil)
	if logs {
		err = c.copyLogs(ctx, out, cmd)
	}
	if err == nil {
		cmd, err = c.Service.WaitCommand(ctx, c.who, cmd.SessionID, cmd.ID)
	}
	if err == nil && cmd.Exit == nil {
		err = cloche.Errorf(cloche.CodeGone, "the session ended before the command did")
	}
	if err != nil {
		if ctx.Err() != nil {
			return err
		}
		c.tell(out, err)
		return nil
	}
	return out.command(cmd, true)
}

// tell writes a failure into a stream, and what clients do not see into the
// log.
func (c *call) tell(out *stream, err error) {
	if cloche.ErrorCode(err) == cloche.CodeInternal {
		c.Log.ErrorContext(c.r.Context(), "stream failed", "error", err)
	}
	_ = out.failure(public(err)) // a client that has gone has cancelled the request
}

// copyLogs copies a command's log into the stream, from its begin to the end of
// the command.
func (c *call) copyLogs(ctx context.Context, out *stream, cmd cloche.Command) error {
	log, err := c.Service.CommandLogs(ctx, c.who, cmd.SessionID, cmd.ID)
	if err != nil {
		return err
	}
	defer log.Close() // only read from
	for {
		e, err := log.Next(ctx)
		if err == io.EOF {
			return nil
		}
		if err == nil {
			err = out.entry(e)
		}
		if err != nil {
			return err
		}
	}
}

// kill ends a command whose client has gone. Clients cancel a command by
// closing the connection, and have no other way.
func (c *call) kill(cmd cloche.Command) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.r.Context()), killTimeout)
	defer cancel()
	_, err := c.Service.SignalCommand(ctx, c.who, cmd.SessionID, cmd.ID, int(syscall.SIGKILL))
	switch cloche.ErrorCode(err) {
	case "":
		c.Log.InfoContext(ctx, "killed a command whose client went away", "command", cmd.ID)
	case cloche.CodeGone, cloche.CodeStopping, cloche.CodeNotFound: // it ended otherwise
	default:
		c.Log.ErrorContext(ctx, "kill a command whose client went away", "command", cmd.ID, "error", err)
	}
}

// listCommands is an extra: the protocol has no list.
func (c *call) listCommands() error {
	id, err := c.session()
	if err != nil {
		return err
	}
	commands, err := c.Service.ListCommands(c.r.Context(), c.who, id)
	if err != nil {
		return err
	}
	out := commandsAnswer{Commands: make([]commandBody, 0, len(commands))}
	for _, cmd := range commands {
		out.Commands = append(out.Commands, commandOf(cmd))
	}
	return c.answer(out)
}

// getCommand answers with the command as it is, or, if asked to wait, as it has
// ended: with an exit code, which clients then require.
func (c *call) getCommand() error {
	sid, cid, err := c.command()
	if err != nil {
		return err
	}
	wait, err := boolean(c.r.URL.Query(), "wait")
	if err != nil {
		return err
	}
	if !wait {
		cmd, err := c.Service.GetCommand(c.r.Context(), c.who, sid, cid)
		if err != nil {
			return err
		}
		return c.answer(commandAnswer{commandOf(cmd)})
	}
	return c.slowly(false, nil, func(ctx context.Context) (any, error) {
		cmd, err := c.Service.WaitCommand(ctx, c.who, sid, cid)
		if err == nil && cmd.Exit == nil {
			err = cloche.Errorf(cloche.CodeGone, "the session ended before the command did")
		}
		if err != nil {
			return nil, err
		}
		return commandAnswer{commandOf(cmd)}, nil
	})
}

// commandLogs replays a command's output from the start and follows it until
// the command ends, or, as an extra, ends with what there is.
func (c *call) commandLogs() error {
	sid, cid, err := c.command()
	if err != nil {
		return err
	}
	follow := true
	if q := c.r.URL.Query(); q.Get("follow") != "" {
		if follow, err = boolean(q, "follow"); err != nil {
			return err
		}
	}
	ctx, cancel := context.WithCancelCause(c.r.Context())
	defer cancel(nil)
	// Opened before the stream, so that a missing command still has a status.
	log, err := c.Service.CommandLogs(ctx, c.who, sid, cid)
	if err != nil {
		return err
	}
	defer log.Close() // only read from
	if !follow {
		log.Cut()
	}
	out := c.open(func() { cancel(errClientGone) })
	defer out.close()
	for {
		e, err := log.Next(ctx)
		switch {
		case err == io.EOF:
			_ = out.end()
			return nil
		case err == nil:
			_ = out.entry(e) // a failed write cancels ctx
		case errors.Is(context.Cause(ctx), ErrShutdown):
			_ = out.failure(failure{cloche.CodeUnavailable, ErrShutdown.Error()})
			return nil
		case ctx.Err() != nil:
			c.w.cut = true
			return nil
		default:
			c.tell(out, err)
			return nil
		}
	}
}

// killCommand sends a signal and answers at once with the command as it is.
func (c *call) killCommand() error {
	sid, cid, err := c.command()
	if err != nil {
		return err
	}
	var body struct {
		Signal *int `json:"signal"`
	}
	if err := c.decode(&body, maxBody); err != nil {
		return err
	}
	signal := int(syscall.SIGTERM)
	if body.Signal != nil {
		signal = *body.Signal
	}
	if signal < 1 || signal > 64 {
		return cloche.Errorf(cloche.CodeInvalid, "the field \"signal\" is %d; signals are 1 to 64", signal)
	}
	cmd, err := c.Service.SignalCommand(c.r.Context(), c.who, sid, cid, signal)
	if err != nil {
		return err
	}
	return c.answer(commandAnswer{commandOf(cmd)})
}
