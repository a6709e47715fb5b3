package cli

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

// cleanupTime is how long --rm and --stop may take once the command has ended.
const cleanupTime = 60 * time.Second

// createFlags describe a new sandbox.
type createFlags struct {
	Name    string   `complete:"sandbox" help:"Name of the sandbox; made up if absent." placeholder:"NAME"`
	Image   string   `help:"Image to start from." placeholder:"IMAGE" xor:"base"`
	Runtime string   `help:"Language runtime to put first on PATH: node22, node24, python3.13." placeholder:"RUNTIME" xor:"base"`
	VCPUs   int      `name:"vcpus" help:"Number of CPUs; each comes with 2 GiB of memory." placeholder:"N"`
	Timeout Duration `help:"Time after which the sandbox stops by itself (default: 5m)." placeholder:"DURATION"`
	Net     string   `help:"What the sandbox may reach: deny-all." placeholder:"deny-all"`
	Port    []int    `short:"p" help:"Port to make reachable from outside (not in this version)." placeholder:"PORT"`
	Env     []string `short:"e" sep:"none" help:"Variable for all commands; NAME alone copies it from here." placeholder:"K=V"`
	Tag     []string `short:"t" sep:"none" help:"Tag of the sandbox." placeholder:"K=V"`
}

// given names the flags that only a new sandbox takes.
func (f *createFlags) given() string {
	var names []string
	for name, set := range map[string]bool{
		"--image": f.Image != "", "--runtime": f.Runtime != "", "--vcpus": f.VCPUs != 0, "--timeout": f.Timeout != 0,
		"--env": len(f.Env) > 0, "--tag": len(f.Tag) > 0,
	} {
		if set {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return strings.Join(names, ", ")
}

// request is the flags as a request.
func (f *createFlags) create(env *Env) (client.Create, error) {
	r := client.Create{
		Name: f.Name, Image: f.Image, Runtime: f.Runtime, VCPUs: f.VCPUs,
		Timeout: time.Duration(f.Timeout), Ports: f.Port, Network: f.Net,
	}
	if f.Name != "" {
		if err := cloche.CheckName(f.Name); err != nil {
			return r, err
		}
	}
	if f.Net != "" && f.Net != string(cloche.DenyAll) {
		return r, cloche.Errorf(cloche.CodeNotImplemented,
			"--net %s: not implemented yet; sandboxes have loopback only, which is --net deny-all", f.Net)
	}
	var err error
	if r.Env, err = parseEnv(f.Env, env.Getenv); err != nil {
		return r, err
	}
	r.Tags, err = parseTags(f.Tag)
	return r, err
}

// commandFlags describe how a command runs.
type commandFlags struct {
	WorkDir string `name:"workdir" short:"w" help:"Directory to run in; a relative one is below the sandbox's." placeholder:"DIR"`
	Sudo    bool   `help:"Run as root."`
	NoStdin bool   `short:"n" help:"Give the command an empty standard input, and leave ours alone."`
	Quiet   bool   `short:"q" help:"Print nothing but what the command prints, and errors."`
}

func (f *commandFlags) command(argv []string, env *Env) client.Run {
	r := client.Run{
		Command: argv[0], Args: argv[1:], WorkDir: f.WorkDir, Sudo: f.Sudo,
		Stdin: env.Stdin, Stdout: env.Stdout, Stderr: env.Stderr,
	}
	if f.NoStdin {
		r.Stdin = nil
	}
	return r
}

// argv is the command of a command line. The grammar leaves the "--" in it.
func argv(words []string) ([]string, error) {
	if len(words) > 0 && words[0] == "--" {
		words = words[1:]
	}
	if len(words) == 0 || words[0] == "" {
		return nil, cloche.Errorf(cloche.CodeInvalid, "no command was given; put it behind --, as in `cloche run -- echo hello`")
	}
	return words, nil
}

// runCmd is `cloche run`.
type runCmd struct {
	createFlags  `embed:""`
	commandFlags `embed:""`
	Rm           bool     `help:"Remove the sandbox at the end, however it comes." xor:"end"`
	Stop         bool     `help:"Stop the sandbox at the end, however it comes." xor:"end"`
	Argv         []string `arg:"" name:"command" passthrough:"partial" help:"Command and its arguments, behind --."`
}

// Help is the text below the flags.
func (r *runCmd) Help() string {
	return `Standard input, output and error pass through byte for byte, and the exit code is the command's; 125 means that cloche itself failed. Ctrl-C goes to the command; a second one kills it.

Without --rm the sandbox stays until its timeout, and its name is printed to standard error.

Examples:
  cloche run --rm -- python3 -c 'print(6*7)'
  tar -c src | cloche run --rm -- tar -xv
  cloche run --name build --timeout 1h -- make
  cloche run --rm --sudo -e DEBUG=1 --workdir /tmp -- sh -c 'id; env'`
}

// Run runs the command.
func (r *runCmd) Run(ctx context.Context, env *Env) error {
	words, err := argv(r.Argv)
	if err != nil {
		return err
	}
	request, err := r.create(env)
	if err != nil {
		return err
	}
	if r.Rm {
		ephemeral := false
		request.Persistent = &ephemeral
	}
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	signals := catchSignals()
	defer signals.Close()
	ctx = context.WithoutCancel(ctx) // a signal may end it, and they are ours now

	// Nothing that was made may be left behind unseen: a signal waits until
	// the answer is there, and with it the name. A second one gives up.
	makeCtx, cancel := signals.give(ctx)
	view, made, err := r.sandbox(makeCtx, env, c, request)
	cancel()
	if err != nil {
		return err
	}
	err = interrupted(signals)
	if err == nil {
		r.note(env, "sandbox %s", view.Sandbox.Name)
		longer := "--timeout gives it longer"
		if !made {
			longer = extendHint(view.Sandbox.Name)
			if ignored := r.given(); ignored != "" {
				fmt.Fprintf(env.Stderr, "cloche: %s was there already: %s without effect\n", view.Sandbox.Name, ignored)
			}
		}
		err = foreground(ctx, env, c, site{view.Session.ID, view.Sandbox.Name, longer}, r.commandFlags.command(words, env), signals)
	}
	return errors.Join(err, r.end(ctx, env, c, view))
}

// note prints a line about the sandbox that stays behind.
func (r *runCmd) note(env *Env, format string, args ...any) {
	if !r.Quiet && !r.Rm {
		fmt.Fprintf(env.Stderr, "cloche: "+format+"\n", args...)
	}
}

// sandbox returns the sandbox of the given name, started if it is not running,
// or a new one, and whether it was made here.
func (r *runCmd) sandbox(ctx context.Context, env *Env, c *client.Client, request client.Create) (view client.View, made bool, err error) {
	p := startProgress(env, "starting a sandbox", nil)
	defer p.Done()
	if request.Name != "" {
		view, err = c.GetSandbox(ctx, request.Name, true)
		if code(err) != cloche.CodeNotFound {
			return view, false, err
		}
	}
	view, err = c.Create(ctx, request)
	if code(err) == cloche.CodeConflict && request.Name != "" { // somebody else was first
		view, err = c.GetSandbox(ctx, request.Name, true)
		return view, false, err
	}
	return view, true, err
}

// end does what --rm and --stop ask for.
func (r *runCmd) end(ctx context.Context, env *Env, c *client.Client, view client.View) error {
	if !r.Rm && !r.Stop {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	p := startProgress(env, "stopping "+view.Sandbox.Name, nil)
	defer p.Done()
	var err error
	if r.Stop {
		_, err = c.StopSession(ctx, view.Session.ID)
	} else if err = c.DeleteSandbox(ctx, view.Sandbox.Name); code(err) == cloche.CodeNotFound {
		err = nil
	}
	if err != nil {
		return fmt.Errorf("end of sandbox %s: %w", view.Sandbox.Name, err)
	}
	return nil
}

// execCmd is `cloche exec`.
type execCmd struct {
	commandFlags `embed:""`
	Env          []string `short:"e" sep:"none" help:"Variable for the command; NAME alone copies it from here." placeholder:"K=V"`
	Timeout      Duration `help:"Time after which the command is killed." placeholder:"DURATION"`
	Detach       bool     `short:"d" help:"Print the command's id and leave it running."`
	Name         string   `arg:"" complete:"sandbox" help:"Sandbox."`
	Argv         []string `arg:"" name:"command" passthrough:"partial" help:"Command and its arguments, behind --."`
}

// Help is the text below the flags.
func (e *execCmd) Help() string {
	return `Standard input, output and error pass through byte for byte, and the exit code is the command's; 125 means that cloche itself failed. Ctrl-C goes to the command; a second one kills it. A sandbox that has stopped is started again, from its image.

Examples:
  cloche exec build -- make test
  cloche exec build --timeout 30s -- ./slow
  cloche logs -f build $(cloche exec -d build -- npm run dev)
  cloche exec build -- sh -c 'cat > notes.txt' < notes.txt
  while read f; do cloche exec -n build -- rm "$f"; done < list`
}

// Run runs the command.
func (e *execCmd) Run(ctx context.Context, env *Env) error {
	words, err := argv(e.Argv)
	if err != nil {
		return err
	}
	request := e.commandFlags.command(words, env)
	request.Timeout = time.Duration(e.Timeout)
	if request.Env, err = parseEnv(e.Env, env.Getenv); err != nil {
		return err
	}
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	view, err := getSandbox(ctx, c, e.Name, true)
	if err != nil {
		return err
	}
	if view.Resumed && !e.Quiet {
		kept := ""
		if !view.Sandbox.Persistent {
			kept = ", without its files"
		}
		fmt.Fprintf(env.Stderr, "cloche: %s had stopped and was started again%s\n", e.Name, kept)
	}
	if e.Detach {
		started, err := c.Start(ctx, view.Session.ID, request)
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(env.Stdout, started.ID)
		return err
	}
	signals := catchSignals()
	defer signals.Close()
	// A signal may end ctx, and they are ours now.
	return foreground(context.WithoutCancel(ctx), env, c, site{view.Session.ID, e.Name, extendHint(e.Name)}, request, signals)
}

// getSandbox checks the name before it asks for the sandbox.
func getSandbox(ctx context.Context, c *client.Client, name string, resume bool) (client.View, error) {
	if err := cloche.CheckName(name); err != nil {
		return client.View{}, err
	}
	view, err := c.GetSandbox(ctx, name, resume)
	if code(err) == cloche.CodeNotFound {
		return view, cloche.Errorf(cloche.CodeNotFound, "there is no sandbox %s", name)
	}
	return view, err
}

// site is where a command runs.
type site struct {
	id     cloche.SessionID
	name   string // of the sandbox
	longer string // how to give the sandbox a longer timeout
}

func extendHint(name string) string { return "`cloche extend " + name + " DURATION` gives it longer" }

// askTime bounds the question whether a command was ended with its sandbox.
const askTime = 5 * time.Second

// explain says in one line on standard error if it was the end of the sandbox
// that ended the command, which the exit code alone does not tell.
func (s site) explain(ctx context.Context, env *Env, c *client.Client) {
	ctx, cancel := context.WithTimeout(ctx, askTime)
	defer cancel()
	session, err := c.GetSession(ctx, s.id)
	switch {
	case code(err) == cloche.CodeNotFound:
		fmt.Fprintf(env.Stderr, "cloche: the sandbox %s was removed\n", s.name)
	case err != nil: // nothing is known, and the exit code stands
	case session.Cause == client.CauseTimeout:
		fmt.Fprintf(env.Stderr, "cloche: the sandbox %s reached its timeout of %s; %s\n", s.name, short(session.Timeout.Duration()), s.longer)
	case session.Status == cloche.Stopping, session.Status == cloche.Snapshotting, session.Status == cloche.Stopped:
		fmt.Fprintf(env.Stderr, "cloche: the sandbox %s was stopped\n", s.name)
	}
}

// foreground runs a command to its end and returns its exit code as an
// *ExitError, nil for 0. Signals go to the command.
func foreground(parent context.Context, env *Env, c *client.Client, at site, r client.Run, signals *signals) error {
	ctx, cancel := context.WithCancelCause(parent)
	defer cancel(nil)
	started := make(chan cloche.CommandID, 1)
	var id cloche.CommandID
	r.Started = func(cmd client.Command) { id = cmd.ID; started <- cmd.ID }
	forwarded := signals.forward(ctx, cancel, started, func(ctx context.Context, cmd cloche.CommandID, n int) error {
		_, err := c.Kill(ctx, at.id, cmd, n)
		return err
	})
	cmd, err := c.Run(ctx, at.id, r)
	cancel(nil)
	killErr := forwarded()
	// By a signal, or as a shell tells of one: so ends what a stop ends.
	if code(err) == cloche.CodeGone || err == nil && cmd.Cause == "" && *cmd.ExitCode > 128 {
		at.explain(parent, env, c)
	}

	var out *client.OutputError
	switch {
	case errors.As(err, &out) && isPipe(out.Err):
		return &ExitError{Code: exitPipe}
	case err != nil && killErr != nil:
		return &ExitError{Code: ExitOwn, Err: fmt.Errorf("%w (and the signal was not delivered: %w)", err, killErr)}
	case err != nil && id != "" && code(err) == cloche.CodeUnavailable: // the server went, or the way to it
		return &ExitError{Code: ExitOwn, Err: fmt.Errorf("%w\nhint: the command may go on: `cloche logs -f %s %s`", err, at.name, id)}
	case err != nil:
		return &ExitError{Code: ExitOwn, Err: fmt.Errorf("%s: %w", strings.Join(append([]string{r.Command}, r.Args...), " "), err)}
	}
	switch cmd.Cause {
	case cloche.CauseOOM:
		fmt.Fprintln(env.Stderr, "cloche: the command was killed: the sandbox was out of memory")
	case cloche.CauseTimeout:
		fmt.Fprintf(env.Stderr, "cloche: the command was killed after its timeout of %s\n", short(r.Timeout))
	}
	if *cmd.ExitCode != 0 {
		return &ExitError{Code: *cmd.ExitCode}
	}
	return nil
}
