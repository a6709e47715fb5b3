// Package frames is the binary form of a command's output between our own
// client and the API: it carries any bytes, where the NDJSON form that other
// clients read carries text alone. It is a contract: constants and framing, no
// I/O but on the readers and writers that it is handed.
//
// A client asks for it with "Accept: application/vnd.cloche.frames". The answer
// is a sequence of frames: type (1 byte), length (4 bytes, big endian, at most
// MaxPayload), payload. To run a command:
//
//	Command, then any of Stdout, Stderr, Notice and Idle, then End or Failure
//
// and to read its log, the same without Command. An answer that ends before End
// or Failure was cut.
//
// A client that sends standard input sets "Cloche-Stdin: stream" on the request
// that runs the command. The request body is then the JSON of the command on
// one line, a newline, and the bytes of standard input until the body ends. The
// answer comes while the body is still being sent. A body that breaks off means
// that the client has gone, and the command is killed.
package frames

import (
	"encoding/binary"
	"fmt"
	"io"
)

// What a client puts into its request.
const (
	MediaType   = "application/vnd.cloche.frames" // value of Accept and of the answer's Content-Type
	StdinHeader = "Cloche-Stdin"
	StdinStream = "stream" // the only value of StdinHeader
)

// Type is the first byte of a frame.
type Type byte

// The frame types. A reader skips those that it does not know.
const (
	Idle    Type = 0 // empty: the stream is alive, there is just nothing to say
	Command Type = 1 // JSON, as "command" on the wire: it has started
	Stdout  Type = 2 // bytes
	Stderr  Type = 3 // bytes
	Notice  Type = 4 // bytes: text of ours, such as the mark where a log reached its bound
	End     Type = 5 // run: JSON, as "command" on the wire, with its exit; log: empty
	Failure Type = 6 // JSON {"code","message"}: how it ended is not known
)

// MaxPayload bounds one frame. Output comes in pieces of at most 64 KiB; a
// command's record holds its arguments.
const MaxPayload = 16 << 20

const headerLen = 5

// Append appends one frame to dst. The payload must be within MaxPayload.
func Append(dst []byte, t Type, payload []byte) []byte {
	dst = append(dst, byte(t))
	dst = binary.BigEndian.AppendUint32(dst, uint32(len(payload)))
	return append(dst, payload...)
}

// Reader reads frames. It is not safe for concurrent use.
type Reader struct {
	r   io.Reader
	buf []byte
}

// NewReader returns a Reader on r, which it reads without reading ahead.
func NewReader(r io.Reader) *Reader { return &Reader{r: r} }

// Next returns the next frame. The payload is valid until the next call. The
// error is io.EOF only between frames; inside one it is io.ErrUnexpectedEOF.
// A frame over MaxPayload is an error, and its payload is not read.
func (f *Reader) Next() (Type, []byte, error) {
	var h [headerLen]byte
	if _, err := io.ReadFull(f.r, h[:]); err != nil {
		return 0, nil, err
	}
	n := int64(binary.BigEndian.Uint32(h[1:]))
	if n > MaxPayload {
		return 0, nil, fmt.Errorf("frame %d: %d bytes exceed the bound", h[0], n)
	}
	if int64(cap(f.buf)) < n {
		f.buf = make([]byte, n)
	}
	f.buf = f.buf[:n]
	if _, err := io.ReadFull(f.r, f.buf); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return Type(h[0]), f.buf, nil
}
