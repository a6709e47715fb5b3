package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

// target names a session: a sandbox's latest one, or another.
type target struct {
	Name    string           `arg:"" complete:"sandbox" help:"Sandbox."`
	Session cloche.SessionID `help:"An earlier session of the sandbox, from cloche sessions ls." placeholder:"ID"`
}

// id finds the session, without starting anything.
func (t *target) id(ctx context.Context, c *client.Client) (cloche.SessionID, error) {
	if t.Session != "" {
		if !t.Session.Valid() {
			return "", cloche.Errorf(cloche.CodeInvalid, "%q is no session; `cloche sessions ls %s` lists them", t.Session, t.Name)
		}
		return t.Session, nil
	}
	view, err := getSandbox(ctx, c, t.Name, false)
	return view.Session.ID, err
}

// unknown adds to the error of a command that is not in the session where to
// look for it.
func (t *target) unknown(err error) error {
	if code(err) != cloche.CodeNotFound {
		return err
	}
	if t.Session != "" {
		return fmt.Errorf("%w; `cloche ps %s --session %s` lists those that there are", err, t.Name, t.Session)
	}
	return fmt.Errorf("%w; `cloche ps %s` lists those of its last session, `cloche sessions ls %[2]s` the earlier sessions", err, t.Name)
}

// psCmd is `cloche ps`.
type psCmd struct {
	target   `embed:""`
	jsonFlag `embed:""`
}

// Run prints the list.
func (p *psCmd) Run(ctx context.Context, env *Env) error {
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	id, err := p.id(ctx, c)
	if err != nil {
		return err
	}
	commands, err := c.Commands(ctx, id)
	if err != nil {
		return err
	}
	if p.JSON {
		if commands == nil {
			commands = []client.Command{}
		}
		return printJSON(env.Stdout, commands)
	}
	t := newTable(env.Stdout, "COMMAND ID", "STATUS", "STARTED", "TOOK", "COMMAND")
	for _, cmd := range commands {
		took := ""
		if cmd.ExitCode != nil {
			took = short(cmd.Duration.Duration())
		}
		t.row(string(cmd.ID), status(cmd), ago(cmd.StartedAt), took, line(cmd))
	}
	return t.flush()
}

// status is how a command is, in a word or two.
func status(cmd client.Command) string {
	switch {
	case cmd.Lost:
		return "lost" // with its machine
	case cmd.ExitCode == nil:
		return "running"
	case cmd.Cause != "":
		return "killed (" + string(cmd.Cause) + ")"
	case cmd.Signal != 0:
		return "killed (" + signalName(cmd.Signal) + ")"
	}
	return "exit " + strconv.Itoa(*cmd.ExitCode)
}

// maxLine bounds the command line in a table, in characters.
const maxLine = 80

// line is a command line, cut to fit a table.
func line(cmd client.Command) string {
	s := []rune(strings.Join(append([]string{cmd.Name}, cmd.Args...), " "))
	if len(s) > maxLine {
		return string(s[:maxLine-1]) + "…"
	}
	return string(s)
}

// logsCmd is `cloche logs`.
type logsCmd struct {
	target  `embed:""`
	Command cloche.CommandID `arg:"" name:"command-id" help:"Command, from cloche ps."`
	Follow  bool             `short:"f" help:"Go on until the command ends."`
}

// Help is the text below the flags.
func (l *logsCmd) Help() string {
	return `The log is kept on the server's host and outlives the sandbox's session. Standard output and error of the command come on ours, byte for byte. Without -f, of a running command what it has printed so far.

Example:
  cloche logs -f build cmd_01k6…`
}

// Run prints the log.
func (l *logsCmd) Run(ctx context.Context, env *Env) error {
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	if err := checkCommand(l.Command, l.Name); err != nil {
		return err
	}
	id, err := l.id(ctx, c)
	if err != nil {
		return err
	}
	return l.unknown(c.Logs(ctx, id, l.Command, l.Follow, env.Stdout, env.Stderr))
}

// killCmd is `cloche kill`.
type killCmd struct {
	target   `embed:""`
	Command  cloche.CommandID `arg:"" name:"command-id" help:"Command, from cloche ps."`
	Signal   string           `short:"s" help:"Signal, by name or number." default:"TERM" placeholder:"SIG"`
	jsonFlag `embed:""`
}

// Run sends the signal.
func (k *killCmd) Run(ctx context.Context, env *Env) error {
	n, err := parseSignal(k.Signal)
	if err != nil {
		return err
	}
	if err := checkCommand(k.Command, k.Name); err != nil {
		return err
	}
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	id, err := k.id(ctx, c)
	if err != nil {
		return err
	}
	cmd, err := c.Kill(ctx, id, k.Command, n)
	if err != nil {
		return k.unknown(err)
	}
	if k.JSON {
		return printJSON(env.Stdout, cmd)
	}
	return nil
}

func checkCommand(id cloche.CommandID, sandbox string) error {
	if id.Valid() {
		return nil
	}
	return cloche.Errorf(cloche.CodeInvalid, "%q is no command's id; `cloche ps %s` lists them", id, sandbox)
}
