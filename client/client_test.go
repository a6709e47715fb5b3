package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"

	"go.uber.org/goleak"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/frames"
)

const session = cloche.SessionID("sbx_00000000000000000000000000")
const command = cloche.CommandID("cmd_00000000000000000000000000")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve returns a client of a server that answers with h.
func serve(t *testing.T, h http.HandlerFunc) *Client {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.Start()
	c, err := New(s.URL+"/", "clo_secret")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Close()
		s.CloseClientConnections()
		s.Close()
	})
	return c
}

func TestNewRefusesWhatIsNoAddress(t *testing.T) {
	for _, address := range []string{"", "localhost:80", "ftp://x", "http://", "://"} {
		if _, err := New(address, "t"); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("New(%q): %v", address, err)
		}
	}
	if _, err := New("http://x", "a\nb"); cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("token with a newline: %v", err)
	}
	for _, address := range []string{"http://h:1", "http://h:1/", "http://h:1/api", "http://h:1/api/"} {
		if c, err := New(address, "t"); err != nil || c.base != "http://h:1/api" {
			t.Errorf("New(%q): %v, %v", address, c, err)
		}
	}
}

func TestFromEnvSaysWhatIsMissing(t *testing.T) {
	env := map[string]string{}
	get := func(k string) string { return env[k] }
	for _, name := range []string{EnvURL, EnvToken} {
		if _, err := FromEnv(get); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("without %s: %v", name, err)
		}
		env[name] = "http://h"
	}
	if _, err := FromEnv(get); err != nil {
		t.Error(err)
	}
}

func TestEveryErrorIsRebuilt(t *testing.T) {
	for _, test := range []struct {
		status      int
		kind, body  string
		code        cloche.Code
		wantMessage string
	}{
		{410, "application/json", `{"error":{"code":"sandbox_stopped","message":"it has ended"}}`, cloche.CodeGone, "it has ended"},
		{400, "application/json; charset=utf-8", `{"error":{"code":"not_implemented","message":"later"}}`, cloche.CodeNotImplemented, "later"},
		{500, "application/json", `{"error":{"code":"internal_error","message":"internal error"}}`, cloche.CodeInternal, "internal error (request req-1)"},
		{404, "text/html", "<html>", cloche.CodeNotFound, "the server answered 404 Not Found to /api/v2/sandboxes/x"},
		{403, "application/json", `{"error":`, cloche.CodeForbidden, "the server answered 403 Forbidden to /api/v2/sandboxes/x"},
		{418, "application/json", `{}`, cloche.CodeInvalid, "the server answered 418 I'm a teapot to /api/v2/sandboxes/x"},
	} {
		c := serve(t, func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Type", test.kind)
			w.Header().Set("X-Request-Id", "req-1")
			w.WriteHeader(test.status)
			io.WriteString(w, test.body)
		})
		_, err := c.GetSandbox(t.Context(), "x", false)
		var e *cloche.Error
		if !errors.As(err, &e) || e.Code != test.code || e.Message != test.wantMessage {
			t.Errorf("%d %s: %v", test.status, test.body, err)
		}
	}
}

func TestRequestsCarryTokenAndEscapedNames(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer clo_secret" || r.URL.EscapedPath() != "/api/v2/sandboxes/a%2F..%3Fb" {
			t.Errorf("%s %q", r.URL.EscapedPath(), r.Header)
		}
		io.WriteString(w, `{"sandbox":{"name":"a"}}`)
	})
	if v, err := c.GetSandbox(t.Context(), "a/..?b", true); err != nil || v.Sandbox.Name != "a" {
		t.Error(v, err)
	}
}

