// Package cli is the cloche command for people who use a server: its grammar,
// what it prints and its exit codes. It talks to the server through package
// client alone. Commands that need more than that (serve, token, image) are
// given to Main by its caller.
package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"

	"github.com/alecthomas/kong"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

// Exit codes of cloche itself. A command that ran in a sandbox gives its own.
const (
	ExitFailed = 1   // something did not work
	ExitUsage  = 2   // the command line makes no sense
	ExitOwn    = 125 // run and exec: cloche failed, not the command
)

// exitInterrupted is what a shell gives to a process that Ctrl-C ended: 128 and
// SIGINT's number.
const exitInterrupted = 130

// exitPipe is what a process that SIGPIPE ended has: 128 and 13.
const exitPipe = 141

// exitNoCommand is what a sandbox answers for an executable that is not there.
const exitNoCommand = 127

// Env is what a command sees of the process: bound for every Run method.
type Env struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	// Getenv reads the environment that Main was given.
	Getenv func(string) string
}

// Client returns the client that the environment describes.
func (e *Env) Client() (*client.Client, error) { return client.FromEnv(e.Getenv) }

// Command is a command that the caller of Main adds. Cmd is a pointer to a kong
// command: a struct of flags with a method Run, whose parameters may be
// context.Context and *Env, or a struct of such structs.
type Command struct {
	Name  string
	Help  string
	Group string // a heading of the help; "" = the common ones
	Cmd   any
}

// ExitError makes Main return Code. With a nil Err nothing is printed: whoever
// returned it has said what there is to say.
type ExitError struct {
	Code int
	Err  error
}

// Error gives the cause.
func (e *ExitError) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

// Unwrap returns the cause.
func (e *ExitError) Unwrap() error { return e.Err }

// grammar is the command line. Flags of a command are its struct's fields.
type grammar struct {
	Run    runCmd    `cmd:"" group:"sandboxes" help:"Run a command in a fresh sandbox, or in the one of a name."`
	Exec   execCmd   `cmd:"" group:"sandboxes" help:"Run a command in a sandbox."`
	Create createCmd `cmd:"" group:"sandboxes" help:"Make a sandbox."`
	Ls     lsCmd     `cmd:"" group:"sandboxes" aliases:"list" help:"List sandboxes."`
	Get    getCmd    `cmd:"" group:"sandboxes" aliases:"inspect" help:"Show all there is to know about a sandbox."`
	Extend extendCmd `cmd:"" group:"sandboxes" help:"Let a sandbox run for longer."`
	Stop   stopCmd   `cmd:"" group:"sandboxes" help:"Stop sandboxes."`
	Rm     rmCmd     `cmd:"" group:"sandboxes" aliases:"remove" help:"Stop and remove sandboxes."`
	Cp     cpCmd     `cmd:"" group:"sandboxes" aliases:"copy" help:"Copy files and directories into or out of a sandbox."`

	Ps       psCmd       `cmd:"" group:"inside" help:"List the commands of a sandbox."`
	Logs     logsCmd     `cmd:"" group:"inside" help:"Print a command's output from its start."`
	Kill     killCmd     `cmd:"" group:"inside" help:"Send a signal to a command."`
	Sessions sessionsCmd `cmd:"" group:"inside" help:"The runs of a sandbox."`
	Fork     forkCmd     `cmd:"" group:"inside" help:"Make a sandbox from what another one has saved (not in this version)."`
	Snapshot snapshotCmd `cmd:"" group:"inside" help:"Save a sandbox's files, and stop it (not in this version)."`

	Completion completionCmd `cmd:"" group:"host" help:"Print the completion script of a shell."`
	Complete   completeCmd   `cmd:"" name:"__complete" hidden:""`
}

var helpGroups = []kong.Group{
	{Key: "sandboxes", Title: "Sandboxes:"},
	{Key: "inside", Title: "Inside a sandbox:"},
	{Key: "host", Title: "This host:"},
}

const description = `Runs code that nobody should trust in a sealed sandbox of its own.

CLOCHE_URL and CLOCHE_TOKEN say which server to use and who asks.

Try it: cloche run --rm -- echo hello`

// Main runs the command line args, without the program's name, and returns the
// exit code. environ has the form of os.Environ. The commands of extra are part
// of the grammar. The end of ctx ends everything but run and exec: while a command
// runs in a sandbox, signals are handled here and go to the command.
func Main(ctx context.Context, args, environ []string, stdin io.Reader, stdout, stderr io.Writer, extra ...Command) int {
	env := &Env{Stdin: stdin, Stdout: stdout, Stderr: stderr, Getenv: lookup(environ)}
	parser, err := newParser(ctx, env, extra)
	if err != nil {
		fmt.Fprintln(stderr, "cloche: command line:", err)
		return ExitUsage
	}
	args = spelled(args)
	return run(parser, args, env)
}

// spelled puts what people type out of habit into the grammar's words.
func spelled(args []string) []string {
	switch {
	case len(args) == 0:
		return []string{"--help"}
	case args[0] == "help":
		return append(slices.Clone(args[1:]), "--help")
	case len(args) == 1 && args[0] == "--version":
		return []string{"version"}
	}
	return args
}

// helpShown unwinds Parse after --help, which would end the process otherwise.
type helpShown struct{ code int }

