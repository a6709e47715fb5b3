package dial

import (
	"io"
	"sync"
)

const (
	surgeSmall = 4 << 10
	surgeBig   = 256 << 10
	surgeKeep  = surgeBig / 8 // a read that gives less ends the use of a big buffer
)

// surge reads ahead with a small buffer, and with a big one from a pool while
// data comes fast. Every read of an HTTP/2 body gives the agent credit, which
// costs it several system calls: 64 KiB at a time halves the speed. A big buffer
// for each silent command would cost the daemon its memory.
type surge struct {
	r    io.Reader
	pool *sync.Pool // of *[surgeBig]byte
	rest []byte     // read and not given yet, in one of the buffers
	last int        // length of the last read
	big  *[surgeBig]byte
	own  [surgeSmall]byte
}

// Read implements io.Reader.
func (s *surge) Read(p []byte) (int, error) {
	if len(s.rest) == 0 {
		if err := s.fill(); err != nil {
			return 0, err
		}
	}
	n := copy(p, s.rest)
	s.rest = s.rest[n:]
	return n, nil
}

func (s *surge) fill() error {
	switch {
	case s.big == nil && s.last == surgeSmall:
		var ok bool
		if s.big, ok = s.pool.Get().(*[surgeBig]byte); !ok {
			s.big = new([surgeBig]byte)
		}
	case s.big != nil && s.last < surgeKeep:
		s.release()
	}
	buf := s.own[:]
	if s.big != nil {
		buf = s.big[:]
	}
	n, err := s.r.Read(buf)
	s.rest, s.last = buf[:n], n
	if n > 0 {
		return nil // an error comes again
	}
	s.release()
	return err
}

// release gives the big buffer back. Nothing of it may be unread.
func (s *surge) release() {
	if s.big != nil {
		s.pool.Put(s.big)
		s.big = nil
	}
}
