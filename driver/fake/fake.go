// Package fake is a driver for fast tests. IT ISOLATES NOTHING: its machines are
// processes in plain Linux namespaces on the host's own kernel, without limits
// on CPU or memory, without seccomp, with the host's devices. It must never run
// code that is not the tests' own, and no server offers it. What it has in
// common with a real driver is the contract: the real agent as process 1, the
// same root file system, machines that outlive the process that started them.
//
// It needs root, and nsenter from util-linux.
package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/cleanup"
	"github.com/cloche-dev/cloche/internal/overlay"
	"github.com/cloche-dev/cloche/internal/process"
)

// Driver implements driver.Driver.
type Driver struct {
	machines string // directory of the records
	agent    string
	userns   *os.File

	mu sync.Mutex // held while a machine is made or unmade
}

var _ driver.Driver = (*Driver)(nil)

// New returns a driver that keeps its records in dir and runs the static
// executable agent as process 1. The running executable must call Dispatch
// first in main.
func New(dir, agent string) (*Driver, error) {
	d := &Driver{machines: filepath.Join(dir, "machines"), agent: agent}
	if err := os.MkdirAll(d.machines, 0o700); err != nil {
		return nil, fmt.Errorf("records: %w", err)
	}
	var err error
	d.userns, err = overlay.UserNamespace()
	return d, err
}

// Name implements driver.Driver.
func (d *Driver) Name() string { return "fake" }

// Capabilities implements driver.Driver. Numbers of vCPUs have no effect.
func (d *Driver) Capabilities() driver.Capabilities {
	return driver.Capabilities{MaxVCPUs: cloche.MaxVCPUs}
}

// Start implements driver.Driver.
func (d *Driver) Start(ctx context.Context, spec driver.Spec) (_ driver.Machine, err error) {
	if err := spec.Check(d.Capabilities()); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	m := d.machine(record{Spec: spec})
	if err := os.Mkdir(m.dir, 0o700); errors.Is(err, fs.ErrExist) {
		return nil, cloche.Errorf(cloche.CodeConflict, "session %s has a machine", spec.ID)
	} else if err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	var undo cleanup.Stack
	undo.Push("machine", m.undo)
	defer func() {
		if err != nil {
			err = errors.Join(err, undo.Unwind(ctx))
		}
	}()
	if err := m.save(); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	if m.fresh, err = overlay.LayTop(spec.Root.Top); err != nil {
		return nil, fmt.Errorf("top: %w", err)
	}
	if m.rec.Init, err = d.runStarter(ctx, order{Spec: spec, State: m.dir, Agent: d.agent}); err != nil {
		return nil, fmt.Errorf("start machine %s: %w", spec.ID, err)
	}
	if err := m.save(); err != nil {
		return nil, fmt.Errorf("record: %w", err)
	}
	return m, nil
}

// runStarter has this executable start process 1 of a machine and end, so that
// the machine is no child of this process.
func (d *Driver) runStarter(ctx context.Context, o order) (process.Process, error) {
	arg, err := json.Marshal(o)
	if err != nil {
		return process.Process{}, err
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Args = []string{starterName, string(arg)}
	cmd.ExtraFiles = []*os.File{d.userns}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Setsid: true}
	out, err := cmd.Output()
	if ctx.Err() != nil {
		return process.Process{}, ctx.Err()
	}
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) {
		return process.Process{}, fmt.Errorf("%w: %s", err, exit.Stderr)
	}
	if err != nil {
		return process.Process{}, err
	}
	var p process.Process
	return p, json.Unmarshal(out, &p)
}

// Recover implements driver.Driver.
func (d *Driver) Recover(ctx context.Context, id cloche.SessionID) (driver.Machine, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	m := d.machine(record{Spec: driver.Spec{ID: id}})
	if _, err := os.Lstat(m.dir); !id.Valid() || err != nil {
		return nil, cloche.Errorf(cloche.CodeNotFound, "no machine runs session %s", id)
	}
	if err := m.load(); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("record of %s: %w", id, err)
	}
	if m.rec.Init.PID == 0 { // cut off in Start
		if _, err := m.conclude(ctx); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// List implements driver.Driver.
func (d *Driver) List(context.Context) ([]cloche.SessionID, error) {
	entries, err := os.ReadDir(d.machines)
	if err != nil {
		return nil, fmt.Errorf("list records: %w", err)
	}
	var ids []cloche.SessionID
	for _, e := range entries {
		if id := cloche.SessionID(e.Name()); id.Valid() {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// Remove implements driver.Driver.
func (d *Driver) Remove(ctx context.Context, id cloche.SessionID) error {
	m := d.machine(record{Spec: driver.Spec{ID: id}})
	if !id.Valid() {
		return nil
	}
	// Without a readable record there is no more than the id to go by.
	_ = m.load()
	return m.Release(ctx)
}

// Close implements driver.Driver. Machines go on.
func (d *Driver) Close() error {
	if err := d.userns.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}
