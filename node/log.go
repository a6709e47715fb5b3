package node

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// A command's log is one file on the host, DIR/SESSION/COMMAND:
//
//	status block   statusLen bytes, overwritten in place when the state changes
//	header         JSON of logHeader, its length in the status block
//	records        type (1 byte), length (4 bytes, big endian), payload
//
// The writer appends a record by one write(2), so that a process killed at any
// moment leaves whole records and at most one torn one at the end, which the
// next writer cuts off. The record counts as output received: the number of
// payload bytes of stdout and stderr is the offset at which a new process goes
// on with the agent. Bytes in the page cache survive the end of a process; a
// power cut ends the machine as well, and may take the last seconds of its logs.

// logState is what is known about the command.
type logState uint8

const (
	logStarting logState = iota // the agent has not said that it runs
	logRunning
	logExited
	logLost // the machine ended first
)

const (
	logMagic  = "clochel1"
	statusLen = 128
	recordLen = 5 // type and length

	recordStdout = 1
	recordStderr = 2
	recordNotice = 3

	// ackEvery bounds what an agent keeps of output that is already in a log.
	ackEvery = guest.Window / 4
)

// logStatus is the status block, as it is on disk, big endian.
type logStatus struct {
	Magic     [8]byte
	HeaderLen uint32
	State     logState
	Truncated bool // output beyond the bound was dropped
	Code      int32
	Signal    int32
	Cause     [16]byte
	StartedAt int64 // nanoseconds since 1970
	Duration  int64 // nanoseconds
}

// logHeader is the part of a command that does not change.
type logHeader struct {
	ID        cloche.CommandID `json:"id"`
	SessionID cloche.SessionID `json:"session"`
	Name      string           `json:"name"`
	Args      []string         `json:"args"`
	WorkDir   string           `json:"workDir"`
}

// commandLog is a log with a writer. One goroutine writes; any number read.
type commandLog struct {
	f      *os.File
	max    int64
	header logHeader

	mu      sync.Mutex
	status  logStatus
	command cloche.Command // what readers see
	size    int64          // of the file, whole records only
	offset  int64          // output bytes received, kept or dropped
	kept    int64          // output bytes in the file
	gaps    int            // notices of missing output that this process wrote
	changed chan struct{}  // closed and replaced at each change
	ended   bool           // no record will follow
	buf     []byte         // of recordLocked
}

func (n *Node) logPath(s cloche.SessionID, c cloche.CommandID) (string, error) {
	if !s.Valid() || !c.Valid() {
		return "", cloche.Errorf(cloche.CodeNotFound, "no command %s in session %s", c, s)
	}
	return filepath.Join(n.cfg.LogDir, string(s), string(c)), nil
}

// createLog makes the log of a command that is about to be started.
func (n *Node) createLog(h logHeader) (*commandLog, error) {
	path, err := n.logPath(h.SessionID, h.ID)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, logError(err)
	}
	head, err := json.Marshal(h)
	if err != nil {
		return nil, cloche.Internal("command log", err)
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, logError(err)
	}
	l := &commandLog{f: f, max: n.cfg.MaxLog, header: h, changed: make(chan struct{})}
	copy(l.status.Magic[:], logMagic)
	l.status.HeaderLen = uint32(len(head))
	l.size = statusLen + int64(len(head))
	if _, err := f.WriteAt(append(l.status.encode(), head...), 0); err != nil {
		return nil, errors.Join(logError(err), f.Close(), os.Remove(path))
	}
	l.command = l.status.command(h)
	return l, nil
}

// logError names the one fault of a log that a user can do something about.
func logError(err error) error {
	if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
		return &cloche.Error{Code: cloche.CodeExhausted, Op: "command log", Message: "the server's disk is full", Err: err}
	}
	return cloche.Internal("command log", err)
}

// discard removes a log whose command never started.
func (l *commandLog) discard() error {
	return errors.Join(os.Remove(l.f.Name()), l.f.Close())
}

func (s *logStatus) encode() []byte {
	b := bytes.NewBuffer(make([]byte, 0, statusLen))
	// All fields have a fixed size, so that this cannot fail.
	_ = binary.Write(b, binary.BigEndian, s)
	return append(b.Bytes(), make([]byte, statusLen-b.Len())...)
}

func (s *logStatus) command(h logHeader) cloche.Command {
	c := cloche.Command{
		ID: h.ID, SessionID: h.SessionID, Name: h.Name, Args: h.Args, WorkDir: h.WorkDir,
		StartedAt: time.Unix(0, s.StartedAt), Lost: s.State == logLost,
	}
	if s.State == logExited {
		c.Exit = &cloche.Exit{
			Code: int(s.Code), Signal: int(s.Signal),
			Cause:    cloche.ExitCause(bytes.TrimRight(s.Cause[:], "\x00")),
			Duration: time.Duration(s.Duration),
		}
	}
	return c
}

