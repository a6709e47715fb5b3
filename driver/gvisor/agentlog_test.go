package gvisor

import (
	"bufio"
	"bytes"
	"log/slog"
	"os"
	"strings"
	"testing"
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
