package main

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/guest/dial"
)

func TestGigabyteOfOutputAndASlowReader(t *testing.T) {
	m, c := configured(t)
	size := int64(1 << 30)
	if raceEnabled {
		size = 1 << 27
	}
	sh(t, c, "true")
	before := m.memory()
	id := cloche.NewCommandID()
	st, err := c.Run(t.Context(), id, guest.Start{Argv: []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	// Nobody acknowledges: the process stops at the window.
	produced := func() int64 {
		all, err := c.Status(t.Context())
		if err != nil || len(all) != 2 {
			t.Fatalf("%+v, %v", all, err)
		}
		return all[1].Output
	}
	eventually(t, "the window fills", func() bool { return produced() > guest.Window*3/4 })
	<-time.After(100 * time.Millisecond)
	if n := produced(); n > guest.Window {
		t.Errorf("%d bytes kept, the window is %d", n, guest.Window)
	}
	var total int64
	most := 0
	for i := 0; ; i++ {
		e, err := st.Next()
		if err != nil {
			t.Fatal(err)
		}
		if e.Exit != nil {
			if e.Exit.Code != 0 {
				t.Errorf("exit %+v", e.Exit)
			}
			break
		}
		total += int64(len(e.Data))
		st.Ack(e.Offset)
		if i%1000 == 0 {
			most = max(most, m.memory())
		}
	}
	if total != size {
		t.Errorf("%d bytes came", total)
	}
	if most > before+48<<10 {
		t.Errorf("the agent grew from %d to %d KiB", before, most)
	}
	t.Logf("agent: %d KiB before, %d KiB at most", before, most)
}

// numbers prints the numbers below n, four bytes each, to both streams in turn.
const numbers = `
import os, struct, sys
n = int(sys.argv[1])
i = 0
while i < n:
    k = min(n - i, 1 + (i * 7919) % 3000)
    os.write(1 + i % 2, b"".join(struct.pack(">I", j) for j in range(i, i + k)))
    i += k
`

// TestE1_ResumeGivesEveryByteOnce drops the connection at random points, with
// random parts acknowledged, and goes on from what was kept.
func TestE1_ResumeGivesEveryByteOnce(t *testing.T) {
	_, c := configured(t)
	rapid.Check(t, func(r *rapid.T) {
		total := rapid.IntRange(1, 400_000).Draw(r, "numbers")
		id := cloche.NewCommandID()
		ctx := t.Context()
		st, err := c.Run(ctx, id, guest.Start{Argv: []string{"/usr/bin/python3", "-c", numbers, fmt.Sprint(total)}}, nil)
		if err != nil {
			r.Fatal(err)
		}
		streams := map[cloche.Stream][]byte{}
		kept := int64(0)
		for exit := false; !exit; {
			cut := kept + int64(rapid.IntRange(0, 1_500_000).Draw(r, "cut"))
			for {
				e, err := st.Next()
				if err != nil {
					r.Fatalf("after %d bytes: %v", kept, err)
				}
				if e.Exit != nil {
					exit = true
					if e.Exit.Code != 0 {
						r.Errorf("exit %+v", e.Exit)
					}
					break
				}
				streams[e.Stream] = append(streams[e.Stream], e.Data...)
				kept = e.Offset
				if rapid.Bool().Draw(r, "ack") {
					st.Ack(kept)
				}
				if kept >= cut {
					break
				}
			}
			// Some streams are closed by the host, others replaced.
			if rapid.Bool().Draw(r, "close") {
				_ = st.Close()
			}
			old := st
			if st, err = c.Attach(ctx, id, kept); err != nil {
				r.Fatal(err)
			}
			_ = old.Close()
			if got := st.Started().Offset; got != kept {
				r.Fatalf("attached at %d, asked for %d", got, kept)
			}
		}
		if _, err := collect(st); err != nil {
			r.Fatalf("attach after the end: %v", err)
		}
		checkNumbers(r, streams, total)
		if err := c.Forget(ctx, id); err != nil {
			r.Error(err)
		}
	})
}

// checkNumbers checks that each stream has its numbers in order and that none
// is missing or there twice.
func checkNumbers(t rapid.TB, streams map[cloche.Stream][]byte, total int) {
	seen := 0
	for name, b := range streams {
		last := -1
		if len(b)%4 != 0 {
			t.Fatalf("%s has %d bytes", name, len(b))
		}
		for ; len(b) > 0; b = b[4:] {
			n := int(binary.BigEndian.Uint32(b))
			if n <= last {
				t.Fatalf("%s: %d after %d", name, n, last)
			}
			last = n
			seen++
		}
	}
	if seen != total {
		t.Fatalf("%d of %d numbers", seen, total)
	}
}

func TestCommandsOutliveTheirConnection(t *testing.T) {
	m, c := configured(t)
	id, st := begin(t, c, script("echo first; sleep 0.5; echo second"))
	if err := c.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := st.Next(); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("a stream whose connection is gone: %v", err)
	}
	c = m.client()
	if _, err := c.Configure(t.Context(), testConfig()); err != nil {
		t.Errorf("configure again: %v", err)
	}
	st, err := c.Attach(t.Context(), id, 0)
	if err != nil {
		t.Fatal(err)
	}
	r, err := collect(st)
	if err != nil || string(r.stdout) != "first\nsecond\n" || r.exit.Code != 0 {
		t.Errorf("%q, %+v, %v", r.stdout, r.exit, err)
	}
	if _, err := c.Attach(t.Context(), id, 1<<40); cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("attach beyond the end: %v", err)
	}
	all := int64(len("first\nsecond\n"))
	for _, from := range []int64{all, 0} { // the first of them acknowledges all
		st, err = c.Attach(t.Context(), id, from)
		if err != nil {
			t.Fatal(err)
		}
		if got := st.Started().Offset; got != all {
			t.Errorf("attach at %d to what is acknowledged goes on from %d", from, got)
		}
		if r, err := collect(st); err != nil || len(r.stdout) != 0 || r.exit.Code != 0 {
			t.Errorf("%+v, %v", r, err)
		}
	}
}

