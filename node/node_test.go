package node_test

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/node"
)

// start starts a session with one command and returns both.
func start(t *testing.T, n *node.Node) (cloche.Session, cloche.Command) {
	t.Helper()
	s := cloche.Session{ID: cloche.NewSessionID(), VCPUs: 1, MemoryMiB: 256}
	if err := n.Start(t.Context(), s, nil); err != nil {
		t.Fatal(err)
	}
	c, err := n.Run(t.Context(), s.ID, cloche.RunCommand{Name: "prog"})
	if err != nil {
		t.Fatal(err)
	}
	return s, c
}

// readLog reads a whole log and returns it with the streams marked.
func readLog(t *testing.T, n *node.Node, id cloche.SessionID, cmd cloche.CommandID) (string, error) {
	t.Helper()
	r, err := n.Logs(t.Context(), id, cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	var b strings.Builder
	for {
		e, err := r.Next(t.Context())
		if err != nil {
			if errors.Is(err, io.EOF) {
				err = nil
			}
			return b.String(), err
		}
		b.WriteString(string(e.Stream) + ":" + string(e.Data) + "|")
	}
}

func TestRun(t *testing.T) {
	h := newHost(t)
	n := h.node(0)
	s, c := start(t, n)
	if c.WorkDir != "/resolved" || c.Exit != nil || c.Name != "prog" || c.Args == nil {
		t.Errorf("command as started: %+v", c)
	}
	p := h.machine(s.ID).process(t)
	p.print(cloche.Stdout, "one")
	p.print(cloche.Stderr, "two")
	p.end(cloche.Exit{Code: 3, Duration: time.Minute})
	got, err := n.Wait(t.Context(), s.ID, c.ID)
	if err != nil || got.Exit == nil || got.Exit.Code != 3 || got.Exit.Duration != time.Minute {
		t.Errorf("Wait: %+v, %v", got.Exit, err)
	}
	if log, err := readLog(t, n, s.ID, c.ID); log != "stdout:one|stderr:two|" || err != nil {
		t.Errorf("log %q, %v", log, err)
	}
}

// A command that cannot be tried leaves no command and no file.
func TestRunThatCannotStart(t *testing.T) {
	h := newHost(t)
	n := h.node(0)
	s, _ := start(t, n)
	before := len(h.logFiles())
	_, err := n.Run(t.Context(), s.ID, cloche.RunCommand{Name: "cannot"})
	if cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("got %v", err)
	}
	if after := len(h.logFiles()); after != before {
		t.Errorf("%d log files, before %d", after, before)
	}
}

// Any number of readers, while it runs and after, each see everything once.
func TestE1_EveryReaderSeesEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		n := h.node(0)
		s, c := start(t, n)
		p := h.machine(s.ID).process(t)
		p.print(cloche.Stdout, "a")
		type result struct {
			log string
			err error
		}
		results := make(chan result, 3)
		for range 3 {
			go func() {
				log, err := readLog(t, n, s.ID, c.ID)
				results <- result{log, err}
			}()
			synctest.Wait()
			<-time.After(20 * time.Minute) // fake time: the command is silent
			p.print(cloche.Stdout, "b")
		}
		p.end(cloche.Exit{})
		for range 3 {
			if r := <-results; r.log != "stdout:a|stdout:b|stdout:b|stdout:b|" || r.err != nil {
				t.Errorf("a reader got %q, %v", r.log, r.err)
			}
		}
		if _, err := n.Stop(t.Context(), s.ID, 0); err != nil {
			t.Error(err)
		}
	})
}

func TestE8_LogsOutliveTheSession(t *testing.T) {
	h := newHost(t)
	n := h.node(0)
	s, c := start(t, n)
	h.machine(s.ID).process(t).print(cloche.Stdout, "kept")
	usage, err := n.Stop(t.Context(), s.ID, time.Second)
	if err != nil || usage.ActiveCPU != time.Second {
		t.Errorf("Stop: %+v, %v", usage, err)
	}
	if log, err := readLog(t, n, s.ID, c.ID); log != "stdout:kept|" || err != nil {
		t.Errorf("log %q, %v", log, err)
	}
	got, err := n.Command(t.Context(), s.ID, c.ID)
	if err != nil || got.Exit == nil || got.Exit.Code != 143 || got.Exit.Signal != 15 {
		t.Errorf("after the stop: %+v, %v", got.Exit, err)
	}
	if _, err := n.Run(t.Context(), s.ID, cloche.RunCommand{Name: "x"}); cloche.ErrorCode(err) != cloche.CodeGone {
		t.Errorf("run after the stop: %v", err)
	}
	h.wantNothing(t)
}