func TestOnlyWhatIsSafeIsRepeated(t *testing.T) {
	ctx := t.Context()
	for _, test := range []struct {
		name   string
		status int
		do     func(*Client) error
		want   int32 // requests
	}{
		{"get", 503, func(c *Client) error { _, err := c.GetSandbox(ctx, "x", true); return err }, 3},
		{"stop", 502, func(c *Client) error { _, err := c.StopSession(ctx, session); return err }, 3},
		{"create", 503, func(c *Client) error { _, err := c.Create(ctx, Create{Name: "x"}); return err }, 1},
		{"start", 503, func(c *Client) error { _, err := c.Start(ctx, session, Run{Command: "x"}); return err }, 1},
		{"create, refused for now", 429, func(c *Client) error { _, err := c.Create(ctx, Create{}); return err }, 3},
		{"get, a fault", 500, func(c *Client) error { _, err := c.GetSandbox(ctx, "x", true); return err }, 1},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			var n atomic.Int32
			c := serve(t, func(w http.ResponseWriter, r *http.Request) {
				n.Add(1)
				w.Header().Set("Retry-After", "0")
				w.WriteHeader(test.status)
			})
			if err := test.do(c); err == nil || n.Load() != test.want {
				t.Errorf("%d requests, want %d; %v", n.Load(), test.want, err)
			}
		})
	}
}

func TestAnswerThatIsCutIsUnavailable(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Length", "100")
		io.WriteString(w, `   {"sandbox":`)
	})
	if _, err := c.Create(t.Context(), Create{}); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Error(err)
	}
}

// answerFrames starts an answer of frames, and returns how to write one.
func answerFrames(w http.ResponseWriter) func(frames.Type, string) {
	rc := http.NewResponseController(w)
	_ = rc.EnableFullDuplex()
	w.Header().Set("Content-Type", frames.MediaType)
	return func(kind frames.Type, payload string) {
		_, _ = w.Write(frames.Append(nil, kind, []byte(payload)))
		_ = rc.Flush()
	}
}

func TestRunPassesBytesWhileItReads(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		put := answerFrames(w)
		var head [4096]byte
		n, _ := r.Body.Read(head[:])
		var body runBody
		if err := json.Unmarshal(head[:n], &body); err != nil || !body.Wait || !body.Logs || body.Args == nil || body.Env == nil {
			t.Errorf("%q: %v", head[:n], err)
		}
		put(frames.Command, `{"id":"cmd_1","exitCode":null}`)
		put(200, "of a newer server")
		for {
			var b [1]byte
			if _, err := io.ReadFull(r.Body, b[:]); err != nil {
				break
			}
			put(frames.Stdout, string(b[:]))
			put(frames.Idle, "")
			put(frames.Stderr, "\xff\x00")
		}
		put(frames.Notice, "!")
		put(frames.End, `{"id":"cmd_1","exitCode":137,"signal":9,"cause":"oom"}`)
	})
	// Each byte is sent only when the one before has come back.
	in, out := io.Pipe()
	var stdout, stderr bytes.Buffer
	var started cloche.CommandID
	echo := writer(func(p []byte) (int, error) {
		stdout.Write(p)
		if stdout.Len() == 256 {
			out.Close()
		} else {
			go out.Write([]byte{byte(stdout.Len())})
		}
		return len(p), nil
	})
	cmd, err := c.Run(t.Context(), session, Run{
		Command: "x", Stdin: in, Stdout: echo, Stderr: &stderr,
		Started: func(cmd Command) { started = cmd.ID; go out.Write([]byte{0}) },
	})
	if err != nil || *cmd.ExitCode != 137 || cmd.Signal != 9 || cmd.Cause != cloche.CauseOOM || started != "cmd_1" {
		t.Errorf("%+v %v", cmd, err)
	}
	for i, b := range stdout.Bytes() {
		if int(b) != i {
			t.Fatalf("byte %d is %d", i, b)
		}
	}
	if want := strings.Repeat("\xff\x00", 256) + "!"; stderr.String() != want {
		t.Errorf("stderr has %d bytes, want %d", stderr.Len(), len(want))
	}
}

type writer func([]byte) (int, error)

func (w writer) Write(p []byte) (int, error) { return w(p) }

