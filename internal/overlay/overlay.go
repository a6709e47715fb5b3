// Package overlay mounts a driver.Root as a host overlay, for the drivers whose
// machines take a directory tree. It works on the caller's mount namespace,
// which should be one that ends with the machine: then a crash can leave no
// mount behind. It knows nothing of machines.
//
// Ids are shifted on the way: the image is owned as inside a machine and is
// idmapped; layers and the top are owned as on the host, by the guest's ids plus
// driver.IDOffset. Idmapping upper and lower at once would make the overlay
// silently read-only (Linux 6.18).
package overlay

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

// dirWork is the kernel's scratch directory in a top, beside driver.TopUpper.
const dirWork = "work"

// MaxLayers is the largest number of layers that Place and Mount take: overlayfs
// takes 500 lower directories (OVL_MAX_STACK, Linux 6.18), and the image and the
// caller's lowest one are among them.
const MaxLayers = 490

// LayTop makes what an overlay needs in a top, unless it is there, and reports
// whether it had no upper directory yet.
func LayTop(top string) (fresh bool, err error) {
	for _, d := range []string{driver.TopUpper, dirWork} {
		path := filepath.Join(top, d)
		err := os.Mkdir(path, 0o755)
		if errors.Is(err, os.ErrExist) {
			if info, lerr := os.Lstat(path); lerr != nil || !info.IsDir() {
				return fresh, fmt.Errorf("%s is not a directory", d)
			}
			continue
		}
		if err != nil {
			return fresh, err
		}
		fresh = fresh || d == driver.TopUpper
		if err := os.Lchown(path, driver.IDOffset, driver.IDOffset); err != nil {
			return fresh, err
		}
	}
	return fresh, nil
}

// CleanTop removes the scratch directory of a top that no overlay uses any
// more. What the session wrote stays.
func CleanTop(top string) error { return os.RemoveAll(filepath.Join(top, dirWork)) }

// Place clones the top, the layers and the image of r to scratch: "top", and the
// lower directories by number, the topmost "0". It returns the number of lowers.
// scratch must be an empty directory; userns comes from UserNamespace.
func Place(scratch string, r driver.Root, userns int) (lowers int, err error) {
	place := func(src, name string, o Options) error {
		dst := filepath.Join(scratch, name)
		if err := os.Mkdir(dst, 0o755); err != nil {
			return err
		}
		if err := Clone(src, dst, o); err != nil {
			return fmt.Errorf("place %s: %w", name, err)
		}
		return nil
	}
	if err := place(r.Top, "top", Options{}); err != nil {
		return 0, err
	}
	for i := len(r.Layers) - 1; i >= 0; i-- {
		src := filepath.Join(r.Layers[i], driver.TopUpper)
		if err := place(src, strconv.Itoa(lowers), Options{ReadOnly: true}); err != nil {
			return 0, err
		}
		lowers++
	}
	if err := place(r.Image, strconv.Itoa(lowers), Options{ReadOnly: true, UserNS: userns}); err != nil {
		return 0, err
	}
	return lowers + 1, nil
}

// Mount mounts what Place has placed at target. lowest is one more lower
// directory, below the image. Paths must be short: mount(2) takes them all in
// one page. (fsconfig's lowerdir+ would lift that, on kernels since 6.7.)
func Mount(target, scratch string, lowers int, lowest string) error {
	var dirs strings.Builder
	for i := range lowers {
		fmt.Fprintf(&dirs, "%s/%d:", scratch, i)
	}
	// redirect_dir: without it renaming a directory of the image fails with
	// EXDEV. index and metacopy would tie the top to this very image's inodes.
	opts := fmt.Sprintf("lowerdir=%s%s,upperdir=%s/top/%s,workdir=%s/top/%s,redirect_dir=on,index=off,metacopy=off",
		dirs.String(), lowest, scratch, driver.TopUpper, scratch, dirWork)
	if len(opts) >= os.Getpagesize() {
		return errors.New("mount overlay: the layers' paths exceed a page")
	}
	if err := unix.Mount("overlay", target, "overlay", unix.MS_NOSUID|unix.MS_NODEV, opts); err != nil {
		return fmt.Errorf("mount overlay of %d lower directories: %w", lowers, err)
	}
	return nil
}

// Options of Clone. Every clone is nosuid and nodev.
type Options struct {
	ReadOnly bool
	UserNS   int // descriptor of a user namespace to idmap by; 0 = none
}

// Clone attaches a copy of the mount at src, from src downwards and without
// what is mounted below, to dst, which must be of the same kind.
func Clone(src, dst string, o Options) error {
	fd, err := unix.OpenTree(unix.AT_FDCWD, src,
		unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC|unix.AT_SYMLINK_NOFOLLOW)
	if err != nil {
		return fmt.Errorf("open_tree: %w", err)
	}
	defer unix.Close(fd)
	attr := unix.MountAttr{Attr_set: unix.MOUNT_ATTR_NOSUID | unix.MOUNT_ATTR_NODEV}
	if o.ReadOnly {
		attr.Attr_set |= unix.MOUNT_ATTR_RDONLY
	}
	if o.UserNS != 0 {
		attr.Attr_set |= unix.MOUNT_ATTR_IDMAP
		attr.Userns_fd = uint64(o.UserNS)
	}
	if err := unix.MountSetattr(fd, "", unix.AT_EMPTY_PATH, &attr); err != nil {
		return fmt.Errorf("mount_setattr: %w", err)
	}
	if err := unix.MoveMount(fd, "", unix.AT_FDCWD, dst, unix.MOVE_MOUNT_F_EMPTY_PATH); err != nil {
		return fmt.Errorf("move_mount: %w", err)
	}
	return nil
}

// UserNamespace returns a user namespace that maps the guest's ids to the
// host's. A child that ptrace stops before it runs anything serves to make it;
// the namespace lives on in the descriptor.
func UserNamespace() (*os.File, error) {
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
		return nil, fmt.Errorf("user namespace: %w", err)
	}
	f, err := os.Open(fmt.Sprintf("/proc/%d/ns/user", p.Pid))
	if kerr := p.Kill(); err == nil && kerr != nil {
		err = errors.Join(kerr, f.Close())
	}
	if _, werr := p.Wait(); err == nil && werr != nil {
		err = errors.Join(werr, f.Close())
	}
	if err != nil {
		return nil, fmt.Errorf("user namespace: %w", err)
	}
	return f, nil
}
