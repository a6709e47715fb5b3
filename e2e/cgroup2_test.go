package e2e

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche/driver/drivertest"
	"github.com/cloche-dev/cloche/internal/testenv"
)

// What the virtual machine of TestCgroup2 takes. QEMU translates its code, so
// it is an order of magnitude slower than this host.
const (
	vmMemory  = "4G"
	vmCPUs    = "2"
	vmDisk    = 3 << 30 // bytes, sparse
	vmTimeout = 30 * time.Minute
)

// vmModules are the modules of Debian's cloud kernel between its start and an
// overlay on an ext4 on a virtio disk, in the order of their dependencies. (The
// rest is built in.)
var vmModules = []string{"virtio_ring", "virtio", "virtio_pci_legacy_dev", "virtio_pci_modern_dev", "virtio_pci", "virtio_blk", "overlay"}

// cgroup2Tests is what has to pass in the machine, by what it shows. The tests
// run with their own time bounds.
var cgroup2Tests = map[string][]string{
	"the hierarchy itself":       {"TestCgroup", "TestProbe"},
	"start, exec, kill, release": {"TestSuite/Life", "TestSuite/KillReleaseTwice", "TestSuite/Concurrent", "TestSuite/CancelledStart"},
	"size, nproc, MemTotal":      {"TestSuite/Size"},
	"the memory limit":           {"TestSuite/OutOfMemory"},
	"the CPU quota":              {"TestSuite/CPUBound"},
	"CPU and memory used":        {"TestSuite/Stats"},
	"why a machine ended":        {"TestSuite/AgentKilledInside", "TestSuite/KilledOutside"},
	"recovery":                   {"TestSuite/Recover", "TestSuite/RecoverEnded", "TestAgentLogArrives", "TestKilledAtFailpoints"},
	"the rest of the contract":   {"TestSuite"},
}

// cgroup2Skips is what does not run there. Twenty machines that start at once
// take longer than the test's bound, which is a bound on hosts. (TestKilledAtAnyTime,
// whose moments are those of a start at full speed, is not in cgroup2Tests.)
const cgroup2Skips = "^TestSuite$/^Twenty$"

// TestCgroup2 runs the conformance tests of the gVisor driver in a virtual
// machine whose kernel has cgroup v2 and nothing of version 1 mounted, as
// Debian and Ubuntu have it, whatever this host has.
func TestCgroup2(t *testing.T) {
	testenv.Soak(t)
	testenv.Root(t)
	qemu, err := exec.LookPath("qemu-system-x86_64")
	if err != nil {
		testenv.Skip(t, "no QEMU: apt-get install qemu-system-x86")
	}
	kernel := vmKernel(t)
	out := runVM(t, qemu, kernel, vmInitramfs(t, kernel), vmRoot(t))
	for _, want := range []string{
		"VM cgroups: 0 of version 1, 1 of version 2",
		"VM exit: 0",
		"VM left: 0 cgroups, 0 processes",
	} {
		if !strings.Contains(out, want+"\n") {
			t.Errorf("the machine did not say %q", want)
		}
	}
	for what, names := range cgroup2Tests {
		for _, name := range names {
			if !regexp.MustCompile(`(?m)^ *--- PASS: ` + regexp.QuoteMeta(name) + ` `).MatchString(out) {
				t.Errorf("%s: %s did not pass", what, name)
			}
		}
	}
	for line := range strings.Lines(out) {
		if strings.HasPrefix(strings.TrimSpace(line), "--- ") {
			t.Log(strings.TrimSpace(line))
		}
	}
	if t.Failed() {
		t.Logf("console:\n%s", tail(out, 200))
	}
}

// vmKernel returns a directory with Debian's kernel package in it, which it
// fetches and unpacks if this host has not got it.
func vmKernel(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(testenv.CacheDir(t), "vm-kernel")
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), "vm-kernel-tmp-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp)
	cmd := exec.Command("sh", "-ec", `
		package=$(LC_ALL=C apt-cache depends --important linux-image-cloud-amd64 | sed -n 's/.*Depends: //p' | head -n 1)
		apt-get download "${package:?not known to apt: apt-get update}"
		dpkg -x "$package"_*.deb root`)
	cmd.Dir = tmp
	if out, err := cmd.CombinedOutput(); err != nil {
		testenv.Skip(t, fmt.Sprintf("Debian's package linux-image-cloud-amd64 cannot be fetched: %v\n%s", err, out))
	}
	if err := os.Rename(filepath.Join(tmp, "root"), dir); err != nil {
		t.Fatal(err)
	}
	return dir
}