func TestRunThatBreaksHasNoExitCode(t *testing.T) {
	for name, test := range map[string]struct {
		answer func(put func(frames.Type, string))
		code   cloche.Code
	}{
		"cut":            {func(put func(frames.Type, string)) { panic(http.ErrAbortHandler) }, cloche.CodeUnavailable},
		"ended":          {func(put func(frames.Type, string)) {}, cloche.CodeUnavailable},
		"lost":           {func(put func(frames.Type, string)) { put(frames.Failure, `{"code":"sandbox_stopped","message":"m"}`) }, cloche.CodeGone},
		"no exit code":   {func(put func(frames.Type, string)) { put(frames.End, `{"exitCode":null}`) }, cloche.CodeInternal},
		"no JSON":        {func(put func(frames.Type, string)) { put(frames.End, `x`) }, cloche.CodeInternal},
		"frame too long": {func(put func(frames.Type, string)) { put(frames.Stdout, strings.Repeat("x", frames.MaxPayload+1)) }, cloche.CodeUnavailable},
	} {
		t.Run(name, func(t *testing.T) {
			c := serve(t, func(w http.ResponseWriter, r *http.Request) {
				put := answerFrames(w)
				put(frames.Command, `{"id":"cmd_1","exitCode":null}`)
				test.answer(put)
			})
			cmd, err := c.Run(t.Context(), session, Run{Command: "x"})
			if cmd.ExitCode != nil && name != "no exit code" || cloche.ErrorCode(err) != test.code {
				t.Errorf("%+v %v", cmd, err)
			}
		})
	}
}

func TestRunSendsNoBytesThatJSONWouldChange(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) { t.Error("a request was made") })
	for _, r := range []Run{{Command: "\xff"}, {Command: "x", Args: []string{"\xff"}}, {Command: "x", Env: map[string]string{"A": "\xff"}}} {
		if _, err := c.Run(t.Context(), session, r); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Error(err)
		}
		if _, err := c.Start(t.Context(), session, r); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Error(err)
		}
	}
}

func TestRunTellsWhoseFaultItIs(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		put := answerFrames(w)
		put(frames.Command, `{"id":"cmd_1","exitCode":null}`)
		put(frames.Stdout, "x")
		_, _ = io.Copy(io.Discard, r.Body)
	})
	full := errors.New("disk full")
	_, err := c.Run(t.Context(), session, Run{Command: "x", Stdout: writer(func([]byte) (int, error) { return 0, full })})
	var out *OutputError
	if !errors.As(err, &out) || out.Stream != cloche.Stdout || !errors.Is(err, full) {
		t.Error(err)
	}
	_, err = c.Run(t.Context(), session, Run{Command: "x", Stdin: io.MultiReader(strings.NewReader("a"), broken2{full})})
	if !errors.Is(err, full) {
		t.Error(err)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	never, w := io.Pipe()
	defer w.Close()
	_, err = c.Run(ctx, session, Run{Command: "x", Stdin: never, Stdout: writer(func(p []byte) (int, error) { cancel(full); return len(p), nil })})
	if !errors.Is(err, full) {
		t.Error(err)
	}
}

type broken2 struct{ err error }

func (b broken2) Read([]byte) (int, error) { return 0, b.err }

func TestLogsAreWholeThoughCutThreeTimes(t *testing.T) {
	var n atomic.Int32
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		put := answerFrames(w)
		pieces := []struct {
			kind frames.Type
			text string
		}{{frames.Stdout, "one "}, {frames.Stderr, "err "}, {frames.Stdout, "two "}, {frames.Stdout, "three"}, {frames.Stderr, "end"}}
		try := int(n.Add(1))
		for i, p := range pieces {
			if try <= 3 && i == try {
				put(p.kind, p.text[:1]) // cut in the middle of a piece
				panic(http.ErrAbortHandler)
			}
			put(p.kind, p.text)
		}
		put(frames.End, "")
	})
	var stdout, stderr strings.Builder
	err := c.Logs(t.Context(), session, command, true, &stdout, &stderr)
	if err != nil || stdout.String() != "one two three" || stderr.String() != "err end" || n.Load() != 4 {
		t.Errorf("%q %q after %d: %v", stdout.String(), stderr.String(), n.Load(), err)
	}
}

