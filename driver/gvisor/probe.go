package gvisor

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/overlay"
)

// Check is one thing that the driver needs of the host.
type Check struct {
	Name string
	Why  string // what it is for
	Err  error  // nil = here
	Fix  string // what to do about it: a command where there is one
}

// Checks looks for all that the driver needs, by doing it where that is
// possible. It leaves nothing behind. dir is an existing directory on the file
// system that will hold tops, "" = any; exe is as Config.Exe.
func Checks(ctx context.Context, dir, exe string) []Check {
	return []Check{
		{
			Name: "root",
			Why:  "machines need mounts, namespaces and cgroups",
			Err:  checkRoot(),
			Fix:  "run the server as root",
		}, {
			Name: "static executable",
			Why:  "it is run again where no shared library is",
			Err:  checkStatic(exe),
			Fix:  "build it with CGO_ENABLED=0",
		}, {
			Name: "cgroups",
			Why:  "they bound the CPU and the memory of a machine",
			Err:  checkCgroups(),
			Fix: "mount cgroup2 at " + cgroupRoot + ", or boot with systemd.unified_cgroup_hierarchy=1; " +
				"in a container, take the host's cgroup namespace and mount " + cgroupRoot + " writable",
		}, {
			Name: "user namespaces",
			Why:  "root in a machine must be nobody on the host",
			Err:  checkUserNamespace(),
			Fix:  "sysctl -w user.max_user_namespaces=10000",
		}, {
			Name: "seccomp",
			Why:  "gVisor catches system calls with it (systrap) and closes itself in",
			Err:  checkSeccomp(),
			Fix:  "use a kernel with CONFIG_SECCOMP_FILTER",
		}, {
			Name: "ptrace",
			Why:  "gVisor sets up the processes of a machine with it",
			Err:  checkPtrace(),
			Fix:  "sysctl -w kernel.yama.ptrace_scope=1",
		}, {
			Name: "overlay of idmapped mounts",
			Why:  "all machines share an image, each with a writable layer of its own",
			Err:  checkOverlay(ctx, dir, exe),
			Fix:  "use Linux 5.19 or later with overlayfs: modprobe overlay",
		},
	}
}

// Probe is Checks as one error, which says what to do.
func Probe(ctx context.Context, dir, exe string) error {
	var errs []error
	for _, c := range Checks(ctx, dir, exe) {
		if c.Err != nil {
			errs = append(errs, fmt.Errorf("%s: %w; %s (needed because %s)", c.Name, c.Err, c.Fix, c.Why))
		}
	}
	return errors.Join(errs...)
}

func checkRoot() error {
	if os.Geteuid() != 0 {
		return fmt.Errorf("the user id is %d", os.Geteuid())
	}
	return nil
}

func checkStatic(exe string) (err error) {
	if exe == "" {
		exe = "/proc/self/exe"
	}
	f, err := elf.Open(exe)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	for _, p := range f.Progs {
		if p.Type == elf.PT_INTERP {
			return errors.New("it is linked dynamically")
		}
	}
	return nil
}

// checkCgroups makes a cgroup with limits, as a machine's, and removes it.
func checkCgroups() (err error) {
	id := cloche.NewSessionID()
	h, err := openHierarchy("/cloche-probe-" + string(id))
	if err != nil {
		return err
	}
	defer h.tidy()
	defer func() { err = errors.Join(err, h.remove(id)) }()
	return h.create(id, limits{vcpus: 1, memoryBytes: driver.MinMemoryMiB << 20})
}

func checkUserNamespace() error {
	ns, err := overlay.UserNamespace()
	if err != nil {
		return err
	}
	return ns.Close()
}

func checkSeccomp() error {
	data, err := os.ReadFile("/proc/sys/kernel/seccomp/actions_avail")
	if err != nil {
		return err
	}
	if !strings.Contains(string(data), "trap") {
		return errors.New("the kernel has no action trap")
	}
	return nil
}

func checkPtrace() error {
	data, err := os.ReadFile("/proc/sys/kernel/yama/ptrace_scope")
	if errors.Is(err, fs.ErrNotExist) {
		return nil // no Yama, no bound
	}
	if err == nil && strings.TrimSpace(string(data)) == "3" {
		return errors.New("kernel.yama.ptrace_scope is 3: no process may be traced")
	}
	return err
}

// checkOverlay has a starter mount a root file system of empty directories.
func checkOverlay(ctx context.Context, parent, exe string) (err error) {
	if exe == "" {
		exe = "/proc/self/exe"
	}
	dir, err := os.MkdirTemp(parent, "cloche-probe-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	root := driver.Root{Image: filepath.Join(dir, "image"), Top: filepath.Join(dir, "top")}
	o := order{Probe: true, Spec: driver.Spec{Root: root}, State: filepath.Join(dir, "state"), Agent: filepath.Join(dir, "agent")}
	for _, d := range []string{root.Image, root.Top, o.State} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
	}
	for _, f := range []string{o.Agent, filepath.Join(o.State, fileExit)} {
		if err := os.WriteFile(f, nil, 0o600); err != nil {
			return err
		}
	}
	if _, err := overlay.LayTop(root.Top); err != nil {
		return err
	}
	userns, err := overlay.UserNamespace()
	if err != nil {
		return err
	}
	defer userns.Close()
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return err
	}
	d := &Driver{conf: Config{Exe: exe}, cgroups: noCgroups{}, userns: userns}
	if _, err := d.runStarter(ctx, "", o); err != nil {
		return fmt.Errorf("on a file system of type %#x: %w", st.Type, err)
	}
	return nil
}

// noCgroups is for the starter of a probe, which stays where it is.
type noCgroups struct{ hierarchy }

func (noCgroups) dir(cloche.SessionID) (*os.File, error) { return nil, nil }
func (noCgroups) add(cloche.SessionID, int) error        { return nil }
