// Package process names a process of the host so that a later program can know
// it again, and waits for ones that are not children: machines outlive the
// process that started them.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// Process names a process for good, until a reboot: the kernel uses a PID again,
// but not with the same start time. The zero value is no process.
type Process struct {
	PID   int
	Start uint64 // clock ticks since boot: proc(5), /proc/PID/stat, field 22
}

// Identify returns the process that has the PID now.
func Identify(pid int) (Process, error) {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return Process{}, err
	}
	// The second field is the command's name in parentheses, and may itself
	// hold spaces and parentheses.
	fields := bytes.Fields(data[bytes.LastIndexByte(data, ')')+1:])
	if len(fields) < 20 {
		return Process{}, fmt.Errorf("stat of process %d has %d fields", pid, len(fields))
	}
	start, err := strconv.ParseUint(string(fields[19]), 10, 64)
	return Process{PID: pid, Start: start}, err
}

// open returns a pidfd of the process, or nil if it has ended.
func (p Process) open() (*os.File, error) {
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open pidfd: %w", err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	// Only now is the PID pinned, so only now does the start time count.
	if now, err := Identify(p.PID); err != nil || now != p {
		return nil, f.Close()
	}
	return f, nil
}

// Wait blocks until the process has ended or ctx does.
func (p Process) Wait(ctx context.Context) error {
	f, err := p.open()
	if err != nil || f == nil {
		return err
	}
	var once sync.Once
	closeFile := func() { once.Do(func() { _ = f.Close() }) } // read only: nothing to lose
	defer closeFile()
	defer context.AfterFunc(ctx, closeFile)()
	conn, err := f.SyscallConn()
	if err != nil {
		return err
	}
	// A pidfd becomes readable when its process has ended; the runtime's
	// poller waits for that without a thread.
	err = conn.Read(func(fd uintptr) bool { return ended(int(fd)) })
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return err
}

// ended reports whether the process of a pidfd has ended.
func ended(pidfd int) bool {
	fds := []unix.PollFd{{Fd: int32(pidfd), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1
}

// Alive reports whether the process runs. A zombie does not.
func (p Process) Alive() bool {
	if p.PID == 0 {
		return false
	}
	f, err := p.open()
	if err != nil || f == nil {
		return false
	}
	defer f.Close()
	conn, err := f.SyscallConn()
	if err != nil {
		return false
	}
	gone := false
	err = conn.Control(func(fd uintptr) { gone = ended(int(fd)) })
	return err == nil && !gone
}
