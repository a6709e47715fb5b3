package vercel

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
)

// server is the API on a fake, on a real socket.
type server struct {
	*httptest.Server
	fake     *fake
	shutdown context.CancelCauseFunc
}

// start serves service, or the fake alone if it is nil.
func start(t *testing.T, service Service, change ...func(*Config)) *server {
	t.Helper()
	f := newFake(t)
	c := Config{Service: f, Authenticator: testTokens}
	if service != nil {
		c.Service = service
	}
	for _, ch := range change {
		ch(&c)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	s := &server{Server: httptest.NewUnstartedServer(New(c)), fake: f, shutdown: cancel}
	s.Config.BaseContext = func(net.Listener) context.Context { return ctx }
	s.Start()
	t.Cleanup(s.Close)
	return s
}

// box makes a sandbox and returns its session.
func (s *server) box(t *testing.T) cloche.SessionID {
	t.Helper()
	v, err := s.fake.CreateSandbox(t.Context(), testTokens[testToken], cloche.CreateSandbox{})
	if err != nil {
		t.Fatal(err)
	}
	return v.Session.ID
}

func (s *server) request(t *testing.T, method, path string, body io.Reader, headers ...string) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, s.URL+path, body)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Authorization", "Bearer "+testToken)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
	}
	return r
}

// send returns the answer with its whole body.
func (s *server) send(t *testing.T, r *http.Request) (*http.Response, string) {
	t.Helper()
	res, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("read the answer: %v", err)
	}
	return res, string(b)
}

func (s *server) call(t *testing.T, method, path, body string, headers ...string) (*http.Response, string) {
	t.Helper()
	return s.send(t, s.request(t, method, path, strings.NewReader(body), headers...))
}

// wantError checks an error answer: its status, its code, and its form.
func wantError(t *testing.T, res *http.Response, body string, status int, code cloche.Code) failure {
	t.Helper()
	var e errorBody
	d := json.NewDecoder(strings.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil {
		t.Fatalf("%s %s: status %d, body %q: %v", res.Request.Method, res.Request.URL.Path, res.StatusCode, body, err)
	}
	if res.StatusCode != status || e.Error.Code != code || e.Error.Message == "" {
		t.Fatalf("%s %s: status %d, %+v, want %d %s", res.Request.Method, res.Request.URL.Path, res.StatusCode, e.Error, status, code)
	}
	if ct := res.Header.Get("Content-Type"); ct != "application/json" {
		t.Fatalf("content-type %q", ct)
	}
	return e.Error
}

// eventually waits for cond without sleeping through the test.
func eventually(t *testing.T, what string, cond func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("never came true: %s", what)
		}
	}
}

func jsonBody(t testing.TB, v any) io.Reader {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.NewReader(b)
}
