package control

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/failpoint"
	"github.com/cloche-dev/cloche/store"
)

// childVar makes the test binary run one scenario in the directory childDirVar
// instead of the tests.
const (
	childVar    = "CLOCHE_TEST_SCENARIO"
	childDirVar = "CLOCHE_TEST_DIR"
)

func TestMain(m *testing.M) {
	name := os.Getenv(childVar)
	if name == "" {
		// Each check of the random lives is a few hundred commits. The command
		// line may ask for more.
		if err := flag.Set("rapid.checks", "30"); err != nil {
			panic(err)
		}
		os.Exit(m.Run())
	}
	if err := runScenario(os.Getenv(childDirVar), scenarios[name]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// scenario is something that a server does and may be killed in. Two sandboxes
// run already, "keep" and "box"; before lets the server of then do more, and
// ends it. run may be nil: a start is a scenario, too.
type scenario struct {
	empty  bool // no data directory yet
	before func(*rig)
	run    func(*Control, *fakeNode, *store.Store) error
}

var scenarios = map[string]scenario{
	"first start": {empty: true},
	"create": {run: func(c *Control, _ *fakeNode, _ *store.Store) error {
		_, err := c.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: "new"})
		return err
	}},
	"failing create": {run: func(c *Control, n *fakeNode, _ *store.Store) error {
		n.onStart = func(context.Context, cloche.Session) error { return errors.New("no such device") }
		_, err := c.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: "new"})
		if err == nil {
			return errors.New("the create succeeded")
		}
		return nil
	}},
	"create without its client": {run: func(c *Control, n *fakeNode, _ *store.Store) error {
		ctx, cancel := context.WithCancel(context.Background())
		n.deaf = true
		n.onStart = func(context.Context, cloche.Session) error { cancel(); return nil }
		_, err := c.CreateSandbox(ctx, me, cloche.CreateSandbox{Name: "new"})
		if !errors.Is(err, context.Canceled) {
			return fmt.Errorf("the create: %w", err)
		}
		return nil
	}},
	"stop and resume": {run: func(c *Control, _ *fakeNode, s *store.Store) error {
		b, err := s.Sandbox(context.Background(), me.Team, me.Project, "box")
		if err != nil {
			return err
		}
		if _, err := c.StopSession(context.Background(), me, b.SessionID); err != nil {
			return err
		}
		_, _, err = c.GetSandbox(context.Background(), me, "box", true)
		return err
	}},
	"update": {run: func(c *Control, _ *fakeNode, _ *store.Store) error {
		vcpus := 1
		v, err := c.UpdateSandbox(context.Background(), me, "box", cloche.UpdateSandbox{VCPUs: &vcpus})
		if err != nil {
			return err
		}
		_, err = c.ExtendTimeout(context.Background(), me, v.Session.ID, cloche.DefaultTimeout)
		return err
	}},
	"delete": {run: func(c *Control, _ *fakeNode, _ *store.Store) error {
		_, err := c.DeleteSandbox(context.Background(), me, "box")
		return err
	}},
	"abort": {run: func(c *Control, n *fakeNode, s *store.Store) error {
		b, err := s.Sandbox(context.Background(), me.Team, me.Project, "box")
		if err != nil {
			return err
		}
		if err := os.Remove(n.file(b.SessionID)); err != nil {
			return err
		}
		l := c.life(b.SessionID)
		c.Ended(context.Background(), cloche.SessionEnd{ID: b.SessionID, Cause: "out of memory"})
		<-l.final
		return nil
	}},
	"recovery": {before: leaveDebris},
}

// leaveDebris ends the server in the middle of everything at once.
func leaveDebris(r *rig) {
	ctx := context.Background()
	begun := make(chan struct{})
	block := func(ctx context.Context, s cloche.Session) error {
		// The machine is there, but nobody has written so.
		if err := os.WriteFile(r.node.file(s.ID), nil, 0o600); err != nil {
			return err
		}
		begun <- struct{}{}
		<-ctx.Done()
		return ctx.Err()
	}
	stopped := r.create("stopped")
	if _, err := r.StopSession(ctx, me, stopped.Session.ID); err != nil {
		r.t.Fatal(err)
	}
	crashed, stopping := r.create("crashed"), r.create("stopping")
	if err := os.Remove(r.node.file(crashed.Session.ID)); err != nil {
		r.t.Fatal(err)
	}
	r.node.set(func(n *fakeNode) {
		n.onStart = block
		n.onStop = func(ctx context.Context, _ cloche.SessionID) error {
			begun <- struct{}{}
			<-ctx.Done()
			return ctx.Err()
		}
	})
	var wg sync.WaitGroup
	fail := func(err error) {
		if err == nil {
			r.t.Error("an operation succeeded that was cut off")
		}
	}
	wg.Go(func() {
		_, err := r.CreateSandbox(ctx, me, cloche.CreateSandbox{Name: "new"})
		fail(err)
	})
	<-begun
	wg.Go(func() {
		_, _, err := r.GetSandbox(ctx, me, "stopped", true)
		fail(err)
	})
	<-begun
	wg.Go(func() {
		_, err := r.StopSession(ctx, me, stopping.Session.ID)
		fail(err)
	})
	<-begun
	r.crash()
	wg.Wait()
}

