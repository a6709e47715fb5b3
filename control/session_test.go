package control

import (
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cloche-dev/cloche"
)

func TestConcurrentStopsShareOne(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			got, err := r.StopSession(context.Background(), me, v.Session.ID)
			if err != nil || got.Session.State != cloche.Stopped {
				t.Errorf("stop: %s, %v", got.Session.State, err)
			}
		})
	}
	wg.Wait()
	if _, stops := r.node.calls(); stops != 1 {
		t.Errorf("the node was asked %d times", stops)
	}
	got, err := r.StopSession(t.Context(), me, v.Session.ID) // once more
	if err != nil {
		t.Fatal(err)
	}
	s := got.Session
	if s.Usage.ActiveCPU != fakeUsage.ActiveCPU || s.Usage.Duration != s.EndedAt.Sub(s.StartedAt) || s.StopRequestedAt.IsZero() || s.Cause != "" {
		t.Errorf("session %+v", s)
	}
	if got.Sandbox.Total != s.Usage {
		t.Errorf("total %+v, usage %+v", got.Sandbox.Total, s.Usage)
	}
}

func TestStopOfAPendingSessionCutsTheStartOff(t *testing.T) {
	r := newRig(t, Config{})
	g := newGate(r.node) // never opened
	var wg sync.WaitGroup
	wg.Go(func() {
		v, err := r.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: "box"})
		if err != nil || v.Session.State != cloche.Stopped {
			t.Errorf("the creator got %s, %v", v.Session.State, err)
		}
	})
	id := <-g.entered
	v, err := r.StopSession(t.Context(), me, id)
	if err != nil || v.Session.State != cloche.Stopped || !v.Session.StartedAt.IsZero() {
		t.Errorf("stop: %+v, %v", v.Session, err)
	}
	wg.Wait()
	checkConverged(t, r.store, r.node)
}

// L1: a node that cannot stop a machine for a while leaves nothing stuck.
func TestL1StopConvergesAfterNodeFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{MaxSessions: 1})
		v := r.create("box")
		begin := time.Now()
		r.node.set(func(n *fakeNode) {
			n.onStop = func(context.Context, cloche.SessionID) error {
				if time.Since(begin) < 20*time.Second {
					return errors.New("the disk is busy")
				}
				return nil
			}
		})
		got, err := r.StopSession(t.Context(), me, v.Session.ID)
		if took := time.Since(begin); err != nil || got.Session.State != cloche.Stopped || took > time.Minute {
			t.Errorf("stop: %s after %s, %v", got.Session.State, took, err)
		}
		r.create("another") // the quota is free
	})
}

func TestStopThatTakesTooLongIsToldAndGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		v := r.create("box")
		begin := time.Now()
		r.node.set(func(n *fakeNode) {
			n.onStop = func(context.Context, cloche.SessionID) error {
				if time.Since(begin) < 2*stopWait {
					return errors.New("the disk is busy")
				}
				return nil
			}
		})
		_, err := r.StopSession(t.Context(), me, v.Session.ID)
		wantCode(t, err, cloche.CodeStopping)
		time.Sleep(2 * stopWait)
		synctest.Wait()
		if state := r.state(v.Session.ID); state != cloche.Stopped {
			t.Errorf("state %s", state)
		}
	})
}

func TestSessionStopsAtItsTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		v := r.create("box")
		time.Sleep(cloche.DefaultTimeout - time.Second)
		synctest.Wait()
		if state := r.state(v.Session.ID); state != cloche.Running {
			t.Errorf("a second before: %s", state)
		}
		time.Sleep(time.Second)
		l := r.life(v.Session.ID)
		if l != nil {
			<-l.final
		}
		got, err := r.GetSession(t.Context(), me, v.Session.ID)
		s := got.Session
		if err != nil || s.State != cloche.Stopped || s.Cause != "timeout" || s.EndedAt.Sub(s.StartedAt) != cloche.DefaultTimeout {
			t.Errorf("session %+v, %v", s, err)
		}
		if st := r.Stats(); st.TimedOut != 1 || st.Live != 0 {
			t.Errorf("stats %+v", st)
		}
		checkConverged(t, r.store, r.node)
	})
}

