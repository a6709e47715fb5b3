// Package dial is the host's side of the channel to the agent: one connection
// for each machine, shared by everything that the host wants of it, made anew
// when it breaks. Nothing that comes from the agent is trusted: all of it is
// bounded, and an agent that breaks the protocol is cut off.
package dial

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/internal/trace"
)

const (
	// authority stands where HTTP wants a host name.
	authority = "agent:80"

	readBuffer      = 256 << 10 // of the connection
	streamBuffer    = 1 << 20   // most that the agent sends ahead of a stream's reader
	maxHeaders      = 64 << 10
	maxTransfers    = guest.MaxTransfers / 2 // ours: another client may be on its way out
	pingAfter       = 30 * time.Second       // of silence, the connection is probed
	pingTimeout     = 30 * time.Second       // for the answer
	maxWelcomeField = 256                    // bytes of the agent's name that reach the log
)

// Client speaks to one agent. Its methods may be called concurrently. Errors are
// *cloche.Error: what the agent answered, or CodeUnavailable if the connection
// could not be made or broke; then the next call makes a new one.
type Client struct {
	open  func(context.Context) (net.Conn, error)
	token string
	log   *slog.Logger

	life  context.Context // ends with Close
	end   context.CancelFunc
	dials sync.WaitGroup

	transfers chan struct{} // places for reads and writes of files
	buffers   sync.Pool     // of *[surgeBig]byte

	mu      sync.Mutex
	conn    *http.ClientConn // nil = none
	dialing *dialing         // nil = nobody dials
	closed  bool
}

// dialing is one attempt that any number of calls wait for.
type dialing struct {
	done chan struct{}
	conn *http.ClientConn
	err  error
}

// New returns a client that makes its connections with open, and names token in
// each. It connects with the first call.
func New(open func(context.Context) (net.Conn, error), token string, log *slog.Logger) *Client {
	c := &Client{open: open, token: token, log: log, transfers: make(chan struct{}, maxTransfers)}
	c.life, c.end = context.WithCancel(context.Background())
	return c
}

// Close closes the connection; all streams on it break. Calls fail from then on.
func (c *Client) Close() error {
	c.mu.Lock()
	conn := c.conn
	c.conn, c.closed = nil, true
	c.mu.Unlock()
	c.end()
	c.dials.Wait()
	if conn != nil {
		return conn.Close()
	}
	return nil
}

func unavailable(op string, err error) error {
	var e *cloche.Error
	if errors.As(err, &e) {
		return err
	}
	return &cloche.Error{Code: cloche.CodeUnavailable, Op: op, Message: "the sandbox does not answer", Err: err}
}

// connection returns the connection, making one if there is none that works.
func (c *Client) connection(ctx context.Context) (*http.ClientConn, error) {
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return nil, unavailable("reach agent", net.ErrClosed)
	}
	if c.conn != nil && c.conn.Err() == nil {
		defer c.mu.Unlock()
		return c.conn, nil
	}
	d := c.dialing
	if d == nil {
		d = &dialing{done: make(chan struct{})}
		c.dialing = d
		// Not the first caller's: others wait for it too. It is bounded in time.
		c.dials.Go(func() { c.dial(context.WithoutCancel(ctx), d) })
	}
	c.mu.Unlock()
	select {
	case <-d.done:
		return d.conn, d.err
	case <-ctx.Done():
		return nil, unavailable("reach agent", ctx.Err())
	}
}

// dial makes one connection; at most guest.HelloTimeout twice, once to open it
// and once for the handshake.
func (c *Client) dial(ctx context.Context, d *dialing) {
	octx, cancel := context.WithTimeout(ctx, 2*guest.HelloTimeout)
	defer cancel()
	defer context.AfterFunc(c.life, cancel)()
	conn, err := c.connect(octx)
	c.mu.Lock()
	var useless *http.ClientConn
	switch {
	case err != nil:
	case c.closed:
		useless, err = conn, net.ErrClosed
	default:
		useless, c.conn, d.conn = c.conn, conn, conn
	}
	if err != nil {
		d.err = unavailable("reach agent", err)
	}
	c.dialing = nil
	c.mu.Unlock()
	close(d.done)
	if useless != nil {
		_ = useless.Close() // broken, or nobody's
	}
}

