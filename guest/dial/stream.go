package dial

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// stdinBuffer is the size of reads of a caller's standard input.
const stdinBuffer = 32 << 10

// Event is one thing that a command did: output, or, as the last one, its Exit.
type Event struct {
	Stream cloche.Stream
	Data   []byte // valid until the next call of Next
	Offset int64  // of the output after Data: what to acknowledge once it is kept
	Exit   *cloche.Exit
}

// Stream is a command as the host sees it. Next is for one goroutine; the other
// methods may be called concurrently.
type Stream struct {
	body    *frames
	resp    *http.Response
	frames  *guest.FrameReader
	started guest.Started
	offset  int64
	ended   bool
	cancel  context.CancelFunc
}

// Run starts a command. With a stdin, it is copied to the command until its EOF;
// a Read of it that is in progress when the stream ends is abandoned. ctx is the
// stream's: when it ends the stream breaks, and the command runs on. A refusal
// is the agent's error; with CodeUnavailable it is unknown whether the command
// started, and Attach tells.
func (c *Client) Run(ctx context.Context, id cloche.CommandID, s guest.Start, stdin io.Reader) (*Stream, error) {
	s.Stdin = stdin != nil
	payload, err := json.Marshal(s)
	if err != nil {
		return nil, cloche.Internal("make start frame", err)
	}
	if len(payload) > guest.MaxStart {
		return nil, cloche.Errorf(cloche.CodeInvalid, "the arguments and the environment are longer than %d bytes", guest.MaxStart)
	}
	st, err := c.stream(ctx, commandPath(id), guest.AppendFrame(nil, guest.FrameStart, payload), 0)
	if err == nil && stdin != nil {
		// Without an owner that waits: only the caller can end a Read of its own.
		go st.copyInput(stdin)
	}
	return st, err
}

// Attach goes on with a command from offset: the bytes before it are kept by the
// host. The agent may have dropped some bytes from there on only if the host
// acknowledged them; Started says where the output goes on. A stream that was
// attached before breaks.
func (c *Client) Attach(ctx context.Context, id cloche.CommandID, offset int64) (*Stream, error) {
	return c.stream(ctx, commandPath(id)+"/attach", guest.AppendAck(nil, guest.FrameAck, offset), offset)
}

func (c *Client) stream(ctx context.Context, path string, first []byte, offset int64) (*Stream, error) {
	ctx, cancel := context.WithCancel(ctx)
	s := &Stream{body: newFrames(first), cancel: cancel}
	resp, err := c.do(ctx, http.MethodPost, path, s.body)
	if err != nil {
		cancel()
		return nil, err
	}
	s.resp = resp
	s.frames = guest.NewFrameReader(&surge{r: resp.Body, pool: &c.buffers})
	if err := s.begin(offset); err != nil {
		return nil, errors.Join(err, s.Close())
	}
	return s, nil
}

// begin reads the first frame.
func (s *Stream) begin(offset int64) error {
	t, payload, err := s.frames.Next()
	switch {
	case err != nil:
		return unavailable("start command", noEOF(err))
	case t == guest.FrameFailure:
		return parseFailure(payload)
	case t != guest.FrameStarted:
		return unavailable("start command", fmt.Errorf("frame %d first", t))
	}
	if err := json.Unmarshal(payload, &s.started); err != nil {
		return unavailable("start command", err)
	}
	if err := checkStarted(s.started, offset); err != nil {
		return unavailable("start command", err)
	}
	s.offset = s.started.Offset
	s.body.begin(s.started.Stdin)
	return nil
}

// maxOffset is more output than any command makes, and far from overflow.
const maxOffset = 1 << 60