func TestExtensionAddsExactly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{MaxTimeout: time.Hour})
		v := r.create("box")
		id := v.Session.ID
		s, err := r.ExtendTimeout(t.Context(), me, id, 7*time.Minute)
		if err != nil || s.Timeout != 12*time.Minute {
			t.Errorf("timeout %s, %v", s.Timeout, err)
		}
		for _, d := range []time.Duration{48*time.Minute + 1, 1<<63 - 1, 0, -time.Minute} {
			_, err = r.ExtendTimeout(t.Context(), me, id, d)
			wantCode(t, err, cloche.CodeTimeoutInvalid)
		}
		time.Sleep(12*time.Minute - time.Nanosecond)
		synctest.Wait()
		if state := r.state(id); state != cloche.Running {
			t.Errorf("just before: %s", state)
		}
		time.Sleep(time.Nanosecond)
		if l := r.life(id); l != nil {
			<-l.final
		}
		if state := r.state(id); state != cloche.Stopped {
			t.Errorf("at the deadline: %s", state)
		}
		_, err = r.ExtendTimeout(t.Context(), me, id, time.Minute)
		wantCode(t, err, cloche.CodeGone)
	})
}

func TestDeadlinesSurviveARestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		early, late := r.create("early"), r.create("late")
		if _, err := r.ExtendTimeout(t.Context(), me, late.Session.ID, 10*time.Minute); err != nil {
			t.Fatal(err)
		}
		r.crash()
		time.Sleep(6 * time.Minute)
		r.open()
		if l := r.life(early.Session.ID); l != nil {
			<-l.final
		}
		got, err := r.GetSession(t.Context(), me, early.Session.ID)
		if err != nil || got.Session.State != cloche.Stopped || got.Session.Cause != "timeout" {
			t.Errorf("the deadline that passed meanwhile: %s (%s), %v", got.Session.State, got.Session.Cause, err)
		}
		if state := r.state(late.Session.ID); state != cloche.Running {
			t.Errorf("the other one: %s", state)
		}
		time.Sleep(9 * time.Minute)
		if l := r.life(late.Session.ID); l != nil {
			<-l.final
		}
		if state := r.state(late.Session.ID); state != cloche.Stopped {
			t.Errorf("the other one at its deadline: %s", state)
		}
		checkConverged(t, r.store, r.node)
	})
}

func TestMachineThatEndsByItselfAborts(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	if _, err := r.node.Stop(t.Context(), v.Session.ID, 0); err != nil {
		t.Fatal(err)
	}
	l := r.life(v.Session.ID)
	r.Ended(t.Context(), cloche.SessionEnd{ID: v.Session.ID, Cause: "out of memory", Usage: fakeUsage})
	r.Ended(t.Context(), cloche.SessionEnd{ID: cloche.NewSessionID()}) // unknown
	<-l.final
	got, err := r.StopSession(t.Context(), me, v.Session.ID) // harmless
	if err != nil || got.Session.State != cloche.Aborted || got.Session.Cause != "out of memory" || got.Sandbox.Total.ActiveCPU != fakeUsage.ActiveCPU {
		t.Errorf("session %+v, %v", got.Session, err)
	}
	_, err = r.RunCommand(t.Context(), me, v.Session.ID, cloche.RunCommand{Name: "true"})
	if wantCode(t, err, cloche.CodeGone); err != nil && !strings.Contains(err.Error(), "out of memory") {
		t.Errorf("%v does not say why", err)
	}
	if _, resumed, err := r.GetSandbox(t.Context(), me, "box", true); err != nil || !resumed {
		t.Errorf("resume: %v, %v", resumed, err)
	}
	checkConverged(t, r.store, r.node)
}

func TestGoneIsAnsweredOnceTheRecordSaysSo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		v := r.create("box")
		if _, err := r.node.Stop(t.Context(), v.Session.ID, 0); err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(2*time.Second, func() {
			r.Ended(context.Background(), cloche.SessionEnd{ID: v.Session.ID, Cause: "out of memory"})
		})
		_, err := r.RunCommand(t.Context(), me, v.Session.ID, cloche.RunCommand{Name: "true"})
		wantCode(t, err, cloche.CodeGone)
		got, resumed, err := r.GetSandbox(t.Context(), me, "box", true)
		if err != nil || !resumed || got.Session.ID == v.Session.ID {
			t.Errorf("the client's resume: %s, %v, %v", got.Session.ID, resumed, err)
		}
		if _, err := r.RunCommand(t.Context(), me, got.Session.ID, cloche.RunCommand{Name: "true"}); err != nil {
			t.Errorf("the client's second try: %v", err)
		}
	})
}

