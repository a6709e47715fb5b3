package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/dustin/go-humanize"
	"golang.org/x/sys/unix"
)

const (
	// minKernel is the first Linux with idmapped mounts of overlayfs' layers:
	// commit bc70682a497c, in 5.19.
	minKernelMajor, minKernelMinor = 5, 19
	// minDisk is room for the default image and some sandboxes' files.
	minDisk = 5 << 30
	// minInodes is about two default images.
	minInodes = 200_000
	// firstUID is the host's uid of a sandbox's root.
	firstUID = 100_000
)

// host is where the checks look; root is "/" but in tests.
type host struct{ root, data string }

// HostChecks are the checks that need nothing but the kernel and the file
// system. root is "/"; data is the server's data directory, which need not
// exist.
func HostChecks(root, data string) []Check {
	h := host{root, data}
	return []Check{
		{Name: "root", Why: "the server makes namespaces, mounts and cgroups", Run: checkRoot},
		{Name: "kernel", Why: "layers are shared between sandboxes through idmapped overlay mounts, of Linux 5.19", Run: checkKernel},
		{Name: "user namespaces", Why: "root in a sandbox is nobody on the host", Run: h.checkUserNamespaces},
		{Name: "cgroups", Why: "a sandbox is kept to its CPUs and memory", Run: h.checkCgroups},
		{Name: "overlayfs", Why: "a sandbox's files are layers over its image", Run: h.checkOverlay},
		{Name: "seccomp", Why: "gVisor catches system calls with it, and closes the host's to itself", Run: h.checkSeccomp},
		{Name: "ptrace", Why: "gVisor starts a sandbox's processes with it", Run: h.checkPtrace},
		{Name: "disk", Why: "images, layers and logs need room", Run: h.checkDisk},
		tool("mmdebstrap", "`cloche image build` makes the default image with it; `cloche image pull` works without", "mmdebstrap"),
		{Name: "debian keyring", Optional: true,
			Why: "`cloche image build` checks Debian's signatures with it", Run: h.checkKeyring},
		tool("node", "the demo uses the JavaScript SDK", "nodejs"),
		tool("npm", "`cloche image build` fetches Node.js with it, and the demo the SDK", "npm"),
		{Name: "/dev/kvm", Optional: true,
			Why: "a driver for virtual machines will use it; gVisor does not", Run: h.checkKVM},
		tool("qemu-system-x86_64", "a driver for virtual machines will use it; gVisor does not", "qemu-system-x86"),
	}
}

func checkRoot(context.Context) Result {
	if uid := os.Geteuid(); uid != 0 {
		return missing("run this, and `cloche serve`, with sudo", "the uid is %d", uid)
	}
	return ok("the uid is 0")
}

func checkKernel(context.Context) Result {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return missing("", "uname: %v", err)
	}
	return kernelResult(unix.ByteSliceToString(u.Release[:]))
}

func kernelResult(release string) Result {
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return missing("", "the release %q is of no known form", release)
	}
	if major < minKernelMajor || major == minKernelMajor && minor < minKernelMinor {
		return missing("install Debian 12, Ubuntu 22.04 with linux-generic-hwe, or newer; then reboot", "Linux %s", release)
	}
	return ok("Linux %s", release)
}

// checkUserNamespaces makes one as the server does. That the kernel has them
// proves little: distributions and containers close them in several ways.
func (h host) checkUserNamespaces(ctx context.Context) Result {
	limit := strings.TrimSpace(h.read("proc/sys/user/max_user_namespaces"))
	if limit == "" || limit == "0" {
		return missing("sysctl -w user.max_user_namespaces=15000", "user.max_user_namespaces is %q", limit)
	}
	if os.Geteuid() != 0 {
		return missing("run this with sudo", "cannot be tried without root")
	}
	cmd := exec.CommandContext(ctx, "/bin/true")
	ids := []syscall.SysProcIDMap{{HostID: firstUID, Size: 65536}}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWUSER, UidMappings: ids, GidMappings: ids,
		Credential: &syscall.Credential{},
	}
	if err := cmd.Run(); err != nil {
		return missing("look for a seccomp or AppArmor profile around this host: inside a container, run it privileged", "a process in one did not start: %v", err)
	}
	return ok("a process ran as uid %d of the host", firstUID)
}

// checkCgroups looks for the CPU, memory and pids controllers in either
// version.
func (h host) checkCgroups(context.Context) Result {
	want := []string{"cpu", "memory", "pids"}
	dir := "sys/fs/cgroup"
	version, have := "v2", strings.Fields(h.read(dir+"/cgroup.controllers"))
	if len(have) == 0 {
		version = "v1"
		for _, c := range want {
			if h.exists(dir + "/" + c + "/cgroup.procs") {
				have = append(have, c)
			}
		}
	}
	if len(have) == 0 {
		return missing("mount -t cgroup2 none /sys/fs/cgroup", "no controllers in /sys/fs/cgroup")
	}
	for _, c := range want {
		if !slices.Contains(have, c) {
			return missing("add cgroup_enable="+c+" to the kernel's command line and reboot", "cgroup %s without the %s controller", version, c)
		}
	}
	return ok("cgroup %s with %s", version, strings.Join(want, ", "))
}

