package client

import (
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
	"github.com/cloche-dev/cloche/internal/frames"
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
	Lost   bool             `json:"lost,omitempty"` // the machine ended first: no exit code will come
}

// Ended reports whether the command will do no more.
func (c *Command) Ended() bool { return c.ExitCode != nil || c.Lost }

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
	in := &stdin{r: bytes.NewReader(head)}
	if r.Stdin != nil {
		in.r = io.MultiReader(bytes.NewReader(append(head, '\n')), r.Stdin)
	}
	req, err := c.request(ctx, call{method: http.MethodPost, path: sessionPath(id) + "/cmd"}, in)
	if err != nil {
		return Command{}, err
	}
	req.Header.Set("Accept", frames.MediaType)
	if r.Stdin != nil {
		req.Header.Set(frames.StdinHeader, frames.StdinStream)
	} else {
		req.ContentLength = int64(len(head))
	}
	resp, err := c.stream(req)
	if err != nil {
		return Command{}, in.explain(err)
	}
	defer resp.Body.Close()
	if t := resp.Header.Get("Content-Type"); t != frames.MediaType {
		return Command{}, fmt.Errorf("answer of type %q in place of %s: the server is no Cloche server, or too old", t, frames.MediaType)
	}
	cmd, err := reading{started: r.Started, stdout: r.Stdout, stderr: r.Stderr}.run(resp.Body)
	if err != nil && ctx.Err() != nil {
		return Command{}, context.Cause(ctx)
	}
	return cmd, in.explain(err)
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

const (
	// logAttempts is how many connections in a row may bring nothing new.
	logAttempts = 6
	// logPause is before the first new connection, and doubles with each one
	// that brings nothing: 12 seconds in all.
	logPause = 200 * time.Millisecond
)

// Logs writes a command's log, byte for byte, from its start: with follow until
// the command has ended, else what is in it when the server gets the request. A
// connection that breaks in the middle is made anew, and what was written already
// is passed over; the server may take some seconds to come back. Notices of the
// server go to stderr.
func (c *Client) Logs(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID, follow bool, stdout, stderr io.Writer) error {
	out, errs := &resumed{w: stdout}, &resumed{w: stderr}
	for failures := 0; ; {
		before := out.done + errs.done
		out.seen, errs.seen = 0, 0
		err := c.logs(ctx, id, cmd, follow, out, errs)
		after := out.done + errs.done
		if cloche.ErrorCode(err) != cloche.CodeUnavailable || after == 0 {
			return err
		}
		if failures++; after > before {
			failures = 0
		}
		if failures == logAttempts {
			return err
		}
		select {
		case <-time.After(logPause << failures):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// logs makes one connection.
func (c *Client) logs(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID, follow bool, stdout, stderr *resumed) error {
	r := call{method: http.MethodGet, path: commandPath(id, cmd) + "/logs"}
	if !follow {
		r.query = url.Values{"follow": {"false"}}
	}
	req, err := c.request(ctx, r, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Accept", frames.MediaType)
	resp, err := c.stream(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = reading{stdout: stdout, stderr: stderr}.copy(resp.Body)
	if err != nil && ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

// resumed writes a stream that may begin anew, each byte once.
type resumed struct {
	w    io.Writer
	done int64 // bytes written
	seen int64 // bytes that the present connection has brought
}

// Write writes what is new in p.
func (r *resumed) Write(p []byte) (int, error) {
	start := r.seen
	r.seen += int64(len(p))
	if r.seen <= r.done {
		return len(p), nil
	}
	fresh := p[max(r.done-start, 0):]
	n, err := r.w.Write(fresh)
	r.done += int64(n)
	if err != nil {
		return len(p) - len(fresh) + n, err
	}
	return len(p), nil
}

func commandPath(id cloche.SessionID, cmd cloche.CommandID) string {
	return sessionPath(id) + "/cmd/" + url.PathEscape(string(cmd))
}
