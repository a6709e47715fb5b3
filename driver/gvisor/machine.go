package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/failpoint"
	"github.com/cloche-dev/cloche/internal/overlay"
)

// machine implements driver.Machine. All that matters is on disk and in the
// cgroup, so that any number of them, in any process, can stand for one machine.
type machine struct {
	d   *Driver
	dir string
	rec record

	mu       sync.Mutex
	exit     *driver.Exit  // guarded by mu; set once
	last     *driver.Stats // guarded by mu; what the cgroup said before it went
	released bool          // guarded by mu
}

func (d *Driver) machine(r record) *machine {
	return &machine{d: d, dir: d.stateDir(r.Spec.ID), rec: r}
}

// ID implements driver.Machine.
func (m *machine) ID() cloche.SessionID { return m.rec.Spec.ID }

// Wait implements driver.Machine.
func (m *machine) Wait(ctx context.Context) (driver.Exit, error) {
	if e := m.concluded(); e != nil {
		return *e, nil
	}
	if m.alive() {
		if err := m.rec.Sandbox.Wait(ctx); err != nil {
			return driver.Exit{}, fmt.Errorf("wait for %s: %w", m.ID(), err)
		}
	}
	return m.conclude(ctx)
}

// alive reports whether the sentry runs: it is the machine.
func (m *machine) alive() bool {
	if m.rec.Sandbox.PID == 0 {
		return false
	}
	boot, err := bootID()
	return err == nil && boot == m.rec.BootID && m.rec.Sandbox.Alive()
}

func (m *machine) concluded() *driver.Exit {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.exit
}

// conclude ends what is left of a machine whose sentry has ended, and says why
// it did: what somebody concluded first, in this process or another.
func (m *machine) conclude(ctx context.Context) (driver.Exit, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.exit != nil {
		return *m.exit, nil
	}
	// The gofer may be a moment behind, and what a crash left may be more.
	if err := killAll(ctx, m.d.cgroups, m.ID()); err != nil {
		return driver.Exit{}, fmt.Errorf("end of %s: %w", m.ID(), err)
	}
	exit := m.cause()
	data, err := json.Marshal(exit)
	if err != nil {
		return driver.Exit{}, err
	}
	data, first, err := writeOnce(filepath.Join(m.dir, fileEnd), data)
	if err == nil {
		err = json.Unmarshal(data, &exit)
	} else if errors.Is(err, fs.ErrNotExist) {
		err = nil // released by somebody else
	} else if errors.Is(err, syscall.ENOSPC) {
		// The end goes on, because it is what makes room; another process would
		// find the cause out again.
		first, err = true, nil
	}
	if err != nil {
		return driver.Exit{}, fmt.Errorf("end of %s: %w", m.ID(), err)
	}
	if first {
		m.d.log.InfoContext(ctx, "machine ended", "session", m.ID(), "cause", exit.Cause, "detail", exit.Detail)
	}
	m.exit = &exit
	return exit, nil
}

