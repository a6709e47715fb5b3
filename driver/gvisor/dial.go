package gvisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/sentry/control"
	"gvisor.dev/gvisor/pkg/unet"
	"gvisor.dev/gvisor/pkg/urpc"
	"gvisor.dev/gvisor/runsc/boot"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// pipeSize is the capacity asked for a channel's pipes, in bytes: the most that
// fs.pipe-max-size allows by default (Linux 6.18).
const pipeSize = 1 << 20

// Dial implements driver.Machine. A helper process in the machine, the agent's
// own executable, inherits two pipes, hands them to process 1 and ends.
func (m *machine) Dial(ctx context.Context) (net.Conn, error) {
	if m.concluded() != nil || !m.alive() {
		return nil, m.gone(nil)
	}
	inR, inW, err := pipe()
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", m.ID(), err)
	}
	outR, outW, err := pipe()
	if err != nil {
		return nil, errors.Join(fmt.Errorf("dial %s: %w", m.ID(), err), inR.Close(), inW.Close())
	}
	err = m.handReady(ctx, inR, outW)
	if cerr := errors.Join(inR.Close(), outW.Close()); err == nil {
		err = cerr
	}
	if err == nil {
		return &conn{r: outR, w: inW, id: m.ID()}, nil
	}
	err = errors.Join(err, inW.Close(), outR.Close())
	if ctx.Err() != nil {
		return nil, fmt.Errorf("dial %s: %w", m.ID(), ctx.Err())
	}
	if m.ends(ctx, err) {
		return nil, m.gone(err)
	}
	return nil, fmt.Errorf("dial %s: %w", m.ID(), err)
}

// ends reports whether the machine has ended, or is about to, when a call to the
// sentry failed with err: a connection that broke is the first sign of it.
func (m *machine) ends(ctx context.Context, err error) bool {
	var answered urpc.RemoteError
	if m.alive() && !errors.As(err, &answered) && !errors.Is(err, errNotReady) {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		defer cancel()
		_ = m.rec.Sandbox.Wait(ctx) // whatever it says, alive is asked again
	}
	return !m.alive()
}

// handReady is hand, again and again while the agent has not started to listen.
func (m *machine) handReady(ctx context.Context, r, w *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, guest.HelloTimeout)
	defer cancel()
	delay := time.NewTimer(0)
	defer delay.Stop()
	for wait := 4 * time.Millisecond; ; wait = min(2*wait, 100*time.Millisecond) {
		err := m.hand(ctx, r, w)
		if !errors.Is(err, errNotReady) || !m.alive() {
			return err
		}
		delay.Reset(wait)
		select {
		case <-ctx.Done():
			return errors.Join(err, ctx.Err())
		case <-delay.C:
		}
	}
}

var errNotReady = errors.New("the agent does not listen")

func (m *machine) gone(cause error) error {
	return &cloche.Error{Code: cloche.CodeGone, Op: "dial", Message: "the session's machine has ended", Err: cause}
}

// hand runs the helper with r and w as its standard input and output.
func (m *machine) hand(ctx context.Context, r, w *os.File) error {
	client, stop, err := m.connect(ctx)
	if err != nil {
		return fmt.Errorf("control socket: %w", err)
	}
	defer stop()
	args := control.ExecArgs{
		Filename:         agentPath,
		Argv:             []string{agentPath, "hand"},
		WorkingDirectory: "/",
		ContainerID:      string(m.ID()),
		FilePayload:      control.NewFilePayload(map[int]*os.File{0: r, 1: w}, nil),
	}
	var pid int32
	if err := client.Call(boot.ContMgrExecuteAsync, &args, &pid); err != nil {
		return fmt.Errorf("run helper: %w", err)
	}
	var status unix.WaitStatus
	if err := client.Call(boot.ContMgrWaitPID, &boot.WaitPIDArgs{PID: pid, CID: string(m.ID())}, &status); err != nil {
		return fmt.Errorf("wait for helper: %w", err)
	}
	if status != 0 {
		return fmt.Errorf("%w: helper ended with status %d", errNotReady, status.ExitStatus())
	}
	return nil
}

// connect opens the sentry's control socket. stop ends the connection; so does
// the end of ctx, and with it a call that is under way.
func (m *machine) connect(ctx context.Context) (_ *urpc.Client, stop func(), err error) {
	// By its directory's descriptor: a socket's path has at most 107 bytes.
	dir, err := os.Open(m.dir)
	if err != nil {
		return nil, nil, err
	}
	defer dir.Close()
	// Without O_NONBLOCK a sentry that hangs, its backlog full, would hang us.
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, err
	}
	path := filepath.Join(fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), "runsc-"+string(m.ID())+".sock")
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, nil, errors.Join(os.NewSyscallError("connect", err), unix.Close(fd))
	}
	sock, err := unet.NewSocket(fd)
	if err != nil {
		return nil, nil, errors.Join(err, unix.Close(fd))
	}
	client := urpc.NewClient(sock)
	unhook := context.AfterFunc(ctx, func() {
		_ = sock.Shutdown() // fails only if the peer is gone, which has the same effect
	})
	return client, func() {
		unhook()
		_ = client.Close() // nothing is buffered
	}, nil
}

// pipe returns a pipe whose ends take deadlines.
func pipe() (r, w *os.File, err error) {
	r, w, err = os.Pipe()
	if err != nil {
		return nil, nil, err
	}
	c, err := w.SyscallConn()
	if err != nil {
		return nil, nil, errors.Join(err, r.Close(), w.Close())
	}
	// The default of 64 KiB works too, only slower.
	_ = c.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, pipeSize) })
	return r, w, nil
}

// conn is a channel: one pipe in each direction.
type conn struct {
	r, w *os.File
	id   cloche.SessionID
}

// addr is the address of both ends of a channel.
type addr cloche.SessionID

func (a addr) Network() string { return "gvisor" }
func (a addr) String() string  { return string(a) }

func (c *conn) Read(p []byte) (int, error)  { return c.r.Read(p) }
func (c *conn) Write(p []byte) (int, error) { return c.w.Write(p) }
func (c *conn) Close() error                { return errors.Join(c.w.Close(), c.r.Close()) }
func (c *conn) LocalAddr() net.Addr         { return addr(c.id) }
func (c *conn) RemoteAddr() net.Addr        { return addr(c.id) }

func (c *conn) SetDeadline(t time.Time) error {
	return errors.Join(c.r.SetReadDeadline(t), c.w.SetWriteDeadline(t))
}
func (c *conn) SetReadDeadline(t time.Time) error  { return c.r.SetReadDeadline(t) }
func (c *conn) SetWriteDeadline(t time.Time) error { return c.w.SetWriteDeadline(t) }
