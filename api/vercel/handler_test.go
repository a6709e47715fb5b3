package vercel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/trace"
)

var pathParameter = regexp.MustCompile(`\{\w+\}`)

// TestEveryRouteAuthorizes: no route answers a caller without a token, with a
// wrong one, or with the team or project of somebody else; and under /api and
// without it the routes are the same.
func TestEveryRouteAuthorizes(t *testing.T) {
	s := start(t, nil)
	for _, rt := range routes() {
		for _, prefix := range []string{"", "/api"} {
			path := prefix + pathParameter.ReplaceAllString(rt.path, "fork")
			r := s.request(t, rt.method, path, strings.NewReader("{}"))
			r.Header.Del("Authorization")
			res, body := s.send(t, r)
			wantError(t, res, body, 401, cloche.CodeUnauthorized)
			if res.Header.Get("WWW-Authenticate") != "Bearer" {
				t.Errorf("%s: no WWW-Authenticate", rt.name())
			}
			for _, header := range []string{"Bearer wrong", "Basic " + testToken, "Bearer " + strings.Repeat("x", 10000)} {
				res, body = s.call(t, rt.method, path, "{}", "Authorization", header)
				wantError(t, res, body, 401, cloche.CodeUnauthorized)
			}
			for _, query := range []string{"teamId=team_other", "teamId=team_self&teamId=team_other", "projectId=prj_other", "project=prj_other"} {
				res, body = s.call(t, rt.method, path+"?"+query, "{}")
				wantError(t, res, body, 403, cloche.CodeForbidden)
			}
		}
	}
}

// TestEveryStrangeIDIsNotFound: what has not the form of an id or a name never
// reaches the Service.
func TestEveryStrangeIDIsNotFound(t *testing.T) {
	s := start(t, nil)
	for _, rt := range routes() {
		if !pathParameter.MatchString(rt.path) {
			continue
		}
		path := pathParameter.ReplaceAllString(rt.path, "%2e%2e%2f%00%ff")
		res, body := s.call(t, rt.method, path, "{}")
		if res.StatusCode != 400 || !strings.Contains(body, "not_implemented") {
			wantError(t, res, body, 404, cloche.CodeNotFound)
		}
	}
}

func TestUnknownRouteAndMethod(t *testing.T) {
	s := start(t, nil)
	for _, path := range []string{"/", "/api", "/api/", "/v4/sandboxes", "/api/v3/nothing", "/v2/sandboxes/", "/api//v2/sandboxes", "/v2/sandboxes/x/../y", "/v2/sandboxes/%2e%2e/v1"} {
		res, body := s.call(t, "GET", path, "")
		wantError(t, res, body, 404, cloche.CodeNotFound)
	}
	res, body := s.call(t, "PUT", "/api/v2/sandboxes/x", "")
	wantError(t, res, body, 405, cloche.CodeInvalid)
	if allow := res.Header.Get("Allow"); allow != "DELETE, GET, HEAD, PATCH" {
		t.Errorf("Allow: %q", allow)
	}
	res, body = s.call(t, "POST", "/v2/sandboxes/x/dance", "{}")
	wantError(t, res, body, 404, cloche.CodeNotFound)
}

// failing is a Service that fails every create with one error.
type failing struct {
	Service
	err error
}

func (f failing) CreateSandbox(context.Context, cloche.Principal, cloche.CreateSandbox) (cloche.SandboxView, error) {
	if f.err == nil {
		panic("no error was set")
	}
	return cloche.SandboxView{}, f.err
}

// TestErrorMapping: each code has its one status, and the cause of an error
// stays in the log.
func TestErrorMapping(t *testing.T) {
	want := map[cloche.Code]int{
		"bad_request": 400, "sandbox_timeout_invalid": 400, "unauthorized": 401, "forbidden": 403,
		"not_found": 404, "conflict": 409, "sandbox_stopped": 410, "sandbox_stopping": 422,
		"too_large": 413, "resource_exhausted": 429, "not_implemented": 400, "unavailable": 503, "internal_error": 500,
	}
	if len(want) != len(statuses) {
		t.Fatalf("%d codes are mapped, %d are expected", len(statuses), len(want))
	}
	for code, status := range want {
		cause := errors.New("/host/path and secret")
		s := start(t, failing{err: fmt.Errorf("wrapped: %w", &cloche.Error{Code: code, Op: "secret step", Message: "for you", Err: cause})})
		res, body := s.call(t, "POST", "/v3/sandboxes", "{}")
		e := wantError(t, res, body, status, code)
		if strings.Contains(body, "secret") || strings.Contains(body, "wrapped") {
			t.Errorf("%s: the body %s tells the cause", code, body)
		}
		if code != cloche.CodeInternal && e.Message != "for you" {
			t.Errorf("%s: message %q", code, e.Message)
		}
		if after := res.Header.Get("Retry-After"); (status == 429 || status == 503) != (after != "") {
			t.Errorf("%s: Retry-After %q", code, after)
		}
	}
	s := start(t, failing{err: errors.New("secret")})
	res, body := s.call(t, "POST", "/v3/sandboxes", "{}")
	if e := wantError(t, res, body, 500, cloche.CodeInternal); strings.Contains(e.Message, "secret") {
		t.Errorf("message %q", e.Message)
	}
}