// readLogHead reads the status block and the header.
func readLogHead(f *os.File) (logStatus, logHeader, error) {
	var s logStatus
	var h logHeader
	block := make([]byte, statusLen)
	if _, err := f.ReadAt(block, 0); err != nil {
		return s, h, fmt.Errorf("status block: %w", err)
	}
	if err := binary.Read(bytes.NewReader(block), binary.BigEndian, &s); err != nil {
		return s, h, fmt.Errorf("status block: %w", err)
	}
	if string(s.Magic[:]) != logMagic || s.HeaderLen > guest.MaxStart {
		return s, h, errors.New("not a command log")
	}
	head := make([]byte, s.HeaderLen)
	if _, err := f.ReadAt(head, statusLen); err != nil {
		return s, h, fmt.Errorf("header: %w", err)
	}
	if err := json.Unmarshal(head, &h); err != nil {
		return s, h, fmt.Errorf("header: %w", err)
	}
	return s, h, nil
}

// openLogs opens the logs of a session's commands that have no end yet, ready
// to be written on.
func (n *Node) openLogs(id cloche.SessionID) ([]*commandLog, error) {
	entries, err := os.ReadDir(filepath.Join(n.cfg.LogDir, string(id)))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var open []*commandLog
	for _, e := range entries {
		path := filepath.Join(n.cfg.LogDir, string(id), e.Name())
		l, err := n.openLog(path)
		if err != nil {
			// Torn at its creation by a power cut: there is no command in it.
			n.log.Warn("removing an unreadable command log", "session", id, "command", e.Name(), "error", err)
			if err := os.Remove(path); err != nil {
				return open, err
			}
			continue
		}
		if l != nil {
			open = append(open, l)
		}
	}
	return open, nil
}

// openLog opens one log for writing on, or returns nil if it has its end.
func (n *Node) openLog(path string) (*commandLog, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	s, h, err := readLogHead(f)
	if err != nil || s.State == logExited || s.State == logLost {
		return nil, errors.Join(err, f.Close())
	}
	l := &commandLog{
		f: f, max: n.cfg.MaxLog, header: h, status: s, command: s.command(h),
		size: statusLen + int64(s.HeaderLen), changed: make(chan struct{}),
	}
	var r [recordLen]byte
	for {
		if _, err := f.ReadAt(r[:], l.size); err != nil {
			break
		}
		length := int64(binary.BigEndian.Uint32(r[1:]))
		if fi, err := f.Stat(); err != nil || l.size+recordLen+length > fi.Size() {
			break
		}
		l.size += recordLen + length
		if r[0] != recordNotice {
			l.kept += length
		}
	}
	l.offset = l.kept
	if err := f.Truncate(l.size); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return l, nil
}

// setStatus changes the status block, on disk first.
func (l *commandLog) setStatus(change func(*logStatus)) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := l.status
	change(&s)
	if _, err := l.f.WriteAt(s.encode(), 0); err != nil {
		return err
	}
	l.status = s
	l.command = s.command(l.header)
	l.ended = s.State == logExited || s.State == logLost
	l.wakeLocked()
	return nil
}

func (l *commandLog) wakeLocked() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// started records what the agent said. It is called before the first append.
func (l *commandLog) started(st guest.Started) error {
	if st.WorkDir != "" && st.WorkDir != l.header.WorkDir {
		if err := l.rewriteHeader(st.WorkDir); err != nil {
			return err
		}
	}
	return l.setStatus(func(s *logStatus) {
		s.State = logRunning
		s.StartedAt = st.StartedAt.UnixNano()
	})
}

// rewriteHeader puts the resolved working directory in; no record is there yet.
func (l *commandLog) rewriteHeader(dir string) error {
	l.header.WorkDir = dir
	head, err := json.Marshal(l.header)
	if err != nil {
		return err
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status.HeaderLen = uint32(len(head))
	l.size = statusLen + int64(len(head))
	_, err = l.f.WriteAt(append(l.status.encode(), head...), 0)
	return err
}

// append adds output. Beyond the bound it is counted and dropped, and the log
// says so once.
func (l *commandLog) append(e cloche.LogEntry) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.offset += int64(len(e.Data))
	data := e.Data
	if room := l.max - l.kept; int64(len(data)) > room {
		data = data[:max(room, 0)]
	}
	err := l.recordLocked(e.Stream, data)
	if err == nil {
		l.kept += int64(len(data))
		if len(data) == len(e.Data) {
			return nil
		}
	} else if !errors.Is(err, syscall.ENOSPC) {
		return err
	}
	return l.truncateLocked(err)
}

// truncateLocked marks that output was dropped, because of the bound or, with a
// cause, because the host's disk is full. The command goes on either way.
func (l *commandLog) truncateLocked(cause error) error {
	if l.status.Truncated {
		return nil
	}
	l.status.Truncated = true
	l.max = l.kept
	if _, err := l.f.WriteAt(l.status.encode(), 0); err != nil {
		return err
	}
	why := fmt.Sprintf("the log has reached its bound of %d bytes", l.max)
	if cause != nil {
		why = "the server's disk is full"
	}
	err := l.recordLocked(cloche.StreamNotice, fmt.Appendf(nil, "\n[cloche: %s; later output is not kept]\n", why))
	if errors.Is(err, syscall.ENOSPC) {
		return nil // the status block says it
	}
	return err
}