// With an ended context a reader takes what is there and waits for nothing.
func TestLogsWithAnEndedContext(t *testing.T) {
	h := newHost(t)
	n := h.node(0)
	s, c := start(t, n)
	p := h.machine(s.ID).process(t)
	p.print(cloche.Stdout, "one")
	p.print(cloche.Stderr, "two")
	waitForLog(t, n, s.ID, c.ID, 2)
	r, err := n.Logs(t.Context(), s.ID, c.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	ended, end := context.WithCancel(t.Context())
	end()
	for _, want := range []string{"one", "two"} {
		if e, err := r.Next(ended); string(e.Data) != want || err != nil {
			t.Errorf("%q, %v; want %q", e.Data, err, want)
		}
	}
	if e, err := r.Next(ended); err != context.Canceled {
		t.Errorf("behind what is there: %q, %v", e.Data, err)
	}
	p.end(cloche.Exit{})
	if _, err := n.Wait(t.Context(), s.ID, c.ID); err != nil {
		t.Fatal(err)
	}
	if e, err := r.Next(ended); err != io.EOF {
		t.Errorf("at the end: %q, %v", e.Data, err)
	}
}

// A log that is cut ends with what was there, whatever comes and however it
// ends; one that had ended is not changed by it.
func TestLogsCut(t *testing.T) {
	h := newHost(t)
	n := h.node(0)
	s, c := start(t, n)
	p := h.machine(s.ID).process(t)
	open := func() cloche.LogReader {
		r, err := n.Logs(t.Context(), s.ID, c.ID)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { r.Close() })
		r.Cut()
		return r
	}
	check := func(r cloche.LogReader, want string, end error) {
		t.Helper()
		var got string
		for {
			e, err := r.Next(t.Context())
			if err != nil {
				if got != want || err != end && cloche.ErrorCode(err) != cloche.ErrorCode(end) {
					t.Errorf("%q, %v; want %q, %v", got, err, want, end)
				}
				return
			}
			got += string(e.Data)
		}
	}
	check(open(), "", io.EOF)
	p.print(cloche.Stdout, "one")
	waitForLog(t, n, s.ID, c.ID, 1)
	r := open()
	p.print(cloche.Stdout, "two")
	waitForLog(t, n, s.ID, c.ID, 2)
	r.Cut() // the first one counts
	h.machine(s.ID).end(driver.ExitCrashed)
	if _, err := n.Wait(t.Context(), s.ID, c.ID); cloche.ErrorCode(err) != cloche.CodeGone {
		t.Fatal(err)
	}
	check(r, "one", io.EOF)
	check(open(), "onetwo", cloche.Errorf(cloche.CodeGone, "lost"))
}

// The log stops at its bound and says so; the process goes on.
func TestLogBound(t *testing.T) {
	h := newHost(t)
	n := h.node(10)
	s, c := start(t, n)
	p := h.machine(s.ID).process(t)
	for range 5 {
		p.print(cloche.Stdout, "sixsix")
	}
	p.end(cloche.Exit{Code: 4})
	if got, err := n.Wait(t.Context(), s.ID, c.ID); err != nil || got.Exit.Code != 4 {
		t.Fatalf("Wait: %+v, %v", got, err)
	}
	log, err := readLog(t, n, s.ID, c.ID)
	if err != nil || !strings.HasPrefix(log, "stdout:sixsix|stdout:sixs|notice:") || strings.Count(log, "notice:") != 1 {
		t.Errorf("log %q, %v", log, err)
	}
}

// A process that is replaced, and a stream that breaks, lose nothing and repeat
// nothing.
func TestRecoverGoesOnAtTheOffset(t *testing.T) {
	h := newHost(t)
	first := h.node(0)
	s, c := start(t, first)
	p := h.machine(s.ID).process(t)
	p.print(cloche.Stdout, "one")
	waitForLog(t, first, s.ID, c.ID, 1)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	p.print(cloche.Stderr, "two") // while nobody listens
	corrupt(t, h.logFiles()[0])

	p.mu.Lock()
	p.cuts = 2
	p.mu.Unlock()
	second := h.node(0)
	gone, err := second.Recover(t.Context(), []cloche.Session{s})
	if err != nil || len(gone) != 0 {
		t.Fatalf("Recover: %v, %v", gone, err)
	}
	p.print(cloche.Stdout, "three")
	p.end(cloche.Exit{Code: 5})
	if got, err := second.Wait(t.Context(), s.ID, c.ID); err != nil || got.Exit.Code != 5 {
		t.Fatalf("Wait: %+v, %v", got, err)
	}
	if log, err := readLog(t, second, s.ID, c.ID); log != "stdout:one|stderr:two|stdout:three|" || err != nil {
		t.Errorf("log %q, %v", log, err)
	}
}