// checkOverlay mounts one in a mount namespace that ends with the mount
// command.
func (h host) checkOverlay(ctx context.Context) Result {
	if !strings.Contains(h.read("proc/filesystems"), "\toverlay\n") {
		return missing("modprobe overlay", "the kernel does not list overlay")
	}
	if os.Geteuid() != 0 {
		return missing("run this with sudo", "cannot be tried without root")
	}
	dir, err := os.MkdirTemp(h.existing(), ".cloche-doctor-*")
	if err != nil {
		return missing("check the file system of "+h.data, "no temporary directory: %v", errors.Unwrap(err))
	}
	defer os.RemoveAll(dir)
	for _, sub := range []string{"lower", "upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(dir, sub), 0o700); err != nil {
			return missing("check the file system of "+h.data, "no temporary directory: %v", err)
		}
	}
	cmd := exec.CommandContext(ctx, "mount", "-t", "overlay", "-o", "lowerdir=lower,upperdir=upper,workdir=work", "overlay", "merged")
	cmd.Dir = dir
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS}
	if out, err := cmd.CombinedOutput(); err != nil {
		return missing("put --data on ext4 or xfs", "a mount below %s did not work: %s", h.data, printable(strings.TrimSpace(string(out))))
	}
	return ok("mounts below %s work", h.data)
}

func (h host) checkSeccomp(context.Context) Result {
	actions := strings.Fields(h.read("proc/sys/kernel/seccomp/actions_avail"))
	for _, a := range []string{"trap", "kill_process"} {
		if !slices.Contains(actions, a) {
			return missing("use a kernel with CONFIG_SECCOMP_FILTER", "the kernel lacks the action %s", a)
		}
	}
	return ok("filters with trap and kill")
}

// checkPtrace reads Yama's setting. At 2 only root may trace, which the server
// is; 3 cannot be undone without a reboot.
func (h host) checkPtrace(context.Context) Result {
	switch scope := strings.TrimSpace(h.read("proc/sys/kernel/yama/ptrace_scope")); scope {
	case "":
		return ok("not restricted")
	case "3":
		return missing("set kernel.yama.ptrace_scope=1 in /etc/sysctl.d and reboot", "kernel.yama.ptrace_scope is 3, which forbids it")
	default:
		return ok("kernel.yama.ptrace_scope is %s", scope)
	}
}

func (h host) checkDisk(context.Context) Result {
	dir := h.existing()
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return missing("", "%s: %v", dir, err)
	}
	free := s.Bavail * uint64(s.Bsize)
	detail := humanize.IBytes(free) + " free for " + h.data
	switch {
	case free < minDisk:
		return missing("make room, or choose another --data; "+humanize.IBytes(minDisk)+" is the least", "%s", detail)
	case s.Files > 0 && s.Ffree < minInodes: // btrfs has no such number
		return missing("choose a --data on a file system with more inodes", "%s, but %d inodes", detail, s.Ffree)
	}
	return ok("%s", detail)
}

func (h host) checkKeyring(context.Context) Result {
	for _, suffix := range []string{"gpg", "pgp"} {
		name := "usr/share/keyrings/debian-archive-keyring." + suffix
		if h.exists(name) {
			return ok("/%s", name)
		}
	}
	return missing("apt-get install -y debian-archive-keyring", "not in /usr/share/keyrings")
}

// checkKVM says no more than it knows: the device is there on hosts whose
// hypervisor then refuses, or hangs.
func (h host) checkKVM(context.Context) Result {
	f, err := os.OpenFile(filepath.Join(h.root, "dev/kvm"), os.O_RDWR, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return missing("enable virtualization in the firmware or, of a rented machine, nested virtualization; then modprobe kvm_intel or kvm_amd", "not there")
	case err != nil:
		return missing("run this with sudo", "%v", errors.Unwrap(err))
	}
	f.Close()
	return ok("it opens, which does not prove that a virtual machine runs")
}

// tool is an optional program of Debian's.
func tool(name, why, pkg string) Check {
	return Check{Name: name, Why: why, Optional: true, Run: func(context.Context) Result {
		p, err := exec.LookPath(name)
		if err != nil {
			return missing("apt-get install -y "+pkg, "not on PATH")
		}
		return ok("%s", p)
	}}
}

// existing is the data directory, or the nearest one above it that exists.
func (h host) existing() string {
	dir := h.data
	for {
		if info, err := os.Stat(dir); err == nil && info.IsDir() || dir == filepath.Dir(dir) {
			return dir
		}
		dir = filepath.Dir(dir)
	}
}

// read returns a file's content, "" if it cannot be read.
func (h host) read(name string) string {
	b, _ := os.ReadFile(filepath.Join(h.root, name))
	return string(b)
}

func (h host) exists(name string) bool {
	_, err := os.Stat(filepath.Join(h.root, name))
	return err == nil
}