// one is the only file that matches.
func one(t *testing.T, pattern string) string {
	t.Helper()
	found, err := filepath.Glob(pattern)
	if err != nil || len(found) != 1 {
		t.Fatalf("%s: %v, %v, want one file", pattern, found, err)
	}
	return found[0]
}

// shell runs a script in dir, with args as $1 and so on.
func shell(t *testing.T, dir, script string, args ...string) {
	t.Helper()
	cmd := exec.Command("sh", append([]string{"-ec", script, "sh"}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v\n%s", script, err, out)
	}
}

// vmInitramfs makes the file system that the kernel starts with: it loads what
// the real one is on.
func vmInitramfs(t *testing.T, kernel string) string {
	t.Helper()
	dir := t.TempDir()
	shell(t, dir, `
		mkdir -p ram/bin ram/dev ram/root ram/modules
		cp "$1" ram/init
		cp "$2" ram/bin/busybox`,
		filepath.Join(testenv.ModuleRoot(t), "e2e/testdata/vm/initramfs"), filepath.Join(drivertest.Image(t), "bin/busybox"))
	modules := one(t, filepath.Join(kernel, "lib/modules/*/kernel"))
	for _, m := range vmModules {
		// Later releases of Debian compress them.
		shell(t, dir, `
			file=$(find "$1" -name "$2.ko" -o -name "$2.ko.xz")
			cp "$file" ram/modules/
			[ "$file" = "${file%.xz}" ] || xz -d "ram/modules/$2.ko.xz"
			echo "$2" >>ram/modules/order`, modules, m)
	}
	shell(t, filepath.Join(dir, "ram"), `find . | bin/busybox cpio -o -H newc >../initramfs`)
	return filepath.Join(dir, "initramfs")
}

// vmRoot makes the disk of the machine: busybox, the image of the driver's
// tests, and the tests as a program.
func vmRoot(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	module := testenv.ModuleRoot(t)
	shell(t, module, `go test -c -trimpath -ldflags '-s -w' -o "$1" ./driver/gvisor`, filepath.Join(dir, "gvisor.test"))
	shell(t, dir, `
		image=$1 module=$2 agent=$3 size=$4
		cp -a "$image" root
		mkdir -p root/dev root/proc root/sys root/run root/tmp root/test/src root/root/.cache/cloche
		cp -a "$image" root/root/.cache/cloche/
		cp "$module/e2e/testdata/vm/init" root/init
		cp "$agent" root/test/cloche-agent
		mv gvisor.test root/test/
		cp "$module"/driver/gvisor/*.go root/test/src/
		echo "$5" >root/test/args
		truncate -s "$size" disk
		mkfs.ext4 -q -F -d root disk
		rm -r root`,
		drivertest.Image(t), module, testenv.Agent(t), fmt.Sprint(vmDisk),
		fmt.Sprintf("-test.timeout=%v -test.run=^(%s)$ -test.skip=%s", vmTimeout, vmTopTests(), cgroup2Skips))
	return filepath.Join(dir, "disk")
}

// vmTopTests is a pattern of the top level tests to run.
func vmTopTests() string {
	var names []string
	for _, list := range cgroup2Tests {
		for _, name := range list {
			if !strings.Contains(name, "/") {
				names = append(names, name)
			}
		}
	}
	return strings.Join(names, "|")
}

// runVM boots the machine and returns what it wrote on its console until it
// powered itself off.
func runVM(t *testing.T, qemu, kernel, initramfs, disk string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), vmTimeout)
	defer cancel()
	var console, stderr bytes.Buffer
	// Software emulation: a kernel may be run whatever this host is itself.
	cmd := exec.CommandContext(ctx, "nice", "-n", "10", qemu,
		"-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", vmCPUs, "-m", vmMemory,
		"-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot",
		"-kernel", one(t, filepath.Join(kernel, "boot/vmlinuz-*")), "-initrd", initramfs,
		"-append", "console=ttyS0 loglevel=1 panic=-1",
		"-drive", "if=virtio,format=raw,cache=unsafe,file="+disk)
	cmd.Stdout, cmd.Stderr = &console, &stderr
	err := cmd.Run()
	out := strings.ReplaceAll(console.String(), "\r", "")
	if err != nil {
		t.Errorf("QEMU: %v, %v\n%s", err, ctx.Err(), &stderr)
	}
	return out
}