// cause finds out why the machine ended, from what it left behind.
func (m *machine) cause() driver.Exit {
	now := time.Now()
	if _, err := os.Lstat(m.dir); err != nil {
		return driver.Exit{Cause: driver.ExitKilled, Detail: "removed", At: now}
	}
	if word, err := os.ReadFile(filepath.Join(m.dir, fileExit)); err == nil && len(word) > 0 {
		// The sentry wrote it as its last act; a guest cannot.
		var how string
		var n int
		if _, err := fmt.Sscanf(string(word), "%s %d", &how, &n); err == nil {
			return driver.Exit{Cause: driver.ExitStopped, Detail: fmt.Sprintf("the agent ended: %s %d", how, n), At: now}
		}
	}
	if _, err := os.Lstat(filepath.Join(m.dir, fileKilled)); err == nil {
		return driver.Exit{Cause: driver.ExitKilled, At: now}
	}
	if m.rec.Sandbox.PID == 0 {
		return driver.Exit{Cause: driver.ExitCrashed, Detail: "it was cut off in its start", At: now}
	}
	if boot, err := bootID(); err == nil && boot != m.rec.BootID {
		return driver.Exit{Cause: driver.ExitCrashed, Detail: "the host was restarted", At: now}
	}
	if u, err := m.d.cgroups.stat(m.ID()); err == nil && u.oomKills > 0 {
		return driver.Exit{Cause: driver.ExitOOM, Detail: "the host's kernel ended it for its memory", At: now}
	}
	exit := driver.Exit{Cause: driver.ExitCrashed, Detail: "its process was killed from outside", At: now}
	if log, err := os.ReadFile(filepath.Join(m.dir, filePanic)); err == nil && len(bytes.TrimSpace(log)) > 0 {
		exit.Detail = "its kernel crashed"
		m.d.log.Error("sentry crashed", "session", m.ID(), "log", string(log[:min(len(log), 16<<10)]))
	}
	return exit
}

// Kill implements driver.Machine.
func (m *machine) Kill(ctx context.Context) error {
	if m.concluded() != nil {
		return nil
	}
	if m.alive() {
		err := os.WriteFile(filepath.Join(m.dir, fileKilled), nil, 0o600)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("kill %s: %w", m.ID(), err)
		}
	}
	failpoint.Here("gvisor/kill/before-kill")
	_, err := m.conclude(ctx)
	return err
}

// abandon ends a machine whose start was cut off.
func (m *machine) abandon(ctx context.Context) error {
	_, err := m.conclude(ctx)
	return err
}

// Stats implements driver.Machine.
func (m *machine) Stats(context.Context) (driver.Stats, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.released && m.last != nil {
		return *m.last, nil
	}
	s, err := m.read()
	if err != nil {
		if m.last != nil {
			return *m.last, nil
		}
		if errors.Is(err, fs.ErrNotExist) {
			return driver.Stats{}, nil // removed by somebody else
		}
		return driver.Stats{}, fmt.Errorf("usage of %s: %w", m.ID(), err)
	}
	m.last = &s
	return s, nil
}

func (m *machine) read() (driver.Stats, error) {
	u, err := m.d.cgroups.stat(m.ID())
	if err != nil {
		return driver.Stats{}, err
	}
	pids, err := m.d.cgroups.procs(m.ID())
	if err != nil {
		return driver.Stats{}, err
	}
	s := driver.Stats{CPU: u.cpu, MemoryBytes: u.memory, PeakBytes: u.peak, Processes: len(pids)}
	if len(pids) == 0 {
		s.MemoryBytes = 0 // what is charged still is page cache
	}
	return s, nil
}

// Release implements driver.Machine.
func (m *machine) Release(ctx context.Context) error {
	defer m.d.locks.lock(m.ID())()
	if err := m.Kill(ctx); err != nil {
		return err
	}
	failpoint.Here("gvisor/release/after-kill")
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.released {
		return nil
	}
	if s, err := m.read(); err == nil {
		m.last = &s
	}
	if err := m.d.removeCgroup(ctx, m.ID()); err != nil {
		return fmt.Errorf("cgroup of %s: %w", m.ID(), err)
	}
	failpoint.Here("gvisor/release/after-cgroup")
	if m.rec.Spec.Root.Top != "" {
		// Only the kernel's scratch directory of the overlay; upper stays.
		if err := overlay.CleanTop(m.rec.Spec.Root.Top); err != nil {
			return fmt.Errorf("top of %s: %w", m.ID(), err)
		}
	}
	failpoint.Here("gvisor/release/after-top")
	if err := os.RemoveAll(m.dir); err != nil {
		return fmt.Errorf("state of %s: %w", m.ID(), err)
	}
	failpoint.Here("gvisor/release/after-state")
	m.released = true
	return nil
}
