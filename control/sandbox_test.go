package control

import (
	"context"
	"errors"
	"maps"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
)

func TestCreateAnswersARunningSandbox(t *testing.T) {
	r := newRig(t, Config{})
	v, err := r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Env: map[string]string{"A": "b"}, Ports: []int{3000}})
	if err != nil {
		t.Fatal(err)
	}
	if err := cloche.CheckName(v.Sandbox.Name); err != nil {
		t.Errorf("made-up name: %v", err)
	}
	b, s := v.Sandbox, v.Session
	if s.State != cloche.Running || s.StartedAt.IsZero() || b.SessionID != s.ID || b.Timeout != cloche.DefaultTimeout ||
		b.VCPUs != 2 || b.MemoryMiB != 4096 || b.User != "ubuntu" || b.WorkDir != "/vercel/sandbox" ||
		b.Persistent || b.Policy.Mode != cloche.DenyAll || b.Image != "universal@sha256:00" {
		t.Errorf("sandbox %+v\nsession %+v", b, s)
	}
	if want := map[string]string{"A": "b"}; !maps.Equal(r.node.env, want) {
		t.Errorf("the machine got env %v", r.node.env)
	}
	got, resumed, err := r.GetSandbox(t.Context(), me, b.Name, true)
	if err != nil || resumed || got.Session.ID != s.ID {
		t.Errorf("GetSandbox: %s, resumed %v, %v", got.Session.ID, resumed, err)
	}
	if st := r.Stats(); st.Live != 1 || st.Created != 1 {
		t.Errorf("stats %+v", st)
	}
}

func TestRuntimeGivesUserAndPath(t *testing.T) {
	r := newRig(t, Config{})
	v, err := r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Runtime: "node22"})
	if err != nil {
		t.Fatal(err)
	}
	if v.Sandbox.User != "vercel-sandbox" || v.Session.Runtime != "node22" {
		t.Errorf("user %q, runtime %q", v.Sandbox.User, v.Session.Runtime)
	}
	if path := r.node.env["PATH"]; path != "/vercel/runtimes/node22/bin:/usr/bin" {
		t.Errorf("PATH %q", path)
	}
	own := cloche.CreateSandbox{Runtime: "node22", Env: map[string]string{"PATH": "/mine"}}
	if _, err := r.CreateSandbox(t.Context(), me, own); err != nil || r.node.env["PATH"] != "/mine" {
		t.Errorf("the caller's own PATH became %q, %v", r.node.env["PATH"], err)
	}
	_, err = r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Runtime: "python3.14"})
	if wantCode(t, err, cloche.CodeInvalid); err != nil && !strings.Contains(err.Error(), "node22, node24") {
		t.Errorf("%v does not say which runtimes exist", err)
	}
}

