package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// pipeSize is the capacity of an output pipe, filled only as far as the agent
// lags behind.
const pipeSize = 1 << 20

// start starts a command under id.
func (a *Agent) start(ctx context.Context, id cloche.CommandID, s guest.Start) (*command, error) {
	c, cfg, err := a.enroll(id)
	if err != nil {
		return nil, err
	}
	if err := a.launch(c, s, cfg); err != nil {
		a.mu.Lock()
		delete(a.commands, id)
		a.mu.Unlock()
		return nil, err
	}
	a.mu.Lock()
	c.started = true
	a.mu.Unlock()
	a.log.InfoContext(ctx, "command started", "command", id, "pid", c.info.PID, "name", s.Argv[0])
	return c, nil
}

// enroll takes the id and a place among the commands.
func (a *Agent) enroll(id cloche.CommandID) (*command, guest.Config, error) {
	if !id.Valid() {
		return nil, guest.Config{}, cloche.Errorf(cloche.CodeInvalid, "%.64q is no command id", string(id))
	}
	cfg, err := a.configured()
	if err != nil {
		return nil, cfg, err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.stopping:
		return nil, cfg, cloche.Errorf(cloche.CodeStopping, "the sandbox is being stopped")
	case a.commands[id] != nil:
		return nil, cfg, cloche.Errorf(cloche.CodeConflict, "the command %s exists", id)
	case len(a.commands) >= guest.MaxCommands:
		return nil, cfg, cloche.Errorf(cloche.CodeExhausted, "the sandbox has %d commands; it takes no more until some end", guest.MaxCommands)
	}
	c := &command{id: id, out: newOutput(a.budget)}
	a.commands[id] = c
	return c, cfg, nil
}

// launch forks the command and starts the goroutines that serve it.
func (a *Agent) launch(c *command, s guest.Start, cfg guest.Config) (err error) {
	_, mark := a.groups.(*sessions)
	p, err := a.newPlan(c.id, s, cfg, mark)
	if err != nil {
		return err
	}
	if c.group, err = a.groups.make(c.id); err != nil {
		return startError(err)
	}
	fds, err := a.stdio(s, p.user)
	if err == nil {
		err = a.fork(c, s, p, fds)
	}
	if err != nil {
		fds.close()
		a.sweep(c.group)
		return startError(err)
	}
	return nil
}

// stdio is both sides of a command's descriptors.
type stdio struct {
	child   [3]*os.File // may hold the same file several times
	in      *os.File    // our side of standard input, nil if it is at EOF
	out     []*os.File  // our side of the output: one (PTY) or two
	streams []guest.FrameType
	pty     *os.File // our side of the PTY, which is also in and out[0]
}

// close closes both sides.
func (f *stdio) close() {
	f.closeChild()
	for _, o := range append(f.out, f.in) {
		if o != nil {
			_ = o.Close() // nothing was written to it
		}
	}
}

func (f *stdio) closeChild() {
	for i, c := range f.child {
		if c != nil && (i == 0 || c != f.child[0]) {
			_ = c.Close() // the child has its own
		}
	}
	f.child = [3]*os.File{}
}

// stdio makes the descriptors that s asks for. What it returns is to be closed,
// also with an error.
func (a *Agent) stdio(s guest.Start, u account) (*stdio, error) {
	f := &stdio{}
	if s.PTY != nil {
		return f, f.openPTY(*s.PTY, u)
	}
	var err error
	switch {
	case s.Stdin:
		f.child[0], f.in, err = pipe(u, true)
	case a.null != nil:
		var fd int
		if fd, err = unix.FcntlInt(a.null.Fd(), unix.F_DUPFD_CLOEXEC, 0); err == nil {
			f.child[0] = os.NewFile(uintptr(fd), "null")
		}
	default:
		var w *os.File
		if f.child[0], w, err = pipe(u, true); err == nil {
			err = w.Close()
		}
	}
	for i, stream := range []guest.FrameType{guest.FrameStdout, guest.FrameStderr} {
		if err != nil {
			return f, err
		}
		var ours *os.File
		if f.child[i+1], ours, err = pipe(u, false); err == nil {
			f.out, f.streams = append(f.out, ours), append(f.streams, stream)
		}
	}
	return f, err
}

// pipe makes a pipe of which the child reads or writes one end, which blocks,
// and the agent has the other, which does not. It belongs to u, so that opening
// /dev/stdout works.
func pipe(u account, childReads bool) (child, ours *os.File, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	theirs, mine := fds[1], fds[0]
	if childReads {
		theirs, mine = fds[0], fds[1]
	}
	if u.uid != 0 {
		_ = unix.Fchown(theirs, u.uid, u.gid) // a convenience that not every kernel has
	}
	if !childReads {
		// Fewer wake-ups for a process that writes much; the default works too.
		_, _ = unix.FcntlInt(uintptr(mine), unix.F_SETPIPE_SZ, pipeSize)
	}
	if err := unix.SetNonblock(mine, true); err != nil {
		closeAll(fds[:])
		return nil, nil, fmt.Errorf("pipe: %w", err)
	}
	return os.NewFile(uintptr(theirs), "child"), os.NewFile(uintptr(mine), "command"), nil
}

