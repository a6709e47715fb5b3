package agent

import (
	"bufio"
	"context"
	"crypto/subtle"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/internal/trace"
)

const (
	maxPending  = 8 // handshakes at the same time; one more ends the oldest
	maxChannels = 4 // channels with a token; one more ends the oldest

	channelBuffer = 128 << 10 // read buffer of one channel
	maxRequestID  = 128       // bytes of a request id that reach the log
)

// channels hands authenticated channels to the HTTP server, as its listener, and
// bounds how many there are.
type channels struct {
	agent *Agent
	ready chan net.Conn
	quit  context.Context
	stop  context.CancelFunc
	wg    sync.WaitGroup

	pending crowd // in the handshake
	live    crowd // with the token
}

// serve runs the HTTP/2 server on the channels of t until ctx ends or t fails.
func (a *Agent) serve(ctx context.Context, t Transport) error {
	l := &channels{agent: a, ready: make(chan net.Conn), pending: crowd{limit: maxPending}, live: crowd{limit: maxChannels}}
	l.quit, l.stop = context.WithCancel(ctx)
	srv := &http.Server{
		Handler:   a.handler(),
		ErrorLog:  slog.NewLogLogger(a.log.Handler(), slog.LevelWarn),
		Protocols: new(http.Protocols),
		// Frames and windows are large because each one costs several system
		// calls, which are slow in gVisor.
		HTTP2: &http.HTTP2Config{
			MaxConcurrentStreams:          guest.MaxCommands * 2,
			MaxReadFrameSize:              256 << 10,
			MaxReceiveBufferPerConnection: 4<<20 - 1,
			MaxReceiveBufferPerStream:     1 << 20,
		},
	}
	srv.Protocols.SetUnencryptedHTTP2(true)
	stop := context.AfterFunc(l.quit, func() { _ = t.Close() }) // its error has no reader: the accept loop below ends
	defer stop()
	var served sync.WaitGroup
	served.Go(func() {
		if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, net.ErrClosed) {
			a.log.Error("serve channels", "error", err)
		}
	})
	err := l.accept(t)
	l.stop()
	err = errors.Join(err, srv.Close())
	l.pending.closeAll()
	l.live.closeAll()
	l.wg.Wait()
	served.Wait()
	return err
}

// accept starts a handshake on every channel of t.
func (l *channels) accept(t Transport) error {
	for {
		c, err := t.Accept()
		if l.quit.Err() != nil {
			if err == nil {
				err = c.Close()
			} else {
				err = nil
			}
			return err
		}
		if err != nil {
			return fmt.Errorf("accept channel: %w", err)
		}
		if l.pending.enter(c) {
			l.agent.noise.warn("too many handshakes: the oldest ends")
		}
		l.wg.Go(func() {
			err := l.shake(c)
			if err != nil {
				l.agent.noise.warn("channel refused", "error", err)
				_ = c.Close() // the error is logged, and the channel is of no use
			}
		})
	}
}

// shake does the handshake on c and passes it to the HTTP server.
func (l *channels) shake(c net.Conn) error {
	defer l.pending.leave(c)
	if err := c.SetDeadline(time.Now().Add(guest.HelloTimeout)); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	r := bufio.NewReaderSize(c, channelBuffer)
	hello, err := guest.ReadHello(r)
	if err != nil {
		return err
	}
	welcome := guest.Welcome{Nonce: hello.Nonce, Agent: Version()}
	version, failure := guest.Negotiate(hello.Min, hello.Max, guest.MinVersion, guest.MaxVersion)
	if failure == nil && !l.agent.admit(hello.Token) {
		failure = &guest.Failure{Code: cloche.CodeUnauthorized, Message: "the token is not this session's"}
	}
	if failure != nil {
		welcome.Error, welcome.Min, welcome.Max = failure, guest.MinVersion, guest.MaxVersion
		return errors.Join(failure.Err(), guest.WriteWelcome(c, welcome))
	}
	welcome.Version = version
	if err := guest.WriteWelcome(c, welcome); err != nil {
		return fmt.Errorf("write welcome: %w", err)
	}
	if err := c.SetDeadline(time.Time{}); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	ch := &channel{Conn: c, r: r, list: l}
	if l.live.enter(ch) {
		l.agent.noise.warn("too many channels: the oldest ends")
	}
	select {
	case l.ready <- ch:
		return nil
	case <-l.quit.Done():
		return ch.Close()
	}
}

// admit compares the token with the session's, which the first one sets.
func (a *Agent) admit(token string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if token == "" {
		return false
	}
	if a.token == "" {
		a.token = token
	}
	return subtle.ConstantTimeCompare([]byte(token), []byte(a.token)) == 1
}

