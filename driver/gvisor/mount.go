package gvisor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/cmd/sandboxsetup"

	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/internal/overlay"
)

// Paths in the root that the starter builds for itself and for gVisor's
// processes. They are short: mount(2) takes all lower layers in one page.
const (
	innerRoot     = "/root"  // the machine's root file system
	innerState    = "/state" // the machine's state directory
	innerAgent    = "/agent"
	innerExit     = "/exit"
	innerLayers   = "/l"
	innerSkeleton = "/skel"
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
	if err := placeFiles(base, o, userns); err != nil {
		return err
	}
	lowers, err := overlay.Place(base+innerLayers, o.Spec.Root, userns)
	if err != nil {
		return err
	}
	if err := enter(base); err != nil {
		return fmt.Errorf("enter inner root: %w", err)
	}
	return overlay.Mount(innerRoot, innerLayers, lowers, innerSkeleton)
}

// placeFiles clones what is not part of the root file system to its inner
// place. The agent is root's in the machine.
func placeFiles(base string, o order, userns int) error {
	err := overlay.Clone(o.Agent, base+innerAgent, overlay.Options{ReadOnly: true, UserNS: userns})
	if err != nil {
		return fmt.Errorf("place agent: %w", err)
	}
	// From its inner place: the outer one is covered.
	err = overlay.Clone(base+innerState+"/"+fileExit, base+innerExit, overlay.Options{})
	if err != nil {
		return fmt.Errorf("place exit file: %w", err)
	}
	return nil
}

// skeleton makes the mount points of the inner root, and the lowest layer of
// the machine's root: without it gVisor would make its own mount points in the
// session's top.
func skeleton(base string) error {
	dirs := []string{innerRoot, innerState, innerLayers, "/proc", "/sys", "/dev", "/tmp", "/old", innerSkeleton}
	for _, d := range []string{"/proc", "/sys", "/dev", "/tmp", "/run", "/run/cloche"} {
		dirs = append(dirs, innerSkeleton+d)
	}
	for _, d := range dirs {
		if err := os.Mkdir(base+d, 0o755); err != nil {
			return err
		}
	}
	for _, f := range []string{innerAgent, innerExit, innerSkeleton + agentPath} {
		if err := os.WriteFile(base+f, nil, 0o555); err != nil {
			return err
		}
	}
	if err := os.Chmod(base+innerSkeleton+"/tmp", 0o777|os.ModeSticky); err != nil {
		return err
	}
	return filepath.WalkDir(base+innerSkeleton, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return os.Lchown(path, driver.IDOffset, driver.IDOffset)
	})
}

// checkMountPoint refuses a root in which gVisor could not mount a file at path.
// Its gofer opens what is there, following links as it does here, and on a pipe
// it would wait until the start is given up.
func checkMountPoint(root, path string) error {
	at, err := sandboxsetup.ResolveSymlinks(root, path)
	if err != nil {
		return fmt.Errorf("the place of %s: %w", path, err)
	}
	info, err := os.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) {
		return nil // gVisor makes it
	}
	if err != nil {
		return fmt.Errorf("the place of %s: %w", path, err)
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("the place of %s in the root file system holds no file (%s)", path, info.Mode())
	}
	return nil
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
