package gvisor

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/cgroups/v3"
	"github.com/containerd/cgroups/v3/cgroup1"
	"github.com/containerd/cgroups/v3/cgroup2"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

const (
	cgroupRoot = "/sys/fs/cgroup"
	cpuPeriod  = 100_000 // microseconds, the kernel's default
)

// limits bound a machine.
type limits struct {
	vcpus       int
	memoryBytes int64
}

// usage is what a cgroup has counted.
type usage struct {
	cpu      time.Duration
	memory   int64
	peak     int64 // 0 = the kernel does not tell
	oomKills uint64
}

// hierarchy is the place of all machines' cgroups, of version 1 or 2. No limit
// on pids is ever set: reaching it would kill the sentry, not a guest process.
type hierarchy interface {
	create(id cloche.SessionID, l limits) error
	exists(id cloche.SessionID) bool
	// dir opens the cgroup for CLONE_INTO_CGROUP; nil where add is needed.
	dir(id cloche.SessionID) (*os.File, error)
	add(id cloche.SessionID, pid int) error
	procs(id cloche.SessionID) ([]int, error)
	// threads counts what keeps the cgroup from being removed. procs does not
	// list a process whose threads are all on their way out.
	threads(id cloche.SessionID) (int, error)
	// kill sends SIGKILL to every process that is in it now.
	kill(id cloche.SessionID) error
	// stat fails with fs.ErrNotExist for a cgroup that is gone.
	stat(id cloche.SessionID) (usage, error)
	remove(id cloche.SessionID) error
	list() ([]string, error)
	// tidy removes the parent if no machine is left in it.
	tidy()
}

func openHierarchy(parent string) (hierarchy, error) {
	switch mode := cgroups.Mode(); mode {
	case cgroups.Unified:
		return v2{cgroupRoot, parent}, nil
	case cgroups.Legacy, cgroups.Hybrid:
		return v1{parent}, nil
	default:
		return nil, errors.New("no cgroup file system is mounted at " + cgroupRoot)
	}
}

// killAll ends every process of the cgroup and returns once nothing is left.
func killAll(ctx context.Context, h hierarchy, id cloche.SessionID) error {
	delay := time.NewTimer(0)
	defer delay.Stop()
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		n, err := h.threads(id)
		if err != nil || n == 0 {
			return err
		}
		if err := h.kill(id); err != nil {
			return err
		}
		delay.Reset(wait)
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d threads do not end: %w", n, ctx.Err())
		case <-delay.C:
		}
	}
}

// gone reports that a cgroup was removed before or while a file of it was open.
func gone(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV)
}

func children(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() {
			names = append(names, e.Name())
		}
	}
	return names, err
}

func isDir(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.IsDir()
}

// v1 uses only the controllers that it needs: joining one costs a
// synchronization of the whole host.
type v1 struct{ parent string }

func (v v1) subsystems() ([]cgroup1.Subsystem, error) {
	return []cgroup1.Subsystem{
		// Memory is last: who is in it is in all, and its list is what is killed.
		cgroup1.NewCpu(cgroupRoot),
		cgroup1.NewCpuacct(cgroupRoot),
		cgroup1.NewMemory(cgroupRoot, cgroup1.IgnoreModules("memsw", "kmem", "kmem.tcp")),
	}, nil
}

func (v v1) path(id cloche.SessionID) cgroup1.Path {
	return cgroup1.StaticPath(filepath.Join(v.parent, string(id)))
}

func (v v1) load(id cloche.SessionID) (cgroup1.Cgroup, error) {
	return cgroup1.Load(v.path(id), cgroup1.WithHierarchy(v.subsystems))
}

func (v v1) create(id cloche.SessionID, l limits) error {
	quota, period := int64(l.vcpus)*cpuPeriod, uint64(cpuPeriod)
	res := &specs.LinuxResources{
		CPU:    &specs.LinuxCPU{Quota: &quota, Period: &period},
		Memory: &specs.LinuxMemory{Limit: &l.memoryBytes},
	}
	if _, err := os.Lstat(filepath.Join(cgroupRoot, "memory/memory.memsw.limit_in_bytes")); err == nil {
		res.Memory.Swap = &l.memoryBytes // memory and swap together: no swap
	}
	_, err := cgroup1.New(v.path(id), res, cgroup1.WithHierarchy(v.subsystems))
	return err
}

func (v v1) exists(id cloche.SessionID) bool {
	for _, c := range []string{"cpu", "cpuacct", "memory"} {
		if isDir(filepath.Join(cgroupRoot, c, v.parent, string(id))) {
			return true
		}
	}
	return false
}

func (v v1) dir(cloche.SessionID) (*os.File, error) { return nil, nil }

func (v v1) add(id cloche.SessionID, pid int) error {
	cg, err := v.load(id)
	if err != nil {
		return err
	}
	return cg.AddProc(uint64(pid))
}

func (v v1) procs(id cloche.SessionID) ([]int, error) {
	cg, err := v.load(id)
	if errors.Is(err, cgroup1.ErrCgroupDeleted) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	seen := map[int]bool{}
	var pids []int
	for _, s := range cg.Subsystems() {
		procs, err := cg.Processes(s.Name(), true)
		if err != nil && !gone(err) {
			return nil, err
		}
		for _, p := range procs {
			if !seen[p.Pid] {
				seen[p.Pid] = true
				pids = append(pids, p.Pid)
			}
		}
	}
	return pids, nil
}

func (v v1) threads(id cloche.SessionID) (n int, err error) {
	cg, err := v.load(id)
	if errors.Is(err, cgroup1.ErrCgroupDeleted) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	for _, s := range cg.Subsystems() {
		tasks, err := cg.Tasks(s.Name(), true)
		if err != nil && !gone(err) {
			return 0, err
		}
		n += len(tasks)
	}
	return n, nil
}

