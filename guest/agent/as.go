package agent

import (
	"errors"
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// as runs f with the file permissions of u, so that the kernel decides what f
// may reach as it would for a process of u. f must do its system calls in its
// own goroutine.
//
// Linux keeps ids per thread. The effective ones of a locked thread change and
// go back; the real and saved ones stay root's, so that u may neither signal nor
// trace it. (setfsuid would be narrower, but gVisor has not got it.) The Go
// runtime never clones a locked thread for other goroutines.
func as(u account, f func() error) error {
	if u.uid == 0 {
		return f()
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := become(u)
		if err == nil {
			err = f()
		}
		if back := becomeRoot(); back != nil {
			// Still locked: the thread ends with this goroutine.
			result <- errors.Join(err, back)
			return
		}
		runtime.UnlockOSThread()
		result <- err
	}()
	return <-result
}

// become changes the effective ids and the groups of the calling thread alone:
// the functions of package unix would change all threads.
func become(u account) error {
	if err := setThreadGroups(u.groups); err != nil {
		return err
	}
	if err := setThreadID(unix.SYS_SETRESGID, u.gid); err != nil {
		return err
	}
	return setThreadID(unix.SYS_SETRESUID, u.uid)
}

func becomeRoot() error {
	// The uid first: it brings back the capabilities that the rest needs.
	if err := setThreadID(unix.SYS_SETRESUID, 0); err != nil {
		return err
	}
	if err := setThreadID(unix.SYS_SETRESGID, 0); err != nil {
		return err
	}
	return setThreadGroups(nil)
}

func setThreadID(call uintptr, id int) error {
	const keep = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(call, keep, uintptr(id), keep); errno != 0 {
		return fmt.Errorf("change to id %d: %w", id, errno)
	}
	return nil
}

func setThreadGroups(groups []int) error {
	list := make([]uint32, max(len(groups), 1))
	for i, g := range groups {
		list[i] = uint32(g)
	}
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(groups)), uintptr(unsafe.Pointer(&list[0])), 0)
	if errno != 0 {
		return fmt.Errorf("change groups: %w", errno)
	}
	return nil
}
