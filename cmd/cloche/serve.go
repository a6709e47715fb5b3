package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"syscall"
	"time"

	"github.com/cloche-dev/cloche/api/vercel"
	"github.com/cloche-dev/cloche/cli"
	"github.com/cloche-dev/cloche/internal/cleanup"
	"github.com/cloche-dev/cloche/internal/trace"
)

// serveCmd is `cloche serve`. The flags that DESIGN fixes come first.
type serveCmd struct {
	Data   string `required:"" placeholder:"DIR" help:"Data directory; made if it does not exist."`
	Listen string `default:"127.0.0.1:4180" placeholder:"ADDR" help:"Address to listen on (default: 127.0.0.1:4180). Anything but loopback needs TLS in front."`
	Driver string `default:"auto" enum:"auto,gvisor,microvm" help:"What makes machines: auto or gvisor; microvm is not in this version."`
	Accel  string `default:"auto" enum:"auto,kvm,tcg" help:"Acceleration of the microvm driver: auto, kvm or tcg."`
	Config string `type:"path" placeholder:"FILE" help:"Configuration in TOML; flags go over it."`

	StopSandboxes bool   `help:"Stop all sandboxes when the server ends. By default they go on."`
	LogFormat     string `default:"text" enum:"text,json" help:"Form of the log on standard error: text or json."`
	LogLevel      string `default:"info" enum:"debug,info,warn,error" help:"Least severe level that is logged."`
}

// drain is what requests in flight get when the server ends. Streams that last
// longer are cut; their commands go on.
const drain = 10 * time.Second

// farewell is what they get after that to say so to their clients.
const farewell = time.Second

// Run serves until ctx ends.
func (c *serveCmd) Run(ctx context.Context, env *cli.Env) (err error) {
	log, err := newLogger(env.Stderr, c.LogFormat, c.LogLevel)
	if err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("the server makes mounts, namespaces and cgroups and has to run as root; try sudo")
	}
	if err := raiseDescriptors(); err != nil {
		log.Warn("the limit of open files stays as it was; many commands may reach it", "error", err)
	}
	conf, err := readConfig(c.Config)
	if err != nil {
		return err
	}
	dir, err := openDataDir(c.Data)
	if err != nil {
		return err
	}
	var undo cleanup.Stack
	defer func() { err = errors.Join(err, undo.Unwind(context.Background())) }()

	// Listening is last: start is recover, and nobody is answered before it.
	// The address is taken first, so that a second server fails at once.
	listener, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return fmt.Errorf("listen on %s: %w", c.Listen, err)
	}
	undo.Push("listener", func(context.Context) error { return ignoreClosed(listener.Close()) })
	if tcp, ok := listener.Addr().(*net.TCPAddr); ok && !tcp.IP.IsLoopback() {
		log.Warn("listening on an address that is not loopback: tokens travel in the clear unless TLS ends in front of it", "address", tcp.String())
	}
	s, err := openServer(ctx, c, conf, dir, log)
	if err != nil {
		return err
	}
	undo.Push("server", func(context.Context) error { return s.close() })
	return s.run(ctx, listener, env.Stdout, c.StopSandboxes)
}

// maxDescriptors is for thousands of sandboxes: each running command has its log
// open, and one tenant's must not leave none for the others. Machines inherit it:
// gVisor has every file and directory open that its guest uses.
const maxDescriptors = 1 << 20

// raiseDescriptors makes the limit of open files what it has to be, whatever the
// shell or the service manager gave. It takes CAP_SYS_RESOURCE, which root may lack
// in a container.
func raiseDescriptors() error {
	var have syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &have); err != nil || have.Max >= maxDescriptors {
		return err
	}
	return syscall.Setrlimit(syscall.RLIMIT_NOFILE, &syscall.Rlimit{Cur: maxDescriptors, Max: maxDescriptors})
}

func ignoreClosed(err error) error {
	if errors.Is(err, net.ErrClosed) {
		return nil
	}
	return err
}

// run answers requests until ctx ends, then finishes those in flight.
func (s *server) run(ctx context.Context, listener net.Listener, stdout io.Writer, stopSandboxes bool) error {
	admin, err := listenAdmin(s.base.dir)
	if err != nil {
		return err
	}
	// The context of requests ends after the drain, and with a cause that tells
	// a request cut by us from one whose client has gone.
	life, cut := context.WithCancelCause(context.WithoutCancel(ctx))
	defer cut(nil)
	servers := map[*http.Server]net.Listener{
		vercel.NewServer(life, s.routes(), s.log):             listener,
		vercel.NewServer(life, adminRoutes(s.local()), s.log): admin,
	}
	failed := make(chan error, len(servers))
	for srv, l := range servers {
		go func() { failed <- srv.Serve(l) }() // ends with Shutdown or Close below
	}
	if _, err := fmt.Fprintf(stdout, "ready http://%s\n", listener.Addr()); err != nil {
		return err
	}
	s.log.Info("serving", "address", listener.Addr().String(), "driver", s.driver.Name(), "version", version)

	var errs []error
	select {
	case <-ctx.Done():
		s.log.Info("stopping", "sandboxes", s.node.Running(), "stopSandboxes", stopSandboxes)
	case err := <-failed:
		errs = append(errs, fmt.Errorf("serve: %w", err))
	}
	bound, cancel := context.WithTimeout(context.WithoutCancel(ctx), drain)
	defer cancel()
	s.stopping.Store(true)
	for srv := range servers {
		err := srv.Shutdown(bound)
		if errors.Is(err, context.DeadlineExceeded) {
			cut(vercel.ErrShutdown)
			last, end := context.WithTimeout(context.WithoutCancel(ctx), farewell)
			err = srv.Shutdown(last)
			end()
			if errors.Is(err, context.DeadlineExceeded) {
				err = srv.Close()
			}
		}
		errs = append(errs, err)
	}
	if stopSandboxes {
		errs = append(errs, s.control.StopAll(context.WithoutCancel(ctx)))
	}
	return errors.Join(errs...)
}

// newLogger is the one logger of the process, with the request id in each line.
func newLogger(w io.Writer, format, level string) (*slog.Logger, error) {
	var l slog.Level
	if err := l.UnmarshalText([]byte(level)); err != nil {
		return nil, err
	}
	opts := &slog.HandlerOptions{Level: l}
	var h slog.Handler = slog.NewTextHandler(w, opts)
	if format == "json" {
		h = slog.NewJSONHandler(w, opts)
	}
	return slog.New(trace.Handler{Handler: h}), nil
}
