package vercel

import (
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"path"
	"regexp"
	"runtime/debug"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/trace"
)

// Config is what the API is made of.
type Config struct {
	Service       Service
	Authenticator Authenticator
	Log           *slog.Logger // nil = discard

	// Observe, if not nil, is told of every answered request. route is the
	// route's pattern without prefix ("POST /v2/sandboxes"), or "unmatched";
	// the set is finite. It is called from many goroutines.
	Observe func(route string, status int, d time.Duration)

	// Heartbeat is how long a stream may be silent before it carries a sign of
	// life, so that no proxy or client cuts it. 0 = 15 s.
	Heartbeat time.Duration

	// HeadersWithin is how long an operation may take before its answer's
	// headers go out ahead of it. Clients repeat a request that got none for
	// 300 s. 0 = 45 s.
	HeadersWithin time.Duration
}

// requestIDHeader carries the request id in both directions.
const requestIDHeader = "X-Request-Id"

// statusClientGone is what Observe sees of a request whose client went away
// before its answer; no client ever sees it. The number is nginx's.
const statusClientGone = 499

// ErrShutdown is the cause with which the wiring cancels the base context of
// the server when it does not wait any longer, before it closes connections. Streams then end with an error
// of code unavailable, and commands live on; without it a stream's end would
// look like a client that went away, which kills a command that it waits for.
var ErrShutdown = errors.New("the server is shutting down")

type api struct {
	Config
	mux *http.ServeMux
}

// New returns the handler of the whole API: /api/v1, v2 and v3, and the same at
// /v1, v2 and v3. Any other path under it answers 404 in JSON.
func New(c Config) http.Handler {
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.Heartbeat == 0 {
		c.Heartbeat = 15 * time.Second
	}
	if c.HeadersWithin == 0 {
		c.HeadersWithin = 45 * time.Second
	}
	a := &api{Config: c, mux: http.NewServeMux()}
	for _, r := range routes() {
		for _, prefix := range []string{"", "/api"} {
			a.mux.Handle(r.method+" "+prefix+r.path, a.handler(r))
		}
	}
	return a
}

// call is one request on its way through the API.
type call struct {
	*api
	w     *answerWriter
	r     *http.Request
	who   cloche.Principal
	start time.Time
}

// ServeHTTP gives the request its id and finds its route.
func (a *api) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	id := r.Header.Get(requestIDHeader)
	if !requestIDForm.MatchString(id) {
		id = trace.NewID()
	}
	w.Header().Set(requestIDHeader, id)
	r = r.WithContext(trace.WithID(r.Context(), id))

	if _, pattern := a.mux.Handler(r); pattern == "" || path.Clean(r.URL.Path) != r.URL.Path {
		a.unmatched(w, r)
		return
	}
	a.mux.ServeHTTP(w, r)
}

var requestIDForm = regexp.MustCompile(`^[A-Za-z0-9._:-]{1,128}$`)

// handler wraps a route's function: authorization, errors, panics, the log.
func (a *api) handler(rt route) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c := &call{api: a, w: &answerWriter{ResponseWriter: w}, r: r, start: time.Now()}
		defer func() {
			if p := recover(); p != nil {
				c.panicked(rt, p)
			}
		}()
		err := c.authorize()
		if err == nil {
			err = rt.serve(c)
		}
		if err != nil {
			c.fail(err)
		}
		c.done(rt)
	})
}

// panicked turns a panic into an answer, and aborts the connection where an
// answer has begun: a cut one must not look whole.
func (c *call) panicked(rt route, p any) {
	if p != http.ErrAbortHandler {
		c.Log.ErrorContext(c.r.Context(), "panic", "route", rt.name(), "panic", fmt.Sprint(p), "stack", string(debug.Stack()))
		if c.w.status == 0 {
			c.fail(cloche.Internal("serve", fmt.Errorf("panic: %v", p)))
			c.done(rt)
			return
		}
	}
	c.done(rt)
	panic(http.ErrAbortHandler)
}

func (c *call) done(rt route) {
	status := c.w.status
	if status == 0 || c.w.cut {
		status = statusClientGone
	}
	d := time.Since(c.start)
	c.Log.InfoContext(c.r.Context(), "request", "route", rt.name(), "path", c.r.URL.Path, "status", status, "duration", d)
	if c.Observe != nil {
		c.Observe(rt.name(), status, d)
	}
}

// unmatched answers a path or a method that no route has.
func (a *api) unmatched(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	// The mux knows which methods a path has and says so in its own, plain
	// text answer; only the header is of use. For a path with dots or double
	// slashes it would answer for another path.
	probe := &discardWriter{header: http.Header{}}
	if path.Clean(r.URL.Path) == r.URL.Path {
		h, _ := a.mux.Handler(r)
		h.ServeHTTP(probe, r)
	}
	status, err := http.StatusNotFound, cloche.Errorf(cloche.CodeNotFound, "there is no %s here; see the API document for the routes", strings.ToValidUTF8(r.URL.Path, "\ufffd"))
	if allow := probe.header.Get("Allow"); allow != "" && probe.status == http.StatusMethodNotAllowed {
		w.Header().Set("Allow", allow)
		status, err = http.StatusMethodNotAllowed, cloche.Errorf(cloche.CodeInvalid, "%s is not a method of this path; it has %s", r.Method, allow)
	}
	writeError(w, status, err)
	if a.Observe != nil {
		a.Observe("unmatched", status, time.Since(start))
	}
}

// answerWriter remembers whether an answer has begun.
type answerWriter struct {
	http.ResponseWriter
	status int  // 0 = nothing has been sent
	cut    bool // the client went away midway
}

// WriteHeader implements http.ResponseWriter.
func (w *answerWriter) WriteHeader(status int) {
	if w.status == 0 {
		w.status = status
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (w *answerWriter) Write(b []byte) (int, error) {
	if w.status == 0 {
		w.status = http.StatusOK
	}
	return w.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (w *answerWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// discardWriter keeps what an answer's headers would have been.
type discardWriter struct {
	header http.Header
	status int
}

func (w *discardWriter) Header() http.Header         { return w.header }
func (w *discardWriter) WriteHeader(status int)      { w.status = status }
func (w *discardWriter) Write(b []byte) (int, error) { return len(b), nil }