// TestPanicIsAnAnswer: a fault in one request is that request's failure alone.
func TestPanicIsAnAnswer(t *testing.T) {
	s := start(t, failing{})
	for range 2 {
		res, body := s.call(t, "POST", "/v3/sandboxes", "{}") // in the operation's goroutine
		wantError(t, res, body, 500, cloche.CodeInternal)
		res, body = s.call(t, "GET", "/v2/sandboxes", "") // in the handler's: failing has no list
		wantError(t, res, body, 500, cloche.CodeInternal)
	}
}

type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestU7RequestID: one id is in the answer, in the log beside the cause, and in
// the context that goes to the node.
func TestU7RequestID(t *testing.T) {
	var log logBuffer
	var seen string
	s := start(t, nil, func(c *Config) {
		c.Log = slog.New(trace.Handler{Handler: slog.NewTextHandler(&log, nil)})
	})
	s.fake.onCreate = func(ctx context.Context) error {
		seen = trace.ID(ctx)
		return errors.New("the cause")
	}
	for given, kept := range map[string]bool{"req-1.a_B:c": true, "bad id\t": false, strings.Repeat("x", 200): false, "": false} {
		res, body := s.call(t, "POST", "/v3/sandboxes", "{}", "X-Request-Id", given)
		wantError(t, res, body, 500, cloche.CodeInternal)
		id := res.Header.Get("X-Request-Id")
		if (id == given) != kept || id == "" || seen != id {
			t.Errorf("given %q: answered %q, context %q", given, id, seen)
		}
		if want := "request=" + id; !strings.Contains(log.String(), want) || !strings.Contains(log.String(), "the cause") {
			t.Errorf("the log has not %q: %s", want, log.String())
		}
	}
}

func TestObserve(t *testing.T) {
	var mu sync.Mutex
	var got []string
	s := start(t, nil, func(c *Config) {
		c.Observe = func(route string, status int, _ time.Duration) {
			mu.Lock()
			defer mu.Unlock()
			got = append(got, fmt.Sprint(route, " ", status))
		}
	})
	s.call(t, "GET", "/api/v2/sandboxes/some-name", "")
	s.call(t, "GET", "/somewhere", "")
	s.call(t, "GET", "/v2/sandboxes", "")
	want := []string{"GET /v2/sandboxes/{name} 404", "unmatched 404", "GET /v2/sandboxes 200"}
	eventually(t, "all three are observed", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return fmt.Sprint(got) == fmt.Sprint(want)
	})
}

// TestSlowAnswerSendsHeadersEarly: clients repeat a request that got no headers
// for too long, so they come before the answer; a failure after them is told in
// a form that no client takes for success.
func TestSlowAnswerSendsHeadersEarly(t *testing.T) {
	release := make(chan error)
	s := start(t, nil, func(c *Config) { c.HeadersWithin, c.Heartbeat = 10*time.Millisecond, 5*time.Millisecond })
	s.fake.onCreate = func(ctx context.Context) error {
		select {
		case err := <-release:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	for _, fail := range []error{nil, cloche.Errorf(cloche.CodeConflict, "taken")} {
		res, err := s.Client().Do(s.request(t, "POST", "/v3/sandboxes", strings.NewReader("{}")))
		if err != nil {
			t.Fatal(err)
		}
		if res.StatusCode != 200 || res.Header.Get("Content-Type") != "application/json" {
			t.Fatalf("status %d, %q", res.StatusCode, res.Header.Get("Content-Type"))
		}
		spaces := make([]byte, 3)
		for i := range spaces {
			if n, err := res.Body.Read(spaces[i : i+1]); n != 1 || err != nil {
				t.Fatalf("no keep-alive: %v", err)
			}
		}
		release <- fail
		var rest bytes.Buffer
		if _, err := rest.ReadFrom(res.Body); err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		text := strings.TrimLeft(rest.String(), " ")
		want := `{"sandbox":{`
		if fail != nil {
			want = `{"error":{"code":"conflict","message":"taken"}}`
		}
		if string(spaces) != "   " || !strings.HasPrefix(text, want) {
			t.Errorf("body %q %q, want %s…", spaces, text, want)
		}
	}
	// A client that goes away cancels what it asked for.
	ctx, cancel := context.WithCancel(t.Context())
	cancelled := make(chan struct{})
	s.fake.onCreate = func(ctx context.Context) error {
		cancel()
		<-ctx.Done()
		close(cancelled)
		return ctx.Err()
	}
	_, err := s.Client().Do(s.request(t, "POST", "/v3/sandboxes", strings.NewReader("{}")).WithContext(ctx))
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("err %v", err)
	}
	<-cancelled
}

func TestServerLimits(t *testing.T) {
	s := NewServer(t.Context(), http.NotFoundHandler(), slog.New(slog.DiscardHandler))
	if s.ReadTimeout != 0 || s.WriteTimeout != 0 {
		t.Error("a limit on whole requests or answers cuts files and streams")
	}
	if s.ReadHeaderTimeout == 0 || s.IdleTimeout < 10*time.Second {
		t.Error("heads need a limit, and idle connections longer than the client's 4 s")
	}
}