func TestCreateRefusesBadInput(t *testing.T) {
	r := newRig(t, Config{MaxVCPUs: 4, MaxTimeout: time.Hour})
	many := make(map[string]string)
	for _, k := range []string{"1", "2", "3", "4", "5", "6"} {
		many[k] = ""
	}
	long := strings.Repeat("x", 300)
	type c = cloche.CreateSandbox
	for name, bad := range map[string]struct {
		c    c
		code cloche.Code
	}{
		"a reserved name":      {c{Name: "sessions"}, cloche.CodeInvalid},
		"a long name":          {c{Name: long}, cloche.CodeInvalid},
		"a name not in UTF-8":  {c{Name: "a\xff"}, cloche.CodeInvalid},
		"a name with a slash":  {c{Name: "a/b"}, cloche.CodeInvalid},
		"runtime and image":    {c{Runtime: "node24", Image: "universal"}, cloche.CodeInvalid},
		"an unknown image":     {c{Image: "none"}, cloche.CodeNotFound},
		"too many vCPUs":       {c{VCPUs: 5}, cloche.CodeInvalid},
		"negative vCPUs":       {c{VCPUs: -1}, cloche.CodeInvalid},
		"a short timeout":      {c{Timeout: time.Millisecond}, cloche.CodeTimeoutInvalid},
		"a negative timeout":   {c{Timeout: -1}, cloche.CodeTimeoutInvalid},
		"a long timeout":       {c{Timeout: time.Hour + 1}, cloche.CodeTimeoutInvalid},
		"port 0":               {c{Ports: []int{0}}, cloche.CodeInvalid},
		"port 65536":           {c{Ports: []int{65536}}, cloche.CodeInvalid},
		"a port twice":         {c{Ports: []int{80, 81, 80}}, cloche.CodeInvalid},
		"16 ports":             {c{Ports: []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}}, cloche.CodeInvalid},
		"6 tags":               {c{Tags: many}, cloche.CodeInvalid},
		"a long tag":           {c{Tags: map[string]string{"k": long}}, cloche.CodeInvalid},
		"a tag without a key":  {c{Tags: map[string]string{"": "v"}}, cloche.CodeInvalid},
		"long env keys":        {c{Env: map[string]string{strings.Repeat("k", cloche.MaxEnvKeysLen+1): ""}}, cloche.CodeTooLarge},
		"a long env":           {c{Env: map[string]string{"k": strings.Repeat("v", cloche.MaxEnvLen)}}, cloche.CodeTooLarge},
		"an env not in UTF-8":  {c{Env: map[string]string{"k": "\xff"}}, cloche.CodeInvalid},
		"an env key with =":    {c{Env: map[string]string{"a=b": ""}}, cloche.CodeInvalid},
		"an env with NUL":      {c{Env: map[string]string{"a": "\x00"}}, cloche.CodeInvalid},
		"a region not in UTF8": {c{Region: "\xff"}, cloche.CodeInvalid},
	} {
		if _, err := r.CreateSandbox(t.Context(), me, bad.c); cloche.ErrorCode(err) != bad.code {
			t.Errorf("%s: %v, want %s", name, err, bad.code)
		}
	}
	if starts, _ := r.node.calls(); starts != 0 || r.Stats().Live != 0 {
		t.Errorf("%d starts, %d live", starts, r.Stats().Live)
	}
}

func TestFailedCreateLeavesNothing(t *testing.T) {
	r := newRig(t, Config{})
	full := cloche.Errorf(cloche.CodeExhausted, "no memory left")
	var failed cloche.SessionID
	r.node.set(func(n *fakeNode) {
		n.onStart = func(_ context.Context, s cloche.Session) error { failed = s.ID; return full }
	})
	_, err := r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Name: "box"})
	if !errors.Is(err, full) {
		t.Errorf("CreateSandbox: %v", err)
	}
	_, _, err = r.GetSandbox(t.Context(), me, "box", false)
	wantCode(t, err, cloche.CodeNotFound)
	_, err = r.GetSession(t.Context(), me, failed)
	wantCode(t, err, cloche.CodeNotFound)
	if st := r.Stats(); st.Live != 0 || st.CreateFailed != 1 {
		t.Errorf("stats %+v", st)
	}
	checkConverged(t, r.store, r.node)
	r.node.set(func(n *fakeNode) { n.onStart = nil })
	r.create("box") // the client's retry
}

// L5: two creators of one name; the loser's clean-up must not touch what the
// winner has.
func TestL5LoserOfANameTouchesNothing(t *testing.T) {
	r := newRig(t, Config{})
	const racers = 8
	var wg sync.WaitGroup
	views, errs := make([]cloche.SandboxView, racers), make([]error, racers)
	for i := range racers {
		wg.Go(func() {
			views[i], errs[i] = r.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: "box"})
		})
	}
	wg.Wait()
	var winner cloche.SessionID
	for i, err := range errs {
		if err != nil {
			wantCode(t, err, cloche.CodeConflict)
		} else if winner != "" {
			t.Error("two creators have won")
		} else {
			winner = views[i].Session.ID
		}
	}
	v, _, err := r.GetSandbox(t.Context(), me, "box", false)
	if err != nil || v.Session.ID != winner || v.Session.State != cloche.Running {
		t.Errorf("the winner's session %s; the sandbox has %s, %s, %v", winner, v.Session.ID, v.Session.State, err)
	}
	if starts, _ := r.node.calls(); starts != 1 || r.Stats().Live != 1 {
		t.Errorf("%d starts, %d live", starts, r.Stats().Live)
	}
	checkConverged(t, r.store, r.node)
}

// gate is a hook for onStart that holds a start until it is opened or cut off.
type gate struct {
	entered chan cloche.SessionID
	open    chan struct{}
}

