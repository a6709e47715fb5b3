package e2e

import (
	"bytes"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
	"github.com/cloche-dev/cloche/internal/testenv"
)

// cutter is a TCP proxy that cuts its first connections after some bytes of
// their answers, as middleboxes do.
type cutter struct {
	target string
	after  int64        // bytes of an answer
	left   atomic.Int32 // connections that are still to be cut
	conns  atomic.Int32
	wg     sync.WaitGroup
}

// newCutter listens until the end of the test and returns its URL.
func newCutter(t *testing.T, target string, cuts int32, after int64) (c *cutter, url string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c = &cutter{target: target, after: after}
	c.left.Store(cuts)
	c.wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return // the listener is closed
			}
			c.wg.Go(func() { c.serve(conn) })
		}
	})
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		c.wg.Wait()
	})
	return c, "http://" + l.Addr().String()
}

func (c *cutter) serve(front net.Conn) {
	defer front.Close()
	c.conns.Add(1)
	back, err := net.Dial("tcp", c.target)
	if err != nil {
		return // the client sees a connection that ends
	}
	defer back.Close()
	c.wg.Go(func() {
		_, _ = io.Copy(back, front) // ends with either
		_ = back.Close()
	})
	limit := int64(1 << 62)
	if c.left.Add(-1) >= 0 {
		limit = c.after
	}
	_, _ = io.Copy(front, io.LimitReader(back, limit)) // as above
}

// TestE1_ReaderCutThreeTimes: whoever reads a log over a line that breaks finds
// everything again, once.
func TestE1_ReaderCutThreeTimes(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	cmd, err := s.c.Start(t.Context(), v.Session.ID, client.Run{Command: "bash", Args: []string{"-c",
		"for n in $(seq 10); do for i in $(seq 500); do echo line $((i + 500*(n-1))); done; sleep 0.1; done"}})
	if err != nil {
		t.Fatal(err)
	}
	proxy, url := newCutter(t, strings.TrimPrefix(s.url, "http://"), 3, 10_000)
	c, err := client.New(url, s.token("default", "default"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	through := s.in(t)
	through.c = c
	wholeLog(through, v.Session.ID, cmd.ID)
	if n := proxy.conns.Load(); n < 4 {
		t.Errorf("%d connections: it was not cut three times", n)
	}
	// So does a reader without our client's care, by reading from the start.
	if log := logOf(s, v.Session.ID, cmd.ID); strings.Count(log, "\n") != 5000 {
		t.Errorf("%d lines", strings.Count(log, "\n"))
	}
}

// TestForegroundCut: a foreground command whose line breaks is reported as
// such, never as ended, and its log is there.
func TestForegroundCut(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	_, url := newCutter(t, strings.TrimPrefix(s.url, "http://"), 1, 5_000)
	c, err := client.New(url, s.token("default", "default"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	var started client.Command
	_, err = c.Run(t.Context(), v.Session.ID, client.Run{Command: "bash", Args: []string{"-c", "seq 2000; sleep 500"},
		Started: func(cmd client.Command) { started = cmd }})
	if cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("a line that broke: %v", err)
	}
	got, err := s.c.WaitCommand(t.Context(), v.Session.ID, started.ID)
	if err != nil || got.ExitCode == nil || *got.ExitCode != 137 {
		t.Errorf("the command after it: %+v, %v", got, err)
	}
	if log := logOf(s, v.Session.ID, started.ID); strings.Count(log, "\n") != 2000 {
		t.Errorf("%d lines", strings.Count(log, "\n"))
	}
}

// TestE1_E7_LongSilence: nobody ends a command that says nothing for 20 minutes.
func TestE1_E7_LongSilence(t *testing.T) {
	testenv.Soak(t)
	s := newServer(t)
	v := s.create(client.Create{Timeout: 2 * time.Hour})
	res, err := s.try(v.Session.ID, client.Run{Command: "bash", Args: []string{"-c", "echo first; sleep 1260; for i in $(seq 1500); do echo line; sleep 1; done; exit 7"}})
	if err != nil || res.code != 7 || strings.Count(res.stdout, "line\n") != 1500 {
		t.Errorf("code %d, %d lines, %v", res.code, strings.Count(res.stdout, "line\n"), err)
	}
}

// TestL5_TwoCreators: of many who ask for one name, some of them for what
// cannot be, one wins, and no loser's clean-up touches what it has.
func TestL5_TwoCreators(t *testing.T) {
	s := newServer(t)
	for round := range 3 {
		var wg sync.WaitGroup
		var mu sync.Mutex
		var won []client.View
		for i := range 8 {
			wg.Go(func() {
				r := client.Create{Name: "same"}
				if i%4 == 3 {
					r.Image = "example.com/none:1"
				}
				v, err := s.c.Create(t.Context(), r)
				mu.Lock()
				defer mu.Unlock()
				switch code := cloche.ErrorCode(err); {
				case err == nil:
					won = append(won, v)
				case code != cloche.CodeConflict && (r.Image == "" || code != cloche.CodeNotFound):
					t.Errorf("round %d: %v", round, err)
				}
			})
		}
		wg.Wait()
		if len(won) != 1 {
			t.Fatalf("round %d: %d winners", round, len(won))
		}
		alive(s, won[0], "a race for its name")
		got, err := s.c.GetSandbox(t.Context(), "same", false)
		if err != nil || got.Session.ID != won[0].Session.ID {
			t.Errorf("round %d: %+v, %v", round, got, err)
		}
		if code, body := s.get("/healthz"); code != 200 || !strings.Contains(body, `"sessions":1`) {
			t.Errorf("round %d: %d %s", round, code, body)
		}
		deleters(s, round)
	}
}

// deleters delete one sandbox at the same time: it is gone, and nobody hears of
// a fault.
func deleters(s *server, round int) {
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			if err := s.c.DeleteSandbox(s.t.Context(), "same"); err != nil && cloche.ErrorCode(err) != cloche.CodeNotFound {
				s.t.Errorf("round %d: delete: %v", round, err)
			}
		})
	}
	wg.Wait()
}

// TestF3_AnyBytes: names and contents of any bytes, through the API itself.
func TestF3_AnyBytes(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	for _, name := range []string{"\xff\xfe", "new\nline", "tab\t", "\x01\x7f", "ünï", strings.Repeat("n", 255), " ", "-rf", "a\\b", "$(id)", "*"} {
		if err := s.c.WriteFiles(t.Context(), v.Session.ID, cloche.DefaultWorkDir, tarOf(t, "any/"+name, 256, bytes.NewReader(all))); err != nil {
			t.Errorf("write %q: %v", name, err)
			continue
		}
		if got := s.read(v, "any/"+name); got != string(all) {
			t.Errorf("%q came back as %d bytes", name, len(got))
		}
	}
	// Inside they are the same: one of them has a newline, which find ends with NUL.
	if res := s.sh(v, `find any -type f -size 256c -print0 | tr -cd '\0' | wc -c; cat any/"$(printf '\377\376')" | wc -c; ls -d any/*'
'*`); res.stdout != "11\n256\nany/new\nline\n" {
		t.Errorf("inside: %q %q", res.stdout, res.stderr)
	}
}
