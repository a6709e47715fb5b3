// Package drivertest is the suite that every driver passes: package driver says
// what, this makes it true. It reaches into machines through the real agent, by
// package guest, and looks at the host for what machines leave behind. It needs
// root.
package drivertest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
)

// Config is the driver under test.
type Config struct {
	// New opens the driver on dir, which holds what the driver keeps. It is
	// called again for the same dir, as by a later process.
	New func(t testing.TB, dir string) driver.Driver

	// Image is the tree that machines run on; see the function Image.
	Image string

	// Isolates is true if machines have a kernel of their own, so that they
	// are bounded in CPU and memory, show it, and end with their process 1,
	// which root inside may kill. (Linux protects the process 1 of a PID
	// namespace from those inside.) Only the fake does not.
	Isolates bool

	// Crash ends the machine from outside, as an administrator's kill -9 of
	// its main process would.
	Crash func(t testing.TB, dir string, id cloche.SessionID)
}

// Timeout bounds each test of the suite, on a slow and busy host.
const Timeout = 2 * time.Minute

// Suite runs all tests.
func Suite(t *testing.T, c Config) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the driver suite needs root")
	}
	for name, test := range map[string]func(*testing.T, *env){
		"Life":              testLife,
		"KillReleaseTwice":  testKillReleaseTwice,
		"AgentKilledInside": testAgentKilledInside,
		"KilledOutside":     testKilledOutside,
		"OutOfMemory":       testOutOfMemory,
		"Recover":           testRecover,
		"RecoverEnded":      testRecoverEnded,
		"Unknown":           testUnknown,
		"Conflict":          testConflict,
		"BadSpec":           testBadSpec,
		"CancelledStart":    testCancelledStart,
		"Size":              testSize,
		"CPUBound":          testCPUBound,
		"Top":               testTop,
		"Layers":            testLayers,
		"ImageUnchanged":    testImageUnchanged,
		"TopUntouchedByUs":  testTopUntouched,
		"KillWhileDialing":  testKillWhileDialing,
		"DeadChannel":       testDeadChannel,
		"Deadline":          testDeadline,
		"ManyChannels":      testManyChannels,
		"Concurrent":        testConcurrent,
		"Twenty":            testTwenty,
		"Stats":             testStats,
		"Isolation":         testIsolation,
	} {
		t.Run(name, func(t *testing.T) { test(t, newEnv(t, c)) })
	}
}

// env is what one test has: a driver on a directory of its own.
type env struct {
	c   Config
	dir string
	d   driver.Driver
	ctx context.Context
}

func newEnv(t *testing.T, c Config) *env {
	ctx, cancel := context.WithTimeout(t.Context(), Timeout)
	t.Cleanup(cancel)
	e := &env{c: c, dir: t.TempDir(), ctx: ctx}
	e.d = c.New(t, filepath.Join(e.dir, "driver"))
	t.Cleanup(func() { e.cleanUp(t) })
	return e
}

// cleanUp removes what a test left and fails it if something stays.
func (e *env) cleanUp(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), Timeout)
	defer cancel()
	ids, err := e.d.List(ctx)
	if err != nil {
		t.Errorf("List: %v", err)
	}
	for _, id := range ids {
		if err := e.d.Remove(ctx, id); err != nil {
			t.Errorf("Remove(%s): %v", id, err)
		}
		e.noLeftovers(t, id)
	}
	if err := e.d.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

func (e *env) noLeftovers(t testing.TB, id cloche.SessionID) {
	t.Helper()
	for _, l := range Leftovers(t, filepath.Join(e.dir, "driver"), id) {
		t.Errorf("left over: %s", l)
	}
}

// spec is a machine on the image with a fresh top.
func (e *env) spec(t testing.TB) driver.Spec {
	t.Helper()
	id := cloche.NewSessionID()
	return driver.Spec{
		ID:        id,
		Hostname:  "box-1",
		VCPUs:     1,
		MemoryMiB: 256,
		Root:      driver.Root{Image: e.c.Image, Top: e.top(t, string(id))},
	}
}

func (e *env) top(t testing.TB, name string) string {
	t.Helper()
	top := filepath.Join(e.dir, "tops", name)
	if err := os.MkdirAll(top, 0o700); err != nil {
		t.Fatal(err)
	}
	return top
}

func (e *env) start(t testing.TB, spec driver.Spec) driver.Machine {
	t.Helper()
	m, err := e.d.Start(e.ctx, spec)
	if err != nil {
		t.Fatalf("Start: %v", err)
	}
	return m
}

// session opens a channel and configures the agent.
func (e *env) session(t testing.TB, m driver.Machine, spec driver.Spec) *session {
	t.Helper()
	s, err := open(e.ctx, m)
	if err != nil {
		t.Fatalf("open channel: %v", err)
	}
	t.Cleanup(func() { _ = s.Close() }) // the machine may have ended first
	if err := s.configure(e.ctx, spec); err != nil {
		t.Fatalf("configure: %v", err)
	}
	return s
}

// sh runs a script in the machine and fails the test unless it exits with 0.
func (e *env) sh(t testing.TB, s *session, script string) string {
	t.Helper()
	out, exit, err := s.run(e.ctx, script)
	if err != nil || exit.Code != 0 {
		t.Fatalf("%s: exit %+v, error %v, output %q", script, exit, err, out)
	}
	return out
}

// wait returns the machine's exit and fails the test unless the cause is want.
func (e *env) wait(t testing.TB, m driver.Machine, want driver.ExitCause) driver.Exit {
	t.Helper()
	exit, err := m.Wait(e.ctx)
	if err != nil {
		t.Fatalf("Wait: %v", err)
	}
	if exit.Cause != want {
		t.Errorf("cause = %q (%s), want %q", exit.Cause, exit.Detail, want)
	}
	if exit.At.IsZero() || time.Since(exit.At) > Timeout {
		t.Errorf("ended at %v", exit.At)
	}
	return exit
}

func wantCode(t testing.TB, what string, err error, want cloche.Code) {
	t.Helper()
	var e *cloche.Error
	if !errors.As(err, &e) || e.Code != want {
		t.Errorf("%s: error %v, want one of code %s", what, err, want)
	}
}

func (e *env) listed(t testing.TB, id cloche.SessionID) bool {
	t.Helper()
	ids, err := e.d.List(e.ctx)
	if err != nil {
		t.Fatalf("List: %v", err)
	}
	for _, l := range ids {
		if l == id {
			return true
		}
	}
	return false
}
