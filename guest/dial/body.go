package dial

import (
	"encoding/json"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// errDetached: the call that the source belonged to has ended.
var errDetached = errors.New("the request has ended")

// source is a caller's reader as a request body. HTTP may read a body after the
// answer has come, and hides its errors: the source remembers the error, and
// reads no more once the call has ended.
type source struct {
	mu  sync.Mutex // held over each Read
	r   io.Reader  // nil = detached
	err error
}

// Read implements io.Reader.
func (s *source) Read(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.r == nil {
		return 0, errDetached
	}
	n, err := s.r.Read(p)
	if err != nil && err != io.EOF {
		s.err = err
	}
	return n, err
}

// detach waits for a Read in progress, lets none follow, and returns the error
// that the reader gave, if any.
func (s *source) detach() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.r = nil
	return s.err
}

const (
	// An acknowledgement goes out when it covers ackBytes, or ackDelay after
	// the first that did not: each costs the agent several system calls. The
	// delay bounds how long a process waits at a window that is nearly full of
	// small pieces.
	ackBytes = guest.Window / 4
	ackDelay = 10 * time.Millisecond
)

// frames is the request body of a command stream: what the host has to say, in
// order, with acknowledgements merged. Nobody but the stdin copier ever waits
// on it.
type frames struct {
	mu     sync.Mutex
	queue  []byte      // frames ready to be sent
	ack    int64       // latest acknowledgement
	acked  int64       // the one that was sent
	due    bool        // ack is to be sent
	timer  *time.Timer // makes it due; nil = none runs
	sent   int64       // bytes of input queued so far
	credit int64       // bytes of input that the agent has passed on
	eof    bool        // end of input queued
	closed bool
	change chan struct{} // closed and replaced at every change
}

func newFrames(first []byte) *frames { return &frames{queue: first, change: make(chan struct{})} }

func (f *frames) changedLocked() {
	close(f.change)
	f.change = make(chan struct{})
}

// Read implements io.Reader for the HTTP transport.
func (f *frames) Read(p []byte) (int, error) {
	for {
		f.mu.Lock()
		if f.closed {
			f.mu.Unlock()
			return 0, io.EOF
		}
		if len(f.queue) == 0 && f.due {
			f.acked, f.due = f.ack, false
			f.queue = guest.AppendAck(f.queue, guest.FrameAck, f.ack)
		}
		if len(f.queue) > 0 {
			n := copy(p, f.queue)
			f.queue = f.queue[n:]
			if len(f.queue) == 0 {
				f.queue = nil
			}
			f.mu.Unlock()
			return n, nil
		}
		change := f.change
		f.mu.Unlock()
		<-change
	}
}

// Close implements io.Closer: the transport calls it when the stream has ended.
func (f *frames) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.closed {
		f.closed = true
		f.stopLocked()
		f.changedLocked()
	}
	return nil
}

func (f *frames) acknowledge(offset int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if offset <= f.ack {
		return
	}
	f.ack = offset
	switch {
	case f.closed || f.due:
	case f.ack-f.acked >= ackBytes:
		f.dueLocked()
	case f.timer == nil:
		f.timer = time.AfterFunc(ackDelay, func() {
			f.mu.Lock()
			defer f.mu.Unlock()
			if f.timer != nil {
				f.dueLocked()
			}
		})
	}
}

func (f *frames) dueLocked() {
	f.due = true
	f.stopLocked()
	f.changedLocked()
}

func (f *frames) stopLocked() {
	if f.timer != nil {
		f.timer.Stop()
		f.timer = nil
	}
}

func (f *frames) resize(size cloche.WindowSize) error {
	payload, err := json.Marshal(size)
	if err != nil {
		return cloche.Internal("make resize frame", err)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.queue = guest.AppendFrame(f.queue, guest.FrameResize, payload)
	f.changedLocked()
	return nil
}

// grant takes the agent's FrameStdinAck, or false if it is impossible.
func (f *frames) grant(offset int64) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if offset < f.credit || offset > f.sent {
		return false
	}
	f.credit = offset
	f.changedLocked()
	return true
}

// begin sets how much input the agent had before this stream. Its first
// FrameStdinAck says how much of that it has passed on.
func (f *frames) begin(received int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.sent += received
}

// write queues input, waiting for credit. It returns how much it queued before
// the stream ended or the input's end was queued.
func (f *frames) write(p []byte) (n int) {
	for n < len(p) {
		f.mu.Lock()
		if f.closed || f.eof {
			f.mu.Unlock()
			return n
		}
		room := guest.StdinWindow - (f.sent - f.credit)
		k := min(int64(len(p)-n), room, guest.MaxFrame)
		if k <= 0 {
			change := f.change
			f.mu.Unlock()
			<-change
			continue
		}
		f.queue = guest.AppendFrame(f.queue, guest.FrameStdin, p[n:n+int(k)])
		f.sent += k
		n += int(k)
		f.changedLocked()
		f.mu.Unlock()
	}
	return n
}

// end queues the end of input, once.
func (f *frames) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.eof {
		f.eof = true
		f.queue = guest.AppendFrame(f.queue, guest.FrameStdinEOF, nil)
		f.changedLocked()
	}
}
