// Package testenv gives tests what they need of the machine that they run on:
// root or a loud skip, a cache that outlives the run, the built binaries. Only
// tests import it.
package testenv

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
)

// Root skips a test that needs root, and says on standard error what was not
// tested, so that a green run without root cannot be mistaken for a whole one.
func Root(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		Skip(t, "it needs root: mounts, namespaces and cgroups")
	}
}

// Skip skips a test loudly.
func Skip(t testing.TB, why string) {
	t.Helper()
	fmt.Fprintf(os.Stderr, "SKIPPED %s: %s\n", t.Name(), why)
	t.Skip(why)
}

// Soak skips a test that is too long for every run, unless CLOCHE_SOAK is set.
func Soak(t testing.TB) {
	t.Helper()
	if os.Getenv("CLOCHE_SOAK") == "" {
		t.Skip("a long one: make soak runs it")
	}
}

// CacheDir is the directory for what a first run makes and later ones use:
// CLOCHE_CACHE, by default cloche in the user's cache directory.
func CacheDir(t testing.TB) string {
	t.Helper()
	dir := os.Getenv("CLOCHE_CACHE")
	if dir == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			t.Fatal(err)
		}
		dir = filepath.Join(base, "cloche")
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// ModuleRoot is the directory of go.mod.
func ModuleRoot(t testing.TB) string {
	t.Helper()
	_, file, _, ok := runtime.Caller(0)
	if !ok {
		t.Fatal("no source positions in this test binary")
	}
	return filepath.Join(filepath.Dir(file), "..", "..")
}

// Agent returns the path of the agent, built from this tree.
func Agent(t testing.TB) string {
	t.Helper()
	return built(t, &agentOnce, "agent", "cmd/cloche/agent/cloche-agent")
}

// Cloche returns the path of bin/cloche, built from this tree with the agent
// in it.
func Cloche(t testing.TB) string {
	t.Helper()
	return built(t, &clocheOnce, "build", "bin/cloche")
}

var agentOnce, clocheOnce once

type once struct {
	sync.Once
	err error
}

// built runs a target of the Makefile once in this process.
func built(t testing.TB, o *once, target, file string) string {
	t.Helper()
	root := ModuleRoot(t)
	o.Do(func() {
		cmd := exec.Command("make", "--no-print-directory", "-s", target)
		cmd.Dir = root
		if out, err := cmd.CombinedOutput(); err != nil {
			o.err = fmt.Errorf("make %s: %w\n%s", target, err, out)
		}
	})
	if o.err != nil {
		t.Fatal(o.err)
	}
	return filepath.Join(root, file)
}
