package vercel

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/cloche-dev/cloche"
)

// decodeText returns the text of data that came in pieces of size n.
func decodeText(t *testing.T, data []byte, n int) string {
	t.Helper()
	var x text
	var inside []byte
	for len(data) > 0 {
		k := min(n, len(data))
		inside = x.append(inside, data[:k])
		data = data[k:]
	}
	inside = x.finish(inside)
	for _, b := range inside {
		if b >= utf8.RuneSelf || b < ' ' {
			t.Fatalf("byte %#x in %q", b, inside)
		}
	}
	var s string
	if err := json.Unmarshal([]byte(`"`+string(inside)+`"`), &s); err != nil {
		t.Fatalf("%q: %v", inside, err)
	}
	return s
}

// replaced is what the bytes are as text: each that belongs to no character is
// one U+FFFD.
func replaced(data []byte) string { return string([]rune(string(data))) }

func TestTextOfAnyPieces(t *testing.T) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for _, s := range []string{
		"", "plain", "\"\\\n\r\t\x00\x7f<>&", "ü€𝄞\u2028\ufeff", string(all), "a\xff", "\xe2\x82", "\xe2\x82A", "\xf0\x9d\x84",
		"\xf0\x9d\xf0\x9d\x84\x9e", "\xe2\xe2\x82\xac", "\xed\xa0\x80", "\xc0\x80", "\xf4\x90\x80\x80", "x\xc3", strings.Repeat("\xf0", 9),
	} {
		for n := 1; n <= max(len(s), 1); n++ {
			if got, want := decodeText(t, []byte(s), n), replaced([]byte(s)); got != want {
				t.Errorf("%q in pieces of %d: %q, want %q", s, n, got, want)
			}
		}
	}
}

// TestTextHoldsBackCharacters: a line never ends within a character.
func TestTextHoldsBackCharacters(t *testing.T) {
	l := &lines{}
	var got []string
	for _, e := range []cloche.LogEntry{
		{Stream: cloche.Stdout, Data: []byte("a\xe2")}, {Stream: cloche.Stderr, Data: []byte("e\n")},
		{Stream: cloche.Stdout, Data: []byte("\x82")}, {Stream: cloche.Stdout, Data: []byte("\xacb")},
		{Stream: cloche.StreamNotice, Data: []byte("cut")}, {Stream: cloche.Stderr, Data: []byte("\xf0")},
	} {
		got = append(got, string(l.entry(nil, e)))
	}
	got = append(got, string(l.finish(nil)))
	want := []string{
		`{"stream":"stdout","data":"a"}` + "\n", `{"stream":"stderr","data":"e\n"}` + "\n", "",
		`{"stream":"stdout","data":"\u20acb"}` + "\n", `{"stream":"stderr","data":"cut"}` + "\n", "",
		`{"stream":"stderr","data":"\ufffd"}` + "\n",
	}
	for i := range want {
		if got[i] != want[i] {
			t.Errorf("%d: %q, want %q", i, got[i], want[i])
		}
	}
}

func FuzzText(f *testing.F) {
	f.Add([]byte("ü\xff\"\n"), uint8(1))
	f.Add([]byte("\xf0\x9d\xf0\x9d\x84\x9e\xe2\x82"), uint8(3))
	f.Fuzz(func(t *testing.T, data []byte, n uint8) {
		if got, want := decodeText(t, data, int(n)+1), replaced(data); got != want {
			t.Errorf("%q in pieces of %d: %q, want %q", data, n, got, want)
		}
	})
}
