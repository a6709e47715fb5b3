package gvisor

import (
	"bufio"
	"bytes"
	"log/slog"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func agentLogOf(t testing.TB, input []byte) string {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	written := make(chan error)
	go func() {
		_, err := w.Write(input)
		if cerr := w.Close(); err == nil {
			err = cerr
		}
		written <- err
	}()
	var out bytes.Buffer
	copyAgentLog(r, slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug})))
	if err := <-written; err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestAgentLog(t *testing.T) {
	out := agentLogOf(t, []byte(`{"time":"x","level":"ERROR","msg":"request","request":"req_1"}`+"\nplain \"words\"\n"))
	for _, want := range []string{"level=WARN msg=agent", "request=req_1", `level=INFO msg=agent line="plain \"words\""`} {
		if !strings.Contains(out, want) {
			t.Errorf("log %q has no %q", out, want)
		}
	}
}

// TestAgentLogFlood: a guest cannot fill the host's log.
func TestAgentLogFlood(t *testing.T) {
	flood := bytes.Repeat(append(bytes.Repeat([]byte("x"), 100_000), '\n'), 2000)
	if out := agentLogOf(t, flood); len(out) > maxLogLines*(maxLogLine+200) {
		t.Errorf("%d bytes of log from %d of a guest", len(out), len(flood))
	}
}

func FuzzReadLine(f *testing.F) {
	f.Add([]byte("a\nb"))
	f.Add(bytes.Repeat([]byte("x"), agentLogBuffer+3))
	f.Add([]byte("\n\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bufio.NewReaderSize(bytes.NewReader(data), 16)
		n := 0
		for {
			line, err := readLine(r)
			if len(line) > maxLogLine || strings.Contains(line, "\n") {
				t.Fatalf("line of %d bytes: %q", len(line), line)
			}
			if err != nil {
				break
			}
			n++
			logAgentLine(slog.New(slog.DiscardHandler), line)
		}
		if want := bytes.Count(data, []byte("\n")); n != want {
			t.Errorf("%d lines, want %d", n, want)
		}
	})
}

// endless gives bytes without a line's end, and counts them.
type endless struct{ n int }

func (e *endless) Read(p []byte) (int, error) {
	e.n += len(p)
	return len(p), nil
}

// A machine that writes without end is read at a pace.
func TestAgentLogIsPaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := &endless{}
		r, began := &paced{r: source}, time.Now()
		for b := make([]byte, agentLogBuffer); source.n < 100*logPace; {
			if _, err := r.Read(b); err != nil {
				t.Fatal(err)
			}
		}
		if took := time.Since(began); took < 98*paceWindow || took > 101*paceWindow {
			t.Errorf("%d bytes were read in %s", source.n, took)
		}
	})
}
