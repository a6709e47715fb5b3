package gvisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche/driver"
)

// Paths in the root that the starter builds for itself and for gVisor's
// processes. They are short: mount(2) takes all lower layers in one page.
const (
	innerRoot  = "/root"  // the machine's root file system
	innerState = "/state" // the machine's state directory
	innerAgent = "/agent"
	innerExit  = "/exit"
	innerTop   = "/top"
	innerLower = "/l" // lower layers by number, 0 = topmost
)

// mountRoot makes this process's mount namespace, which must be its own, hold
// nothing but what the machine needs, and mounts the machine's root file
// system at innerRoot.
func mountRoot(o order, userns int) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	// Over the state directory itself: it exists, and is no place of the guest's.
	base := o.State
	state, err := unix.OpenTree(unix.AT_FDCWD, base, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	if err != nil {
		return fmt.Errorf("clone state directory: %w", err)
	}
	defer unix.Close(state)
	if err := unix.Mount("cloche", base, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV, "mode=755,size=1m"); err != nil {
		return fmt.Errorf("mount inner root: %w", err)
	}
	if err := skeleton(base); err != nil {
		return fmt.Errorf("skeleton: %w", err)
	}
	if err := unix.MoveMount(state, "", unix.AT_FDCWD, base+innerState, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("mount state directory: %w", err)
	}
	for _, dir := range []string{"/proc", "/sys", "/dev"} {
		if err := unix.Mount(dir, base+dir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s: %w", dir, err)
		}
	}
	lowers, err := placeLayers(base, o, userns)
	if err != nil {
		return err
	}
	if err := enter(base); err != nil {
		return fmt.Errorf("enter inner root: %w", err)
	}
	return mountOverlay(lowers)
}

// placeLayers clones the image, the layers, the top, the agent and the exit
// file to their inner places and returns the number of lower layers. The image
// and the agent have unshifted ids and are idmapped; a layer was a top, and is
// shifted on disk.
func placeLayers(base string, o order, userns int) (int, error) {
	const mapped, plain = true, false
	type place struct {
		src, dst string
		mapped   bool
		readOnly bool
	}
	places := []place{
		{o.Spec.Root.Top, innerTop, plain, false},
		{filepath.Join(o.State, fileExit), innerExit, plain, false},
		{o.Agent, innerAgent, mapped, true},
	}
	n := 0
	lower := func(src string, m bool) {
		places = append(places, place{src, innerLower + "/" + strconv.Itoa(n), m, true})
		n++
	}
	for i := len(o.Spec.Root.Layers) - 1; i >= 0; i-- {
		lower(filepath.Join(o.Spec.Root.Layers[i], dirUpper), plain)
	}
	lower(o.Spec.Root.Image, mapped)
	for _, p := range places {
		src := p.src
		if p.dst == innerExit {
			src = filepath.Join(base, innerState, fileExit) // its old path is covered
		}
		attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
		if p.readOnly {
			attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
		}
		if p.mapped {
			attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
			attr.Userns_fd = uint64(userns)
		}
		if strings.HasPrefix(p.dst, innerLower+"/") {
			if err := os.Mkdir(base+p.dst, 0o755); err != nil {
				return 0, err
			}
		}
		if err := cloneMount(src, base+p.dst, &attr); err != nil {
			return 0, fmt.Errorf("place %s: %w", p.dst, err)
		}
	}
	return n, nil
}

