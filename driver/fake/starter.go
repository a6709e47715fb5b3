package fake

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/overlay"
	"github.com/cloche-dev/cloche/internal/process"
)

// argv[0] of the two processes that Dispatch runs.
const (
	starterName = "cloche-fake-starter"
	initName    = "cloche-fake-init"
)

const (
	fdUserns = 3 // of the starter
	fdReady  = 3 // of init: closed by its exec, or written to on an error

	agentPath = "/run/cloche/agent"
)

// order is what a starter is to do.
type order struct {
	Spec         driver.Spec
	State, Agent string
}

// Dispatch runs the process as part of a fake machine, if that is what it was
// started for, and then never returns. It must be the first call in TestMain.
func Dispatch() {
	var run func(order) error
	switch os.Args[0] {
	case starterName:
		run = starterMain
	case initName:
		run = initMain
	default:
		return
	}
	var o order
	err := json.Unmarshal([]byte(os.Args[1]), &o)
	if err == nil {
		err = run(o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// starterMain runs in a mount namespace that the machine will keep, as the
// host's root: it mounts the root file system and starts process 1.
func starterMain(o order) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// The name of the mount shows in all of the machine's mountinfo.
	if err := unix.Mount(string(o.Spec.ID), o.State, "tmpfs", 0, "mode=755"); err != nil {
		return err
	}
	root, lower, skel := filepath.Join(o.State, "r"), filepath.Join(o.State, "l"), filepath.Join(o.State, "s")
	for _, d := range []string{root, lower, skel, skel + "/proc", skel + "/sys", skel + "/dev", skel + "/tmp", skel + "/run"} {
		if err := os.Mkdir(d, 0o755); err != nil {
			return err
		}
		if err := os.Lchown(d, driver.IDOffset, driver.IDOffset); err != nil {
			return err
		}
	}
	if err := os.Chmod(skel+"/tmp", 0o777|os.ModeSticky); err != nil {
		return err
	}
	n, err := overlay.Place(lower, o.Spec.Root, fdUserns)
	if err != nil {
		return err
	}
	if err := overlay.Mount(root, lower, n, skel); err != nil {
		return err
	}
	if err := mountOthers(root, o.Agent); err != nil {
		return err
	}
	// Process 1 is not allowed to walk to the root: it starts there.
	if err := os.Chdir(root); err != nil {
		return err
	}
	return startInit(o)
}

// mountOthers mounts what needs the host's root: devices and the agent.
func mountOthers(root, agent string) error {
	for dir, opts := range map[string]string{"/dev": "mode=755,size=64k", "/run": "mode=755,size=16m"} {
		opts += fmt.Sprintf(",uid=%d,gid=%d", driver.IDOffset, driver.IDOffset)
		if err := unix.Mount("fake", root+dir, "tmpfs", 0, opts); err != nil {
			return fmt.Errorf("mount %s: %w", dir, err)
		}
	}
	binds := map[string]string{agent: root + agentPath}
	for _, dev := range []string{"null", "zero", "full", "random", "urandom", "tty"} {
		binds["/dev/"+dev] = root + "/dev/" + dev
	}
	for src, dst := range binds {
		if err := os.MkdirAll(filepath.Dir(dst), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(dst, nil, 0o644); err != nil {
			return err
		}
		if err := unix.Mount(src, dst, "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("bind %s: %w", src, err)
		}
	}
	return nil
}

// startInit starts process 1, waits until the agent runs in it, and says on
// standard output which process it is.
func startInit(o order) error {
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: driver.IDOffset, Size: driver.IDCount}}
	readyR, readyW, err := os.Pipe()
	if err != nil {
		return err
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{initName, os.Args[1]}
	cmd.ExtraFiles = []*os.File{readyW}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWIPC |
			unix.CLONE_NEWUTS | unix.CLONE_NEWNET,
		UidMappings: ids,
		GidMappings: ids,
		Credential:  &syscall.Credential{Uid: 0, Gid: 0},
		Setsid:      true,
		// The agent drops to the user of a command, groups included.
		GidMappingsEnableSetgroups: true,
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("process 1: %w", err)
	}
	if err := readyW.Close(); err != nil {
		return err
	}
	message, err := io.ReadAll(readyR)
	if err == nil && len(message) > 0 {
		err = errors.New(string(message))
	}
	if err != nil {
		return fmt.Errorf("process 1: %w", err)
	}
	p, err := process.Identify(cmd.Process.Pid)
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(p)
}

// initMain finishes the machine from inside and becomes the agent.
func initMain(o order) error {
	unix.CloseOnExec(fdReady)
	err := enter(o)
	if err == nil {
		err = unix.Exec(agentPath, []string{agentPath, "init"}, []string{"PATH=/bin:/sbin:/usr/bin:/usr/sbin"})
	}
	if _, werr := fmt.Fprint(os.NewFile(fdReady, "ready"), err); werr != nil {
		return werr
	}
	return err
}

func enter(o order) error {
	for _, m := range []struct{ dir, fs, opts string }{
		{"/proc", "proc", ""},
		{"/sys", "sysfs", ""},
		{"/dev/shm", "tmpfs", fmt.Sprintf("mode=1777,size=%dm", o.Spec.MemoryMiB/2)},
		{"/dev/pts", "devpts", "newinstance,ptmxmode=0666,mode=620"},
	} {
		if err := os.MkdirAll("."+m.dir, 0o755); err != nil {
			return err
		}
		if err := unix.Mount(m.fs, "."+m.dir, m.fs, unix.MS_NOSUID, m.opts); err != nil {
			return fmt.Errorf("mount %s: %w", m.dir, err)
		}
	}
	if err := os.Symlink("pts/ptmx", "./dev/ptmx"); err != nil {
		return err
	}
	if err := unix.Sethostname([]byte(o.Spec.Hostname)); err != nil {
		return err
	}
	if err := unix.Chroot("."); err != nil {
		return err
	}
	return os.Chdir("/")
}