func newParser(ctx context.Context, env *Env, extra []Command) (*kong.Kong, error) {
	options := []kong.Option{
		kong.Name("cloche"),
		kong.Description(description),
		kong.Writers(env.Stdout, env.Stderr),
		kong.Exit(func(code int) { panic(helpShown{code}) }),
		kong.ConfigureHelp(kong.HelpOptions{NoExpandSubcommands: true, Compact: true, WrapUpperBound: 100}),
		kong.ExplicitGroups(helpGroups),
		kong.BindTo(ctx, (*context.Context)(nil)),
		kong.Bind(env),
		kong.KindMapper(reflect.String, kong.MapperFunc(rawString)),
	}
	for _, c := range extra {
		group := c.Group
		if group == "" {
			group = "host"
		}
		options = append(options, kong.DynamicCommand(c.Name, c.Help, group, c.Cmd))
	}
	return kong.New(&grammar{}, options...)
}

// rawString takes a word of the command line as it is. kong's own mapper goes
// through JSON, which changes what is not UTF-8 (kong 1.17.0, scanner.go).
func rawString(ctx *kong.DecodeContext, target reflect.Value) error {
	token, err := ctx.Scan.PopValue("string")
	if err != nil {
		return err
	}
	s, ok := token.Value.(string)
	if !ok {
		return fmt.Errorf("%v is no string", token.Value)
	}
	target.SetString(s)
	return nil
}

// run parses and runs. It is apart from Main for the recover.
func run(parser *kong.Kong, args []string, env *Env) (code int) {
	defer func() {
		switch r := recover().(type) {
		case nil:
		case helpShown:
			code = r.code
		default:
			panic(r)
		}
	}()
	own := ExitFailed
	if args[0] == "run" || args[0] == "exec" {
		own = ExitOwn
	}
	parsed, err := parser.Parse(args)
	if err != nil {
		fmt.Fprintf(env.Stderr, "cloche: %v\n", err)
		fmt.Fprintf(env.Stderr, "hint: %s --help shows what there is\n", usagePath(err))
		if own == ExitOwn {
			return ExitOwn
		}
		return ExitUsage
	}
	return report(env, parsed.Run(parser), own)
}

// usagePath is the command up to where the parser understood it.
func usagePath(err error) string {
	var parse *kong.ParseError
	if !errors.As(err, &parse) || parse.Context == nil {
		return "cloche"
	}
	names := []string{}
	for n := parse.Context.Selected(); n != nil; n = n.Parent {
		names = append([]string{n.Name}, names...)
	}
	if len(names) == 0 {
		return "cloche"
	}
	return strings.Join(names, " ")
}

// report prints err and what to do about it, and returns the exit code. own is
// the code of an error that brings none.
func report(env *Env, err error, own int) int {
	if err == nil {
		return 0
	}
	code := own
	var exit *ExitError
	if errors.As(err, &exit) {
		code = exit.Code
		if exit.Err == nil {
			return code
		}
	}
	if errors.Is(err, context.Canceled) {
		fmt.Fprintln(env.Stderr, "cloche: interrupted")
		return exitInterrupted
	}
	fmt.Fprintf(env.Stderr, "cloche: %v\n", err)
	if hint := nextStep(err); hint != "" {
		fmt.Fprintf(env.Stderr, "hint: %s\n", hint)
	}
	return code
}

// nextStep says what a person can do about an error of the server that does not
// say it itself.
func nextStep(err error) string {
	if strings.Contains(err.Error(), "`cloche ") {
		return ""
	}
	switch code(err) {
	case cloche.CodeUnauthorized:
		return "make a token with `cloche token create --data DIR` on the server's host and put it into CLOCHE_TOKEN"
	case cloche.CodeForbidden:
		return "the token in CLOCHE_TOKEN belongs to another team or project"
	case cloche.CodeNotFound:
		return "`cloche ls --all` lists the sandboxes that there are, `cloche image ls` the images"
	case cloche.CodeConflict:
		return "choose another name, or use the one that exists with `cloche exec NAME -- COMMAND`"
	case cloche.CodeGone:
		return "the session has ended; `cloche run --name NAME -- COMMAND` starts the sandbox again"
	case cloche.CodeStopping:
		return "wait until it has stopped; `cloche get NAME` shows the state"
	case cloche.CodeTimeoutInvalid:
		return "ask for a shorter time"
	case cloche.CodeExhausted:
		return "`cloche ls` shows what runs and `cloche rm NAME` makes room"
	case cloche.CodeInternal:
		return "the server's log has the cause"
	}
	return ""
}

// code is the code of an error that a server or the client made, "" for others.
func code(err error) cloche.Code {
	var e *cloche.Error
	if errors.As(err, &e) {
		return e.Code
	}
	return ""
}

// lookup makes a Getenv of an environment; of a name that is there twice the
// last counts, as in the C library's own putenv.
func lookup(environ []string) func(string) string {
	values := make(map[string]string, len(environ))
	for _, kv := range environ {
		if k, v, ok := strings.Cut(kv, "="); ok {
			values[k] = v
		}
	}
	return func(k string) string { return values[k] }
}

// file returns w as an open file, or nil.
func file(w any) *os.File {
	f, _ := w.(*os.File)
	return f
}
