package gvisor

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// The agent's standard error is a FIFO in the machine's state directory, so it
// outlives this process as the machine does: the next one reads on. What comes
// out of it is the machine's word, written by whoever is root in there: it is
// bounded in length and in rate, and quoted in our log, never believed. Reading is
// bounded too, lest a machine use our CPU instead of its own. While no server
// runs, an agent that says more than a pipe holds waits for the next one.
const (
	maxLogLine     = 2 << 10 // bytes kept of one line
	maxLogLines    = 200     // of one machine, in each logWindow
	logWindow      = 10 * time.Second
	maxRequestID   = 128
	logPace        = 256 << 10 // bytes read of one machine in each paceWindow
	paceWindow     = time.Second
	fileAgentLog   = "agent.log"
	agentLogBuffer = 64 << 10
)

// agentLogs copies agents' logs to ours. The zero value is ready.
type agentLogs struct {
	mu     sync.Mutex
	files  map[cloche.SessionID]*os.File // guarded by mu; being read
	closed bool                          // guarded by mu
	wg     sync.WaitGroup
}

// makeAgentLog makes the FIFO for a machine whose state is in dir.
func makeAgentLog(dir string) error {
	return unix.Mkfifo(filepath.Join(dir, fileAgentLog), 0o600)
}

// follow starts to copy the log of a machine that runs, unless that is being
// done. It ends with the machine or by close.
func (l *agentLogs) follow(m *machine) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed || l.files[m.ID()] != nil {
		return nil
	}
	// The sentry has it open too, so this neither blocks nor reads an end.
	f, err := os.OpenFile(filepath.Join(m.dir, fileAgentLog), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("agent log: %w", err)
	}
	if l.files == nil {
		l.files = map[cloche.SessionID]*os.File{}
	}
	l.files[m.ID()] = f
	l.wg.Go(func() {
		copyAgentLog(&paced{r: f}, m.d.log.With("session", m.ID()))
		l.mu.Lock()
		defer l.mu.Unlock()
		_ = f.Close() // read only, and perhaps closed by close
		delete(l.files, m.ID())
	})
	return nil
}

// close ends all copying.
func (l *agentLogs) close() {
	l.mu.Lock()
	l.closed = true
	for _, f := range l.files {
		_ = f.Close() // read only; it makes the reader return
	}
	l.mu.Unlock()
	l.wg.Wait()
}

// copyAgentLog reads lines until the end of r.
func copyAgentLog(r io.Reader, log *slog.Logger) {
	lines := bufio.NewReaderSize(r, agentLogBuffer)
	var start time.Time
	n, dropped := 0, 0
	for {
		line, err := readLine(lines)
		if err != nil {
			return
		}
		if now := time.Now(); now.Sub(start) > logWindow {
			if dropped > 0 {
				log.Warn("agent log: lines dropped", "lines", dropped)
			}
			start, n, dropped = now, 0, 0
		}
		if n++; n > maxLogLines {
			dropped++
			continue
		}
		logAgentLine(log, line)
	}
}

// paced reads at most logPace bytes in each paceWindow; whoever writes more waits.
type paced struct {
	r     io.Reader
	start time.Time
	n     int
}

// Read implements io.Reader.
func (p *paced) Read(b []byte) (int, error) {
	if now := time.Now(); now.Sub(p.start) >= paceWindow {
		p.start, p.n = now, 0
	} else if p.n >= logPace {
		time.Sleep(paceWindow - now.Sub(p.start)) // an end is seen that much later
		p.start, p.n = time.Now(), 0
	}
	n, err := p.r.Read(b[:min(len(b), logPace)])
	p.n += n
	return n, err
}

// readLine returns the next line without its end, cut at maxLogLine.
func readLine(r *bufio.Reader) (string, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part[:min(len(part), maxLogLine-len(line))]...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return strings.TrimRight(string(line), "\n"), err
		}
	}
}

// logAgentLine logs a line as it is, with the level and the request id that it
// claims, if it is one of the agent's JSON lines.
func logAgentLine(log *slog.Logger, line string) {
	var claim struct {
		Level   slog.Level `json:"level"`
		Request string     `json:"request"`
	}
	attrs := []slog.Attr{slog.String("line", line)}
	if err := json.Unmarshal([]byte(line), &claim); err != nil {
		claim.Level = slog.LevelInfo
	} else if claim.Request != "" && len(claim.Request) <= maxRequestID {
		attrs = append(attrs, slog.String("request", claim.Request))
	}
	claim.Level = min(max(claim.Level, slog.LevelDebug), slog.LevelWarn) // an error of the guest's is none of ours
	log.LogAttrs(context.Background(), claim.Level, "agent", attrs...)
}