// waitForLog reads entries until there were count of them.
func waitForLog(t *testing.T, n *node.Node, id cloche.SessionID, cmd cloche.CommandID, count int) {
	t.Helper()
	r, err := n.Logs(t.Context(), id, cmd)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	for range count {
		if _, err := r.Next(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// What ended while no process looked is reported, and its commands are lost,
// not invented.
func TestRecoverOfAnEndedMachine(t *testing.T) {
	for name, end := range map[string]func(*host, cloche.SessionID){
		"ended":   func(h *host, id cloche.SessionID) { h.machine(id).end(driver.ExitOOM) },
		"no more": func(h *host, id cloche.SessionID) { delete(h.machines, id) },
	} {
		t.Run(name, func(t *testing.T) {
			h := newHost(t)
			first := h.node(0)
			s, c := start(t, first)
			if err := first.Close(); err != nil {
				t.Fatal(err)
			}
			end(h, s.ID)
			second := h.node(0)
			gone, err := second.Recover(t.Context(), []cloche.Session{s})
			if err != nil || len(gone) != 1 || gone[0].ID != s.ID || gone[0].Cause == "" {
				t.Fatalf("Recover: %+v, %v", gone, err)
			}
			got, err := second.Command(t.Context(), s.ID, c.ID)
			if err != nil || got.Exit != nil || !got.Lost {
				t.Errorf("command %+v, %v", got, err)
			}
			if _, err := second.Wait(t.Context(), s.ID, c.ID); cloche.ErrorCode(err) != cloche.CodeGone {
				t.Errorf("Wait: %v", err)
			}
			if _, err := readLog(t, second, s.ID, c.ID); cloche.ErrorCode(err) != cloche.CodeGone {
				t.Errorf("log: %v", err)
			}
			h.wantNothing(t)
		})
	}
}

// Machines and tops that no record knows are removed.
func TestRecoverSweeps(t *testing.T) {
	h := newHost(t)
	first := h.node(0)
	start(t, first)
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	h.tops[cloche.NewSessionID()] = true
	if _, err := h.node(0).Recover(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	h.wantNothing(t)
}

// R1, L6: a machine that ends by itself is reported once and leaves nothing.
func TestR1_MachineEndsByItself(t *testing.T) {
	h := newHost(t)
	n := h.node(0)
	s, c := start(t, n)
	h.machine(s.ID).end(driver.ExitStopped)
	if e := <-h.ends; e.ID != s.ID || e.Usage.ActiveCPU != time.Second {
		t.Errorf("end %+v", e)
	}
	if _, err := n.Wait(t.Context(), s.ID, c.ID); cloche.ErrorCode(err) != cloche.CodeGone {
		t.Errorf("Wait: %v", err)
	}
	h.wantNothing(t)
}

func TestStartThatFailsLeavesNothing(t *testing.T) {
	h := newHost(t)
	h.startErr = errors.New("no machine today")
	err := h.node(0).Start(t.Context(), cloche.Session{ID: cloche.NewSessionID()}, nil)
	if !errors.Is(err, h.startErr) {
		t.Errorf("got %v", err)
	}
	if len(h.tops) != 0 {
		t.Errorf("left: tops %v", h.tops)
	}
}

// An id that is no id never becomes a path.
func TestForeignIDs(t *testing.T) {
	n := newHost(t).node(0)
	for _, id := range []string{"", "../../etc", "cmd_../../../../../../etc/passwd"} {
		_, err := n.Command(context.Background(), cloche.SessionID(id), cloche.CommandID(id))
		if cloche.ErrorCode(err) != cloche.CodeNotFound {
			t.Errorf("%q: %v", id, err)
		}
	}
}

// Logs of a deleted sandbox go; those of a running session do not.
func TestDropLogs(t *testing.T) {
	h := newHost(t)
	n := h.node(0)
	s, c := start(t, n)
	if err := n.DropLogs(t.Context(), s.ID); cloche.ErrorCode(err) != cloche.CodeConflict {
		t.Errorf("logs of a running session: %v", err)
	}
	if _, err := n.Stop(t.Context(), s.ID, 0); err != nil {
		t.Fatal(err)
	}
	if ids, err := n.Logged(t.Context()); err != nil || len(ids) != 1 || ids[0] != s.ID {
		t.Errorf("Logged: %v, %v", ids, err)
	}
	for range 2 {
		if err := n.DropLogs(t.Context(), s.ID); err != nil {
			t.Errorf("DropLogs: %v", err)
		}
	}
	if _, err := n.Command(t.Context(), s.ID, c.ID); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("command after: %v", err)
	}
}

// An agent that breaks every stream as soon as it has it, and claims output that
// is lost each time, costs neither the host's CPU nor its disk.
func TestAgentThatBreaksEveryStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := newHost(t)
		n := h.node(0)
		s, c := start(t, n)
		p := h.machine(s.ID).process(t)
		p.mu.Lock()
		p.cuts, p.skip = 1000, 1
		p.mu.Unlock()
		began := time.Now()
		p.print(cloche.Stdout, "x")
		p.end(cloche.Exit{Code: 6})
		if got, err := n.Wait(t.Context(), s.ID, c.ID); err != nil || got.Exit.Code != 6 {
			t.Fatalf("Wait: %+v, %v", got, err)
		}
		if took := time.Since(began); took < 10*time.Minute {
			t.Errorf("1000 streams broke in %s", took)
		}
		log, err := readLog(t, n, s.ID, c.ID)
		if err != nil || len(log) > 4<<10 || !strings.Contains(log, "bytes of output are missing here") {
			t.Errorf("log of %d bytes: %.300q, %v", len(log), log, err)
		}
		if err := n.Close(); err != nil { // the bubble waits for what it owns
			t.Error(err)
		}
	})
}
