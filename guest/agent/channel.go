package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Transport gives the channels that the host opens, before any handshake. It
// has the methods of a net.Listener; Accept fails for good after Close.
type Transport interface {
	Accept() (net.Conn, error)
	Close() error
}

// address is where Hand meets process 1: an abstract name, which nobody can
// unlink or shadow by a mount, and which the agent takes before any other
// process of the machine exists.
const address = "@cloche/agent"

const (
	handTimeout = 5 * time.Second // for the helper and the agent to meet
	handing     = 8               // hand-overs at the same time; one more ends the oldest
	handed      = 1               // byte that goes both ways with the hand-over
)

// Hand gives in and out, two ends of host pipes, to process 1 as a new channel:
// the agent will read from in and write to out. It returns once the agent has
// them.
func Hand(in, out *os.File) error {
	d := net.Dialer{Timeout: handTimeout}
	conn, err := d.Dial("unix", address)
	if err != nil {
		return fmt.Errorf("reach the agent: %w", err)
	}
	c := conn.(*net.UnixConn)
	defer func() { _ = c.Close() }() // nothing is buffered in it
	if err := c.SetDeadline(time.Now().Add(handTimeout)); err != nil {
		return fmt.Errorf("hand over: %w", err)
	}
	rights := unix.UnixRights(int(in.Fd()), int(out.Fd()))
	if _, _, err := c.WriteMsgUnix([]byte{handed}, rights, nil); err != nil {
		return fmt.Errorf("hand over: %w", err)
	}
	var b [1]byte
	if _, err := io.ReadFull(c, b[:]); err != nil {
		return fmt.Errorf("hand over: the agent refused: %w", err)
	}
	return nil
}

// Socket is the Transport whose channels come through Hand.
type Socket struct {
	noise noise
	l     *net.UnixListener
	out   chan net.Conn
	quit  context.Context
	stop  context.CancelFunc
	wg    sync.WaitGroup
	now   crowd // hand-overs in progress
}

// ListenSocket takes the agent's address.
func ListenSocket(log *slog.Logger) (*Socket, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: address, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("listen for channels: %w", err)
	}
	s := &Socket{noise: noise{log: log}, l: l, out: make(chan net.Conn), now: crowd{limit: handing}}
	s.quit, s.stop = context.WithCancel(context.Background())
	s.wg.Go(s.run)
	return s, nil
}

// Accept returns the next channel that was handed over.
func (s *Socket) Accept() (net.Conn, error) {
	select {
	case c := <-s.out:
		return c, nil
	case <-s.quit.Done():
		return nil, net.ErrClosed
	}
}

// Close stops listening and waits for the hand-overs in progress to end.
func (s *Socket) Close() error {
	s.stop()
	err := s.l.Close()
	s.now.closeAll()
	s.wg.Wait()
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

func (s *Socket) run() {
	for {
		c, err := s.l.AcceptUnix()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // no descriptors left, or the peer has gone
			s.noise.warn("accept channel", "error", err)
			pause(s.quit, 50*time.Millisecond)
			continue
		}
		if uid, err := peerUID(c); err != nil || uid != 0 {
			s.noise.warn("channel refused", "uid", uid, "error", err)
			_ = c.Close() // refused: the peer sees it closed
			continue
		}
		if s.now.enter(c) {
			s.noise.warn("too many hand-overs: the oldest ends")
		}
		s.wg.Go(func() {
			defer s.now.leave(c)
			if err := s.take(c); err != nil {
				s.noise.warn("channel hand-over", "error", err)
			}
		})
	}
}

// crowd bounds how many connections are at one stage. A newcomer always gets in:
// what nobody ends would otherwise keep the host out.
type crowd struct {
	limit int
	mu    sync.Mutex
	conns []net.Conn // oldest first
}

// enter adds c and closes the oldest if there are too many; then it is true.
func (l *crowd) enter(c net.Conn) bool {
	l.mu.Lock()
	l.conns = append(l.conns, c)
	var oldest net.Conn
	if len(l.conns) > l.limit {
		oldest, l.conns = l.conns[0], l.conns[1:]
	}
	l.mu.Unlock()
	if oldest == nil {
		return false
	}
	_ = oldest.Close() // whoever reads it sees that
	return true
}

func (l *crowd) leave(c net.Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, have := range l.conns {
		if have == c {
			l.conns = append(l.conns[:i:i], l.conns[i+1:]...)
			return
		}
	}
}

func (l *crowd) closeAll() {
	l.mu.Lock()
	all := append([]net.Conn(nil), l.conns...)
	l.mu.Unlock()
	for _, c := range all {
		_ = c.Close() // the agent ends; whoever reads it sees that
	}
}