func TestInputGoesOnAfterAttach(t *testing.T) {
	_, c := configured(t)
	id := cloche.NewCommandID()
	in := bytes.Repeat([]byte("0123456789abcdef"), 1<<12)
	st, err := c.Run(t.Context(), id, script(fmt.Sprintf("head -c %d > /dev/null; echo got; sha256sum", len(in))), &endless{b: in})
	if err != nil {
		t.Fatal(err)
	}
	if e, err := st.Next(); err != nil || string(e.Data) != "got\n" {
		t.Fatalf("%+v, %v", e, err)
	}
	again, err := c.Attach(t.Context(), id, int64(len("got\n")))
	if err != nil {
		t.Fatal(err)
	}
	if got := again.Started().Stdin; got != int64(len(in)) {
		t.Errorf("the agent has had %d of %d bytes", got, len(in))
	}
	_ = st.Close()
	again.CloseInput()
	r, err := collect(again)
	if want := fmt.Sprintf("%x  -\n", sha256.Sum256(nil)); err != nil || string(r.stdout) != want {
		t.Errorf("%q, want %q, %v", r.stdout, want, err)
	}
}

// endless gives b and then blocks for ever.
type endless struct{ b []byte }

func (e *endless) Read(p []byte) (int, error) {
	if len(e.b) == 0 {
		select {}
	}
	n := copy(p, e.b)
	e.b = e.b[n:]
	return n, nil
}

func BenchmarkRunTrue(b *testing.B) {
	c := benchmarkClient(b)
	for b.Loop() {
		id := cloche.NewCommandID()
		st, err := c.Run(b.Context(), id, guest.Start{Argv: []string{"true"}}, nil)
		if err != nil {
			b.Fatal(err)
		}
		if _, err := collect(st); err != nil {
			b.Fatal(err)
		}
		if err := c.Forget(b.Context(), id); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPing(b *testing.B) {
	c := benchmarkClient(b)
	for b.Loop() {
		if _, err := c.Ping(b.Context()); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkOutput(b *testing.B) {
	c := benchmarkClient(b)
	const size = 100 << 20
	b.SetBytes(size)
	for b.Loop() {
		st, err := c.Run(b.Context(), cloche.NewCommandID(), guest.Start{Argv: []string{"head", "-c", fmt.Sprint(size), "/dev/zero"}}, nil)
		if err != nil {
			b.Fatal(err)
		}
		for {
			e, err := st.Next()
			if err != nil {
				b.Fatal(err)
			}
			if e.Exit != nil {
				break
			}
			st.Ack(e.Offset)
		}
		_ = st.Close()
	}
}

func benchmarkClient(b *testing.B) *dial.Client {
	m := startMachine(b, true)
	c := m.client()
	if _, err := c.Configure(b.Context(), testConfig()); err != nil {
		b.Fatal(err)
	}
	return c
}
