package drivertest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
)

func testLife(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	if m.ID() != spec.ID {
		t.Errorf("ID = %s, want %s", m.ID(), spec.ID)
	}
	s := e.session(t, m, spec)
	if out := e.sh(t, s, "id -u; hostname; cat /usr/share/deep/tree/leaf"); out != "0\nbox-1\nfrom the image\n" {
		t.Errorf("output = %q", out)
	}
	if !e.listed(t, spec.ID) {
		t.Error("List does not have a running machine")
	}
	if err := m.Kill(e.ctx); err != nil {
		t.Fatalf("Kill: %v", err)
	}
	first := e.wait(t, m, driver.ExitKilled)
	if again := e.wait(t, m, driver.ExitKilled); again != first {
		t.Errorf("second Wait = %+v, first %+v", again, first)
	}
	if !e.listed(t, spec.ID) {
		t.Error("List does not have an ended machine")
	}
	if err := m.Release(e.ctx); err != nil {
		t.Fatalf("Release: %v", err)
	}
	if e.listed(t, spec.ID) {
		t.Error("List has a released machine")
	}
	e.noLeftovers(t, spec.ID)
	if again := e.wait(t, m, driver.ExitKilled); again != first {
		t.Errorf("Wait after Release = %+v, before %+v", again, first)
	}
	_, err := m.Dial(e.ctx)
	wantCode(t, "Dial after Release", err, cloche.CodeGone)
}

func testKillReleaseTwice(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	for i, f := range []func(context.Context) error{m.Kill, m.Kill, m.Release, m.Release, m.Kill} {
		if err := f(e.ctx); err != nil {
			t.Errorf("call %d: %v", i, err)
		}
	}
	for range 2 {
		if err := e.d.Remove(e.ctx, spec.ID); err != nil {
			t.Errorf("Remove of a released machine: %v", err)
		}
	}
	if err := e.d.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
	if err := e.d.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
	e.d = e.c.New(t, filepath.Join(e.dir, "driver"))
}

func testAgentKilledInside(t *testing.T, e *env) {
	if !e.c.Isolates {
		t.Skip("SKIPPED: process 1 of this driver's machines cannot be killed from inside")
	}
	spec := e.spec(t)
	m := e.start(t, spec)
	s := e.session(t, m, spec)
	// The stream may break before the answer.
	_, _, _ = s.run(e.ctx, "kill -9 1")
	e.wait(t, m, driver.ExitStopped)
}

func testKilledOutside(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	e.session(t, m, spec)
	start := time.Now()
	e.c.Crash(t, filepath.Join(e.dir, "driver"), spec.ID)
	e.wait(t, m, driver.ExitCrashed)
	if d := time.Since(start); d > 10*time.Second {
		t.Errorf("Wait took %v to notice", d)
	}
}

func testOutOfMemory(t *testing.T, e *env) {
	if !e.c.Isolates {
		t.Skip("SKIPPED: this driver does not limit memory")
	}
	spec := e.spec(t)
	m := e.start(t, spec)
	s, err := open(e.ctx, m)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	// The agent's own guard would keep it from happening.
	if err := s.configureMemory(e.ctx, spec, 1<<40); err != nil {
		t.Fatal(err)
	}
	// Memory that belongs to no process: no victim but the machine helps. A
	// command that is killed on the way is followed by the next.
	for i := 0; i < 40; i++ {
		_, _, err := s.run(e.ctx, fmt.Sprintf(`mkdir -p /mnt/a && { [ -e /mnt/a/mark ] || mount -t tmpfs -o size=2g none /mnt/a; } &&
			touch /mnt/a/mark && dd if=/dev/zero of=/mnt/a/%d bs=1M count=32`, i))
		if err != nil {
			break // the channel broke with the machine
		}
	}
	e.wait(t, m, driver.ExitOOM)
}

func testRecover(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	s := e.session(t, m, spec)
	e.sh(t, s, "echo before > /root/file")
	later := e.c.New(t, filepath.Join(e.dir, "driver"))
	defer later.Close()
	m2, err := later.Recover(e.ctx, spec.ID)
	if err != nil {
		t.Fatalf("Recover: %v", err)
	}
	s2 := e.session(t, m2, spec)
	if out := e.sh(t, s2, "cat /root/file"); out != "before\n" {
		t.Errorf("file = %q", out)
	}
	if err := m2.Kill(e.ctx); err != nil {
		t.Fatalf("Kill of the recovered machine: %v", err)
	}
	if a, b := e.wait(t, m, driver.ExitKilled), e.wait(t, m2, driver.ExitKilled); !a.At.Equal(b.At) {
		t.Errorf("the exits differ: %+v and %+v", a, b)
	}
	if err := m2.Release(e.ctx); err != nil {
		t.Fatalf("Release: %v", err)
	}
	if err := m.Release(e.ctx); err != nil {
		t.Errorf("Release by the other: %v", err)
	}
	e.noLeftovers(t, spec.ID)
}

