package vercel

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/frames"
)

// ndjson is the content type of streams, and clients compare the whole of it.
const ndjson = "application/x-ndjson"

// stream is an answer that goes on for as long as a command does. Every write
// reaches the client at once. If there is none for a while, the stream carries
// a sign of life, so that nothing on the way takes it for dead. The methods are
// safe for concurrent use.
type stream struct {
	form form
	rc   *http.ResponseController

	mu    sync.Mutex
	w     http.ResponseWriter // guarded by mu
	buf   []byte              // guarded by mu
	quiet bool                // guarded by mu: nothing was written since the last tick
	err   error               // guarded by mu: the first failed write

	onError func() // called once, when a write fails
	stop    chan struct{}
	done    chan struct{}
}

// form is how a stream looks on the wire. Its methods append to dst.
type form interface {
	contentType() string
	idle(dst []byte) []byte
	command(dst []byte, c commandBody, ended bool) ([]byte, error)
	entry(dst []byte, e cloche.LogEntry) []byte
	// finish is what is still to be said of the output.
	finish(dst []byte) []byte
	// end marks the end of a log.
	end(dst []byte) []byte
	failure(dst []byte, f failure) ([]byte, error)
}

// open begins a stream in the form that the client asked for. The caller closes
// it. onError is called when the client cannot be reached any more.
func (c *call) open(onError func()) *stream {
	s := &stream{
		form: &lines{}, rc: http.NewResponseController(c.w), w: c.w,
		onError: onError, stop: make(chan struct{}), done: make(chan struct{}),
	}
	if wantsFrames(c.r) {
		s.form = binary{}
	}
	h := c.w.Header()
	h.Set("Content-Type", s.form.contentType())
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // nginx would collect the lines
	c.w.WriteHeader(http.StatusOK)
	s.put(nil)
	go s.beat(c.Heartbeat)
	return s
}

func wantsFrames(r *http.Request) bool {
	return strings.Contains(r.Header.Get("Accept"), frames.MediaType)
}

// beat writes a sign of life into every interval that had no output.
func (s *stream) beat(interval time.Duration) {
	defer close(s.done)
	t := time.NewTicker(interval)
	defer t.Stop()
	for {
		select {
		case <-s.stop:
			return
		case <-t.C:
		}
		s.mu.Lock()
		if s.quiet {
			s.putLocked(s.form.idle(s.buf[:0]))
		}
		s.quiet = true
		s.mu.Unlock()
	}
}

// close ends the signs of life and waits for the last one.
func (s *stream) close() {
	close(s.stop)
	<-s.done
}

func (s *stream) put(b []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.putLocked(b)
}

func (s *stream) putLocked(b []byte) error {
	if s.err != nil {
		return s.err
	}
	s.quiet = false
	_, err := s.w.Write(b)
	if err == nil {
		err = s.rc.Flush()
	}
	if err != nil {
		s.err = fmt.Errorf("write to the client: %w", err)
		s.onError()
	}
	return s.err
}

// command writes the record of a command: as it starts and, ended, as it is
// after everything else.
func (s *stream) command(c cloche.Command, ended bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, err := s.buf[:0], error(nil)
	if ended {
		b = s.form.finish(b)
	}
	if b, err = s.form.command(b, commandOf(c), ended); err != nil {
		return cloche.Internal("encode the command", err)
	}
	return s.putLocked(b)
}

// entry writes a piece of output.
func (s *stream) entry(e cloche.LogEntry) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buf = s.form.entry(s.buf[:0], e)
	if len(s.buf) == 0 {
		return s.err // held back until the rest of the character comes
	}
	return s.putLocked(s.buf)
}

// end writes the end of a log.
func (s *stream) end() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.putLocked(s.form.end(s.form.finish(s.buf[:0])))
}

// failure writes why the stream ends without its proper end.
func (s *stream) failure(f failure) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, err := s.form.failure(s.form.finish(s.buf[:0]), f)
	if err != nil {
		return cloche.Internal("encode a failure", err)
	}
	return s.putLocked(b)
}

// lines is the form that the protocol has: one JSON object a line.
type lines struct{ out, err text }

func (*lines) contentType() string { return ndjson }

func (*lines) idle(dst []byte) []byte { return append(dst, '\n') }

func (*lines) command(dst []byte, c commandBody, _ bool) ([]byte, error) {
	return appendLine(dst, commandAnswer{c})
}

func (l *lines) entry(dst []byte, e cloche.LogEntry) []byte {
	t, name := &l.out, string(cloche.Stdout)
	if e.Stream != cloche.Stdout { // a notice has no name of its own here
		t, name = &l.err, string(cloche.Stderr)
	}
	head := len(dst)
	dst = append(dst, `{"stream":"`+name+`","data":"`...)
	body := len(dst)
	if dst = t.append(dst, e.Data); len(dst) == body {
		return dst[:head]
	}
	return append(dst, "\"}\n"...)
}

func (l *lines) finish(dst []byte) []byte {
	for _, t := range []struct {
		*text
		name string
	}{{&l.out, "stdout"}, {&l.err, "stderr"}} {
		if t.held() {
			dst = append(dst, `{"stream":"`+t.name+`","data":"`...)
			dst = append(t.finish(dst), "\"}\n"...)
		}
	}
	return dst
}

func (*lines) end(dst []byte) []byte { return dst }

func (*lines) failure(dst []byte, f failure) ([]byte, error) {
	return appendLine(dst, struct {
		Stream string  `json:"stream"`
		Data   failure `json:"data"`
	}{"error", f})
}

// appendLine appends v with everything but ASCII escaped: clients decode each
// piece that arrives by itself, and a character must not lie across two.
func appendLine(dst []byte, v any) ([]byte, error) {
	b, err := encode(v)
	if err != nil {
		return dst, err
	}
	return append(appendASCII(dst, b), '\n'), nil
}

// binary is the form of our own client.
type binary struct{}

func (binary) contentType() string { return frames.MediaType }

func (binary) idle(dst []byte) []byte { return frames.Append(dst, frames.Idle, nil) }

func (binary) command(dst []byte, c commandBody, ended bool) ([]byte, error) {
	b, err := encode(c)
	if err != nil {
		return dst, err
	}
	if ended {
		return frames.Append(dst, frames.End, b), nil
	}
	return frames.Append(dst, frames.Command, b), nil
}

func (binary) entry(dst []byte, e cloche.LogEntry) []byte {
	switch e.Stream {
	case cloche.Stdout:
		return frames.Append(dst, frames.Stdout, e.Data)
	case cloche.Stderr:
		return frames.Append(dst, frames.Stderr, e.Data)
	default:
		return frames.Append(dst, frames.Notice, e.Data)
	}
}

func (binary) finish(dst []byte) []byte { return dst }

func (binary) end(dst []byte) []byte { return frames.Append(dst, frames.End, nil) }

func (binary) failure(dst []byte, f failure) ([]byte, error) {
	b, err := json.Marshal(f)
	if err != nil {
		return dst, err
	}
	return frames.Append(dst, frames.Failure, b), nil
}
