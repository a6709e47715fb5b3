package agent

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// sigaction is the kernel's struct sigaction on amd64.
type sigaction struct {
	handler, flags, restorer uintptr
	mask                     uint64
}

const (
	sigDefault = 0
	sigIgnore  = 1
	sigMax     = 64
)

// defaultSignals gives every signal that this process was started with as
// ignored its default action again. Commands inherit what is ignored across
// execve, and a shell that starts something in the background ignores SIGINT
// for it: a command would then outlive its Ctrl-C.
func defaultSignals() error {
	for n := uintptr(1); n <= sigMax; n++ {
		if n == uintptr(unix.SIGKILL) || n == uintptr(unix.SIGSTOP) {
			continue
		}
		var now sigaction
		if _, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, n, 0, uintptr(unsafe.Pointer(&now)), unsafe.Sizeof(now.mask), 0, 0); errno != 0 {
			return fmt.Errorf("action of signal %d: %w", n, errno)
		}
		if now.handler != sigIgnore {
			continue
		}
		action := sigaction{handler: sigDefault}
		if _, _, errno := unix.RawSyscall6(unix.SYS_RT_SIGACTION, n, uintptr(unsafe.Pointer(&action)), 0, unsafe.Sizeof(action.mask), 0, 0); errno != 0 {
			return fmt.Errorf("action of signal %d: %w", n, errno)
		}
	}
	return nil
}