// cloneMount attaches a copy of the mount at src, that subtree only, to dst.
func cloneMount(src, dst string, attr *unix.MountAttr) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, src,
		unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, attr); err != nil {
		return fmt.Errorf("mount_setattr: %w", err)
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, dst, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

// skeleton makes the mount points of the inner root, and the lowest layer of
// the machine's root: without it gVisor would make its own mount points in the
// session's top.
func skeleton(base string) error {
	dirs := []string{innerRoot, innerState, innerTop, innerLower, "/proc", "/sys", "/dev", "/tmp", "/old",
		"/skel", "/skel/proc", "/skel/sys", "/skel/dev", "/skel/tmp", "/skel/run", "/skel/run/cloche"}
	for _, d := range dirs {
		if err := os.Mkdir(base+d, 0o755); err != nil {
			return err
		}
	}
	for _, f := range []string{innerAgent, innerExit, "/skel" + agentPath} {
		if err := os.WriteFile(base+f, nil, 0o555); err != nil {
			return err
		}
	}
	if err := os.Chmod(base+"/skel/tmp", 0o777|os.ModeSticky); err != nil {
		return err
	}
	return filepath.WalkDir(base+"/skel", func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, driver.IDOffset, driver.IDOffset)
	})
}

// enter makes base the root of this process and its mount namespace, and
// detaches the host's.
func enter(base string) error {
	if err := unix.PivotRoot(base, base+"/old"); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	if err := os.Chdir("/"); err != nil {
		return err
	}
	if err := unix.Unmount("/old", unix.MNT_DETACH); err != nil {
		return fmt.Errorf("detach old root: %w", err)
	}
	return os.Remove("/old")
}

// mountOverlay mounts the machine's root file system of n lower layers.
func mountOverlay(n int) error {
	var lower strings.Builder
	for i := range n {
		fmt.Fprintf(&lower, "%s/%d:", innerLower, i)
	}
	// redirect_dir: without it renaming a directory of the image fails with
	// EXDEV. index and metacopy would tie the top to this very image's inodes.
	opts := fmt.Sprintf("lowerdir=%s/skel,upperdir=%s/%s,workdir=%s/%s,redirect_dir=on,index=off,metacopy=off",
		lower.String(), innerTop, dirUpper, innerTop, dirWork)
	if len(opts) >= os.Getpagesize() {
		return errors.New("too many layers for mount(2)")
	}
	err := unix.Mount("overlay", innerRoot, "overlay", unix.MS_NOSUID|unix.MS_NODEV, opts)
	if err != nil {
		return fmt.Errorf("mount overlay of %d layers: %w", n, err)
	}
	return nil
}

// Directories of a top, and so of a layer.
const (
	dirUpper = "upper"
	dirWork  = "work"
)

// layTop makes upper and work in top and reports whether they were not there.
func layTop(top string) (fresh bool, err error) {
	for _, d := range []string{dirUpper, dirWork} {
		path := filepath.Join(top, d)
		switch err := os.Mkdir(path, 0o755); {
		case err == nil:
			fresh = fresh || d == dirUpper
			if err := os.Lchown(path, driver.IDOffset, driver.IDOffset); err != nil {
				return fresh, err
			}
		case errors.Is(err, os.ErrExist) && isDir(path):
		default:
			return fresh, err
		}
	}
	return fresh, nil
}

// newUserNamespace returns a user namespace that maps the guest's ids to the
// host's. A child that is stopped by ptrace before it runs anything serves to
// make it: the namespace lives on in the descriptor.
func newUserNamespace() (*os.File, error) {
	runtime.LockOSThread() // the tracer is a thread
	defer runtime.UnlockOSThread()
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: driver.IDOffset, Size: driver.IDCount}}
	p, err := os.StartProcess("/proc/self/exe", []string{"cloche-userns"}, &os.ProcAttr{
		Sys: &syscall.SysProcAttr{
			Cloneflags:  syscall.CLONE_NEWUSER,
			UidMappings: ids,
			GidMappings: ids,
			Ptrace:      true,
			Pdeathsig:   syscall.SIGKILL,
		},
	})
	if err != nil {
		return nil, err
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
	if kerr := p.Kill(); err == nil && kerr != nil {
		err = errors.Join(kerr, f.Close())
	}
	if _, werr := p.Wait(); err == nil && werr != nil {
		err = errors.Join(werr, f.Close())
	}
	return f, err
}
