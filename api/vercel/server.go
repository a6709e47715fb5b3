package vercel

import (
	"context"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// NewServer returns an HTTP server for h with the time limits that the API
// needs: none on a whole request or answer, because files and streams are as
// long as they are (the handlers bound what they read), and connections that
// stay open for longer than clients believe (4 s), so that none is closed just
// when a command is sent on it. ctx is the parent of every request's context;
// see ErrShutdown. Its Shutdown does not wait for clients that have connected and
// send nothing.
func NewServer(ctx context.Context, h http.Handler, log *slog.Logger) *http.Server {
	fresh := &fresh{conns: map[net.Conn]bool{}}
	srv := &http.Server{
		Handler:           h,
		BaseContext:       func(net.Listener) context.Context { return ctx },
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       90 * time.Second,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
		ConnState:         fresh.track,
	}
	srv.RegisterOnShutdown(fresh.shutdown)
	return srv
}

// fresh holds the connections on which no request has come. Clients open some
// ahead of need, and net/http's Shutdown waits for each until it is 5 s old (Go
// 1.26, closeIdleConns), in case a request is on its way.
type fresh struct {
	mu     sync.Mutex
	conns  map[net.Conn]bool
	closed bool // whoever comes now is too late
}

// freshTime is from the begin of a shutdown to the end of fresh connections: a
// request that had been sent before has been read by then.
const freshTime = 100 * time.Millisecond

// track is an http.Server's ConnState.
func (f *fresh) track(c net.Conn, state http.ConnState) {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case state != http.StateNew:
		delete(f.conns, c)
	case f.closed:
		_ = c.Close() // nothing was read from it or written to it
	default:
		f.conns[c] = true
	}
}

// shutdown runs when a shutdown begins, in a goroutine of its own.
func (f *fresh) shutdown() {
	time.AfterFunc(freshTime, func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.closed = true
		for c := range f.conns {
			_ = c.Close() // as above
		}
	})
}
