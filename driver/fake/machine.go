package fake

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/overlay"
	"github.com/cloche-dev/cloche/internal/process"
)

// record is a machine on disk.
type record struct {
	Spec driver.Spec
	Init process.Process
}

// machine implements driver.Machine.
type machine struct {
	d     *Driver
	dir   string
	rec   record
	fresh bool // Start made the top's upper directory

	mu   sync.Mutex
	exit *driver.Exit // guarded by mu
	last driver.Stats // guarded by mu
}

func (d *Driver) machine(r record) *machine {
	return &machine{d: d, dir: filepath.Join(d.machines, string(r.Spec.ID)), rec: r}
}

func (m *machine) save() error {
	data, err := json.Marshal(m.rec)
	if err != nil {
		return err
	}
	tmp := filepath.Join(m.dir, "record.tmp")
	if err := os.WriteFile(tmp, data, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, filepath.Join(m.dir, "record.json"))
}

func (m *machine) load() error {
	data, err := os.ReadFile(filepath.Join(m.dir, "record.json"))
	if err != nil {
		return err
	}
	return json.Unmarshal(data, &m.rec)
}

// ID implements driver.Machine.
func (m *machine) ID() cloche.SessionID { return m.rec.Spec.ID }

// processes finds all host processes of the machine: those that see a mount
// with its id in it.
func (m *machine) processes() []int {
	infos, err := filepath.Glob("/proc/[0-9]*/mountinfo")
	if err != nil {
		panic(err) // the pattern is well formed
	}
	var pids []int
	for _, path := range infos {
		// One that has ended meanwhile is none of them.
		data, err := os.ReadFile(path)
		pid, perr := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil && perr == nil && bytes.Contains(data, []byte(m.ID())) {
			pids = append(pids, pid)
		}
	}
	return pids
}

// killAll ends every process of the machine.
func (m *machine) killAll(ctx context.Context) error {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		pids := m.processes()
		if len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				return err
			}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Wait implements driver.Machine.
func (m *machine) Wait(ctx context.Context) (driver.Exit, error) {
	if err := m.rec.Init.Wait(ctx); err != nil {
		return driver.Exit{}, fmt.Errorf("wait for %s: %w", m.ID(), err)
	}
	return m.conclude(ctx)
}

// conclude ends what is left and says why the machine ended: the first
// conclusion, by whoever drew it, stands.
func (m *machine) conclude(ctx context.Context) (driver.Exit, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.exit != nil {
		return *m.exit, nil
	}
	if err := m.killAll(ctx); err != nil {
		return driver.Exit{}, fmt.Errorf("end %s: %w", m.ID(), err)
	}
	exit := driver.Exit{Cause: driver.ExitCrashed, At: time.Now()}
	if _, err := os.Lstat(filepath.Join(m.dir, "killed")); err == nil {
		exit.Cause = driver.ExitKilled
	}
	if _, err := os.Lstat(m.dir); err != nil {
		exit.Cause = driver.ExitKilled
	}
	data, err := json.Marshal(exit)
	if err != nil {
		return driver.Exit{}, err
	}
	path := filepath.Join(m.dir, "end.json")
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	switch {
	case err == nil:
		_, err = f.Write(data)
		if cerr := f.Close(); err == nil {
			err = cerr
		}
	case errors.Is(err, fs.ErrExist):
		data, err = os.ReadFile(path)
	case errors.Is(err, fs.ErrNotExist): // released by somebody else
		err = nil
	}
	if err == nil {
		err = json.Unmarshal(data, &exit)
	}
	if err != nil {
		return driver.Exit{}, fmt.Errorf("end of %s: %w", m.ID(), err)
	}
	m.exit = &exit
	return exit, nil
}

// Kill implements driver.Machine.
func (m *machine) Kill(ctx context.Context) error {
	if m.rec.Init.Alive() {
		err := os.WriteFile(filepath.Join(m.dir, "killed"), nil, 0o600)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("kill %s: %w", m.ID(), err)
		}
	}
	_, err := m.conclude(ctx)
	return err
}