// checkStarted refuses what no honest agent says, and what the host could not
// keep.
func checkStarted(st guest.Started, offset int64) error {
	switch {
	case st.Offset < offset || st.Offset > maxOffset:
		return fmt.Errorf("output from %d where %d was asked for", st.Offset, offset)
	case st.Stdin < 0 || st.Stdin > maxOffset:
		return fmt.Errorf("%d bytes of input received", st.Stdin)
	case len(st.WorkDir) > 2*cloche.MaxPathLen || strings.ContainsRune(st.WorkDir, 0):
		return fmt.Errorf("a working directory of %d bytes", len(st.WorkDir))
	case !st.StartedAt.IsZero() && (st.StartedAt.Year() < 1970 || st.StartedAt.Year() > 2200): // nanoseconds end in 2262
		return fmt.Errorf("started at %s", st.StartedAt)
	}
	return nil
}

// checkExit refuses an exit that no kernel gives.
func checkExit(e cloche.Exit) error {
	switch {
	case e.Code < 0 || e.Code > 255 || e.Signal < 0 || e.Signal > 64:
		return fmt.Errorf("exit code %d, signal %d", e.Code, e.Signal)
	case e.Cause != "" && e.Cause != cloche.CauseOOM && e.Cause != cloche.CauseTimeout:
		return fmt.Errorf("exit cause %.64q", e.Cause)
	}
	return nil
}

// Started is how the command started. It is the agent's word, within what can
// be true.
func (s *Stream) Started() guest.Started { return s.started }

// Next returns the next event, and io.EOF after the Exit. An end without one is
// CodeUnavailable: the stream broke.
func (s *Stream) Next() (Event, error) {
	if s.ended {
		return Event{}, io.EOF
	}
	for {
		t, payload, err := s.frames.Next()
		if err != nil {
			return Event{}, unavailable("read command", noEOF(err))
		}
		switch t {
		case guest.FrameStdout, guest.FrameStderr:
			if len(payload) == 0 {
				continue
			}
			s.offset += int64(len(payload))
			e := Event{Stream: cloche.Stdout, Data: payload, Offset: s.offset}
			if t == guest.FrameStderr {
				e.Stream = cloche.Stderr
			}
			return e, nil
		case guest.FrameStdinAck:
			n, err := guest.ParseAck(payload)
			if err != nil || !s.body.grant(n) {
				return Event{}, unavailable("read command", fmt.Errorf("input acknowledged to %d: %w", n, err))
			}
		case guest.FrameExit:
			var e cloche.Exit
			err := json.Unmarshal(payload, &e)
			if err == nil {
				err = checkExit(e)
			}
			if err != nil {
				return Event{}, unavailable("read command", err)
			}
			e.Duration = max(e.Duration, 0)
			s.ended = true
			return Event{Offset: s.offset, Exit: &e}, nil
		case guest.FrameFailure:
			return Event{}, parseFailure(payload)
		default:
			return Event{}, unavailable("read command", fmt.Errorf("frame %d", t))
		}
	}
}

// Ack tells the agent that the host keeps all output before offset. It never
// waits.
func (s *Stream) Ack(offset int64) { s.body.acknowledge(offset) }

// Resize sets the size of the command's terminal. It never waits.
func (s *Stream) Resize(size cloche.WindowSize) error { return s.body.resize(size) }

// CloseInput ends the command's input, for a stream by Attach whose first host
// has gone. It never waits.
func (s *Stream) CloseInput() { s.body.end() }

// Close ends the stream. The command runs on.
func (s *Stream) Close() error {
	s.cancel()
	return errors.Join(s.body.Close(), s.resp.Body.Close())
}

// copyInput copies in to the command. It needs Next to be called, which takes
// the credit for it.
func (s *Stream) copyInput(in io.Reader) {
	buf := make([]byte, stdinBuffer)
	for {
		n, err := in.Read(buf)
		if s.body.write(buf[:n]) < n {
			return
		}
		if err != nil {
			// A reader that failed ends the input too: a command that waited
			// for more would wait for ever.
			s.body.end()
			return
		}
	}
}

func noEOF(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
