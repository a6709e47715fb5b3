package guest

import (
	"bufio"
	"bytes"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/cloche-dev/cloche"
)

func reader(s string) *bufio.Reader {
	return bufio.NewReader(iotest.OneByteReader(strings.NewReader(s)))
}

func line(t testing.TB, v any) string {
	t.Helper()
	var b bytes.Buffer
	if err := writeLine(&b, v); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func TestHello(t *testing.T) {
	want := Hello{Nonce: "n", Token: "t", Min: 1, Max: 2}
	r := reader(line(t, want) + "PRI *")
	got, err := ReadHello(r)
	if err != nil || got != want {
		t.Errorf("%+v, %v", got, err)
	}
	if rest, err := io.ReadAll(r); err != nil || string(rest) != "PRI *" {
		t.Errorf("what follows: %q, %v", rest, err)
	}
	if err := WriteHello(io.Discard, Hello{Nonce: strings.Repeat("n", MaxHello)}); err == nil {
		t.Error("a line over the bound was written")
	}
	for _, bad := range []string{"", "cloche ", "cloche {}\n", `cloche {"nonce":"n"}`, "clochd {\"nonce\":\"n\"}\n", "\n" + line(t, want),
		"cloche [1]\n", strings.Repeat("x", 1<<20), `cloche {"nonce":"` + strings.Repeat("n", 129) + "\"}\n"} {
		if h, err := ReadHello(reader(bad)); err == nil {
			t.Errorf("%.40q gave %+v", bad, h)
		}
	}
}

func TestWelcomeAfterStaleBytes(t *testing.T) {
	want := Welcome{Nonce: "mine", Version: 1, Agent: "cloche cloche {"}
	answer := line(t, want)
	for name, stale := range map[string]string{
		"none":            "",
		"frames":          "\x00\x00\x10\x00\x00\x00\x00\x00\x01 and \n some \n",
		"no newline":      "half a fra",
		"another's":       line(t, Welcome{Nonce: "other", Version: 1}),
		"a cut one":       line(t, want)[:20],
		"a cut other one": `cloche {"nonce":"oth`,
		"the prefix":      "cloche cloche cloche ",
		"much":            strings.Repeat("x", 3<<20),
		"many lines":      strings.Repeat("x\n", 1<<20),
		"a long line":     strings.Repeat("y", 5*MaxHello+17),
	} {
		r := bufio.NewReader(strings.NewReader(stale + answer + "rest"))
		got, err := ReadWelcome(r, "mine")
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v", name, got, err)
			continue
		}
		if rest, err := io.ReadAll(r); err != nil || string(rest) != "rest" {
			t.Errorf("%s: what follows: %.40q, %v", name, rest, err)
		}
	}
}

func TestWelcomeBounds(t *testing.T) {
	endless := io.MultiReader(strings.NewReader("start"), zeros{})
	if w, err := ReadWelcome(bufio.NewReader(endless), "n"); err == nil {
		t.Errorf("stale bytes without end gave %+v", w)
	}
	// An agent that knows the nonce cannot make the host parse for ever.
	near := strings.Repeat("cloche {\"nonce\":\"mine\" ", 300) + "\n"
	if w, err := ReadWelcome(bufio.NewReader(strings.NewReader(strings.Repeat(near, 5000))), "mine"); err == nil || strings.Contains(err.Error(), "EOF") {
		t.Errorf("near misses gave %+v, %v", w, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func TestNegotiate(t *testing.T) {
	for _, tc := range [][5]int{{1, 1, 1, 1, 1}, {1, 5, 2, 3, 3}, {2, 2, 1, 3, 2}, {0, 100, 1, 1, 1}, {3, 4, 1, 2, 0}, {1, 1, 2, 3, 0}, {3, 1, 1, 3, 0}} {
		v, f := Negotiate(tc[0], tc[1], tc[2], tc[3])
		if v != tc[4] || (f == nil) != (v != 0) {
			t.Errorf("%v: %d, %+v", tc, v, f)
		}
		if f != nil && (f.Code != CodeVersion || cloche.ErrorCode(f.Err()) != CodeVersion) {
			t.Errorf("%v: %+v", tc, f)
		}
	}
	if err := (*Failure)(nil).Err(); err != nil {
		t.Errorf("no failure is %v", err)
	}
}

func FuzzHello(f *testing.F) {
	f.Add([]byte(line(f, Hello{Nonce: "n", Token: "t", Min: 1, Max: 1})))
	f.Add([]byte("cloche {\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		h, err := ReadHello(bufio.NewReader(bytes.NewReader(data)))
		if err == nil && (h.Nonce == "" || len(h.Nonce) > maxNonce || len(data) < len(HelloPrefix)) {
			t.Fatalf("%q gave %+v", data, h)
		}
	})
}

func FuzzWelcome(f *testing.F) {
	f.Add([]byte("stale\n"+line(f, Welcome{Nonce: "mine", Version: 1})), "mine")
	f.Add([]byte(`cloche {"nonce":"oth`+line(f, Welcome{Nonce: "mine"})), "mine")
	f.Fuzz(func(t *testing.T, data []byte, nonce string) {
		w, err := ReadWelcome(bufio.NewReader(bytes.NewReader(data)), nonce)
		if err == nil && w.Nonce != nonce {
			t.Fatalf("%q gave %+v", data, w)
		}
	})
}
