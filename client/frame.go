package client

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/frames"
)

// reading is how frames are read: what becomes of each kind. A nil writer drops
// its stream.
type reading struct {
	started        func(Command) // may be nil
	stdout, stderr io.Writer
}

// run reads the answer to a command that runs, to its end.
func (r reading) run(body io.Reader) (Command, error) {
	payload, err := r.copy(body)
	if err != nil {
		return Command{}, err
	}
	cmd, err := frameCommand(payload)
	if err == nil && cmd.ExitCode == nil {
		err = errors.New("end of the command: no exit code")
	}
	return cmd, err
}

// copy writes output until the End frame, and returns its payload. A stream
// that ends otherwise broke, or gives the server's reason.
func (r reading) copy(body io.Reader) ([]byte, error) {
	in := frames.NewReader(body)
	for {
		kind, payload, err := in.Next()
		if err != nil {
			return nil, broken(err)
		}
		switch kind {
		case frames.Command:
			cmd, err := frameCommand(payload)
			if err != nil {
				return nil, err
			}
			if r.started != nil {
				r.started(cmd)
			}
		case frames.Stdout:
			err = output(r.stdout, cloche.Stdout, payload)
		case frames.Stderr:
			err = output(r.stderr, cloche.Stderr, payload)
		case frames.Notice:
			err = output(r.stderr, cloche.StreamNotice, payload)
		case frames.End:
			return payload, nil
		case frames.Failure:
			return nil, streamError(payload)
		}
		if err != nil {
			return nil, err
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

func output(w io.Writer, stream cloche.Stream, p []byte) error {
	if w == nil || len(p) == 0 {
		return nil
	}
	if _, err := w.Write(p); err != nil {
		return &OutputError{Stream: stream, Err: err}
	}
	return nil
}

func frameCommand(payload []byte) (Command, error) {
	var cmd Command
	if err := json.Unmarshal(payload, &cmd); err != nil {
		return Command{}, fmt.Errorf("command frame: %w", err)
	}
	return cmd, nil
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