func newGate(n *fakeNode) *gate {
	g := &gate{entered: make(chan cloche.SessionID, 16), open: make(chan struct{})}
	n.set(func(n *fakeNode) {
		n.onStart = func(ctx context.Context, s cloche.Session) error {
			g.entered <- s.ID
			select {
			case <-g.open:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}
	})
	return g
}

func TestClientThatGoesAwayHasMadeNothingAndCanRetryAtOnce(t *testing.T) {
	r := newRig(t, Config{})
	g := newGate(r.node)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		_, err := r.CreateSandbox(ctx, me, cloche.CreateSandbox{Name: "box"})
		if !errors.Is(err, context.Canceled) {
			t.Errorf("the client that went away: %v", err)
		}
	})
	<-g.entered
	// Another one meets the name while the first client is there.
	_, err := r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Name: "box"})
	wantCode(t, err, cloche.CodeConflict)
	cancel()
	close(g.open)
	v, err := r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Name: "box"})
	if err != nil {
		t.Fatalf("the retry: %v", err)
	}
	wg.Wait()
	got, _, err := r.GetSandbox(t.Context(), me, "box", false)
	if err != nil || got.Session.ID != v.Session.ID || got.Session.State != cloche.Running {
		t.Errorf("the retry's sandbox has %s %s, %v", got.Session.ID, got.Session.State, err)
	}
	checkConverged(t, r.store, r.node)
}

func TestClientThatGoesAwayAtTheLastMomentHasMadeNothing(t *testing.T) {
	r := newRig(t, Config{})
	ctx, cancel := context.WithCancel(t.Context())
	r.node.set(func(n *fakeNode) {
		n.deaf = true
		n.onStart = func(context.Context, cloche.Session) error { cancel(); return nil }
	})
	_, err := r.CreateSandbox(ctx, me, cloche.CreateSandbox{Name: "box"})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("CreateSandbox: %v", err)
	}
	_, _, err = r.GetSandbox(t.Context(), me, "box", false)
	wantCode(t, err, cloche.CodeNotFound)
	checkConverged(t, r.store, r.node)
}

func TestResumeGoesOnWithoutItsClient(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	if _, err := r.StopSession(t.Context(), me, v.Session.ID); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	r.node.set(func(n *fakeNode) {
		n.onStart = func(context.Context, cloche.Session) error { cancel(); return nil }
	})
	if _, resumed, err := r.GetSandbox(ctx, me, "box", true); err != nil || !resumed {
		t.Errorf("resume: %v, %v", resumed, err)
	}
	checkConverged(t, r.store, r.node)
}

func TestConcurrentResumesMakeOneSession(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	if _, err := r.StopSession(t.Context(), me, v.Session.ID); err != nil {
		t.Fatal(err)
	}
	const callers = 12
	var wg sync.WaitGroup
	ids, resumed := make([]cloche.SessionID, callers), make([]bool, callers)
	for i := range callers {
		wg.Go(func() {
			v, did, err := r.GetSandbox(context.Background(), me, "box", true)
			if err != nil || v.Session.State != cloche.Running {
				t.Errorf("caller %d: %s, %v", i, v.Session.State, err)
			}
			ids[i], resumed[i] = v.Session.ID, did
		})
	}
	wg.Wait()
	did := 0
	for i := range callers {
		if resumed[i] {
			did++
		}
		if ids[i] != ids[0] || ids[i] == v.Session.ID {
			t.Errorf("caller %d has session %s, the first one %s", i, ids[i], ids[0])
		}
	}
	if starts, _ := r.node.calls(); did != 1 || starts != 2 {
		t.Errorf("%d callers resumed, %d starts", did, starts)
	}
	checkConverged(t, r.store, r.node)
}

func TestResumeWaitsForAStopInProgress(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	inStop, goOn := make(chan struct{}), make(chan struct{})
	r.node.set(func(n *fakeNode) {
		n.onStop = func(context.Context, cloche.SessionID) error { close(inStop); <-goOn; return nil }
	})
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := r.StopSession(context.Background(), me, v.Session.ID); err != nil {
			t.Error(err)
		}
	})
	<-inStop
	_, err := r.RunCommand(t.Context(), me, v.Session.ID, cloche.RunCommand{Name: "true"})
	wantCode(t, err, cloche.CodeStopping)
	wg.Go(func() {
		got, resumed, err := r.GetSandbox(context.Background(), me, "box", true)
		if err != nil || !resumed || got.Session.ID == v.Session.ID || got.Session.State != cloche.Running {
			t.Errorf("resume: %s %s, resumed %v, %v", got.Session.ID, got.Session.State, resumed, err)
		}
	})
	close(goOn)
	wg.Wait()
	_, err = r.RunCommand(t.Context(), me, v.Session.ID, cloche.RunCommand{Name: "true"})
	wantCode(t, err, cloche.CodeGone)
	checkConverged(t, r.store, r.node)
}