func (f *stdio) openPTY(size cloche.WindowSize, u account) error {
	master, slave, err := pty.Open()
	if err != nil {
		return fmt.Errorf("open pty: %w", err)
	}
	f.child = [3]*os.File{slave, slave, slave}
	f.pty, f.in, f.out, f.streams = master, master, []*os.File{master}, []guest.FrameType{guest.FrameStdout}
	if u.uid != 0 {
		_ = slave.Chown(u.uid, u.gid) // as login does; without it only opening it by name fails
	}
	rc, err := slave.SyscallConn()
	if err == nil {
		var berr error
		err = errors.Join(rc.Control(func(fd uintptr) { berr = unix.SetNonblock(int(fd), false) }), berr)
	}
	return errors.Join(err, setSize(master, size))
}

func setSize(master *os.File, size cloche.WindowSize) error {
	return pty.Setsize(master, &pty.Winsize{Rows: size.Rows, Cols: size.Cols})
}

// fork starts the process of the plan, or of the plan that says why it cannot
// be started.
func (a *Agent) fork(c *command, s guest.Start, p *plan, f *stdio) error {
	attr := &syscall.ProcAttr{
		Dir:   p.dir,
		Env:   p.env,
		Files: make([]uintptr, 3),
		Sys:   &syscall.SysProcAttr{Setsid: true, Setctty: f.pty != nil},
	}
	for i, child := range f.child {
		attr.Files[i] = fdOf(child)
	}
	cred := &syscall.Credential{Uid: uint32(p.user.uid), Gid: uint32(p.user.gid)}
	for _, g := range p.user.groups {
		cred.Groups = append(cred.Groups, uint32(g))
	}
	attr.Sys.Credential = cred
	c.group.prepare(attr.Sys)

	exited := make(chan syscall.WaitStatus, 1)
	try := func() (int, error) { return syscall.ForkExec(p.path, p.argv, attr) }
	begin := time.Now()
	pid, err := a.reaper.start(try, func(ws syscall.WaitStatus) { exited <- ws })
	if err != nil && p.careful != nil {
		if err := p.careful(); err != nil {
			return err
		}
		pid, err = a.reaper.start(try, func(ws syscall.WaitStatus) { exited <- ws })
	}
	if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EACCES) || errors.Is(err, unix.ENOEXEC) ||
		errors.Is(err, unix.ENOTDIR) || errors.Is(err, unix.EPERM) || errors.Is(err, unix.ELOOP) || errors.Is(err, unix.ETXTBSY) {
		p.fail(err)
		pid, err = a.reaper.start(try, func(ws syscall.WaitStatus) { exited <- ws })
	}
	if errors.Is(err, unix.ENAMETOOLONG) && len(p.path) < cloche.MaxPathLen {
		err = unix.E2BIG // as gVisor says it
	}
	if err != nil {
		return err
	}
	f.closeChild()
	c.group.joined(pid)
	c.pty = f.pty
	c.info = guest.Started{PID: pid, StartedAt: begin, WorkDir: p.dir}
	c.in = newInput(c.out, f.in, f.pty != nil, s.Stdin)
	a.attend(c, s, f, exited)
	return nil
}

// attend starts the goroutines of a command that runs.
func (a *Agent) attend(c *command, s guest.Start, f *stdio, exited <-chan syscall.WaitStatus) {
	var pumps sync.WaitGroup
	ended := make(chan struct{})
	for i, o := range f.out {
		pumps.Add(1)
		a.work.Go(func() { a.pump(o, f.streams[i], c.out, f.pty != nil, ended, pumps.Done) })
	}
	a.work.Go(c.in.run)
	if s.Timeout > 0 {
		c.mu.Lock()
		c.timer = time.AfterFunc(s.Timeout, func() { a.expire(c) })
		c.mu.Unlock()
	}
	a.work.Go(func() {
		ws := <-exited
		e := c.ended(ws, time.Now())
		close(ended)
		for _, o := range f.out {
			_ = o.SetReadDeadline(time.Unix(1, 0)) // fails only if its pump has seen EOF and closed it
		}
		c.in.stop()
		pumps.Wait()
		c.out.finish(e)
		a.log.Debug("command ended", "command", c.id, "code", e.Code, "signal", e.Signal, "cause", e.Cause)
		a.sweep(c.group)
	})
}

// fdOf is the descriptor of f without the change to blocking mode that Fd makes.
func fdOf(f *os.File) uintptr {
	var n uintptr
	rc, err := f.SyscallConn()
	if err == nil {
		err = rc.Control(func(fd uintptr) { n = fd })
	}
	if err != nil {
		panic("a descriptor of a command that is being started is closed: " + err.Error())
	}
	return n
}

// startError names the kernel's reasons that a caller can act on.
func startError(err error) error {
	switch {
	case errors.Is(err, unix.E2BIG):
		return cloche.Errorf(cloche.CodeInvalid, "the arguments and the environment are longer than the kernel takes: "+
			"one may have 131071 bytes, all together about 2 MiB; write large inputs to a file or to standard input")
	case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
		return cloche.Errorf(cloche.CodeExhausted, "the sandbox has no room for another process: too many run, or memory is full")
	case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE):
		return cloche.Errorf(cloche.CodeExhausted, "the sandbox has no file descriptors left")
	case errors.Is(err, unix.ENOSPC):
		return cloche.Errorf(cloche.CodeExhausted, "the sandbox has no room for another command")
	}
	return fmt.Errorf("start command: %w", err)
}