func (c *Client) connect(ctx context.Context) (*http.ClientConn, error) {
	raw, err := c.open(ctx)
	if err != nil {
		return nil, fmt.Errorf("open channel: %w", err)
	}
	conn, err := c.shake(ctx, raw)
	if err != nil {
		return nil, errors.Join(err, raw.Close())
	}
	t := &http.Transport{
		DialContext:            func(context.Context, string, string) (net.Conn, error) { return conn, nil },
		Protocols:              new(http.Protocols),
		DisableCompression:     true,
		MaxResponseHeaderBytes: maxHeaders,
		HTTP2: &http.HTTP2Config{
			// The window of the connection stays at its default, which is
			// more than all streams can have: a reader that stops holds up
			// its own stream and no other.
			MaxReadFrameSize:          256 << 10,
			MaxReceiveBufferPerStream: streamBuffer,
			SendPingTimeout:           pingAfter,
			PingTimeout:               pingTimeout,
		},
	}
	t.Protocols.SetUnencryptedHTTP2(true)
	hc, err := t.NewClientConn(ctx, "http", authority)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start HTTP/2: %w", err), raw.Close())
	}
	return hc, nil
}

// shake does the handshake.
func (c *Client) shake(ctx context.Context, raw net.Conn) (net.Conn, error) {
	if err := raw.SetDeadline(time.Now().Add(guest.HelloTimeout)); err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	stop := context.AfterFunc(ctx, func() {
		_ = raw.SetDeadline(time.Unix(1, 0)) // the handshake below fails at once
	})
	defer stop()
	hello := guest.Hello{Nonce: rand.Text(), Token: c.token, Min: guest.MinVersion, Max: guest.MaxVersion}
	if err := guest.WriteHello(raw, hello); err != nil {
		return nil, fmt.Errorf("write hello: %w", err)
	}
	r := bufio.NewReaderSize(raw, readBuffer)
	w, err := guest.ReadWelcome(r, hello.Nonce)
	if err != nil {
		return nil, err
	}
	if w.Error != nil {
		return nil, &cloche.Error{Code: cloche.CodeUnavailable, Op: "handshake with agent",
			Message: "the sandbox's agent refused the connection", Err: w.Error.Err()}
	}
	if w.Version < guest.MinVersion || w.Version > guest.MaxVersion {
		return nil, fmt.Errorf("handshake: the agent chose version %d of %d to %d", w.Version, guest.MinVersion, guest.MaxVersion)
	}
	if !stop() {
		return nil, fmt.Errorf("handshake: %w", ctx.Err())
	}
	if err := raw.SetDeadline(time.Time{}); err != nil {
		return nil, fmt.Errorf("handshake: %w", err)
	}
	c.log.DebugContext(ctx, "channel open", "agent", clip(w.Agent), "version", w.Version)
	return &buffered{raw, r}, nil
}

func clip(s string) string { return s[:min(len(s), maxWelcomeField)] }

// buffered is a connection of which the handshake has read ahead.
type buffered struct {
	net.Conn
	r *bufio.Reader
}

func (b *buffered) Read(p []byte) (int, error) { return b.r.Read(p) }

// do sends a request. The answer's status is 200, and its body is the caller's.
func (c *Client) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+authority+path, body)
	if err != nil {
		return nil, cloche.Internal("make request to agent", err)
	}
	if id := trace.ID(ctx); id != "" {
		req.Header.Set(guest.HeaderRequestID, id)
	}
	conn, err := c.connection(ctx)
	if err != nil {
		return nil, err
	}
	resp, err := conn.RoundTrip(req)
	if err != nil {
		return nil, unavailable("ask agent", err)
	}
	if resp.StatusCode != http.StatusOK {
		err := readFailure(resp.Body)
		_ = resp.Body.Close() // the failure has been read
		return nil, err
	}
	return resp, nil
}

