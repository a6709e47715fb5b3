package agent

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// Names under the root of the machine's cgroup v2 tree: the agent stands beside
// the commands, so that no limit or kill of theirs is its own.
const (
	cgroupRoot     = "/sys/fs/cgroup"
	cgroupAgent    = "cloche-agent"
	cgroupCommands = "commands"
)

const (
	signalRounds = 8    // how often a signal looks for processes forked meanwhile
	maxSubgroups = 1024 // cgroups that one command may have made, as far as we look
)

// grouper makes groups: what holds all processes of one command together.
type grouper interface {
	// make prepares the group of a command before it starts.
	make(id cloche.CommandID) (group, error)
	// limit applies the machine's bounds to all commands together.
	limit(memoryBytes int64, pids int) error
	// owner gives the command that pid belongs to, "" if none.
	owner(pid int) cloche.CommandID
}

// group holds the processes of one command, whatever session they made.
type group interface {
	// prepare makes the child of attr start in the group.
	prepare(attr *syscall.SysProcAttr)
	// joined tells the group its first process.
	joined(pid int)
	// pids lists the processes of the group that live.
	pids() ([]int, error)
	// kill sends SIGKILL to all of them in one step, if the kernel can.
	kill() error
	// remove gives the group back; false if processes still live in it.
	remove() bool
}

// newGrouper uses the cgroup v2 tree if the agent may, else process sessions.
func newGrouper(log *slog.Logger) grouper {
	g := &cgroups{root: cgroupRoot}
	if err := g.open(); err != nil {
		log.Warn("no cgroup v2 tree to use: commands are held together by session and environment", "error", err)
		return &sessions{groups: make(map[cloche.CommandID]*session)}
	}
	return g
}

// cgroups makes a cgroup for each command.
type cgroups struct {
	root   string
	memory bool // the memory controller is there
	mu     sync.Mutex
	limits string // memory.max of each command
}

func (g *cgroups) open() error {
	var st unix.Statfs_t
	if err := unix.Statfs(g.root, &st); err != nil {
		return fmt.Errorf("cgroup tree: %w", err)
	}
	if st.Type != unix.CGROUP2_SUPER_MAGIC {
		return errors.New("cgroup tree: not cgroup v2")
	}
	if err := g.mkdir(cgroupAgent); err != nil {
		return err
	}
	if err := g.write(cgroupAgent, "cgroup.procs", strconv.Itoa(os.Getpid())); err != nil {
		return err
	}
	// Now that the root has no process of its own, and before the commands'
	// cgroup, which in gVisor only gets the files of what is enabled by then.
	// Each alone: a tree that lacks one controller still has the other.
	_ = g.write("", "cgroup.subtree_control", "+pids")
	g.memory = g.write("", "cgroup.subtree_control", "+memory") == nil
	if err := g.mkdir(cgroupCommands); err != nil {
		return err
	}
	if _, err := os.Stat(filepath.Join(g.root, cgroupCommands, "cgroup.kill")); err != nil {
		return fmt.Errorf("cgroup.kill: %w", err) // Linux 5.14
	}
	g.memory = g.memory && g.write(cgroupCommands, "cgroup.subtree_control", "+memory") == nil
	return nil
}

func (g *cgroups) mkdir(name string) error {
	err := os.Mkdir(filepath.Join(g.root, name), 0o755)
	if err != nil && !errors.Is(err, os.ErrExist) {
		return fmt.Errorf("cgroup %s: %w", name, err)
	}
	return nil
}

// write writes one control file of the cgroup name.
func (g *cgroups) write(name, file, value string) error {
	f, err := os.OpenFile(filepath.Join(g.root, name, file), os.O_WRONLY, 0)
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", file, err)
	}
	_, err = f.WriteString(value)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return fmt.Errorf("cgroup %s: %w", file, err)
	}
	return nil
}

func (g *cgroups) limit(memoryBytes int64, pids int) error {
	var errs []error
	if pids > 0 && g.write(cgroupCommands, "pids.max", strconv.Itoa(pids)) != nil {
		errs = append(errs, limitUsers(pids)) // a tree without the pids controller
	}
	if memoryBytes > 0 && g.memory {
		// gVisor only shows it, and runtimes size themselves by it.
		value := strconv.FormatInt(memoryBytes, 10)
		errs = append(errs, g.write(cgroupCommands, "memory.max", value))
		g.mu.Lock()
		g.limits = value
		g.mu.Unlock()
	}
	return errors.Join(errs...)
}

