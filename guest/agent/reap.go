package agent

import (
	"context"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// reaper is the only waiter of the process: it reaps every child, orphans that
// the kernel gave to process 1 included, and tells those who asked for theirs.
type reaper struct {
	// mu is held over a fork and the entry of the child, and over the reaping
	// of any child: while it is held, a pid in children is not reused.
	mu       sync.Mutex
	children map[int]func(syscall.WaitStatus)
	none     bool          // the last look found no child at all
	change   chan struct{} // closed and replaced after every round
}

func newReaper() *reaper {
	return &reaper{children: make(map[int]func(syscall.WaitStatus)), change: make(chan struct{})}
}

// run reaps until ctx ends. It takes the signals that would end a Go program as
// well, and does nothing with them: a machine does not end because somebody in
// it ran "kill 1".
func (r *reaper) run(ctx context.Context) {
	ch := make(chan os.Signal, 1)
	signal.Notify(ch, unix.SIGCHLD, unix.SIGTERM, unix.SIGINT, unix.SIGHUP, unix.SIGQUIT, unix.SIGUSR1, unix.SIGUSR2,
		unix.SIGALRM, unix.SIGVTALRM, unix.SIGSTKFLT, unix.SIGXCPU, unix.SIGXFSZ, unix.SIGIO, unix.SIGPWR, unix.SIGSYS, unix.SIGTRAP)
	defer signal.Stop(ch)
	for {
		r.round()
		select {
		case <-ch:
		case <-ctx.Done():
			return
		}
	}
}

// round reaps all that can be reaped now.
func (r *reaper) round() {
	for {
		pid, err := peek()
		if pid == 0 {
			r.mu.Lock()
			r.none = err == unix.ECHILD
			close(r.change)
			r.change = make(chan struct{})
			r.mu.Unlock()
			return
		}
		r.mu.Lock()
		var ws syscall.WaitStatus
		got, err := syscall.Wait4(pid, &ws, syscall.WNOHANG|unix.WALL, nil)
		ended := r.children[pid]
		if got == pid && err == nil {
			delete(r.children, pid)
		} else {
			ended = nil // the fork of a command that could not exec reaped it
		}
		r.mu.Unlock()
		if ended != nil {
			ended(ws)
		}
	}
}

// peek returns a child that has ended, without reaping it, or 0; then the error
// tells no children (ECHILD) from none that has ended (nil).
func peek() (int, error) {
	const (
		pAll   = 0
		pidOff = 16 // si_pid in siginfo_t on 64-bit Linux
	)
	var info [128]byte
	for {
		_, _, errno := unix.Syscall6(unix.SYS_WAITID, pAll, 0, uintptr(unsafe.Pointer(&info)),
			unix.WEXITED|unix.WNOHANG|unix.WNOWAIT|unix.WALL, 0, 0)
		switch errno {
		case 0:
			return int(*(*int32)(unsafe.Pointer(&info[pidOff]))), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// start forks by calling fork and arranges for ended to be called, from the
// reaper's goroutine, once the child has ended.
func (r *reaper) start(fork func() (pid int, err error), ended func(syscall.WaitStatus)) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return 0, err
	}
	r.children[pid] = ended
	r.none = false
	return pid, nil
}

// alone waits until process 1 has no children left or ctx ends.
func (r *reaper) alone(ctx context.Context) bool {
	for {
		r.mu.Lock()
		none, change := r.none, r.change
		r.mu.Unlock()
		if none {
			return true
		}
		select {
		case <-change:
		case <-ctx.Done():
			return false
		}
	}
}