func (l *commandLog) recordLocked(stream cloche.Stream, data []byte) error {
	if len(data) == 0 {
		return nil
	}
	kind := byte(recordStdout)
	switch stream {
	case cloche.Stderr:
		kind = recordStderr
	case cloche.StreamNotice:
		kind = recordNotice
	}
	l.buf = binary.BigEndian.AppendUint32(append(l.buf[:0], kind), uint32(len(data)))
	l.buf = append(l.buf, data...)
	if _, err := l.f.WriteAt(l.buf, l.size); err != nil {
		return err
	}
	l.size += recordLen + int64(len(data))
	l.wakeLocked()
	return nil
}

// exit records the end that the kernel gave.
func (l *commandLog) exit(e cloche.Exit) error {
	return l.setStatus(func(s *logStatus) {
		s.State, s.Code, s.Signal = logExited, int32(e.Code), int32(e.Signal)
		copy(s.Cause[:], e.Cause)
		s.Duration = int64(e.Duration)
	})
}

// lose records that nobody saw how the command ended, and closes the log.
func (l *commandLog) lose() error {
	return errors.Join(l.setStatus(func(s *logStatus) { s.State = logLost }), l.f.Close())
}

// snapshot returns the command as it is now and a channel that is closed when
// something changes.
func (l *commandLog) snapshot() (cloche.Command, bool, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.command, l.ended, l.changed
}

// starting reports that the agent has not said yet that the command runs: until
// then it cannot be seen, because its header may still change.
func (l *commandLog) starting() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status.State == logStarting
}

// loseCommands marks every command of an ended session that has no end as lost.
func (n *Node) loseCommands(id cloche.SessionID) error {
	open, err := n.openLogs(id)
	for _, l := range open {
		err = errors.Join(err, l.lose())
	}
	return err
}

// logReader reads a log file from its start. live is nil for a log that has its
// end on disk.
type logReader struct {
	f    *os.File
	live *commandLog
	pos  int64
	cut  int64 // where the log ends for this reader; 0 = with the command
	buf  []byte
}

// Cut implements cloche.LogReader.
func (r *logReader) Cut() {
	if r.live == nil || r.cut != 0 {
		return
	}
	r.live.mu.Lock()
	defer r.live.mu.Unlock()
	if !r.live.ended {
		r.cut = r.live.size
	}
}

// Next implements cloche.LogReader.
func (r *logReader) Next(ctx context.Context) (cloche.LogEntry, error) {
	for {
		if r.cut != 0 && r.pos >= r.cut {
			return cloche.LogEntry{}, io.EOF
		}
		// The state is read before the file: what it calls ended is all there.
		var size int64
		ended, lost := true, false
		var changed <-chan struct{}
		if r.live != nil {
			r.live.mu.Lock()
			size, ended, changed = r.live.size, r.live.ended, r.live.changed
			lost = r.live.status.State == logLost
			r.live.mu.Unlock()
		} else {
			fi, err := r.f.Stat()
			if err != nil {
				return cloche.LogEntry{}, cloche.Internal("command log", err)
			}
			size = fi.Size()
			s, _, err := readLogHead(r.f)
			if err != nil {
				return cloche.LogEntry{}, cloche.Internal("command log", err)
			}
			lost = s.State == logLost
		}
		if r.pos+recordLen <= size {
			if e, err := r.record(size); err != io.ErrUnexpectedEOF {
				return e, err
			}
		}
		if ended {
			if lost {
				return cloche.LogEntry{}, cloche.Errorf(cloche.CodeGone, "the session ended before the command did")
			}
			return cloche.LogEntry{}, io.EOF
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return cloche.LogEntry{}, ctx.Err()
		}
	}
}

// record reads the record at pos; io.ErrUnexpectedEOF is a torn one.
func (r *logReader) record(size int64) (cloche.LogEntry, error) {
	var h [recordLen]byte
	if _, err := r.f.ReadAt(h[:], r.pos); err != nil {
		return cloche.LogEntry{}, cloche.Internal("command log", err)
	}
	n := int64(binary.BigEndian.Uint32(h[1:]))
	if r.pos+recordLen+n > size {
		return cloche.LogEntry{}, io.ErrUnexpectedEOF
	}
	if int64(cap(r.buf)) < n {
		r.buf = make([]byte, max(n, guest.MaxFrame))
	}
	r.buf = r.buf[:n]
	if _, err := r.f.ReadAt(r.buf, r.pos+recordLen); err != nil {
		return cloche.LogEntry{}, cloche.Internal("command log", err)
	}
	r.pos += recordLen + n
	stream := cloche.Stdout
	switch h[0] {
	case recordStderr:
		stream = cloche.Stderr
	case recordNotice:
		stream = cloche.StreamNotice
	}
	return cloche.LogEntry{Stream: stream, Data: r.buf}, nil
}

// Close implements cloche.LogReader.
func (r *logReader) Close() error { return r.f.Close() }