// Release implements driver.Machine.
func (m *machine) Release(ctx context.Context) error {
	m.d.mu.Lock()
	defer m.d.mu.Unlock()
	if err := m.Kill(ctx); err != nil {
		return err
	}
	if m.rec.Spec.Root.Top != "" {
		if err := overlay.CleanTop(m.rec.Spec.Root.Top); err != nil {
			return fmt.Errorf("top of %s: %w", m.ID(), err)
		}
	}
	return os.RemoveAll(m.dir)
}

// undo takes a start back.
func (m *machine) undo(ctx context.Context) error {
	err := m.killAll(ctx)
	if m.fresh {
		err = errors.Join(err, os.RemoveAll(filepath.Join(m.rec.Spec.Root.Top, driver.TopUpper)))
	}
	return errors.Join(err, overlay.CleanTop(m.rec.Spec.Root.Top), os.RemoveAll(m.dir))
}

// Stats implements driver.Machine, from /proc.
func (m *machine) Stats(context.Context) (driver.Stats, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	now := driver.Stats{CPU: m.last.CPU, PeakBytes: m.last.PeakBytes}
	var ticks int64
	for _, pid := range m.processes() {
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it has ended
		}
		f := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
		for _, i := range []int{11, 12, 13, 14} { // utime, stime and those of children: proc(5)
			n, err := strconv.ParseInt(string(f[i]), 10, 64)
			if err != nil {
				return driver.Stats{}, err
			}
			ticks += n
		}
		rss, err := strconv.ParseInt(string(f[21]), 10, 64)
		if err != nil {
			return driver.Stats{}, err
		}
		now.MemoryBytes += rss * int64(os.Getpagesize())
		now.Processes++
	}
	now.CPU = max(now.CPU, time.Duration(ticks)*10*time.Millisecond) // USER_HZ is 100
	now.PeakBytes = max(now.PeakBytes, now.MemoryBytes)
	m.last = now
	return now, nil
}

// Dial implements driver.Machine as the gvisor driver does: the agent's helper
// in the machine hands two pipes to process 1.
func (m *machine) Dial(ctx context.Context) (net.Conn, error) {
	tick := time.NewTicker(3 * time.Millisecond)
	defer tick.Stop()
	for {
		c, err := m.dial(ctx)
		if err == nil {
			return c, nil
		}
		if !m.rec.Init.Alive() {
			return nil, &cloche.Error{Code: cloche.CodeGone, Op: "dial", Message: "the session's machine has ended", Err: err}
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return nil, fmt.Errorf("dial %s: %w", m.ID(), errors.Join(ctx.Err(), err))
		}
	}
}

func (m *machine) dial(ctx context.Context) (_ net.Conn, err error) {
	if !m.rec.Init.Alive() {
		return nil, errors.New("process 1 has ended")
	}
	var ends [4]*os.File
	for i := 0; i < 4 && err == nil; i += 2 {
		ends[i], ends[i+1], err = os.Pipe()
	}
	inR, inW, outR, outW := ends[0], ends[1], ends[2], ends[3]
	if err == nil {
		cmd := exec.CommandContext(ctx, "nsenter", "-t", strconv.Itoa(m.rec.Init.PID), "-U", "-m", "-n", "-p", "-i", "-u",
			"-r", "-w", "-S", "0", "-G", "0", agentPath, "hand")
		cmd.Stdin, cmd.Stdout = inR, outW
		err = cmd.Run()
	}
	for _, f := range []*os.File{inR, outW} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	if err == nil {
		return &conn{outR, inW}, nil
	}
	for _, f := range []*os.File{inW, outR} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return nil, err
}

// conn is two pipes.
type conn struct{ r, w *os.File }

type addr struct{}

func (addr) Network() string { return "pipe" }
func (addr) String() string  { return "fake" }

func (c *conn) Read(p []byte) (int, error)         { return c.r.Read(p) }
func (c *conn) Write(p []byte) (int, error)        { return c.w.Write(p) }
func (c *conn) Close() error                       { return errors.Join(c.w.Close(), c.r.Close()) }
func (c *conn) LocalAddr() net.Addr                { return addr{} }
func (c *conn) RemoteAddr() net.Addr               { return addr{} }
func (c *conn) SetReadDeadline(t time.Time) error  { return c.r.SetReadDeadline(t) }
func (c *conn) SetWriteDeadline(t time.Time) error { return c.w.SetWriteDeadline(t) }
func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}
