package control

import (
	"context"
	"errors"
	"maps"
	"os"
	"testing"

	"pgregory.net/rapid"

	"github.com/cloche-dev/cloche"
)

// world compares a server with a model of it: which sandboxes there are and
// whether each has a running session.
type world struct {
	*rig
	boxes map[string]bool // name -> its session runs
}

// TestRandomLivesKeepTheInvariants runs random sequences of what clients and
// fate can do: one live session for each sandbox, unique names, records and
// machines that agree, and no session that is left on its way.
func TestRandomLivesKeepTheInvariants(t *testing.T) {
	r := newRig(t, Config{})
	rapid.Check(t, func(t *rapid.T) {
		w := &world{rig: r, boxes: make(map[string]bool)}
		defer w.clear(t)
		t.Repeat(map[string]func(*rapid.T){
			"create":       w.create,
			"failedCreate": w.failedCreate,
			"stop":         w.stop,
			"resume":       w.resume,
			"failedResume": w.failedResume,
			"delete":       w.delete,
			"machineEnds":  w.machineEnds,
			"restart":      w.restart,
			"crash":        w.crash,
			"":             w.check,
		})
	})
}

func (w *world) name(t *rapid.T) string {
	return rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "name")
}

// existing draws a sandbox that exists.
func (w *world) existing(t *rapid.T) cloche.SandboxView {
	name := w.name(t)
	if _, ok := w.boxes[name]; !ok {
		t.Skip("no such sandbox")
	}
	v, _, err := w.GetSandbox(context.Background(), me, name, false)
	if err != nil {
		t.Fatalf("get %s: %v", name, err)
	}
	return v
}

func (w *world) create(t *rapid.T) {
	name := w.name(t)
	_, err := w.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: name})
	_, taken := w.boxes[name]
	if taken && cloche.ErrorCode(err) != cloche.CodeConflict || !taken && err != nil {
		t.Fatalf("create %s, taken %v: %v", name, taken, err)
	}
	if !taken {
		w.boxes[name] = true
	}
}

// failing makes each start fail while f runs.
func (w *world) failing(f func()) {
	w.node.set(func(n *fakeNode) {
		n.onStart = func(context.Context, cloche.Session) error { return cloche.Errorf(cloche.CodeExhausted, "full") }
	})
	f()
	w.node.set(func(n *fakeNode) { n.onStart = nil })
}

func (w *world) failedCreate(t *rapid.T) {
	w.failing(func() {
		if _, err := w.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: w.name(t)}); err == nil {
			t.Fatalf("the create succeeded")
		}
	})
}

func (w *world) stop(t *rapid.T) {
	v := w.existing(t)
	got, err := w.StopSession(context.Background(), me, v.Session.ID)
	if err != nil || !got.Session.State.Final() {
		t.Fatalf("stop %s: %s, %v", v.Sandbox.Name, got.Session.State, err)
	}
	w.boxes[v.Sandbox.Name] = false
}

func (w *world) resume(t *rapid.T) {
	v := w.existing(t)
	got, resumed, err := w.GetSandbox(context.Background(), me, v.Sandbox.Name, true)
	if err != nil || got.Session.State != cloche.Running || resumed == w.boxes[v.Sandbox.Name] {
		t.Fatalf("resume %s: %s, resumed %v, %v", v.Sandbox.Name, got.Session.State, resumed, err)
	}
	w.boxes[v.Sandbox.Name] = true
}

func (w *world) failedResume(t *rapid.T) {
	v := w.existing(t)
	w.failing(func() {
		_, resumed, err := w.GetSandbox(context.Background(), me, v.Sandbox.Name, true)
		if runs := w.boxes[v.Sandbox.Name]; resumed || runs != (err == nil) {
			t.Fatalf("resume %s, running %v: resumed %v, %v", v.Sandbox.Name, runs, resumed, err)
		}
	})
}

func (w *world) delete(t *rapid.T) {
	v := w.existing(t)
	if _, err := w.DeleteSandbox(context.Background(), me, v.Sandbox.Name); err != nil {
		t.Fatalf("delete %s: %v", v.Sandbox.Name, err)
	}
	delete(w.boxes, v.Sandbox.Name)
}

