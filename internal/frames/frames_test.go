package frames

import (
	"bytes"
	"errors"
	"io"
	"testing"
)

func TestRoundTrip(t *testing.T) {
	var b []byte
	b = Append(b, Idle, nil)
	b = Append(b, Stdout, []byte{0, 255, '\n'})
	b = Append(b, End, []byte("{}"))
	r := NewReader(bytes.NewReader(b))
	for _, want := range []struct {
		t Type
		p string
	}{{Idle, ""}, {Stdout, "\x00\xff\n"}, {End, "{}"}} {
		typ, p, err := r.Next()
		if err != nil || typ != want.t || string(p) != want.p {
			t.Fatalf("got %d %q %v, want %d %q", typ, p, err, want.t, want.p)
		}
	}
	if _, _, err := r.Next(); err != io.EOF {
		t.Fatalf("after the last frame: %v, want EOF", err)
	}
}

func TestCutFrameIsNotTheEnd(t *testing.T) {
	whole := Append(nil, Stdout, []byte("abc"))
	for n := 1; n < len(whole); n++ {
		if _, _, err := NewReader(bytes.NewReader(whole[:n])).Next(); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Fatalf("%d bytes: %v, want ErrUnexpectedEOF", n, err)
		}
	}
}

func FuzzReader(f *testing.F) {
	f.Add(Append(Append(nil, Command, []byte("{}")), End, nil))
	f.Add([]byte{2, 0xff, 0xff, 0xff, 0xff, 1})
	f.Fuzz(func(t *testing.T, in []byte) {
		r := NewReader(bytes.NewReader(in))
		var out []byte
		for {
			typ, p, err := r.Next()
			if err != nil {
				break
			}
			out = Append(out, typ, p)
		}
		if !bytes.HasPrefix(in, out) {
			t.Fatalf("frames read from %x encode to %x", in, out)
		}
	})
}
