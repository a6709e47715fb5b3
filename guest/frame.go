package guest

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
)

// FrameType is the first byte of a frame.
type FrameType byte

// The frame types. Numbers below 16 go to the agent, the others to the host.
const (
	FrameStart    FrameType = 1 // Start as JSON
	FrameStdin    FrameType = 2 // bytes
	FrameStdinEOF FrameType = 3 // empty
	FrameAck      FrameType = 4 // 8 bytes, big endian: all before it is kept by the host
	FrameResize   FrameType = 5 // cloche.WindowSize as JSON

	FrameStarted FrameType = 16 // Started as JSON
	FrameStdout  FrameType = 17 // bytes
	FrameStderr  FrameType = 18 // bytes
	FrameExit    FrameType = 19 // cloche.Exit as JSON
	FrameFailure FrameType = 20 // Failure as JSON

	// FrameStdinAck is the credit for FrameStdin, 8 bytes, big endian: that
	// many bytes of input have left the agent.
	FrameStdinAck FrameType = 21
)

const frameHeader = 5

// maxPayload is the bound on the payload of a frame of type t.
func maxPayload(t FrameType) int {
	if t == FrameStart {
		return MaxStart
	}
	return MaxFrame
}

// WriteFrame writes one frame in one call of w.Write. It fails without writing
// if the payload is over the bound of its type. Callers serialize.
func WriteFrame(w io.Writer, t FrameType, payload []byte) error {
	if len(payload) > maxPayload(t) {
		return fmt.Errorf("frame %d: %d bytes exceed the bound", t, len(payload))
	}
	b := make([]byte, frameHeader, frameHeader+len(payload))
	b[0] = byte(t)
	binary.BigEndian.PutUint32(b[1:], uint32(len(payload)))
	_, err := w.Write(append(b, payload...))
	return err
}

// WriteFrameJSON writes v as the payload of a frame.
func WriteFrameJSON(w io.Writer, t FrameType, v any) error {
	payload, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("frame %d: %w", t, err)
	}
	return WriteFrame(w, t, payload)
}

// AppendFrame appends one frame to b, for writers that gather several. The
// payload must be within the bound of its type.
func AppendFrame(b []byte, t FrameType, payload []byte) []byte {
	b = append(b, byte(t))
	b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
	return append(b, payload...)
}

// AppendAck appends a FrameAck or FrameStdinAck to b.
func AppendAck(b []byte, t FrameType, offset int64) []byte {
	return AppendFrame(b, t, binary.BigEndian.AppendUint64(nil, uint64(offset)))
}

// WriteAck writes a FrameAck.
func WriteAck(w io.Writer, offset int64) error {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], uint64(offset))
	return WriteFrame(w, FrameAck, b[:])
}

// ParseAck reads the payload of a FrameAck or a FrameStdinAck.
func ParseAck(payload []byte) (int64, error) {
	if len(payload) != 8 {
		return 0, fmt.Errorf("ack frame of %d bytes", len(payload))
	}
	n := int64(binary.BigEndian.Uint64(payload))
	if n < 0 {
		return 0, fmt.Errorf("ack frame: offset %d", n)
	}
	return n, nil
}

// FrameReader reads frames. Its buffer grows to the largest frame seen, which
// maxPayload bounds. It is not safe for concurrent use.
type FrameReader struct {
	r   io.Reader
	buf []byte
}

// NewFrameReader returns a FrameReader on r, which it reads without reading
// ahead.
func NewFrameReader(r io.Reader) *FrameReader { return &FrameReader{r: r} }

// Next returns the next frame. The payload is valid until the next call. The
// error is io.EOF only between frames; inside one it is io.ErrUnexpectedEOF. A
// frame over its bound is an error, and its payload is not read.
func (f *FrameReader) Next() (FrameType, []byte, error) {
	var h [frameHeader]byte
	if _, err := io.ReadFull(f.r, h[:]); err != nil {
		return 0, nil, err
	}
	t, n := FrameType(h[0]), int(binary.BigEndian.Uint32(h[1:]))
	if n > maxPayload(t) {
		return 0, nil, fmt.Errorf("frame %d: %d bytes exceed the bound", t, n)
	}
	if cap(f.buf) < n {
		f.buf = make([]byte, n)
	}
	f.buf = f.buf[:n]
	if _, err := io.ReadFull(f.r, f.buf); err != nil {
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		return 0, nil, err
	}
	return t, f.buf, nil
}
