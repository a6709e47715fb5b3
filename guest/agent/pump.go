package agent

import (
	"errors"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche/guest"
)

const (
	// maxTail bounds what is read of one pipe after the command has ended: a
	// child that it left behind may write for ever. It is what a pipe holds.
	maxTail = pipeSize

	// hungUp is how often a PTY that nobody has open is looked at.
	hungUp = 20 * time.Millisecond

	// maxLeft bounds the pipes that ended commands' children hold open.
	maxLeft = 1024
)

// buffers are the pumps', held only from the moment when there is something to
// read: a thousand silent commands cost none. The zero value is ready.
type buffers struct{ pool sync.Pool }

func (b *buffers) get() *[maxRead]byte {
	if p, ok := b.pool.Get().(*[maxRead]byte); ok {
		return p
	}
	return new([maxRead]byte)
}

func (b *buffers) put(p *[maxRead]byte) { b.pool.Put(p) }

// pump reads f into out until EOF. Once ended is closed, and a deadline on f
// wakes it, it reads what is there then, calls done, and drops the rest until
// EOF, so that children left behind neither block nor die of SIGPIPE.
//
// A PTY has no EOF while the command runs: one that closed its descriptors may
// open the terminal again, and to close the master would send it SIGHUP.
func (a *Agent) pump(f *os.File, stream guest.FrameType, out *output, tty bool, ended <-chan struct{}, done func()) {
	finished := false
	finish := func() {
		if !finished {
			finished = true
			done()
		}
	}
	defer finish()
	defer func() { _ = f.Close() }() // a pipe's reading end
	rc, err := f.SyscallConn()
	if err != nil {
		return
	}
	for {
		err := waitReadable(rc)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
		if err == nil && a.move(rc, stream, out) {
			continue
		}
		if err != nil || !tty {
			return
		}
		select {
		case <-ended:
		case <-time.After(hungUp):
		}
	}
	for tail := waiting(rc); tail > 0; {
		n, again := a.moveNow(rc, stream, out)
		if n == 0 && !again {
			return
		}
		if n == 0 {
			break
		}
		tail -= n
	}
	finish()
	if err := f.SetReadDeadline(time.Time{}); err != nil {
		return
	}
	a.left.add(f)
	defer a.left.remove(f)
	for waitReadable(rc) == nil {
		buf := a.buffers.get()
		n, again := readNow(rc, buf[:])
		a.buffers.put(buf)
		if n == 0 && !again {
			return
		}
	}
}

// waiting is how much there is to read now, at most maxTail. Only pipes can say;
// the most is assumed for a PTY, whose reads stop by themselves.
func waiting(rc syscall.RawConn) int {
	n := maxTail
	err := rc.Control(func(fd uintptr) {
		var st unix.Stat_t
		if unix.Fstat(int(fd), &st) != nil || st.Mode&unix.S_IFMT != unix.S_IFIFO {
			return
		}
		if have, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ); err == nil { // FIONREAD is the same number
			n = min(have, maxTail)
		}
	})
	if err != nil {
		return 0
	}
	return n
}

// move reads once, waiting for room; false means that no more will come.
func (a *Agent) move(rc syscall.RawConn, stream guest.FrameType, out *output) bool {
	n, again := a.moveNow(rc, stream, out)
	return n > 0 || again
}

// moveNow is move, with the results of readNow. Output that was dropped is read
// and not kept.
func (a *Agent) moveNow(rc syscall.RawConn, stream guest.FrameType, out *output) (int, bool) {
	room := out.reserve()
	buf := a.buffers.get()
	defer a.buffers.put(buf)
	if room == 0 {
		return readNow(rc, buf[:])
	}
	n, again := readNow(rc, buf[:room])
	out.commit(stream, buf[:n], room)
	return n, again
}

// waitReadable waits until a read of rc would not block, or its deadline.
func waitReadable(rc syscall.RawConn) error {
	return rc.Read(func(fd uintptr) bool {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(p, 0)
		return n != 0 || err != nil && err != unix.EINTR
	})
}

// readNow reads once without waiting. again is true if there was nothing to read
// yet; (0, false) is the end. A PTY whose other side has closed gives EIO, which
// is an end like any other.
func readNow(rc syscall.RawConn, p []byte) (n int, again bool) {
	cerr := rc.Control(func(fd uintptr) {
		for {
			var err error
			n, err = unix.Read(int(fd), p)
			if err == unix.EINTR {
				continue
			}
			again = err == unix.EAGAIN
			return
		}
	})
	if n < 0 || cerr != nil {
		n = 0
	}
	return n, again && cerr == nil
}

// leftovers are the pipes that children of ended commands hold open, oldest
// first. Past maxLeft the oldest is closed: they cost a descriptor each.
type leftovers struct {
	mu    sync.Mutex
	files []*os.File
}

func (l *leftovers) add(f *os.File) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.files = append(l.files, f)
	if len(l.files) > maxLeft {
		_ = l.files[0].Close() // its pump sees that
		l.files = l.files[1:]
	}
}

func (l *leftovers) remove(f *os.File) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for i, have := range l.files {
		if have == f {
			l.files = append(l.files[:i], l.files[i+1:]...)
			return
		}
	}
}