// testRecoverEnded adopts a machine that ended while nobody watched.
func testRecoverEnded(t *testing.T, e *env) {
	spec := e.spec(t)
	e.session(t, e.start(t, spec), spec)
	e.c.Crash(t, filepath.Join(e.dir, "driver"), spec.ID)
	for range 2 {
		m, err := e.d.Recover(e.ctx, spec.ID)
		if err != nil {
			t.Fatalf("Recover: %v", err)
		}
		e.wait(t, m, driver.ExitCrashed)
	}
}

func testUnknown(t *testing.T, e *env) {
	id := cloche.NewSessionID()
	_, err := e.d.Recover(e.ctx, id)
	wantCode(t, "Recover", err, cloche.CodeNotFound)
	_, err = e.d.Recover(e.ctx, "../../etc")
	wantCode(t, "Recover of no id", err, cloche.CodeNotFound)
	if err := e.d.Remove(e.ctx, id); err != nil {
		t.Errorf("Remove of an unknown machine: %v", err)
	}
}

func testConflict(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	_, err := e.d.Start(e.ctx, spec)
	wantCode(t, "second Start", err, cloche.CodeConflict)
	s := e.session(t, m, spec) // the first one is as it was
	if out := e.sh(t, s, "echo here"); out != "here\n" {
		t.Errorf("output = %q", out)
	}
	if err := m.Kill(e.ctx); err != nil {
		t.Fatal(err)
	}
	_, err = e.d.Start(e.ctx, spec)
	wantCode(t, "Start over an ended machine", err, cloche.CodeConflict)
}

func testBadSpec(t *testing.T, e *env) {
	good := e.spec(t)
	for name, change := range map[string]func(*driver.Spec){
		"id":             func(s *driver.Spec) { s.ID = "../x" },
		"no id":          func(s *driver.Spec) { s.ID = "" },
		"hostname":       func(s *driver.Spec) { s.Hostname = "a b" },
		"no hostname":    func(s *driver.Spec) { s.Hostname = "" },
		"long hostname":  func(s *driver.Spec) { s.Hostname = strings.Repeat("a", 64) },
		"no vCPU":        func(s *driver.Spec) { s.VCPUs = 0 },
		"many vCPUs":     func(s *driver.Spec) { s.VCPUs = e.d.Capabilities().MaxVCPUs + 1 },
		"little memory":  func(s *driver.Spec) { s.MemoryMiB = 255 },
		"no image":       func(s *driver.Spec) { s.Root.Image = filepath.Join(e.dir, "absent") },
		"relative image": func(s *driver.Spec) { s.Root.Image = "." },
		"no top":         func(s *driver.Spec) { s.Root.Top = filepath.Join(e.dir, "absent") },
		"no layer":       func(s *driver.Spec) { s.Root.Layers = []string{filepath.Join(e.dir, "absent")} },
	} {
		spec := good
		change(&spec)
		_, err := e.d.Start(e.ctx, spec)
		wantCode(t, name, err, cloche.CodeInvalid)
	}
	if ids, err := e.d.List(e.ctx); err != nil || len(ids) != 0 {
		t.Errorf("List = %v, %v, want nothing", ids, err)
	}
	if left, err := os.ReadDir(good.Root.Top); err != nil || len(left) != 0 {
		t.Errorf("the top has %v, %v", left, err)
	}
}

// testCancelledStart ends the context at many moments of a start.
func testCancelledStart(t *testing.T, e *env) {
	for delay := time.Millisecond; delay < 300*time.Millisecond; delay = delay*3/2 + time.Millisecond {
		spec := e.spec(t)
		ctx, cancel := context.WithTimeout(e.ctx, delay)
		m, err := e.d.Start(ctx, spec)
		cancel()
		if err == nil {
			if err := m.Release(e.ctx); err != nil {
				t.Fatalf("Release: %v", err)
			}
		} else if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("after %v: %v, want the deadline's error", delay, err)
		}
		if e.listed(t, spec.ID) {
			t.Errorf("after %v: List has the machine", delay)
		}
		e.noLeftovers(t, spec.ID)
	}
}

func testDeadChannel(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	c, err := m.Dial(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := m.Kill(e.ctx); err != nil {
		t.Fatal(err)
	}
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadAll(c); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("a read on the channel of a dead machine blocks")
	}
}
