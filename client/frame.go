package client

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/cloche-dev/cloche"
)

// FramesType is the media type of a binary-safe stream of a command's output.
// It is a sequence of frames: type (1 byte), length (4 bytes, big endian, at
// most MaxFrame), payload. A frame of an unknown type is passed over.
const FramesType = "application/vnd.cloche.frames"

// MaxFrame bounds the payload of a frame. Pieces of output are far smaller; a
// command's record carries its arguments.
const MaxFrame = 16 << 20

// The types of frames. A stream begins with FrameCommand, and ends with
// FrameExit or FrameError; without one of these it broke. An empty FrameStdout
// keeps a silent connection alive.
const (
	FrameCommand byte = 16 // {"command":Command}
	FrameStdout  byte = 17 // bytes
	FrameStderr  byte = 18 // bytes
	FrameExit    byte = 19 // {"command":Command} with an exit code
	FrameError   byte = 20 // {"code":"…","message":"…"}
)

const frameHeader = 5

// frameReader reads frames. Its buffer grows to the largest frame seen.
type frameReader struct {
	r   io.Reader
	buf []byte
}

// next returns the next frame; its payload is valid until the next call. The
// error is io.EOF only between frames.
func (f *frameReader) next() (byte, []byte, error) {
	var h [frameHeader]byte
	if _, err := io.ReadFull(f.r, h[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(h[1:])
	if n > MaxFrame {
		return 0, nil, fmt.Errorf("frame %d: %d bytes exceed the bound", h[0], n)
	}
	if uint32(cap(f.buf)) < n {
		f.buf = make([]byte, n)
	}
	f.buf = f.buf[:n]
	if _, err := io.ReadFull(f.r, f.buf); err != nil {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return h[0], f.buf, nil
}

// readFrames copies a command's output to stdout and stderr until its end. A
// nil writer drops its stream.
func readFrames(r io.Reader, started func(Command), stdout, stderr io.Writer) (Command, error) {
	frames := &frameReader{r: r}
	for {
		kind, payload, err := frames.next()
		if err != nil {
			return Command{}, broken(err)
		}
		switch kind {
		case FrameCommand:
			cmd, err := frameCommand(payload)
			if err != nil {
				return Command{}, err
			}
			if started != nil {
				started(cmd)
			}
		case FrameStdout:
			if err := output(stdout, payload); err != nil {
				return Command{}, &OutputError{Stream: cloche.Stdout, Err: err}
			}
		case FrameStderr:
			if err := output(stderr, payload); err != nil {
				return Command{}, &OutputError{Stream: cloche.Stderr, Err: err}
			}
		case FrameExit:
			cmd, err := frameCommand(payload)
			if err == nil && cmd.ExitCode == nil {
				err = fmt.Errorf("frame %d: no exit code", kind)
			}
			return cmd, err
		case FrameError:
			return Command{}, streamError(payload)
		}
	}
}

// OutputError says that the caller's own writer failed, not the stream.
type OutputError struct {
	Stream cloche.Stream
	Err    error
}

// Error names the stream.
func (e *OutputError) Error() string { return "write " + string(e.Stream) + ": " + e.Err.Error() }

// Unwrap returns the writer's error.
func (e *OutputError) Unwrap() error { return e.Err }

func output(w io.Writer, p []byte) error {
	if w == nil || len(p) == 0 {
		return nil
	}
	_, err := w.Write(p)
	return err
}

func frameCommand(payload []byte) (Command, error) {
	var v struct {
		Command Command `json:"command"`
	}
	if err := json.Unmarshal(payload, &v); err != nil {
		return Command{}, fmt.Errorf("command frame: %w", err)
	}
	return v.Command, nil
}

// streamError rebuilds the error that ends a stream.
func streamError(payload []byte) error {
	var f struct {
		Code    cloche.Code `json:"code"`
		Message string      `json:"message"`
	}
	if err := json.Unmarshal(payload, &f); err != nil {
		return fmt.Errorf("error at the end of a stream: %w", err)
	}
	return &cloche.Error{Code: f.Code, Message: f.Message}
}

// broken is the error for a stream that ended before the command's end did
// arrive: nothing is known about how the command ended, or whether it did.
func broken(err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return &cloche.Error{
		Code:    cloche.CodeUnavailable,
		Message: "the connection broke before the command's end was known",
		Err:     err,
	}
}
