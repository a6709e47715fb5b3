package gvisor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/cleanup"
	"github.com/cloche-dev/cloche/internal/failpoint"
	"github.com/cloche-dev/cloche/internal/overlay"
)

// Start implements driver.Driver.
func (d *Driver) Start(ctx context.Context, spec driver.Spec) (_ driver.Machine, err error) {
	if err := d.check(spec); err != nil {
		return nil, err
	}
	defer d.locks.lock(spec.ID)()
	var undo cleanup.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, undo.Unwind(ctx))
		}
	}()
	boot, err := bootID()
	if err != nil {
		return nil, fmt.Errorf("boot id: %w", err)
	}
	m := d.machine(record{Spec: spec, BootID: boot})
	if err := d.prepare(m, &undo); err != nil {
		return nil, err
	}
	a, err := d.runStarter(ctx, spec.ID, order{Spec: spec, State: m.dir, Agent: d.agent})
	if err != nil {
		return nil, fmt.Errorf("start machine %s: %w", spec.ID, err)
	}
	failpoint.Here("gvisor/start/after-starter")
	pids, err := d.cgroups.procs(spec.ID)
	if err != nil {
		return nil, fmt.Errorf("processes of %s: %w", spec.ID, err)
	}
	if err := exposeStubs(pids, a.Sandbox, a.Gofer); err != nil {
		return nil, fmt.Errorf("oom_score_adj of %s: %w", spec.ID, err)
	}
	failpoint.Here("gvisor/start/after-oom-score")
	m.rec.Sandbox, m.rec.Gofer = a.Sandbox, a.Gofer
	if err := d.save(m.rec); err != nil {
		return nil, fmt.Errorf("record of %s: %w", spec.ID, err)
	}
	failpoint.Here("gvisor/start/after-started")
	if err := d.logs.follow(m); err != nil {
		return nil, fmt.Errorf("start machine %s: %w", spec.ID, err)
	}
	undo.Release()
	return m, nil
}

// prepare makes what a machine has on the host before its first process.
func (d *Driver) prepare(m *machine, undo *cleanup.Stack) error {
	spec := m.rec.Spec
	if d.cgroups.exists(spec.ID) {
		return conflict(spec.ID)
	}
	if err := os.Mkdir(m.dir, 0o700); errors.Is(err, fs.ErrExist) {
		return conflict(spec.ID)
	} else if err != nil {
		return fmt.Errorf("state of %s: %w", spec.ID, err)
	}
	undo.Push("state", func(context.Context) error { return os.RemoveAll(m.dir) })
	failpoint.Here("gvisor/start/after-dir")
	if err := d.save(m.rec); err != nil {
		return fmt.Errorf("record of %s: %w", spec.ID, err)
	}
	failpoint.Here("gvisor/start/after-record")
	exit := filepath.Join(m.dir, fileExit)
	if err := os.WriteFile(exit, nil, 0o600); err != nil {
		return fmt.Errorf("state of %s: %w", spec.ID, err)
	}
	if err := os.Lchown(exit, driver.IDOffset, driver.IDOffset); err != nil {
		return fmt.Errorf("state of %s: %w", spec.ID, err)
	}
	if err := makeAgentLog(m.dir); err != nil {
		return fmt.Errorf("agent log of %s: %w", spec.ID, err)
	}
	fresh, err := overlay.LayTop(spec.Root.Top)
	undo.Push("top", func(context.Context) error {
		err := overlay.CleanTop(spec.Root.Top)
		if fresh {
			err = errors.Join(err, os.RemoveAll(filepath.Join(spec.Root.Top, driver.TopUpper)))
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("top of %s: %w", spec.ID, err)
	}
	failpoint.Here("gvisor/start/after-top")
	undo.Push("cgroup", func(ctx context.Context) error { return d.removeCgroup(ctx, spec.ID) })
	err = d.cgroups.create(spec.ID, limits{vcpus: spec.VCPUs, memoryBytes: int64(spec.MemoryMiB) << 20})
	if err != nil {
		return fmt.Errorf("cgroup of %s: %w", spec.ID, err)
	}
	failpoint.Here("gvisor/start/after-cgroup")
	return nil
}

func conflict(id cloche.SessionID) error {
	return cloche.Errorf(cloche.CodeConflict, "session %s has a machine", id)
}

// removeCgroup ends every process of the machine and removes its cgroup.
func (d *Driver) removeCgroup(ctx context.Context, id cloche.SessionID) error {
	if err := killAll(ctx, d.cgroups, id); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	return d.cgroups.remove(id)
}

// runStarter has a starter carry out o in the cgroup of id. What the starter
// started lives on when this returns, also on an error; the cgroup has it.
func (d *Driver) runStarter(ctx context.Context, id cloche.SessionID, o order) (answer, error) {
	answerR, answerW, err := os.Pipe()
	if err != nil {
		return answer{}, err
	}
	defer answerR.Close()
	var stderr tail
	cmd := exec.CommandContext(ctx, d.conf.Exe)
	cmd.Args = []string{starterName}
	cmd.Env = []string{}
	cmd.Stderr = &stderr
	cmd.WaitDelay = time.Second                    // none of its children has its standard error
	cmd.ExtraFiles = []*os.File{d.userns, answerW} // fdUserns, fdAnswer
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS, Setsid: true}
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return answer{}, errors.Join(err, answerW.Close())
	}
	group, err := d.cgroups.dir(id)
	if err != nil {
		return answer{}, errors.Join(err, answerW.Close())
	}
	if group != nil {
		defer group.Close()
		cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(group.Fd())
	}
	err = cmd.Start()
	if cerr := answerW.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return answer{}, fmt.Errorf("run starter: %w", err)
	}
	failpoint.Here("gvisor/start/after-spawn")
	a, err := d.instruct(id, cmd.Process.Pid, o, stdin, answerR)
	if err != nil {
		// It may be anywhere on its way; the end of its cgroup ends the rest.
		_ = cmd.Process.Kill() // fails only if it has ended
	}
	if werr := cmd.Wait(); err == nil && werr != nil {
		err = werr
	}
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil && stderr.Len() > 0 {
		err = fmt.Errorf("%w (starter: %s)", err, stderr.String())
	}
	return a, err
}

// instruct puts the starter in its cgroup, only then gives it its order, and
// waits for the answer.
func (d *Driver) instruct(id cloche.SessionID, pid int, o order, in io.WriteCloser, out io.Reader) (answer, error) {
	if err := d.cgroups.add(id, pid); err != nil {
		return answer{}, errors.Join(fmt.Errorf("join cgroup: %w", err), in.Close())
	}
	failpoint.Here("gvisor/start/after-join")
	err := json.NewEncoder(in).Encode(o)
	if cerr := in.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return answer{}, fmt.Errorf("order: %w", err)
	}
	failpoint.Here("gvisor/start/after-order")
	var a answer
	if err := json.NewDecoder(out).Decode(&a); err != nil {
		return answer{}, fmt.Errorf("no answer from the starter: %w", err)
	}
	if a.Error != "" {
		return answer{}, errors.New(a.Error)
	}
	return a, nil
}

// tail keeps the last bytes that were written to it.
type tail struct{ bytes.Buffer }

const tailSize = 2 << 10

func (t *tail) Write(p []byte) (int, error) {
	n, _ := t.Buffer.Write(p) // a Buffer never fails
	if over := t.Len() - tailSize; over > 0 {
		t.Next(over)
	}
	return n, nil
}

func isESRCH(err error) bool { return errors.Is(err, unix.ESRCH) }
