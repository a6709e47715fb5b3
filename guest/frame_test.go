package guest

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestFramesRoundTrip(t *testing.T) {
	var b bytes.Buffer
	sent := []struct {
		t       FrameType
		payload []byte
	}{
		{FrameStart, bytes.Repeat([]byte("s"), MaxStart)}, {FrameStdin, []byte("\x00\xff\n")}, {FrameStdinEOF, nil},
		{FrameStdout, bytes.Repeat([]byte("o"), MaxFrame)}, {FrameStderr, []byte("e")}, {FrameExit, []byte("{}")},
	}
	for i, f := range sent {
		if i%2 == 0 {
			if err := WriteFrame(&b, f.t, f.payload); err != nil {
				t.Fatal(err)
			}
		} else {
			b.Write(AppendFrame(nil, f.t, f.payload))
		}
	}
	r := NewFrameReader(iotest.HalfReader(&b))
	for _, want := range sent {
		got, payload, err := r.Next()
		if err != nil || got != want.t || !bytes.Equal(payload, want.payload) {
			t.Fatalf("frame %d: type %d, %d bytes, %v", want.t, got, len(payload), err)
		}
	}
	if _, _, err := r.Next(); err != io.EOF {
		t.Errorf("after the last frame: %v", err)
	}
}

func TestFrameBounds(t *testing.T) {
	var b bytes.Buffer
	if err := WriteFrame(&b, FrameStdout, make([]byte, MaxFrame+1)); err == nil || b.Len() != 0 {
		t.Errorf("a frame over the bound was written: %d bytes, %v", b.Len(), err)
	}
	if err := WriteFrameJSON(&b, FrameStarted, strings.Repeat("x", MaxFrame)); err == nil || b.Len() != 0 {
		t.Errorf("JSON over the bound was written: %d bytes, %v", b.Len(), err)
	}
	for _, head := range [][]byte{{17, 0, 1, 0, 1}, {17, 255, 255, 255, 255}, {1, 0, 64, 0, 1}, {200, 0, 1, 0, 1}} {
		f := NewFrameReader(bytes.NewReader(head))
		if _, _, err := f.Next(); err == nil || errors.Is(err, io.ErrUnexpectedEOF) || f.buf != nil {
			t.Errorf("%v: %v", head, err)
		}
	}
	for n := 1; n < 10; n++ {
		cut := AppendFrame(nil, FrameStdout, []byte("hello"))[:n]
		if _, _, err := NewFrameReader(bytes.NewReader(cut)).Next(); err != io.ErrUnexpectedEOF {
			t.Errorf("cut at %d: %v", n, err)
		}
	}
}

func TestAck(t *testing.T) {
	for _, n := range []int64{0, 1, 1 << 62} {
		var b bytes.Buffer
		if err := WriteAck(&b, n); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(b.Bytes(), AppendAck(nil, FrameAck, n)) {
			t.Error("WriteAck and AppendAck differ")
		}
		ft, payload, err := NewFrameReader(&b).Next()
		if err != nil || ft != FrameAck {
			t.Fatal(ft, err)
		}
		if got, err := ParseAck(payload); err != nil || got != n {
			t.Errorf("%d: %d, %v", n, got, err)
		}
	}
	for _, bad := range [][]byte{nil, make([]byte, 7), make([]byte, 9), bytes.Repeat([]byte{255}, 8)} {
		if n, err := ParseAck(bad); err == nil {
			t.Errorf("%v gave %d", bad, n)
		}
	}
}

func FuzzFrameReader(f *testing.F) {
	f.Add(AppendFrame(AppendFrame(nil, FrameStdout, []byte("hello")), FrameExit, []byte(`{"code":0}`)))
	f.Add([]byte{1, 0, 63, 255, 255, 0})
	f.Add([]byte{17, 0, 1, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := NewFrameReader(bytes.NewReader(data))
		var again []byte
		for {
			ft, payload, err := r.Next()
			if err != nil {
				break
			}
			if len(payload) > maxPayload(ft) {
				t.Fatalf("frame %d of %d bytes", ft, len(payload))
			}
			again = AppendFrame(again, ft, payload)
		}
		if !bytes.HasPrefix(data, again) {
			t.Fatal("what was read is not what was there")
		}
	})
}