// L6: who waits for a start that fails is told at once.
func TestL6WaitersLearnOfAFailedStartAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		v := r.create("box")
		if _, err := r.StopSession(t.Context(), me, v.Session.ID); err != nil {
			t.Fatal(err)
		}
		id := make(chan cloche.SessionID, 1)
		goOn := make(chan struct{})
		r.node.set(func(n *fakeNode) {
			n.onStart = func(_ context.Context, s cloche.Session) error {
				id <- s.ID
				<-goOn
				return errors.New("no such device")
			}
		})
		var wg sync.WaitGroup
		wg.Go(func() {
			_, _, err := r.GetSandbox(context.Background(), me, "box", true)
			wantCode(t, err, cloche.CodeInternal)
		})
		pending := <-id
		wg.Go(func() {
			_, err := r.RunCommand(context.Background(), me, pending, cloche.RunCommand{Name: "true"})
			wantCode(t, err, cloche.CodeGone)
		})
		synctest.Wait()
		begin := time.Now()
		close(goOn)
		wg.Wait()
		if took := time.Since(begin); took != 0 {
			t.Errorf("they waited %s", took)
		}
	})
}

func TestCommandsWaitWhileTheSessionIsPending(t *testing.T) {
	r := newRig(t, Config{})
	g := newGate(r.node)
	var wg sync.WaitGroup
	wg.Go(func() { r.create("box") })
	id := <-g.entered
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := r.RunCommand(ctx, me, id, cloche.RunCommand{Name: "true"}); err == nil {
		t.Error("a caller that went away got a command")
	}
	wg.Go(func() {
		if _, err := r.RunCommand(context.Background(), me, id, cloche.RunCommand{Name: "true"}); err != nil {
			t.Error(err)
		}
	})
	close(g.open)
	wg.Wait()
}

func TestStartThatHangsIsCutOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, Config{})
		newGate(r.node) // never opened
		begin := time.Now()
		_, err := r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Name: "box"})
		wantCode(t, err, cloche.CodeUnavailable)
		if took := time.Since(begin); took != time.Minute {
			t.Errorf("after %s", took)
		}
		_, _, err = r.GetSandbox(t.Context(), me, "box", false)
		wantCode(t, err, cloche.CodeNotFound)
	})
}

// A call on another project's session is answered as one on none.
func TestForeignThingsAreNotFound(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	id, cmd := v.Session.ID, cloche.NewCommandID()
	for _, p := range []cloche.Principal{{Team: "team", Project: "other"}, {Team: "other", Project: "project"}} {
		ctx := t.Context()
		for name, call := range map[string]func() error{
			"GetSandbox":    func() error { _, _, err := r.GetSandbox(ctx, p, "box", true); return err },
			"UpdateSandbox": func() error { _, err := r.UpdateSandbox(ctx, p, "box", cloche.UpdateSandbox{}); return err },
			"DeleteSandbox": func() error { _, err := r.DeleteSandbox(ctx, p, "box"); return err },
			"GetSession":    func() error { _, err := r.GetSession(ctx, p, id); return err },
			"StopSession":   func() error { _, err := r.StopSession(ctx, p, id); return err },
			"ExtendTimeout": func() error { _, err := r.ExtendTimeout(ctx, p, id, time.Second); return err },
			"RunCommand":    func() error { _, err := r.RunCommand(ctx, p, id, cloche.RunCommand{Name: "x"}); return err },
			"GetCommand":    func() error { _, err := r.GetCommand(ctx, p, id, cmd); return err },
			"ListCommands":  func() error { _, err := r.ListCommands(ctx, p, id); return err },
			"WaitCommand":   func() error { _, err := r.WaitCommand(ctx, p, id, cmd); return err },
			"SignalCommand": func() error { _, err := r.SignalCommand(ctx, p, id, cmd, 9); return err },
			"CommandLogs":   func() error { _, err := r.CommandLogs(ctx, p, id, cmd); return err },
			"MakeDir":       func() error { return r.MakeDir(ctx, p, id, cloche.MakeDir{Path: "a"}) },
			"WriteFiles":    func() error { return r.WriteFiles(ctx, p, id, cloche.WriteFiles{}, strings.NewReader("")) },
			"ReadFile":      func() error { _, _, err := r.ReadFile(ctx, p, id, cloche.ReadFile{Path: "a"}); return err },
		} {
			if err := call(); cloche.ErrorCode(err) != cloche.CodeNotFound {
				t.Errorf("%s: %v", name, err)
			}
		}
		boxes, _, err := r.ListSandboxes(ctx, p, cloche.ListSandboxes{})
		if err != nil || len(boxes) != 0 {
			t.Errorf("ListSandboxes: %d, %v", len(boxes), err)
		}
		sessions, _, err := r.ListSessions(ctx, p, cloche.ListSessions{Sandbox: "box"})
		if err != nil || len(sessions) != 0 {
			t.Errorf("ListSessions: %d, %v", len(sessions), err)
		}
	}
	if state := r.state(id); state != cloche.Running {
		t.Errorf("the session is %s", state)
	}
}

