package cli

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/cloche-dev/cloche"
)

// killTime is how long the delivery of one signal may take.
const killTime = 10 * time.Second

// errGivenUp is the end of a wait that another signal cut short.
var errGivenUp = errors.New("interrupted")

// signals catches what would end this process, so that it can be passed on and
// what was made can be removed. SIGPIPE is caught so that a closed standard
// output is an error of a write, not the end.
type signals struct {
	c    chan os.Signal
	pipe chan os.Signal
}

// catchSignals begins to catch; Close ends it.
func catchSignals() *signals {
	// Three are enough: the third one gives up.
	s := &signals{c: make(chan os.Signal, 3), pipe: make(chan os.Signal, 1)}
	for _, sig := range []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT} {
		if !signal.Ignored(sig) { // by nohup, or a shell that put us into the background
			signal.Notify(s.c, sig)
		}
	}
	signal.Notify(s.pipe, syscall.SIGPIPE)
	return s
}

// Close gives the signals their usual effect back.
func (s *signals) Close() {
	signal.Stop(s.c)
	signal.Stop(s.pipe)
}

// give returns a context that ends when a second signal comes. The first one
// stays for interrupted to find. The cancel that it returns must be called, and
// waits.
func (s *signals) give(ctx context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		select {
		case first := <-s.c:
			select {
			case <-s.c:
				cancel(errGivenUp)
			case <-ctx.Done():
				s.c <- first
			}
		case <-ctx.Done():
		}
	}()
	return ctx, func() {
		cancel(nil)
		<-done
	}
}

// interrupted says whether a signal came, as the exit code that a shell gives
// to a process which it ended.
func interrupted(s *signals) error {
	select {
	case sig := <-s.c:
		return &ExitError{Code: 128 + int(sig.(syscall.Signal))}
	default:
		return nil
	}
}

// forward passes signals on until ctx ends: the first as it is, the second as
// SIGKILL; the third calls giveUp. One that comes before the command has started
// waits for that. The function that it returns waits for the end, and gives the
// error of the last delivery.
func (s *signals) forward(ctx context.Context, giveUp func(error), started <-chan cloche.CommandID,
	kill func(context.Context, cloche.CommandID, int) error) (wait func() error) {
	done := make(chan error, 1)
	go func() { done <- s.deliver(ctx, giveUp, started, kill) }()
	return func() error { return <-done }
}

func (s *signals) deliver(ctx context.Context, giveUp func(error), started <-chan cloche.CommandID,
	kill func(context.Context, cloche.CommandID, int) error) error {
	var id cloche.CommandID
	var pending, count int
	var last error
	for {
		select {
		case <-ctx.Done():
			return last
		case id = <-started:
		case sig := <-s.c:
			count++
			switch count {
			case 1:
				pending = int(sig.(syscall.Signal))
			case 2:
				pending = int(syscall.SIGKILL)
			default:
				giveUp(errGivenUp)
				return last
			}
		}
		if id == "" || pending == 0 {
			continue
		}
		killCtx, cancel := context.WithTimeout(ctx, killTime)
		last = kill(killCtx, id, pending)
		cancel()
		pending = 0
	}
}

// isPipe reports whether a write failed because nobody reads any more.
func isPipe(err error) bool { return errors.Is(err, syscall.EPIPE) }