func (g *cgroups) make(id cloche.CommandID) (group, error) {
	name := filepath.Join(cgroupCommands, string(id))
	if err := os.Mkdir(filepath.Join(g.root, name), 0o755); err != nil {
		return nil, fmt.Errorf("cgroup of the command: %w", err)
	}
	dir, err := os.OpenFile(filepath.Join(g.root, name), os.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("cgroup of the command: %w", err), os.Remove(filepath.Join(g.root, name)))
	}
	g.mu.Lock()
	limits := g.limits
	g.mu.Unlock()
	if limits != "" {
		_ = g.write(name, "memory.max", limits) // shown to runtimes that look only here; the parent's binds
	}
	return &cgroup{tree: g, name: name, dir: dir}, nil
}

func (g *cgroups) owner(pid int) cloche.CommandID {
	b, err := readBounded(filepath.Join("/proc", strconv.Itoa(pid), "cgroup"), maxProcFile)
	if err != nil {
		return ""
	}
	return parseOwner(b)
}

// cgroup is the group of one command. dir stays open so that the kill needs no
// path walk and no new descriptor when there are none left.
type cgroup struct {
	tree *cgroups
	name string
	dir  *os.File
}

func (c *cgroup) prepare(attr *syscall.SysProcAttr) {
	attr.UseCgroupFD, attr.CgroupFD = true, int(c.dir.Fd())
}

func (c *cgroup) joined(int) {}

// pids looks below too: root in the machine may have made cgroups of its own.
func (c *cgroup) pids() ([]int, error) {
	var out []int
	err := c.walk(func(dir string) error {
		b, err := readBounded(filepath.Join(dir, "cgroup.procs"), maxProcFile)
		out = append(out, parsePIDs(b)...)
		return err
	})
	return out, err
}

// walk calls f for the command's cgroup and those below it, parents first.
func (c *cgroup) walk(f func(dir string) error) error {
	dirs := []string{filepath.Join(c.tree.root, c.name)}
	for i := 0; i < len(dirs) && i < maxSubgroups; i++ {
		if err := f(dirs[i]); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		entries, err := os.ReadDir(dirs[i])
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		for _, e := range entries {
			if e.IsDir() {
				dirs = append(dirs, filepath.Join(dirs[i], e.Name()))
			}
		}
	}
	return nil
}

func (c *cgroup) kill() error {
	err := c.tree.write(c.name, "cgroup.kill", "1")
	if errors.Is(err, os.ErrNotExist) {
		return nil // removed: nothing lives in it
	}
	return err
}

func (c *cgroup) remove() bool {
	top := filepath.Join(c.tree.root, c.name)
	err := unix.Rmdir(top)
	if errors.Is(err, unix.EBUSY) || errors.Is(err, unix.ENOTEMPTY) {
		err = c.removeBelow(top)
	}
	if err != nil && !errors.Is(err, unix.ENOENT) {
		return false
	}
	_ = c.dir.Close() // a directory opened for reading
	return true
}

// removeBelow removes the cgroups that the command made, and then its own.
func (c *cgroup) removeBelow(top string) error {
	var dirs []string
	if err := c.walk(func(dir string) error { dirs = append(dirs, dir); return nil }); err != nil {
		return err
	}
	for i := len(dirs) - 1; i > 0; i-- {
		if err := unix.Rmdir(dirs[i]); err != nil && !errors.Is(err, unix.ENOENT) {
			return err
		}
	}
	return unix.Rmdir(top)
}

// signalGroup sends sig to every process of g once.
func signalGroup(g group, sig syscall.Signal) error {
	if sig == unix.SIGKILL {
		return g.kill()
	}
	done := make(map[int]bool)
	for range signalRounds {
		pids, err := g.pids()
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		fresh := false
		for _, pid := range pids {
			if !done[pid] {
				done[pid], fresh = true, true
				if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
					return fmt.Errorf("signal process %d: %w", pid, err)
				}
			}
		}
		if !fresh {
			break
		}
	}
	return nil
}
