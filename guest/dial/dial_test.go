package dial

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var id = cloche.NewCommandID()

// fake is an agent whose answers a test makes up.
type fake struct {
	t       testing.TB
	stale   string                                       // written before the welcome
	welcome func(h guest.Hello) any                      // nil = an honest one
	handler func(w http.ResponseWriter, r *http.Request) // nil = pings
	opened  atomic.Int32

	mu    sync.Mutex
	conns []net.Conn
	wg    sync.WaitGroup
}

// client returns a client of the fake that is closed with the test.
func (f *fake) client() *Client {
	c := New(f.open, "token", slog.New(slog.DiscardHandler))
	f.t.Cleanup(func() {
		_ = c.Close()
		f.cut()
		f.wg.Wait()
	})
	return c
}

// cut breaks all connections.
func (f *fake) cut() {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.conns {
		_ = c.Close()
	}
	f.conns = nil
}

func (f *fake) open(context.Context) (net.Conn, error) {
	f.opened.Add(1)
	host, agent := net.Pipe()
	f.mu.Lock()
	f.conns = append(f.conns, host, agent)
	f.mu.Unlock()
	f.wg.Go(func() { f.serve(agent) })
	return host, nil
}

func (f *fake) serve(conn net.Conn) {
	r := bufio.NewReader(conn)
	h, err := guest.ReadHello(r)
	if err != nil {
		return
	}
	var answer any = guest.Welcome{Nonce: h.Nonce, Version: 1, Agent: "fake"}
	if f.welcome != nil {
		answer = f.welcome(h)
	}
	b, err := json.Marshal(answer)
	if err != nil {
		f.t.Error(err)
		return
	}
	if _, err := io.WriteString(conn, f.stale+guest.HelloPrefix+string(b)+"\n"); err != nil {
		return
	}
	handler := f.handler
	if handler == nil {
		handler = func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"commands":3}`) }
	}
	l := &oneConn{conn: &buffered{conn, r}, done: make(chan struct{})}
	srv := &http.Server{Handler: http.HandlerFunc(handler), Protocols: new(http.Protocols)}
	srv.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateClosed {
			l.once.Do(func() { close(l.done) })
		}
	}
	srv.Protocols.SetUnencryptedHTTP2(true)
	_ = srv.Serve(l)
	_ = srv.Close()
}

// oneConn is a listener that gives one connection.
type oneConn struct {
	conn net.Conn
	once sync.Once
	done chan struct{}
}

func (l *oneConn) Accept() (net.Conn, error) {
	if c := l.conn; c != nil {
		l.conn = nil
		return c, nil
	}
	<-l.done
	return nil, net.ErrClosed
}
func (l *oneConn) Close() error   { return nil }
func (l *oneConn) Addr() net.Addr { return &net.UnixAddr{} }

func TestManyCallsShareOneConnection(t *testing.T) {
	f := &fake{t: t}
	c := f.client()
	for round := int32(1); round <= 3; round++ {
		var wg sync.WaitGroup
		for range 30 {
			wg.Go(func() {
				if p, err := c.Ping(t.Context()); err != nil || p.Commands != 3 {
					t.Errorf("%+v, %v", p, err)
				}
			})
		}
		wg.Wait()
		if n := f.opened.Load(); n != round {
			t.Errorf("%d connections in round %d", n, round)
		}
		f.cut()
		for c.conn.Err() == nil {
			runtime.Gosched() // until the reader of the connection has noticed
		}
	}
}

func TestStaleBytesAreDropped(t *testing.T) {
	f := &fake{t: t, stale: strings.Repeat("\x00stale", 100_000) + "cloche {\"nonce\":\"other\",\"version\":1}\ncloche {\"no"}
	if p, err := f.client().Ping(t.Context()); err != nil || p.Commands != 3 {
		t.Errorf("%+v, %v", p, err)
	}
}

func TestRefusedHandshakesFailAtOnce(t *testing.T) {
	for name, w := range map[string]func(h guest.Hello) any{
		"version": func(h guest.Hello) any {
			return guest.Welcome{Nonce: h.Nonce, Min: 7, Max: 9, Error: &guest.Failure{Code: guest.CodeVersion, Message: "the agent speaks 7 to 9"}}
		},
		"token": func(h guest.Hello) any {
			return guest.Welcome{Nonce: h.Nonce, Error: &guest.Failure{Code: cloche.CodeUnauthorized, Message: "no"}}
		},
		"a version that was not offered": func(h guest.Hello) any { return guest.Welcome{Nonce: h.Nonce, Version: 99} },
		"no version":                     func(h guest.Hello) any { return guest.Welcome{Nonce: h.Nonce} },
	} {
		f := &fake{t: t, welcome: w}
		_, err := f.client().Ping(t.Context())
		if cloche.ErrorCode(err) != cloche.CodeUnavailable {
			t.Errorf("%s: %v", name, err)
		}
		if name == "version" && !strings.Contains(err.Error(), "7 to 9") {
			t.Errorf("the versions are not in the log's error: %v", err)
		}
	}
}

func TestE3_ASilentAgentIsGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		host, agent := net.Pipe()
		go func() { _, _ = io.Copy(io.Discard, agent) }()
		c := New(func(context.Context) (net.Conn, error) { return host, nil }, "token", slog.New(slog.DiscardHandler))
		begin := time.Now()
		if _, err := c.Ping(t.Context()); cloche.ErrorCode(err) != cloche.CodeUnavailable {
			t.Errorf("%v", err)
		}
		if d := time.Since(begin); d != guest.HelloTimeout {
			t.Errorf("after %v", d)
		}
		_ = agent.Close()
		_ = c.Close()
	})
}

func TestACallerThatGivesUpDoesNotEndTheDial(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &fake{t: t}
		release := make(chan struct{})
		c := New(func(ctx context.Context) (net.Conn, error) {
			<-release
			return f.open(ctx)
		}, "token", slog.New(slog.DiscardHandler))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.Ping(ctx); cloche.ErrorCode(err) != cloche.CodeUnavailable || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		close(release)
		if _, err := c.Ping(t.Context()); err != nil {
			t.Error(err)
		}
		if n := f.opened.Load(); n != 1 {
			t.Errorf("%d connections", n)
		}
		_ = c.Close()
		f.cut()
		f.wg.Wait()
	})
}

func TestErrorsOfOpenPassThrough(t *testing.T) {
	gone := cloche.Errorf(cloche.CodeGone, "the machine has ended")
	c := New(func(context.Context) (net.Conn, error) { return nil, gone }, "token", slog.New(slog.DiscardHandler))
	if _, err := c.Ping(t.Context()); cloche.ErrorCode(err) != cloche.CodeGone {
		t.Errorf("%v", err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	if _, err := c.Ping(t.Context()); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("after Close: %v", err)
	}
}

func TestFailuresKeepTheirCode(t *testing.T) {
	body := `{"code":"conflict","message":"it exists"}`
	f := &fake{t: t, handler: func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, body)
	}}
	c := f.client()
	err := c.MakeDir(t.Context(), guest.FileRequest{Path: []byte("x")})
	var e *cloche.Error
	if !errors.As(err, &e) || e.Code != cloche.CodeConflict || e.Message != "it exists" {
		t.Errorf("%v", err)
	}
	for _, body = range []string{"", "not JSON", "{}", strings.Repeat("[", 1<<20), strings.Repeat(" ", guest.MaxJSON+2)} {
		if err := c.MakeDir(t.Context(), guest.FileRequest{}); cloche.ErrorCode(err) != cloche.CodeUnavailable {
			t.Errorf("%.20q: %v", body, err)
		}
	}
	if err := c.Forget(t.Context(), id); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("forget: %v", err)
	}
	body = `{"code":"not_found","message":"no command"}`
	if err := c.Forget(t.Context(), id); err != nil {
		t.Errorf("to forget what is not there is success: %v", err)
	}
}

func TestAnswersAreBounded(t *testing.T) {
	f := &fake{t: t, handler: func(w http.ResponseWriter, _ *http.Request) {
		for b := bytes.Repeat([]byte(" "), 1<<20); ; {
			if _, err := w.Write(b); err != nil {
				return
			}
		}
	}}
	if _, err := f.client().Status(t.Context()); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("%v", err)
	}
	f = &fake{t: t, handler: func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", strings.Repeat("x", 1<<20)) }}
	if _, err := f.client().Ping(t.Context()); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("a header of 1 MiB: %v", err)
	}
}

// framesOf answers a command stream with frames.
func framesOf(frames ...[]byte) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, _ *http.Request) {
		for _, f := range frames {
			_, _ = w.Write(f)
		}
	}
}

func frame(t guest.FrameType, payload string) []byte {
	return guest.AppendFrame(nil, t, []byte(payload))
}

func TestStreamsOfHostileAgentsBreak(t *testing.T) {
	started := frame(guest.FrameStarted, `{"pid":5,"offset":100}`)
	for name, tc := range map[string]struct {
		frames [][]byte
		code   cloche.Code
	}{
		"nothing":              {nil, cloche.CodeUnavailable},
		"a failure":            {[][]byte{frame(guest.FrameFailure, `{"code":"bad_request","message":"no"}`)}, cloche.CodeInvalid},
		"a failure of no code": {[][]byte{frame(guest.FrameFailure, `{}`)}, cloche.CodeUnavailable},
		"output first":         {[][]byte{frame(guest.FrameStdout, "x")}, cloche.CodeUnavailable},
		"an earlier offset":    {[][]byte{frame(guest.FrameStarted, `{"offset":99}`)}, cloche.CodeUnavailable},
		"a negative offset":    {[][]byte{frame(guest.FrameStarted, `{"offset":-1}`)}, cloche.CodeUnavailable},
		"negative input":       {[][]byte{frame(guest.FrameStarted, `{"offset":100,"stdin":-1}`)}, cloche.CodeUnavailable},
		"no JSON":              {[][]byte{frame(guest.FrameStarted, `{`)}, cloche.CodeUnavailable},
		"an end without exit":  {[][]byte{started, frame(guest.FrameStdout, "x")}, cloche.CodeUnavailable},
		"a cut frame":          {[][]byte{started, frame(guest.FrameStdout, "xyz")[:6]}, cloche.CodeUnavailable},
		"a large frame":        {[][]byte{started, {17, 0, 1, 0, 1}}, cloche.CodeUnavailable},
		"a host's frame":       {[][]byte{started, frame(guest.FrameAck, "12345678")}, cloche.CodeUnavailable},
		"credit for nothing":   {[][]byte{started, guest.AppendAck(nil, guest.FrameStdinAck, 5)}, cloche.CodeUnavailable},
		"an offset too far":    {[][]byte{frame(guest.FrameStarted, `{"offset":9223372036854775807}`)}, cloche.CodeUnavailable},
		"input too far":        {[][]byte{frame(guest.FrameStarted, `{"offset":100,"stdin":9223372036854775807}`)}, cloche.CodeUnavailable},
		"a long directory":     {[][]byte{frame(guest.FrameStarted, `{"offset":100,"workDir":"`+strings.Repeat("/d", 10_000)+`"}`)}, cloche.CodeUnavailable},
		"a start in year 9999": {[][]byte{frame(guest.FrameStarted, `{"offset":100,"startedAt":"9999-01-01T00:00:00Z"}`)}, cloche.CodeUnavailable},
		"exit code 256":        {[][]byte{started, frame(guest.FrameExit, `{"code":256}`)}, cloche.CodeUnavailable},
		"exit code -1":         {[][]byte{started, frame(guest.FrameExit, `{"code":-1}`)}, cloche.CodeUnavailable},
		"exit code 2^40":       {[][]byte{started, frame(guest.FrameExit, `{"code":1099511627776}`)}, cloche.CodeUnavailable},
		"a made up cause":      {[][]byte{started, frame(guest.FrameExit, `{"code":0,"cause":"the host did it"}`)}, cloche.CodeUnavailable},
		"a made up signal":     {[][]byte{started, frame(guest.FrameExit, `{"code":0,"signal":65}`)}, cloche.CodeUnavailable},
		"a bad exit":           {[][]byte{started, frame(guest.FrameExit, "[]")}, cloche.CodeUnavailable},
	} {
		f := &fake{t: t, handler: framesOf(tc.frames...)}
		s, err := f.client().Attach(t.Context(), id, 100)
		for err == nil {
			var e Event
			if e, err = s.Next(); e.Exit != nil {
				t.Errorf("%s: an exit", name)
			}
		}
		if cloche.ErrorCode(err) != tc.code {
			t.Errorf("%s: %v", name, err)
		}
		if s != nil {
			_ = s.Close()
		}
	}
}

func TestStreamCountsAndEnds(t *testing.T) {
	f := &fake{t: t, handler: framesOf(frame(guest.FrameStarted, `{"pid":5,"offset":100,"workDir":"/w"}`), frame(guest.FrameStdout, "abc"),
		frame(guest.FrameStdout, ""), frame(guest.FrameStderr, "de"), frame(guest.FrameExit, `{"code":3}`), frame(guest.FrameStdout, "late"))}
	s, err := f.client().Attach(t.Context(), id, 90)
	if err != nil || s.Started().PID != 5 || s.Started().WorkDir != "/w" {
		t.Fatalf("%+v, %v", s, err)
	}
	want := []Event{{Stream: cloche.Stdout, Data: []byte("abc"), Offset: 103}, {Stream: cloche.Stderr, Data: []byte("de"), Offset: 105}}
	for _, w := range want {
		if e, err := s.Next(); err != nil || e.Stream != w.Stream || !bytes.Equal(e.Data, w.Data) || e.Offset != w.Offset || e.Exit != nil {
			t.Errorf("%+v, %v, want %+v", e, err, w)
		}
	}
	if e, err := s.Next(); err != nil || e.Exit == nil || e.Exit.Code != 3 || e.Offset != 105 {
		t.Errorf("%+v, %v", e, err)
	}
	for range 2 {
		if e, err := s.Next(); err != io.EOF {
			t.Errorf("after the exit: %+v, %v", e, err)
		}
	}
	_ = s.Close()
}

func TestAcknowledgementsAreMergedAndInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFrames(nil)
		for i := range int64(100) {
			f.acknowledge(i)
			f.acknowledge(i / 2) // an older one changes nothing
		}
		begin := time.Now()
		next := func() int64 {
			t.Helper()
			ft, payload, err := guest.NewFrameReader(f).Next()
			if err != nil || ft != guest.FrameAck {
				t.Fatal(ft, err)
			}
			n, err := guest.ParseAck(payload)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		if n := next(); n != 99 || time.Since(begin) != ackDelay {
			t.Errorf("%d after %v", n, time.Since(begin))
		}
		begin = time.Now()
		f.acknowledge(99 + ackBytes)
		if n := next(); n != 99+ackBytes || time.Since(begin) != 0 {
			t.Errorf("%d after %v", n, time.Since(begin))
		}
		f.acknowledge(1 << 40)
		_ = f.Close()
		if n, err := f.Read(make([]byte, 10)); n != 0 || err != io.EOF {
			t.Errorf("after Close: %d, %v", n, err)
		}
	})
}

func TestFilesThatAreNotWholeAreErrors(t *testing.T) {
	for name, tc := range map[string]struct {
		size, mode, trailer, body string
		code                      cloche.Code // "" = success
	}{
		"whole":            {size: "5", mode: "644", body: "hello"},
		"unknown size":     {mode: "7777", body: "hello"},
		"short":            {size: "6", mode: "644", body: "hello", code: cloche.CodeUnavailable},
		"long":             {size: "4", mode: "644", body: "hello", code: cloche.CodeUnavailable},
		"failed midway":    {size: "6", mode: "644", body: "hello", trailer: `{"code":"conflict","message":"shorter"}`, code: cloche.CodeConflict},
		"failed at an end": {mode: "644", body: "hello", trailer: `{"code":"conflict"}`, code: cloche.CodeConflict},
		"a bad trailer":    {mode: "644", body: "hello", trailer: `x`, code: cloche.CodeUnavailable},
		"no mode":          {size: "5", body: "hello", code: cloche.CodeUnavailable},
		"a bad mode":       {size: "5", mode: "100000", body: "hello", code: cloche.CodeUnavailable},
		"a bad size":       {size: "x", mode: "644", body: "hello", code: cloche.CodeUnavailable},
		"a negative size":  {size: "-1", mode: "644", body: "hello", code: cloche.CodeUnavailable},
	} {
		f := &fake{t: t, handler: func(w http.ResponseWriter, _ *http.Request) {
			h := w.Header()
			h.Set("Trailer", guest.HeaderError)
			for k, v := range map[string]string{guest.HeaderSize: tc.size, guest.HeaderMode: tc.mode} {
				if v != "" {
					h.Set(k, v)
				}
			}
			_, _ = io.WriteString(w, tc.body)
			if tc.trailer != "" {
				h.Set(guest.HeaderError, tc.trailer)
			}
		}}
		info, r, err := f.client().ReadFile(t.Context(), guest.FileRequest{Path: []byte("x")})
		var b []byte
		if err == nil {
			b, err = io.ReadAll(iotest.OneByteReader(r))
			_ = r.Close()
		}
		if cloche.ErrorCode(err) != tc.code || err == nil && string(b) != tc.body || tc.size == "" && info.Size > 0 {
			t.Errorf("%s: %q, %+v, %v", name, b, info, err)
		}
	}
}

func TestTransfersWaitForAPlace(t *testing.T) {
	f := &fake{t: t, handler: func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set(guest.HeaderMode, "644")
		_, _ = io.WriteString(w, "x")
	}}
	c := f.client()
	var open []io.Closer
	for range maxTransfers {
		_, r, err := c.ReadFile(t.Context(), guest.FileRequest{})
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, r)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := c.ReadFile(ctx, guest.FileRequest{}); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("one too many: %v", err)
	}
	for range 2 { // closing twice gives back one place
		_ = open[0].Close()
	}
	_, r, err := c.ReadFile(t.Context(), guest.FileRequest{})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range append(open, r) {
		_ = r.Close()
	}
}

func TestNoReadOfTheArchiveAfterTheAnswer(t *testing.T) {
	f := &fake{t: t, handler: func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.ReadFull(r.Body, make([]byte, 10))
		w.WriteHeader(http.StatusBadRequest)
		_, _ = io.WriteString(w, `{"code":"bad_request","message":"no"}`)
	}}
	var returned atomic.Bool
	body := readFunc(func(p []byte) (int, error) {
		if returned.Load() {
			t.Error("read after the call")
		}
		return len(p), nil
	})
	_, err := f.client().WriteFiles(t.Context(), guest.FileRequest{}, body)
	returned.Store(true)
	if cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("%v", err)
	}
}

type readFunc func([]byte) (int, error)

func (f readFunc) Read(p []byte) (int, error) { return f(p) }

func TestSurgeGivesAllBytesAndItsBuffer(t *testing.T) {
	data := make([]byte, 3<<20)
	for i := range data {
		data[i] = byte(i * i >> 8)
	}
	var pool sync.Pool
	for name, r := range map[string]io.Reader{
		"fast": bytes.NewReader(data), "slow": iotest.OneByteReader(bytes.NewReader(data[:50_000])), "half": iotest.HalfReader(bytes.NewReader(data)),
		"error with data": iotest.DataErrReader(bytes.NewReader(data)),
	} {
		s := &surge{r: r, pool: &pool}
		got, err := io.ReadAll(s)
		if err != nil || !bytes.Equal(got, data[:len(got)]) || name != "slow" && len(got) != len(data) {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		if s.big != nil {
			t.Errorf("%s: the big buffer was kept", name)
		}
	}
}