func TestEndedSessionsStayReadable(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	id, cmd := v.Session.ID, cloche.NewCommandID()
	if _, err := r.StopSession(t.Context(), me, id); err != nil {
		t.Fatal(err)
	}
	if _, err := r.GetCommand(t.Context(), me, id, cmd); err != nil {
		t.Error(err)
	}
	if _, err := r.WaitCommand(t.Context(), me, id, cmd); err != nil {
		t.Error(err)
	}
	if all, err := r.ListCommands(t.Context(), me, id); err != nil || len(all) != 1 {
		t.Errorf("%d commands, %v", len(all), err)
	}
	log, err := r.CommandLogs(t.Context(), me, id, cmd)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := log.Next(t.Context()); err != io.EOF {
		t.Error(err)
	}
	_, err = r.SignalCommand(t.Context(), me, id, cmd, 9)
	wantCode(t, err, cloche.CodeGone)
	wantCode(t, r.MakeDir(t.Context(), me, id, cloche.MakeDir{Path: "a"}), cloche.CodeGone)
}

func TestCallsRefuseBadInput(t *testing.T) {
	r := newRig(t, Config{})
	id := r.create("box").Session.ID
	ctx, long := t.Context(), strings.Repeat("a", cloche.MaxPathLen+1)
	for name, bad := range map[string]struct {
		r    cloche.RunCommand
		code cloche.Code
	}{
		"no command":            {cloche.RunCommand{}, cloche.CodeInvalid},
		"NUL in the command":    {cloche.RunCommand{Name: "a\x00"}, cloche.CodeInvalid},
		"NUL in an argument":    {cloche.RunCommand{Name: "a", Args: []string{"\x00"}}, cloche.CodeInvalid},
		"NUL in the user":       {cloche.RunCommand{Name: "a", User: "\x00"}, cloche.CodeInvalid},
		"arguments over 2 MiB":  {cloche.RunCommand{Name: "a", Args: []string{strings.Repeat("a", cloche.MaxArgsLen)}}, cloche.CodeTooLarge},
		"a negative timeout":    {cloche.RunCommand{Name: "a", Timeout: -1}, cloche.CodeInvalid},
		"a long directory":      {cloche.RunCommand{Name: "a", WorkDir: long}, cloche.CodeInvalid},
		"NUL in the directory":  {cloche.RunCommand{Name: "a", WorkDir: "\x00"}, cloche.CodeInvalid},
		"an environment with =": {cloche.RunCommand{Name: "a", Env: map[string]string{"=": ""}}, cloche.CodeInvalid},
	} {
		if _, err := r.RunCommand(ctx, me, id, bad.r); cloche.ErrorCode(err) != bad.code {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, path := range []string{"", "a\x00", long} {
		_, _, err := r.ReadFile(ctx, me, id, cloche.ReadFile{Path: path})
		wantCode(t, err, cloche.CodeInvalid)
		wantCode(t, r.MakeDir(ctx, me, id, cloche.MakeDir{Path: path}), cloche.CodeInvalid)
	}
	wantCode(t, r.WriteFiles(ctx, me, id, cloche.WriteFiles{WorkDir: "\x00"}, nil), cloche.CodeInvalid)
	for _, signal := range []int{-1, 0, 65} {
		_, err := r.SignalCommand(ctx, me, id, cloche.NewCommandID(), signal)
		wantCode(t, err, cloche.CodeInvalid)
	}
	for _, cmd := range []cloche.CommandID{"", "../x", cloche.CommandID(id)} {
		_, err := r.GetCommand(ctx, me, id, cmd)
		wantCode(t, err, cloche.CodeNotFound)
		_, err = r.CommandLogs(ctx, me, id, cmd)
		wantCode(t, err, cloche.CodeNotFound)
	}
	for _, bad := range []cloche.SessionID{"", "../x", "sbx_"} {
		_, err := r.GetSession(ctx, me, bad)
		wantCode(t, err, cloche.CodeNotFound)
	}
}

func TestCloseWaitsForWhatIsInFlight(t *testing.T) {
	r := newRig(t, Config{})
	g := newGate(r.node)
	var wg sync.WaitGroup
	wg.Go(func() {
		if v, err := r.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: "box"}); err != nil || v.Session.State != cloche.Running {
			t.Errorf("create: %s, %v", v.Session.State, err)
		}
	})
	<-g.entered
	closed := make(chan struct{})
	wg.Go(func() { r.Close(context.Background()); close(closed) })
	<-r.closing
	_, err := r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Name: "other"})
	wantCode(t, err, cloche.CodeUnavailable)
	select {
	case <-closed:
		t.Error("Close did not wait")
	default:
	}
	close(g.open)
	wg.Wait()
	checkConverged(t, r.store, r.node) // the sandbox lives on
}
