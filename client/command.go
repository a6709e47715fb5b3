package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/cloche-dev/cloche"
)

// Command is a command on the wire.
type Command struct {
	ID        cloche.CommandID `json:"id"`
	SessionID cloche.SessionID `json:"sessionId"`
	Name      string           `json:"name"` // executable
	Args      []string         `json:"args"`
	WorkDir   string           `json:"cwd"`
	StartedAt Millis           `json:"startedAt"`
	Duration  Millis           `json:"durationMs,omitempty"`
	ExitCode  *int             `json:"exitCode"` // nil = running, or nobody saw its end
	// Extras of ours.
	Signal int              `json:"signal,omitempty"` // that ended it; 0 = none
	Cause  cloche.ExitCause `json:"cause,omitempty"`
}

// Run is the request to run a command.
type Run struct {
	Command string
	Args    []string
	WorkDir string            // "" = the session's; a relative one is below it
	Env     map[string]string // over the sandbox's
	Sudo    bool              // as root
	Timeout time.Duration     // 0 = none

	// Stdin is copied to the command until its EOF; nil is EOF at once. When
	// the command ends first, a Read may still be pending after Run returned.
	// Not used by Start.
	Stdin io.Reader
	// Stdout and Stderr get the output byte for byte; nil drops it. Not used by
	// Start.
	Stdout, Stderr io.Writer
	// Started, if not nil, is called once, before any output is written. Not
	// used by Start.
	Started func(Command)
}

type runBody struct {
	Command string            `json:"command"`
	Args    []string          `json:"args"`
	WorkDir string            `json:"cwd,omitempty"`
	Env     map[string]string `json:"env"`
	Sudo    bool              `json:"sudo"`
	Timeout int64             `json:"timeout,omitempty"`
	Wait    bool              `json:"wait,omitempty"`
	Logs    bool              `json:"logs,omitempty"`
}

// body is r on the wire. JSON has only Unicode, so that anything else in r is
// CodeInvalid rather than silently changed.
func (r Run) body(wait bool) (runBody, error) {
	if err := checkText(append([]string{r.Command, r.WorkDir}, r.Args...)...); err != nil {
		return runBody{}, err
	}
	for k, v := range r.Env {
		if err := checkText(k, v); err != nil {
			return runBody{}, err
		}
	}
	b := runBody{
		Command: r.Command, Args: r.Args, WorkDir: r.WorkDir, Env: r.Env, Sudo: r.Sudo,
		Timeout: r.Timeout.Milliseconds(), Wait: wait, Logs: wait,
	}
	if b.Args == nil {
		b.Args = []string{}
	}
	if b.Env == nil {
		b.Env = map[string]string{}
	}
	return b, nil
}

func checkText(values ...string) error {
	for _, v := range values {
		if !utf8.ValidString(v) {
			return cloche.Errorf(cloche.CodeInvalid, "%q is not valid UTF-8, and only text can be sent in this place", v)
		}
	}
	return nil
}

// Start starts a command and returns at once. Its output is read with Logs.
func (c *Client) Start(ctx context.Context, id cloche.SessionID, r Run) (Command, error) {
	body, err := r.body(false)
	if err != nil {
		return Command{}, err
	}
	return c.command(ctx, call{method: http.MethodPost, path: sessionPath(id) + "/cmd", body: body})
}

// Run runs a command to its end, with its standard streams passed through byte
// for byte in constant memory. The Command that it returns has an exit code,
// which is no error whatever it is. A connection that breaks is CodeUnavailable
// and a machine that ends under the command CodeGone; an end of ctx ends the
// command too, because the server kills a foreground command whose caller went
// away. A writer's failure is an *OutputError, a reader's one is passed on.
func (c *Client) Run(ctx context.Context, id cloche.SessionID, r Run) (Command, error) {
	body, err := r.body(true)
	if err != nil {
		return Command{}, err
	}
	// The request lives as long as its answer is read, and no longer.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	head, err := json.Marshal(body)
	if err != nil {
		return Command{}, fmt.Errorf("request body: %w", err)
	}
	in := &stdin{r: io.MultiReader(bytes.NewReader(append(head, '\n')), orEmpty(r.Stdin))}
	req, err := c.request(ctx, call{method: http.MethodPost, path: sessionPath(id) + "/cmd"}, in)
	if err != nil {
		return Command{}, err
	}
	req.Header.Set("Cloche-Stdin", "stream")
	req.Header.Set("Accept", FramesType)
	resp, err := c.stream(req)
	if err != nil {
		return Command{}, in.explain(err)
	}
	defer resp.Body.Close()
	if t := resp.Header.Get("Content-Type"); t != FramesType {
		return Command{}, fmt.Errorf("answer of type %q in place of %s: the server is no Cloche server, or too old", t, FramesType)
	}
	cmd, err := readFrames(resp.Body, r.Started, r.Stdout, r.Stderr)
	if err != nil && ctx.Err() != nil {
		return Command{}, context.Cause(ctx)
	}
	return cmd, in.explain(err)
}

func orEmpty(r io.Reader) io.Reader {
	if r == nil {
		return bytes.NewReader(nil)
	}
	return r
}

