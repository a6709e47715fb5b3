package vercel

import (
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"
)

// TestShutdownIsPrompt: clients that have connected and say nothing, or have
// said half of a request, do not hold up a shutdown; a request that runs is
// finished.
func TestShutdownIsPrompt(t *testing.T) {
	begun, finish := make(chan struct{}), make(chan struct{})
	srv := NewServer(t.Context(), http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		close(begun)
		<-finish
		io.WriteString(w, "whole")
	}), slog.New(slog.DiscardHandler))
	accepted := make(chan struct{}, 3)
	track := srv.ConnState
	srv.ConnState = func(c net.Conn, s http.ConnState) {
		track(c, s)
		if s == http.StateNew {
			accepted <- struct{}{}
		}
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(l) }()
	dial := func(send string) net.Conn {
		c, err := net.Dial("tcp", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if _, err := io.WriteString(c, send); err != nil {
			t.Fatal(err)
		}
		<-accepted
		return c
	}
	silent, half := dial(""), dial("GET / HTTP/1.1\r\nHo")
	busy := dial("GET / HTTP/1.1\r\nHost: x\r\n\r\n")
	<-begun

	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	start := time.Now()
	down := make(chan error, 1)
	go func() { down <- srv.Shutdown(ctx) }()
	for _, c := range []net.Conn{silent, half} {
		if _, err := io.ReadAll(c); err != nil && !strings.Contains(err.Error(), "reset") {
			t.Error(err)
		}
	}
	if took := time.Since(start); took < freshTime {
		t.Errorf("a client has %v for a request that it may have sent", took)
	}
	close(finish)
	if answer, err := io.ReadAll(busy); err != nil || !strings.HasSuffix(string(answer), "whole") {
		t.Errorf("%q, %v", answer, err)
	}
	if err := <-down; err != nil {
		t.Error(err)
	}
	// net/http alone waits for 5 s.
	if took := time.Since(start); took > 4*time.Second {
		t.Errorf("it took %v", took)
	}
	if err := <-served; err != http.ErrServerClosed {
		t.Error(err)
	}
}