func TestFailedResumeIsToldToAllWhoWait(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	if _, err := r.StopSession(t.Context(), me, v.Session.ID); err != nil {
		t.Fatal(err)
	}
	entered, goOn := make(chan struct{}), make(chan struct{})
	var once sync.Once
	r.node.set(func(n *fakeNode) {
		n.onStart = func(context.Context, cloche.Session) error {
			once.Do(func() { close(entered) })
			<-goOn
			return cloche.Errorf(cloche.CodeExhausted, "no memory left")
		}
	})
	var wg sync.WaitGroup
	resume := func() {
		_, resumed, err := r.GetSandbox(context.Background(), me, "box", true)
		wantCode(t, err, cloche.CodeExhausted)
		if resumed {
			t.Error("resumed")
		}
	}
	wg.Go(resume)
	<-entered
	for range 3 {
		wg.Go(resume)
	}
	close(goOn)
	wg.Wait()
	got, _, err := r.GetSandbox(t.Context(), me, "box", false)
	if err != nil || got.Session.State != cloche.Failed || got.Session.Cause != "no memory left" {
		t.Errorf("session %s (%s), %v", got.Session.State, got.Session.Cause, err)
	}
	r.node.set(func(n *fakeNode) { n.onStart = nil })
	if _, resumed, err := r.GetSandbox(t.Context(), me, "box", true); err != nil || !resumed {
		t.Errorf("the next resume: %v, %v", resumed, err)
	}
}

func TestUpdateTakesEffectWithTheNextSession(t *testing.T) {
	r := newRig(t, Config{MaxVCPUs: 8})
	v := r.create("box")
	vcpus, timeout, ports, tags, region := 4, time.Hour, []int{80}, map[string]string{"a": "b"}, "sfo1"
	got, err := r.UpdateSandbox(t.Context(), me, "box", cloche.UpdateSandbox{VCPUs: &vcpus, Timeout: &timeout, Ports: &ports, Tags: &tags, Region: &region})
	if err != nil {
		t.Fatal(err)
	}
	if got.Sandbox.VCPUs != 4 || got.Sandbox.MemoryMiB != 8192 || got.Session.VCPUs != 2 || got.Session.Timeout != v.Session.Timeout {
		t.Errorf("sandbox %+v\nsession %+v", got.Sandbox, got.Session)
	}
	if _, err := r.StopSession(t.Context(), me, v.Session.ID); err != nil {
		t.Fatal(err)
	}
	got, _, err = r.GetSandbox(t.Context(), me, "box", true)
	if err != nil || got.Session.VCPUs != 4 || got.Session.Timeout != time.Hour || got.Session.Region != "sfo1" {
		t.Errorf("session %+v, %v", got.Session, err)
	}
	vcpus = 9
	_, err = r.UpdateSandbox(t.Context(), me, "box", cloche.UpdateSandbox{VCPUs: &vcpus})
	wantCode(t, err, cloche.CodeInvalid)
	timeout = 48 * time.Hour
	_, err = r.UpdateSandbox(t.Context(), me, "box", cloche.UpdateSandbox{Timeout: &timeout})
	wantCode(t, err, cloche.CodeTimeoutInvalid)
}

func TestDeleteStopsFirstAndFreesTheName(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	got, err := r.DeleteSandbox(t.Context(), me, "box")
	if err != nil || got.Session.State != cloche.Stopped || got.Sandbox.Total.ActiveCPU != fakeUsage.ActiveCPU {
		t.Errorf("deleted: %s, total %+v, %v", got.Session.State, got.Sandbox.Total, err)
	}
	_, err = r.DeleteSandbox(t.Context(), me, "box")
	wantCode(t, err, cloche.CodeNotFound)
	_, err = r.RunCommand(t.Context(), me, v.Session.ID, cloche.RunCommand{Name: "true"})
	wantCode(t, err, cloche.CodeNotFound)
	r.create("box")
	checkConverged(t, r.store, r.node)
}