func runScenario(dir string, sc scenario) error {
	s, err := openStore(dir)
	if err != nil {
		return err
	}
	n := &fakeNode{dir: filepath.Join(dir, "machines")}
	c := New(s, n, fakeImages{}, Config{Log: quiet()})
	if err := c.Recover(context.Background()); err != nil {
		return err
	}
	if sc.run != nil {
		if err := sc.run(c, n, s); err != nil {
			return err
		}
	}
	c.Close(context.Background())
	return s.Close()
}

// marks reads the names of all failpoints from the sources in dirs.
func marks(t *testing.T, dirs ...string) []string {
	t.Helper()
	call := regexp.MustCompile(`failpoint\.Here\("([^"]+)"\)`)
	var names []string
	for _, dir := range dirs {
		files, err := filepath.Glob(filepath.Join(dir, "*.go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if strings.HasSuffix(file, "_test.go") {
				continue
			}
			for _, m := range call.FindAllSubmatch(text, -1) {
				names = append(names, string(m[1]))
			}
		}
	}
	if unique := slices.Compact(slices.Sorted(slices.Values(names))); len(unique) != len(names) || len(names) == 0 {
		t.Fatalf("%d failpoints with %d names", len(names), len(unique))
	}
	return names
}

// L1: the server is killed at every failpoint of everything it does. The next
// one finds its way from whatever is left.
func TestL1KilledAtAnyStepConverges(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	reached := make(map[string]bool)
	ours, others := marks(t, "."), marks(t, "../store", "../auth")
	t.Run("kill", func(t *testing.T) {
		for what, sc := range scenarios {
			names := ours
			if sc.empty { // each start passes those of the others
				names = slices.Concat(ours, others)
			}
			template := prepare(t, sc)
			for _, mark := range names {
				t.Run(what+"/"+mark, func(t *testing.T) {
					t.Parallel()
					if killAndRecover(t, exe, template, what, mark) {
						mu.Lock()
						reached[mark] = true
						mu.Unlock()
					}
				})
			}
		}
	})
	for _, mark := range slices.Concat(ours, others) {
		if !reached[mark] {
			t.Errorf("no scenario reaches the failpoint %s", mark)
		}
	}
}

// prepare makes the data directory that a scenario begins with.
func prepare(t *testing.T, sc scenario) (dir string) {
	r := &rig{t: t, dir: scratch(t), cfg: Config{Log: quiet()}}
	if err := os.Mkdir(filepath.Join(r.dir, "machines"), 0o700); err != nil {
		t.Fatal(err)
	}
	if sc.empty {
		return r.dir
	}
	r.open()
	r.create("keep")
	r.create("box")
	if sc.before != nil {
		sc.before(r)
	} else {
		r.close()
	}
	return r.dir
}

// killAndRecover runs a scenario with one failpoint armed, in a copy of the
// template. It reports whether that was reached.
func killAndRecover(t *testing.T, exe, template, what, mark string) (reached bool) {
	r := &rig{t: t, dir: scratch(t), cfg: Config{Log: quiet()}}
	if out, err := exec.Command("cp", "-a", template+"/.", r.dir).CombinedOutput(); err != nil {
		t.Fatalf("copy: %v: %s", err, out)
	}
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), childVar+"="+what, childDirVar+"="+r.dir, failpoint.EnvVar+"="+mark)
	out, err := cmd.CombinedOutput()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		status, ok := exit.Sys().(syscall.WaitStatus)
		reached = ok && status.Signaled() && status.Signal() == syscall.SIGKILL
	}
	if err != nil && !reached {
		t.Fatalf("the server ended with %v: %s", err, out)
	}
	r.open()
	defer r.close()
	for _, l := range r.everyLife() {
		if l.phase() == ending {
			<-l.final
		}
	}
	checkConverged(t, r.store, r.node)
	if keep, _, err := r.GetSandbox(t.Context(), me, "keep", false); what != "first start" && (err != nil || keep.Session.State != cloche.Running) {
		t.Errorf("the bystander is %s, %v", keep.Session.State, err)
	}
	// A sandbox is there as a whole, so that its client can go on with it, or
	// not at all, so that its client can make it again.
	for _, name := range []string{"box", "new"} {
		v, _, err := r.GetSandbox(t.Context(), me, name, false)
		switch {
		case cloche.ErrorCode(err) == cloche.CodeNotFound:
			r.create(name)
		case err != nil:
			t.Error(err)
		case v.Session.State == cloche.Failed:
			if _, _, err := r.GetSandbox(t.Context(), me, name, true); err != nil || name == "new" {
				t.Errorf("%s was left with a session that is %s (%s), %v", name, v.Session.State, v.Session.Cause, err)
			}
		default:
			if _, _, err := r.GetSandbox(t.Context(), me, name, true); err != nil {
				t.Errorf("resume of %s: %v", name, err)
			}
		}
	}
	checkConverged(t, r.store, r.node)
	return reached
}