// stdin is a request body that remembers its reader's own failure, which
// net/http shows only as a broken connection.
type stdin struct {
	r   io.Reader
	mu  sync.Mutex
	err error // guarded by mu
}

// Read reads from the caller's reader.
func (s *stdin) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fmt.Errorf("read standard input: %w", err)
		s.mu.Lock()
		s.err = err
		s.mu.Unlock()
	}
	return n, err
}

// explain returns the reader's failure in place of err, which it caused.
func (s *stdin) explain(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil && s.err != nil {
		return s.err
	}
	return err
}

// Commands returns the session's commands, the ended ones too.
func (c *Client) Commands(ctx context.Context, id cloche.SessionID) ([]Command, error) {
	var list struct {
		Commands []Command `json:"commands"`
	}
	err := c.do(ctx, call{method: http.MethodGet, path: sessionPath(id) + "/cmd", repeat: true}, &list)
	return list.Commands, err
}

// GetCommand returns a command as it is now.
func (c *Client) GetCommand(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID) (Command, error) {
	return c.command(ctx, call{method: http.MethodGet, path: commandPath(id, cmd), repeat: true})
}

// WaitCommand returns once the command has ended.
func (c *Client) WaitCommand(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID) (Command, error) {
	return c.command(ctx, call{
		method: http.MethodGet, path: commandPath(id, cmd), repeat: true,
		query: url.Values{"wait": {"true"}},
	})
}

// Kill sends a signal to every process of the command. A command that has
// ended is success.
func (c *Client) Kill(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID, signal int) (Command, error) {
	return c.command(ctx, call{
		method: http.MethodPost, path: commandPath(id, cmd) + "/kill",
		body: map[string]int{"signal": signal},
	})
}

func (c *Client) command(ctx context.Context, r call) (Command, error) {
	var v struct {
		Command Command `json:"command"`
	}
	err := c.do(ctx, r, &v)
	return v.Command, err
}

// maxLogLine bounds a line of a log stream: a piece of 64 KiB, of which every
// byte may have become a \uXXXX escape, and some room.
const maxLogLine = 512 << 10

// logLine is a line of a log stream.
type logLine struct {
	Stream string          `json:"stream"`
	Data   json.RawMessage `json:"data"`
}

// Logs writes a command's log from its start until the command has ended. A
// connection that breaks is made anew, and what was written already is passed
// over, as long as each one brings something new. The log is text: bytes that
// are not UTF-8 arrive as U+FFFD. Notices of the server go to stderr.
func (c *Client) Logs(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID, follow bool, stdout, stderr io.Writer) error {
	w := &logWriter{stdout: stdout, stderr: stderr}
	for {
		before := w.written()
		err := c.logs(ctx, id, cmd, follow, w.restart())
		var out *OutputError
		if err == nil || ctx.Err() != nil || errors.As(err, &out) ||
			cloche.ErrorCode(err) != cloche.CodeUnavailable || w.written() == before {
			return err
		}
	}
}

// logs makes one connection.
func (c *Client) logs(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID, follow bool, w *logWriter) error {
	r := call{method: http.MethodGet, path: commandPath(id, cmd) + "/logs"}
	if !follow {
		r.query = url.Values{"follow": {"false"}}
	}
	req, err := c.request(ctx, r, nil)
	if err != nil {
		return err
	}
	resp, err := c.stream(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 0, 64<<10), maxLogLine)
	for lines.Scan() {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue // a heartbeat
		}
		var line logLine
		if err := json.Unmarshal(lines.Bytes(), &line); err != nil {
			return fmt.Errorf("log line: %w", err)
		}
		if line.Stream == "error" {
			return streamError(line.Data)
		}
		var text string
		if err := json.Unmarshal(line.Data, &text); err != nil {
			return fmt.Errorf("log line: %w", err)
		}
		if err := w.write(cloche.Stream(line.Stream), text); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil {
		return c.unreachable(ctx, err)
	}
	return nil
}

// logWriter writes a log that may begin anew, each byte once.
type logWriter struct {
	stdout, stderr io.Writer
	done           [2]int64 // bytes written of stdout, and of all else
	seen           [2]int64 // bytes that the present connection has brought
}

func (w *logWriter) written() int64 { return w.done[0] + w.done[1] }

// restart begins with the first byte of the log again.
func (w *logWriter) restart() *logWriter {
	w.seen = [2]int64{}
	return w
}

func (w *logWriter) write(s cloche.Stream, text string) error {
	i, out := 0, w.stdout
	if s != cloche.Stdout {
		i, out = 1, w.stderr
	}
	start := w.seen[i]
	w.seen[i] += int64(len(text))
	if w.seen[i] <= w.done[i] {
		return nil
	}
	fresh := text[max(w.done[i]-start, 0):]
	w.done[i] = w.seen[i]
	if err := output(out, []byte(fresh)); err != nil {
		return &OutputError{Stream: s, Err: err}
	}
	return nil
}

func commandPath(id cloche.SessionID, cmd cloche.CommandID) string {
	return sessionPath(id) + "/cmd/" + url.PathEscape(string(cmd))
}