// Whether a log is followed is the server's to know: it alone can tell a pause
// from the end of what there is.
func TestLogsAskWhetherToFollow(t *testing.T) {
	for follow, query := range map[bool]string{true: "", false: "follow=false"} {
		c := serve(t, func(w http.ResponseWriter, r *http.Request) {
			if !strings.HasSuffix(r.URL.Path, "/logs") || r.URL.RawQuery != query {
				t.Errorf("request for %s", r.URL)
			}
			put := answerFrames(w)
			put(frames.Stdout, "so far")
			put(frames.End, "")
		})
		var out strings.Builder
		if err := c.Logs(t.Context(), session, command, follow, &out, io.Discard); err != nil || out.String() != "so far" {
			t.Errorf("follow %v: %q %v", follow, out.String(), err)
		}
	}
}

func TestFileThatIsCutIsAnError(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		var body struct{ PathBytes []byte }
		if err := json.NewDecoder(r.Body).Decode(&body); err != nil || string(body.PathBytes) != "\xff" {
			t.Errorf("%q %v", body.PathBytes, err)
		}
		w.Header().Set("Content-Type", "application/octet-stream")
		w.Header().Set("Cloche-Size", "10")
		w.Header().Set("Cloche-Mode", "640")
		io.WriteString(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	f, err := c.ReadFile(t.Context(), session, "\xff")
	if err != nil || f.Size != 10 || f.Mode != 0o640 {
		t.Fatalf("%+v %v", f, err)
	}
	defer f.Close()
	if b, err := io.ReadAll(f); string(b) != "half" || cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("%q %v", b, err)
	}
}

func TestErrorBodyIsNoContent(t *testing.T) {
	c := serve(t, func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, `{"error":{}}`) })
	if f, err := c.ReadFile(t.Context(), session, "x"); err == nil {
		f.Close()
		t.Error("a JSON body was taken for a file")
	}
}

func TestWriteFilesStreams(t *testing.T) {
	got := make(chan string, 1)
	c := serve(t, func(w http.ResponseWriter, r *http.Request) {
		var first [5]byte
		_, _ = io.ReadFull(r.Body, first[:])
		got <- string(first[:]) // before the rest is written
		rest, _ := io.ReadAll(r.Body)
		if string(rest) != "rest" || r.Header.Get("X-Cwd") != "/d" || r.Header.Get("Content-Type") != "application/x-tar" {
			t.Errorf("%q %v", rest, r.Header)
		}
		io.WriteString(w, "{}")
	})
	r, w := io.Pipe()
	go func() {
		_, _ = io.WriteString(w, "first")
		if s := <-got; s != "first" {
			t.Errorf("%q", s)
		}
		_, _ = io.WriteString(w, "rest")
		w.Close()
	}()
	if err := c.WriteFiles(t.Context(), session, "/d", r); err != nil {
		t.Error(err)
	}
}

func FuzzFrames(f *testing.F) {
	f.Add(frames.Append(frames.Append(nil, frames.Command, []byte(`{"id":"c"}`)), frames.End, []byte(`{"exitCode":3}`)))
	f.Add(frames.Append(nil, frames.Failure, []byte(`{"code":"x"}`)))
	f.Add([]byte{2, 0, 0, 0, 9, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		cmd, err := reading{}.run(bytes.NewReader(b))
		if err == nil && cmd.ExitCode == nil {
			t.Error("success without an exit code")
		}
	})
}

func TestUnreachableSaysWhatToDo(t *testing.T) {
	c, err := New("http://127.0.0.1:1", "t")
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.GetSandbox(t.Context(), "x", false)
	if cloche.ErrorCode(err) != cloche.CodeUnavailable || !strings.Contains(err.Error(), "cloche serve") {
		t.Error(err)
	}
}

// What breaks off is an error, in whichever way it does.
func TestBlocksOfABrokenArchive(t *testing.T) {
	for _, want := range []error{nil, io.ErrUnexpectedEOF, errors.New("broken")} {
		var src io.Reader = strings.NewReader(strings.Repeat("x", blockSize+10))
		if want != nil {
			src = io.MultiReader(src, iotest.ErrReader(want))
		}
		var got bytes.Buffer
		n, err := blocks{src}.WriteTo(&got)
		if err != want || n != blockSize+10 || got.Len() != blockSize+10 {
			t.Errorf("%v: %d bytes, %v", want, n, err)
		}
	}
}