// readFailure reads the body of an error answer.
func readFailure(r io.Reader) error {
	b, err := readJSON(r)
	if err != nil {
		return unavailable("read agent's answer", err)
	}
	return parseFailure(b)
}

func parseFailure(b []byte) error {
	var f guest.Failure
	if err := json.Unmarshal(b, &f); err != nil || f.Code == "" {
		return unavailable("read agent's answer", fmt.Errorf("an error without a code: %.128q", b))
	}
	return f.Err()
}

func readJSON(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, guest.MaxJSON+1))
	if err == nil && len(b) > guest.MaxJSON {
		err = fmt.Errorf("a body of more than %d bytes", guest.MaxJSON)
	}
	return b, err
}

// call sends in as JSON, or nothing if it is nil, and reads the answer into out.
func (c *Client) call(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return cloche.Internal("make request to agent", err)
		}
		body = bytes.NewReader(b)
	}
	resp, err := c.do(ctx, method, path, body)
	if err != nil {
		return err
	}
	b, err := readJSON(resp.Body)
	if cerr := resp.Body.Close(); err == nil {
		err = cerr
	}
	if err == nil && out != nil {
		err = json.Unmarshal(b, out)
	}
	if err != nil {
		return unavailable("read agent's answer", err)
	}
	return nil
}

// Configure tells the agent what machine it is in. Again with the same Config it
// only answers; with another it is CodeConflict.
func (c *Client) Configure(ctx context.Context, cfg guest.Config) (guest.Identity, error) {
	var id guest.Identity
	err := c.call(ctx, http.MethodPost, "/v1/configure", cfg, &id)
	return id, err
}

// Ping is the heartbeat.
func (c *Client) Ping(ctx context.Context) (guest.Ping, error) {
	var p guest.Ping
	err := c.call(ctx, http.MethodGet, "/v1/ping", nil, &p)
	return p, err
}

// SetClock sets the guest's wall clock. A machine that follows the host's is
// CodeNotImplemented.
func (c *Client) SetClock(ctx context.Context, t time.Time) (guest.Ping, error) {
	var p guest.Ping
	err := c.call(ctx, http.MethodPost, "/v1/clock", guest.Clock{Time: t}, &p)
	return p, err
}

// Shutdown ends all commands and syncs; afterwards the machine can be killed
// without a loss.
func (c *Client) Shutdown(ctx context.Context, grace time.Duration) error {
	return c.call(ctx, http.MethodPost, "/v1/shutdown", guest.Shutdown{Grace: grace}, nil)
}

// Status lists the commands that run or are not forgotten. The ids are the
// agent's word: check them.
func (c *Client) Status(ctx context.Context) ([]guest.Status, error) {
	var all []guest.Status
	err := c.call(ctx, http.MethodGet, "/v1/commands", nil, &all)
	return all, err
}

// Signal sends a signal to every process of a command.
func (c *Client) Signal(ctx context.Context, id cloche.CommandID, signal int) (guest.Status, error) {
	var s guest.Status
	err := c.call(ctx, http.MethodPost, commandPath(id)+"/signal", guest.Signal{Signal: signal}, &s)
	return s, err
}

// Forget drops a command that has ended. One that the agent does not know is
// success.
func (c *Client) Forget(ctx context.Context, id cloche.CommandID) error {
	err := c.call(ctx, http.MethodDelete, commandPath(id), nil, nil)
	if cloche.ErrorCode(err) == cloche.CodeNotFound {
		return nil
	}
	return err
}

func commandPath(id cloche.CommandID) string { return "/v1/commands/" + url.PathEscape(string(id)) }