func TestDeleteOfASandboxThatIsBeingMade(t *testing.T) {
	r := newRig(t, Config{})
	g := newGate(r.node)
	var wg sync.WaitGroup
	wg.Go(func() {
		v, err := r.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: "box"})
		if err == nil && v.Session.State != cloche.Stopped || err != nil && cloche.ErrorCode(err) != cloche.CodeConflict {
			t.Errorf("the creator got %s, %v", v.Session.State, err)
		}
	})
	<-g.entered
	if _, err := r.DeleteSandbox(t.Context(), me, "box"); err != nil {
		t.Error(err)
	}
	wg.Wait()
	r.node.set(func(n *fakeNode) { n.onStart = nil })
	r.create("box")
	checkConverged(t, r.store, r.node)
}

// meddler is a Store in which something happens just before a delete.
type meddler struct {
	Store
	once   sync.Once
	before func()
}

func (m *meddler) DeleteSandbox(ctx context.Context, id cloche.SandboxID, latest cloche.SessionID) error {
	m.once.Do(m.before)
	return m.Store.DeleteSandbox(ctx, id, latest)
}

func TestDeleteTakesASessionThatCameBetweenWithIt(t *testing.T) {
	r := newRig(t, Config{})
	v := r.create("box")
	var resumed cloche.SessionID
	r.Control.store = &meddler{Store: r.store, before: func() {
		got, did, err := r.GetSandbox(context.Background(), me, "box", true)
		if err != nil || !did {
			t.Errorf("resume: %v, %v", did, err)
		}
		resumed = got.Session.ID
	}}
	got, err := r.DeleteSandbox(t.Context(), me, "box")
	if err != nil || got.Session.ID != resumed || resumed == v.Session.ID || got.Session.State != cloche.Stopped {
		t.Errorf("deleted with session %s %s, %v", got.Session.ID, got.Session.State, err)
	}
	checkConverged(t, r.store, r.node)
	if live := r.Stats().Live; live != 0 {
		t.Errorf("%d live", live)
	}
}

func TestDeletesAndResumesAtOnceLeaveNoOrphan(t *testing.T) {
	r := newRig(t, Config{})
	for range 10 {
		v := r.create("box")
		if _, err := r.StopSession(t.Context(), me, v.Session.ID); err != nil {
			t.Fatal(err)
		}
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				_, _, err := r.GetSandbox(context.Background(), me, "box", true)
				if code := cloche.ErrorCode(err); err != nil && code != cloche.CodeNotFound {
					t.Errorf("resume: %v", err)
				}
			})
			wg.Go(func() {
				_, err := r.DeleteSandbox(context.Background(), me, "box")
				if code := cloche.ErrorCode(err); err != nil && code != cloche.CodeNotFound {
					t.Errorf("delete: %v", err)
				}
			})
		}
		wg.Wait()
		checkConverged(t, r.store, r.node)
		_, _, err := r.GetSandbox(t.Context(), me, "box", false)
		wantCode(t, err, cloche.CodeNotFound)
	}
	if live := r.Stats().Live; live != 0 {
		t.Errorf("%d live", live)
	}
}

func TestLimitsRefuseBeforeAnythingIsMade(t *testing.T) {
	free := int64(10 << 30)
	r := newRig(t, Config{MaxSessions: 1, MinFreePercent: 5, Disk: func() (int64, int64, error) { return free, 100 << 30, nil }})
	v := r.create("one")
	_, err := r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Name: "two"})
	wantCode(t, err, cloche.CodeExhausted)
	if _, err := r.StopSession(t.Context(), me, v.Session.ID); err != nil {
		t.Fatal(err)
	}
	free = 4 << 30
	_, err = r.CreateSandbox(t.Context(), me, cloche.CreateSandbox{Name: "two"})
	wantCode(t, err, cloche.CodeExhausted)
	_, _, err = r.GetSandbox(t.Context(), me, "one", true)
	wantCode(t, err, cloche.CodeExhausted)
	free = 6 << 30
	if _, _, err = r.GetSandbox(t.Context(), me, "one", true); err != nil {
		t.Errorf("with room again: %v", err)
	}
	if st := r.Stats(); st.Refused != 3 || st.Live != 1 {
		t.Errorf("stats %+v", st)
	}
}
