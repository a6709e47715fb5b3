package agent

import (
	"os"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// endOfTransmission is what a terminal takes for the end of input, ^D.
const endOfTransmission = 4

// input carries a command's standard input from the frames to the process, so
// that a process that does not read never holds up the frames behind it.
type input struct {
	out *output
	w   *os.File // nil = at EOF from the start
	pty bool

	mu       sync.Mutex
	queue    [][]byte
	received int64 // bytes pushed
	passed   int64 // bytes that left the queue
	eof      bool  // FrameStdinEOF came
	stopped  bool  // the command has ended
	change   chan struct{}
}

// newInput returns the input of a command; run must be called.
func newInput(out *output, w *os.File, pty, open bool) *input {
	return &input{out: out, w: w, pty: pty, eof: !open, change: make(chan struct{}, 1)}
}

// push queues a copy of data. It fails if the host is more than StdinWindow
// ahead of what was acknowledged.
func (in *input) push(data []byte) error {
	in.mu.Lock()
	defer in.mu.Unlock()
	n := int64(len(data))
	switch {
	case in.stopped:
		in.received += n
		in.passed += n
		in.out.inputDone(len(data))
		return nil
	case in.eof:
		return cloche.Errorf(cloche.CodeInvalid, "input after its end")
	case in.received-in.passed+n > guest.StdinWindow:
		return cloche.Errorf(cloche.CodeInvalid, "more than %d bytes of input ahead of their acknowledgement", guest.StdinWindow)
	case n == 0:
		return nil
	}
	in.received += n
	in.queue = append(in.queue, append([]byte(nil), data...))
	in.signal()
	return nil
}

// end marks the end of input.
func (in *input) end() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.eof = true
	in.signal()
}

// stop ends run; what comes later is acknowledged and dropped.
func (in *input) stop() {
	in.mu.Lock()
	in.stopped = true
	in.signal()
	in.mu.Unlock()
	if in.w != nil {
		_ = in.w.SetWriteDeadline(time.Unix(1, 0)) // fails only if it is closed already
	}
}

// total is how much input has come.
func (in *input) total() int64 {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.received
}

func (in *input) signal() {
	select {
	case in.change <- struct{}{}:
	default:
	}
}

// run writes the queue to the process until the end of input or of the command.
// A process that closed its input loses the rest, as in a shell's pipeline.
func (in *input) run() {
	broken := in.w == nil
	closed := in.w == nil
	for {
		data, eof, stopped := in.take()
		switch {
		case data != nil:
			if !broken && !stopped {
				_, err := in.w.Write(data)
				broken = err != nil
			}
			in.mu.Lock()
			in.passed += int64(len(data))
			in.mu.Unlock()
			in.out.inputDone(len(data))
			continue
		case !closed && (eof || stopped):
			closed = true
			in.finish(eof && !stopped)
		}
		if stopped {
			return
		}
		<-in.change
	}
}

func (in *input) take() (data []byte, eof, stopped bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if len(in.queue) > 0 {
		data, in.queue = in.queue[0], in.queue[1:]
	}
	return data, in.eof, in.stopped
}

// finish tells the process that no more will come.
func (in *input) finish(told bool) {
	if !in.pty {
		_ = in.w.Close() // what was written is in the pipe
		return
	}
	if told {
		// The PTY's master is the pump's to close.
		_, _ = in.w.Write([]byte{endOfTransmission}) // a PTY that is gone needs no end
	}
}
