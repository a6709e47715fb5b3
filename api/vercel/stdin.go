package vercel

import (
	"bufio"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
)

// stdin is the rest of a request body after the line with the command. The
// Service reads it, from a goroutine of its own that may outlive the request.
type stdin struct {
	rc    *http.ResponseController
	gone  func(error) // called if the body breaks off
	mu    sync.Mutex  // held during a read of the body
	body  *bufio.Reader
	ended bool // guarded by mu
}

// openStdin reads the command from the first line of the body into v, and
// leaves the rest as standard input. From here on the answer and the body are
// open at the same time.
func (c *call) openStdin(v any, gone func(error)) (*stdin, error) {
	rc := http.NewResponseController(c.w)
	if err := rc.EnableFullDuplex(); err != nil {
		return nil, cloche.Errorf(cloche.CodeInvalid, "standard input needs HTTP/1.1")
	}
	c.w.Header().Set("Connection", "close") // the body may never come to its end
	_ = rc.SetReadDeadline(time.Now().Add(bodyTimeout))
	s := &stdin{rc: rc, gone: gone, body: bufio.NewReaderSize(c.r.Body, 64<<10)}
	line, err := readLine(s.body, maxCommandBody)
	if err != nil {
		return nil, err
	}
	_ = rc.SetReadDeadline(time.Time{}) // a person may type
	return s, unmarshal(line, v)
}

// readLine reads up to a newline, or the end.
func readLine(r *bufio.Reader, limit int) ([]byte, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case len(line) > limit:
			return nil, cloche.Errorf(cloche.CodeTooLarge, "the command is over %d bytes", limit)
		case err == nil || err == io.EOF:
			return line, nil
		case !errors.Is(err, bufio.ErrBufferFull):
			return nil, cloche.Errorf(cloche.CodeInvalid, "the request body broke off")
		}
	}
}

// Read implements io.Reader. After close it is at its end.
func (s *stdin) Read(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended {
		return 0, io.EOF
	}
	n, err := s.body.Read(b)
	if err != nil {
		s.ended = true
		if err != io.EOF {
			s.gone(errClientGone)
		}
	}
	return n, err
}

// drainTime bounds how long a client may go on sending after the end of its
// command.
const drainTime = 5 * time.Second

// close lets no Read touch the body again, and throws away what the client
// still sends: it goes on until it has read the command's end and closes the
// connection. Were that closed here on bytes that nobody has read, the kernel
// would reset it, and what the client has not read yet would be lost.
func (s *stdin) close() {
	_ = s.rc.SetReadDeadline(time.Now().Add(drainTime))
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	_, _ = io.Copy(io.Discard, s.body)
}