func (w *world) machineEnds(t *rapid.T) {
	v := w.existing(t)
	l := w.life(v.Session.ID)
	if l == nil {
		t.Skip("it does not run")
	}
	if err := os.Remove(w.node.file(v.Session.ID)); err != nil {
		t.Fatalf("%v", err)
	}
	w.Ended(context.Background(), cloche.SessionEnd{ID: v.Session.ID, Cause: "out of memory"})
	<-l.final
	w.boxes[v.Sandbox.Name] = false
}

func (w *world) restart(*rapid.T) {
	w.rig.close()
	w.open()
	w.settle()
}

// crash ends the server in the middle of an operation, before or after the
// node has done its part, and perhaps a machine while it is down.
func (w *world) crash(t *rapid.T) {
	name, after := w.name(t), rapid.Bool().Draw(t, "after the effect")
	operation := rapid.SampledFrom([]string{"create", "resume", "delete"}).Draw(t, "operation")
	died, done, node := make(chan struct{}), make(chan struct{}), w.node
	die := func(effect error) error {
		node.set(func(n *fakeNode) { n.dead = true })
		close(died)
		return errors.Join(errDead, effect)
	}
	node.set(func(n *fakeNode) {
		n.onStart = func(_ context.Context, s cloche.Session) (err error) {
			if after {
				err = os.WriteFile(node.file(s.ID), nil, 0o600)
			}
			return die(err)
		}
		n.onStop = func(_ context.Context, id cloche.SessionID) (err error) {
			if after {
				err = os.Remove(node.file(id))
			}
			return die(err)
		}
	})
	go func() {
		defer close(done)
		switch operation { // it may end in any way
		case "create":
			_, _ = w.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: name})
		case "resume":
			_, _, _ = w.GetSandbox(context.Background(), me, name, true)
		case "delete":
			_, _ = w.DeleteSandbox(context.Background(), me, name)
		}
	}()
	select {
	case <-died:
	case <-done:
	}
	w.rig.crash()
	<-done
	if machines := node.machines(); len(machines) > 0 && rapid.Bool().Draw(t, "a machine ends meanwhile") {
		if err := os.Remove(node.file(machines[0])); err != nil {
			t.Fatalf("%v", err)
		}
	}
	w.open()
	w.settle()
	for _, n := range []string{"a", "b", "c"} {
		_, had := w.boxes[n]
		v, _, err := w.GetSandbox(context.Background(), me, n, false)
		switch {
		case cloche.ErrorCode(err) == cloche.CodeNotFound:
			if had && (n != name || operation != "delete") {
				t.Fatalf("%s is lost", n)
			}
			delete(w.boxes, n)
		case err != nil:
			t.Fatalf("get %s: %v", n, err)
		case !had && (n != name || operation != "create"):
			t.Fatalf("%s appeared", n)
		default:
			w.boxes[n] = v.Session.State == cloche.Running
		}
	}
}

// settle waits for the ends that a start has found in progress.
func (w *world) settle() {
	for _, l := range w.everyLife() {
		if l.phase() == ending {
			<-l.final
		}
	}
}

func (w *world) check(t *rapid.T) {
	checkConverged(t, w.store, w.node)
	views, _, err := w.ListSandboxes(context.Background(), me, cloche.ListSandboxes{})
	if err != nil {
		t.Fatalf("list: %v", err)
	}
	got := make(map[string]bool)
	for _, v := range views {
		if _, twice := got[v.Sandbox.Name]; twice {
			t.Fatalf("two sandboxes are named %s", v.Sandbox.Name)
		}
		if !v.Session.State.Final() && v.Session.State != cloche.Running {
			t.Fatalf("%s is left %s", v.Sandbox.Name, v.Session.State)
		}
		got[v.Sandbox.Name] = v.Session.State == cloche.Running
	}
	if !maps.Equal(got, w.boxes) {
		t.Fatalf("there are %v, expected %v", got, w.boxes)
	}
}

// clear makes room for the next sequence.
func (w *world) clear(t *rapid.T) {
	for name := range w.boxes {
		if _, err := w.DeleteSandbox(context.Background(), me, name); err != nil {
			t.Fatalf("delete %s: %v", name, err)
		}
	}
	if machines := w.node.machines(); len(machines) != 0 {
		t.Fatalf("machines are left: %v", machines)
	}
}
