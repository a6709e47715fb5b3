package agent

import (
	"bytes"
	"errors"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// envCommand marks the processes of a command where there are no cgroups. It is
// not set where there are.
const envCommand = "CLOCHE_COMMAND"

// sessions makes groups where the machine has no cgroups of its own. A process
// belongs to a command if its session, an ancestor or its first environment
// says so; one that sheds all three at once is lost. RLIMIT_NPROC stands in for
// pids.max.
type sessions struct {
	mu     sync.Mutex
	groups map[cloche.CommandID]*session
}

func (s *sessions) make(id cloche.CommandID) (group, error) {
	g := &session{all: s, id: id}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.groups[id] = g
	return g, nil
}

func (s *sessions) limit(_ int64, pids int) error {
	if pids <= 0 {
		return nil
	}
	// The agent has CAP_SYS_RESOURCE and is not held by it; its children,
	// which inherit it, are, as far as they are not root.
	n := uint64(pids)
	return unix.Setrlimit(unix.RLIMIT_NPROC, &unix.Rlimit{Cur: n, Max: n})
}

func (s *sessions) owner(pid int) cloche.CommandID {
	table, err := processTable()
	if err != nil {
		return ""
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for id, g := range s.groups {
		if g.has(table, pid) {
			return id
		}
	}
	return ""
}

// session is the group of one command.
type session struct {
	all    *sessions
	id     cloche.CommandID
	mu     sync.Mutex
	leader int // 0 before the start and after remove
}

func (g *session) prepare(*syscall.SysProcAttr) {}

func (g *session) joined(pid int) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.leader = pid
}

func (g *session) pids() ([]int, error) {
	table, err := processTable()
	if err != nil {
		return nil, err
	}
	var out []int
	for pid := range table {
		if g.has(table, pid) {
			out = append(out, pid)
		}
	}
	return out, nil
}

// has looks at pid and its ancestors below process 1.
func (g *session) has(table map[int]procStat, pid int) bool {
	g.mu.Lock()
	leader := g.leader
	g.mu.Unlock()
	if leader == 0 {
		return false
	}
	for range len(table) {
		st, ok := table[pid]
		if !ok {
			return false
		}
		if pid == leader || st.session == leader || marked(pid, g.id) {
			return true
		}
		pid = st.parent
	}
	return false
}

func (g *session) kill() error {
	var errs []error
	for range signalRounds {
		pids, err := g.pids()
		if err != nil || len(pids) == 0 {
			return err
		}
		// Stopped first, so that none forks while the others are killed.
		for _, sig := range []syscall.Signal{unix.SIGSTOP, unix.SIGKILL} {
			for _, pid := range pids {
				if err := unix.Kill(pid, sig); err != nil && !errors.Is(err, unix.ESRCH) {
					errs = append(errs, err)
				}
			}
		}
	}
	return errors.Join(errs...)
}

func (g *session) remove() bool {
	if pids, err := g.pids(); err != nil || len(pids) > 0 {
		return false
	}
	g.joined(0)
	g.all.mu.Lock()
	defer g.all.mu.Unlock()
	delete(g.all.groups, g.id)
	return true
}

// processTable reads the state of every process but process 1 and zombies.
func processTable() (map[int]procStat, error) {
	all, err := pids()
	if err != nil {
		return nil, err
	}
	table := make(map[int]procStat, len(all))
	for _, pid := range all {
		if st, ok := readStat(pid); ok && st.state != 'Z' && st.state != 'X' {
			table[pid] = st
		}
	}
	return table, nil
}

// marked reports whether the environment that pid was started with names id.
func marked(pid int, id cloche.CommandID) bool {
	b, err := readBounded(filepath.Join("/proc", strconv.Itoa(pid), "environ"), maxProcFile)
	if err != nil {
		return false
	}
	mark := []byte(envCommand + "=" + string(id))
	for _, v := range bytes.Split(b, []byte{0}) {
		if bytes.Equal(v, mark) {
			return true
		}
	}
	return false
}

// parseOwner finds the command in /proc/PID/cgroup.
func parseOwner(b []byte) cloche.CommandID {
	for line := range strings.Lines(string(b)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::/"+cgroupCommands+"/")
		if !ok {
			continue
		}
		name, _, _ := strings.Cut(path, "/") // a command may make cgroups below its own
		if id := cloche.CommandID(name); id.Valid() {
			return id
		}
	}
	return ""
}