// Accept is the listener that the HTTP server sees.
func (l *channels) Accept() (net.Conn, error) {
	select {
	case c := <-l.ready:
		return c, nil
	case <-l.quit.Done():
		return nil, net.ErrClosed
	}
}

// Close makes Accept fail.
func (l *channels) Close() error {
	l.stop()
	return nil
}

// Addr satisfies net.Listener.
func (l *channels) Addr() net.Addr { return pipeAddr{} }

// channel is an authenticated channel: what the handshake read ahead comes first.
type channel struct {
	net.Conn
	r    *bufio.Reader
	list *channels
}

func (c *channel) Read(p []byte) (int, error) { return c.r.Read(p) }

// Close closes the channel and gives up its place.
func (c *channel) Close() error {
	c.list.live.leave(c)
	return c.Conn.Close()
}

// handler is the table of requests.
func (a *Agent) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/configure", call(a, func(_ context.Context, c guest.Config) (guest.Identity, error) { return a.configure(c) }))
	mux.HandleFunc("GET /v1/ping", func(w http.ResponseWriter, r *http.Request) { a.answer(w, r, a.ping(), nil) })
	mux.HandleFunc("POST /v1/clock", call(a, func(_ context.Context, c guest.Clock) (guest.Ping, error) {
		err := setClock(c)
		return a.ping(), err
	}))
	mux.HandleFunc("POST /v1/shutdown", call(a, func(ctx context.Context, s guest.Shutdown) (struct{}, error) {
		return struct{}{}, a.shutdown(ctx, s.Grace)
	}))
	mux.HandleFunc("POST /v1/commands/{id}", a.serveStart)
	mux.HandleFunc("POST /v1/commands/{id}/attach", a.serveAttach)
	mux.HandleFunc("GET /v1/commands", func(w http.ResponseWriter, r *http.Request) { a.answer(w, r, a.statuses(), nil) })
	mux.HandleFunc("POST /v1/commands/{id}/signal", a.serveSignal)
	mux.HandleFunc("DELETE /v1/commands/{id}", func(w http.ResponseWriter, r *http.Request) {
		a.answer(w, r, struct{}{}, a.forget(r.PathValue("id")))
	})
	mux.HandleFunc("POST /v1/files/read", a.serveRead)
	mux.HandleFunc("POST /v1/files/mkdir", call(a, func(_ context.Context, f guest.FileRequest) (struct{}, error) {
		return struct{}{}, a.makeDir(f)
	}))
	mux.HandleFunc("POST /v1/files/write", a.serveWrite)
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		a.answer(w, r, nil, cloche.Errorf(cloche.CodeNotImplemented, "the agent has no %s %.128q", r.Method, r.URL.Path))
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		id := r.Header.Get(guest.HeaderRequestID)
		if len(id) > maxRequestID {
			id = id[:maxRequestID]
		}
		mux.ServeHTTP(w, r.WithContext(trace.WithID(r.Context(), id)))
	})
}

// call makes a handler of a function from a JSON body to a JSON answer.
func call[In, Out any](a *Agent, f func(context.Context, In) (Out, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var in In
		if err := decode(r.Body, &in); err != nil {
			a.answer(w, r, nil, err)
			return
		}
		out, err := f(r.Context(), in)
		a.answer(w, r, out, err)
	}
}

// decode reads one bounded JSON value.
func decode(r io.Reader, v any) error {
	b, err := io.ReadAll(io.LimitReader(r, guest.MaxJSON+1))
	if err != nil {
		return fmt.Errorf("read body: %w", err)
	}
	if len(b) > guest.MaxJSON {
		return cloche.Errorf(cloche.CodeTooLarge, "the body exceeds %d bytes", guest.MaxJSON)
	}
	if err := json.Unmarshal(b, v); err != nil {
		return cloche.Errorf(cloche.CodeInvalid, "the body is not what this request takes: %v", err)
	}
	return nil
}

// answer writes v, or the Failure of err, as JSON.
func (a *Agent) answer(w http.ResponseWriter, r *http.Request, v any, err error) {
	status := http.StatusOK
	if err != nil {
		v, status = a.failure(r.Context(), err), http.StatusBadRequest
		if cloche.ErrorCode(err) == cloche.CodeNotFound {
			status = http.StatusNotFound
		}
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(v); err != nil {
		a.log.WarnContext(r.Context(), "write answer", "error", err)
	}
}

// failure turns an error into what the host may see, and logs the cause of one
// that is a fault of ours.
func (a *Agent) failure(ctx context.Context, err error) guest.Failure {
	var e *cloche.Error
	if !errors.As(err, &e) {
		a.log.ErrorContext(ctx, "request", "error", err)
		return guest.Failure{Code: cloche.CodeInternal, Message: "the agent failed: " + err.Error()}
	}
	return guest.Failure{Code: e.Code, Message: e.Message}
}