// take receives the two descriptors of one hand-over and passes them on.
func (s *Socket) take(c *net.UnixConn) (err error) {
	defer func() { err = errors.Join(err, c.Close()) }()
	if err := c.SetDeadline(time.Now().Add(handTimeout)); err != nil {
		return err
	}
	fds, err := receive(c)
	if err != nil {
		return err
	}
	conn, err := newPipeConn(fds)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(s.quit, handTimeout)
	defer cancel()
	select {
	case s.out <- conn:
	case <-ctx.Done():
		return errors.Join(errors.New("nobody takes the channel"), conn.Close())
	}
	_, err = c.Write([]byte{handed})
	return err
}

func peerUID(c *net.UnixConn) (uid uint32, err error) {
	rc, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	cerr := rc.Control(func(fd uintptr) {
		var cred *unix.Ucred
		if cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil {
			uid = cred.Uid
		}
	})
	return uid, errors.Join(err, cerr)
}

// receive reads one message and returns its two descriptors. It closes all that
// it got if they are not two.
func receive(c *net.UnixConn) ([]int, error) {
	var b [1]byte
	oob := make([]byte, unix.CmsgSpace(2*4))
	n, oobn, flags, _, err := c.ReadMsgUnix(b[:], oob)
	if err != nil {
		return nil, err
	}
	var fds []int
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	for _, m := range msgs {
		rights, rerr := unix.ParseUnixRights(&m)
		err = errors.Join(err, rerr)
		fds = append(fds, rights...)
	}
	if err == nil && (n != 1 || len(fds) != 2 || flags&unix.MSG_CTRUNC != 0) {
		err = fmt.Errorf("a message of %d bytes with %d descriptors", n, len(fds))
	}
	if err != nil {
		closeAll(fds)
		return nil, err
	}
	return fds, nil
}

func closeAll(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd) // received a moment ago, nothing written to it
	}
}

// noise logs what root in the machine can cause at will, and no more than
// noiseBurst lines of it in noiseTime: the log is on the host.
type noise struct {
	log *slog.Logger

	mu    sync.Mutex
	since time.Time
	lines int
}

const (
	noiseBurst = 10
	noiseTime  = time.Minute
)

func (n *noise) warn(msg string, args ...any) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if now := time.Now(); now.Sub(n.since) > noiseTime {
		n.since, n.lines = now, 0
	}
	if n.lines++; n.lines <= noiseBurst {
		n.log.Warn(msg, args...)
	}
}

// pipeConn is a net.Conn over two one-way descriptors.
type pipeConn struct {
	r, w *os.File
}

// newPipeConn owns fds, also if it fails. It takes only pipes and sockets: what
// else root in the machine may hand over could block for ever.
func newPipeConn(fds []int) (net.Conn, error) {
	for _, fd := range fds {
		var st unix.Stat_t
		err := unix.Fstat(fd, &st)
		if err == nil && st.Mode&unix.S_IFMT != unix.S_IFIFO && st.Mode&unix.S_IFMT != unix.S_IFSOCK {
			err = errors.New("neither a pipe nor a socket")
		}
		if err == nil {
			err = unix.SetNonblock(fd, true)
		}
		if err != nil {
			closeAll(fds)
			return nil, fmt.Errorf("channel descriptor: %w", err)
		}
		unix.CloseOnExec(fd)
	}
	return &pipeConn{os.NewFile(uintptr(fds[0]), "channel"), os.NewFile(uintptr(fds[1]), "channel")}, nil
}

func (c *pipeConn) Read(p []byte) (int, error)  { return c.r.Read(p) }
func (c *pipeConn) Write(p []byte) (int, error) { return c.w.Write(p) }

func (c *pipeConn) Close() error {
	err := errors.Join(c.r.Close(), c.w.Close())
	if errors.Is(err, os.ErrClosed) {
		return nil
	}
	return err
}

func (c *pipeConn) LocalAddr() net.Addr  { return pipeAddr{} }
func (c *pipeConn) RemoteAddr() net.Addr { return pipeAddr{} }

func (c *pipeConn) SetDeadline(t time.Time) error {
	return errors.Join(c.r.SetReadDeadline(t), c.w.SetWriteDeadline(t))
}
func (c *pipeConn) SetReadDeadline(t time.Time) error  { return c.r.SetReadDeadline(t) }
func (c *pipeConn) SetWriteDeadline(t time.Time) error { return c.w.SetWriteDeadline(t) }

type pipeAddr struct{}

func (pipeAddr) Network() string { return "pipe" }
func (pipeAddr) String() string  { return "host" }

// pause waits for d or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
