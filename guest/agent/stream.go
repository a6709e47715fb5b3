package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// maxSend is how much of a command's output one write of its stream gathers.
const maxSend = 256 << 10

// appendJSON appends v as a frame.
func appendJSON(b []byte, t guest.FrameType, v any) ([]byte, error) {
	payload, err := json.Marshal(v)
	if err != nil {
		return b, fmt.Errorf("frame %d: %w", t, err)
	}
	if len(payload) > guest.MaxFrame {
		return b, fmt.Errorf("frame %d: %d bytes exceed the bound", t, len(payload))
	}
	return guest.AppendFrame(b, t, payload), nil
}

// serveStart starts a command and streams it.
func (a *Agent) serveStart(w http.ResponseWriter, r *http.Request) {
	frames := guest.NewFrameReader(r.Body)
	s, err := readStart(frames)
	if err != nil {
		a.answer(w, r, nil, err)
		return
	}
	c, err := a.start(r.Context(), cloche.CommandID(r.PathValue("id")), s)
	if err != nil {
		a.refuse(w, r, err)
		return
	}
	a.stream(w, r, c, frames, 0)
}

func readStart(frames *guest.FrameReader) (guest.Start, error) {
	var s guest.Start
	t, payload, err := frames.Next()
	if err != nil {
		return s, cloche.Errorf(cloche.CodeInvalid, "no start frame: %v", err)
	}
	if t != guest.FrameStart {
		return s, cloche.Errorf(cloche.CodeInvalid, "frame %d where a start frame was due", t)
	}
	if err := json.Unmarshal(payload, &s); err != nil {
		return s, cloche.Errorf(cloche.CodeInvalid, "start frame: %v", err)
	}
	return s, nil
}

// refuse answers with a FrameFailure.
func (a *Agent) refuse(w http.ResponseWriter, r *http.Request, err error) {
	w.WriteHeader(http.StatusOK)
	if err := guest.WriteFrameJSON(w, guest.FrameFailure, a.failure(r.Context(), err)); err != nil {
		a.log.WarnContext(r.Context(), "write failure", "error", err)
	}
}

// serveAttach goes on with the stream of a command that exists.
func (a *Agent) serveAttach(w http.ResponseWriter, r *http.Request) {
	c, err := a.command(r.PathValue("id"))
	if err != nil {
		a.answer(w, r, nil, err)
		return
	}
	frames := guest.NewFrameReader(r.Body)
	t, payload, err := frames.Next()
	if err != nil || t != guest.FrameAck {
		a.answer(w, r, nil, cloche.Errorf(cloche.CodeInvalid, "an attach begins with an acknowledgement"))
		return
	}
	offset, err := guest.ParseAck(payload)
	if err == nil {
		err = c.out.ack(offset)
	}
	if err != nil {
		a.answer(w, r, nil, err)
		return
	}
	a.stream(w, r, c, frames, offset)
}

// serveSignal sends a signal.
func (a *Agent) serveSignal(w http.ResponseWriter, r *http.Request) {
	var s guest.Signal
	err := decode(r.Body, &s)
	var c *command
	if err == nil {
		c, err = a.command(r.PathValue("id"))
	}
	var st guest.Status
	if err == nil {
		st, err = a.signal(c, s.Signal)
	}
	a.answer(w, r, st, err)
}

// stream carries one command over one request until its FrameExit, or until the
// host goes away or attaches anew. The command does not depend on it.
func (a *Agent) stream(w http.ResponseWriter, r *http.Request, c *command, frames *guest.FrameReader, offset int64) {
	ctx, cancel := context.WithCancel(r.Context())
	defer cancel()
	rc := http.NewResponseController(w)
	cut := time.Unix(1, 0)
	detach := c.attach(func() {
		cancel()
		// Errors mean that the stream has ended already.
		_ = rc.SetWriteDeadline(cut)
		_ = rc.SetReadDeadline(cut)
	})
	defer detach()
	var wg sync.WaitGroup
	wg.Go(func() {
		defer cancel()
		if err := c.receive(ctx, frames); err != nil {
			a.log.WarnContext(ctx, "command stream", "command", c.id, "error", err)
			_ = rc.SetWriteDeadline(cut)
		}
	})
	if err := a.send(ctx, w, rc, c, offset); err != nil && ctx.Err() == nil {
		a.log.WarnContext(ctx, "command stream", "command", c.id, "error", err)
	}
	cancel()
	_ = rc.SetReadDeadline(cut) // ends receive; fails only if the stream is gone, which ends it too
	wg.Wait()
}

// receive handles the host's frames until the stream ends. The host may close
// its direction and go on reading.
func (c *command) receive(ctx context.Context, frames *guest.FrameReader) error {
	for {
		t, payload, err := frames.Next()
		if errors.Is(err, io.EOF) {
			<-ctx.Done()
			return nil
		}
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return fmt.Errorf("read frame: %w", err)
		}
		if err := c.handle(t, payload); err != nil {
			return err
		}
	}
}

func (c *command) handle(t guest.FrameType, payload []byte) error {
	switch t {
	case guest.FrameAck:
		offset, err := guest.ParseAck(payload)
		if err != nil {
			return err
		}
		return c.out.ack(offset)
	case guest.FrameStdin:
		return c.in.push(payload)
	case guest.FrameStdinEOF:
		c.in.end()
		return nil
	case guest.FrameResize:
		var size cloche.WindowSize
		if err := json.Unmarshal(payload, &size); err != nil {
			return fmt.Errorf("resize frame: %w", err)
		}
		if c.pty != nil {
			_ = setSize(c.pty, size) // a PTY that is gone has no size
		}
		return nil
	}
	return fmt.Errorf("frame of type %d", t)
}

// send writes FrameStarted and then the output as it comes.
func (a *Agent) send(ctx context.Context, w io.Writer, rc *http.ResponseController, c *command, offset int64) error {
	info := c.info
	cur := cursor{offset: c.out.from(offset)}
	info.Offset, info.Stdin = cur.offset, c.in.total()
	buf, err := appendJSON(nil, guest.FrameStarted, info)
	for ended := false; err == nil; {
		if len(buf) > 0 {
			if _, err = w.Write(buf); err == nil {
				err = rc.Flush()
			}
			if err != nil || ended {
				return err
			}
		}
		buf, ended, err = c.out.append(ctx, &cur, buf[:0], maxSend)
	}
	return err
}
