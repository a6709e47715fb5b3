package image

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// Names of OCI whiteouts:
// https://github.com/opencontainers/image-spec/blob/v1.1.1/layer.md#whiteouts
const (
	whiteoutPrefix = ".wh."
	whiteoutMeta   = ".wh..wh." // aufs's own files; only the next means anything
	whiteoutOpaque = ".wh..wh..opq"
)

// whiteout takes away what lower layers have: one name, or all that is in p. What
// the present layer has put there stays, wherever in the archive the whiteout is.
func (u *unpacker) whiteout(p place, base string) error {
	if base == whiteoutOpaque {
		return u.clear(p)
	}
	if strings.HasPrefix(base, whiteoutMeta) {
		return nil
	}
	name := strings.TrimPrefix(base, whiteoutPrefix)
	if name == "" || name == "." || name == ".." {
		return cloche.Errorf(cloche.CodeInvalid, "a whiteout names a file beside it")
	}
	return u.take(p, name)
}

// clear takes away everything in p that the present layer has not made.
func (u *unpacker) clear(p place) error {
	fd, err := unix.Openat(p.fd, ".", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("open directory: %w", err)
	}
	d := os.NewFile(uintptr(fd), p.real)
	names, err := d.Readdirnames(-1)
	if err = errors.Join(err, d.Close()); err != nil {
		return fmt.Errorf("list directory: %w", err)
	}
	for _, n := range names {
		if err := u.take(p, n); err != nil {
			return err
		}
	}
	return nil
}

// take removes name from p as far as the present layer has not made it.
func (u *unpacker) take(p place, name string) error {
	var st unix.Stat_t
	err := unix.Fstatat(p.fd, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	if errors.Is(err, unix.ENOENT) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("whiteout: %w", err)
	}
	real := path.Join(p.real, name)
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		if u.made(real) {
			return nil
		}
		return unix.Unlinkat(p.fd, name, 0)
	}
	fd, err := unix.Openat(p.fd, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("whiteout: %w", err)
	}
	err = u.clear(place{fd: fd, real: real})
	if err = errors.Join(err, unix.Close(fd)); err != nil || u.made(real) {
		return err
	}
	err = unix.Unlinkat(p.fd, name, unix.AT_REMOVEDIR)
	if errors.Is(err, unix.ENOTEMPTY) { // this layer put something in it
		return nil
	}
	return err
}

// removeAt removes name from the directory dir, with all that is in it. A
// missing one is success. maxDepth bounds how many descriptors that takes.
func removeAt(dir int, name string) error {
	err := unix.Unlinkat(dir, name, 0)
	if err == nil || errors.Is(err, unix.ENOENT) {
		return nil
	}
	if !errors.Is(err, unix.EISDIR) {
		return err
	}
	fd, err := unix.Openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	d := os.NewFile(uintptr(fd), name)
	names, err := d.Readdirnames(-1)
	for _, n := range names {
		if err == nil {
			err = removeAt(fd, n)
		}
	}
	if err = errors.Join(err, d.Close()); err != nil {
		return err
	}
	return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
}