func (v v1) kill(id cloche.SessionID) error {
	pids, err := v.procs(id)
	if err != nil {
		return err
	}
	for _, pid := range pids {
		if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("kill process %d: %w", pid, err)
		}
	}
	return nil
}

func (v v1) stat(id cloche.SessionID) (usage, error) {
	cg, err := v.load(id)
	if errors.Is(err, cgroup1.ErrCgroupDeleted) {
		return usage{}, fmt.Errorf("%w: %w", err, fs.ErrNotExist)
	}
	if err != nil {
		return usage{}, err
	}
	st, err := cg.Stat(cgroup1.IgnoreNotExist)
	if err != nil {
		return usage{}, err
	}
	u := usage{cpu: time.Duration(st.GetCPU().GetUsage().GetTotal())}
	u.memory = int64(st.GetMemory().GetUsage().GetUsage())
	u.peak = int64(st.GetMemory().GetUsage().GetMax())
	u.oomKills = st.GetMemoryOomControl().GetOomKill()
	return u, nil
}

func (v v1) remove(id cloche.SessionID) error {
	cg, err := v.load(id)
	if errors.Is(err, cgroup1.ErrCgroupDeleted) {
		return nil
	}
	if err != nil {
		return err
	}
	return cg.Delete()
}

func (v v1) list() ([]string, error) {
	var all []string
	for _, c := range []string{"cpu", "cpuacct", "memory"} {
		names, err := children(filepath.Join(cgroupRoot, c, v.parent))
		if err != nil {
			return nil, err
		}
		all = append(all, names...)
	}
	return all, nil
}

func (v v1) tidy() {
	for _, c := range []string{"cpu", "cpuacct", "memory"} {
		// Fails as it should while it has children.
		_ = os.Remove(filepath.Join(cgroupRoot, c, v.parent))
	}
}

// v2 is right below the root, on a host with systemd too: a cgroup delegated to
// the server's unit would hold machines that outlive the unit's processes, and
// systemd could not start the unit again in a cgroup that has children with
// controllers. systemd leaves cgroups that it did not make alone, and cannot
// take a controller away from the root while the parent passes it on.
type v2 struct{ mount, parent string }

func (v v2) path(id cloche.SessionID) string {
	return filepath.Join(v.mount, v.parent, string(id))
}

func (v v2) load(id cloche.SessionID) (*cgroup2.Manager, error) {
	return cgroup2.Load(filepath.Join(v.parent, string(id)), cgroup2.WithMountpoint(v.mount))
}

func (v v2) create(id cloche.SessionID, l limits) error {
	quota, period := int64(l.vcpus)*cpuPeriod, uint64(cpuPeriod)
	_, err := cgroup2.NewManager(v.mount, filepath.Join(v.parent, string(id)), &cgroup2.Resources{
		CPU:    &cgroup2.CPU{Max: cgroup2.NewCPUMax(&quota, &period)},
		Memory: &cgroup2.Memory{Max: &l.memoryBytes},
	})
	if err != nil {
		return err
	}
	// The file is missing on a kernel without swap.
	err = os.WriteFile(filepath.Join(v.path(id), "memory.swap.max"), []byte(strconv.Itoa(0)), 0)
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission) {
		return err
	}
	return nil
}

func (v v2) exists(id cloche.SessionID) bool { return isDir(v.path(id)) }

func (v v2) dir(id cloche.SessionID) (*os.File, error) { return os.Open(v.path(id)) }

func (v v2) add(cloche.SessionID, int) error { return nil }

func (v v2) procs(id cloche.SessionID) ([]int, error) {
	cg, err := v.load(id)
	if err != nil {
		return nil, err
	}
	procs, err := cg.Procs(true)
	if gone(err) {
		return nil, nil
	}
	pids := make([]int, len(procs))
	for i, p := range procs {
		pids[i] = int(p)
	}
	return pids, err
}

func (v v2) threads(id cloche.SessionID) (int, error) {
	cg, err := v.load(id)
	if err != nil {
		return 0, err
	}
	threads, err := cg.Threads(true)
	if gone(err) {
		return 0, nil
	}
	return len(threads), err
}

func (v v2) kill(id cloche.SessionID) error {
	// Not cgroup2.Manager.Kill: where the cgroup is gone already, it looks for
	// processes to freeze, and fails.
	err := os.WriteFile(filepath.Join(v.path(id), "cgroup.kill"), []byte("1"), 0)
	if gone(err) {
		return nil
	}
	return err
}

func (v v2) stat(id cloche.SessionID) (usage, error) {
	cg, err := v.load(id)
	if err != nil {
		return usage{}, err
	}
	st, err := cg.Stat()
	if err != nil {
		return usage{}, err
	}
	// Files that are missing read as zeros.
	if !v.exists(id) {
		return usage{}, fmt.Errorf("cgroup of %s: %w", id, fs.ErrNotExist)
	}
	return usage{
		cpu:      time.Duration(st.GetCPU().GetUsageUsec()) * time.Microsecond,
		memory:   int64(st.GetMemory().GetUsage()),
		peak:     int64(st.GetMemory().GetMaxUsage()),
		oomKills: st.GetMemoryEvents().GetOomKill(),
	}, nil
}

func (v v2) remove(id cloche.SessionID) error {
	if err := os.Remove(v.path(id)); !gone(err) {
		return err
	}
	return nil
}

func (v v2) list() ([]string, error) {
	return children(filepath.Join(v.mount, v.parent))
}

func (v v2) tidy() {
	_ = os.Remove(filepath.Join(v.mount, v.parent)) // fails as it should while it has children
}
