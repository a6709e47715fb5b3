package main

import (
	"context"
	"embed"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync/atomic"
	"syscall"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/api/vercel"
	"github.com/cloche-dev/cloche/control"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/driver/gvisor"
	"github.com/cloche-dev/cloche/guest/dial"
	"github.com/cloche-dev/cloche/internal/cleanup"
	"github.com/cloche-dev/cloche/layer"
	"github.com/cloche-dev/cloche/node"
)

// agentFiles holds the agent, which `make build` builds first. A build without
// it works for everything but serving.
//
//go:embed all:agent
var agentFiles embed.FS

func agentBinary() ([]byte, error) {
	b, err := agentFiles.ReadFile("agent/cloche-agent")
	if err != nil {
		return nil, errors.New("this binary was built without the agent: build it with `make build`")
	}
	return b, nil
}

// server is everything that `cloche serve` holds, top to bottom.
type server struct {
	log      *slog.Logger
	base     *base
	driver   driver.Driver
	node     *node.Node
	control  *control.Control
	metrics  *metrics
	close    func() error
	stopping atomic.Bool // healthz says so
}

// openServer opens the data directory, adopts what an earlier process left
// running, and is ready to answer.
func openServer(ctx context.Context, c *serveCmd, conf config, dir dataDir, log *slog.Logger) (_ *server, err error) {
	var undo cleanup.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, undo.Unwind(ctx))
		}
	}()
	b, err := openBase(ctx, dir, log)
	if errors.Is(err, errLocked) {
		return nil, fmt.Errorf("%w: %s", err, c.Data)
	}
	if err != nil {
		return nil, err
	}
	undo.Push("data directory", func(context.Context) error { return b.close() })
	if err := b.images.Recover(ctx); err != nil {
		return nil, fmt.Errorf("images: %w", err)
	}
	d, err := openDriver(ctx, c, dir, log)
	if err != nil {
		return nil, err
	}
	undo.Push("driver", func(context.Context) error { return d.Close() })
	tops, err := layer.Open(dir.path("pool"), log)
	if err != nil {
		return nil, err
	}
	undo.Push("layer pool", func(context.Context) error { return tops.Close() })

	s := &server{log: log, base: b, driver: d}
	s.node = node.New(node.Config{
		Driver: d, Images: imageSource{b}, Tops: tops,
		Dial: func(open func(context.Context) (net.Conn, error), token string) node.Guest {
			return guestChannel{dial.New(open, token, log)}
		},
		LogDir: dir.path("logs"), RunDir: dir.path("run", "sessions"),
		MaxLog: conf.MaxLogBytes, PIDs: conf.MaxPIDs, Log: log,
		// Control is made after the node, because it needs it.
		Ended: func(ctx context.Context, e cloche.SessionEnd) { s.control.Ended(ctx, e) },
	})
	undo.Push("node", func(context.Context) error { return s.node.Close() })
	s.control = control.New(b.store, s.node, b.images, conf.control(dir, d, log))
	undo.Push("control", func(ctx context.Context) error { s.control.Close(ctx); return nil })
	if err := s.control.Recover(ctx); err != nil {
		return nil, fmt.Errorf("recover: %w", err)
	}
	s.metrics = newMetrics(s)
	steps := undo
	s.close = func() error { return steps.Unwind(context.Background()) }
	undo.Release()
	return s, nil
}

// openDriver picks the driver. auto is gVisor until a probe has seen a microVM
// work on this host.
func openDriver(ctx context.Context, c *serveCmd, dir dataDir, log *slog.Logger) (driver.Driver, error) {
	if c.Driver == "microvm" {
		return nil, cloche.Errorf(cloche.CodeNotImplemented, "this version has no microvm driver; use --driver gvisor")
	}
	agent, err := agentBinary()
	if err != nil {
		return nil, err
	}
	switch err := gvisor.Probe(ctx, string(dir), ""); {
	case errors.Is(err, syscall.ENOSPC):
		// What runs has to be taken over, and stopped, all the more.
		log.WarnContext(ctx, "the disk is full, so that the host was not probed", "error", err)
	case err != nil:
		return nil, fmt.Errorf("this host cannot run gVisor machines (`cloche doctor` says more): %w", err)
	}
	return gvisor.New(gvisor.Config{Dir: dir.path("run", "gvisor"), Agent: agent, Log: log})
}

// local is the admin of a running server.
func (s *server) local() admin { return &localAdmin{s.base} }

// routes is what the server answers.
func (s *server) routes() http.Handler {
	api := vercel.New(vercel.Config{
		Service: s.control, Authenticator: s.base.auth, Log: s.log, Observe: s.metrics.observe,
	})
	metrics := promhttp.HandlerFor(s.metrics.registry, promhttp.HandlerOpts{})
	// No ServeMux: it would redirect a path with dots or double slashes before
	// the API has seen a token.
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		read := r.Method == http.MethodGet || r.Method == http.MethodHead
		switch {
		case read && r.URL.Path == "/metrics":
			metrics.ServeHTTP(w, r)
		case read && r.URL.Path == "/healthz":
			s.healthz(w, r)
		default:
			api.ServeHTTP(w, r)
		}
	})
}

// healthz answers 200 while requests are accepted, 503 while the server ends.
func (s *server) healthz(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	if s.stopping.Load() {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	fmt.Fprintf(w, "{\"ok\":%t,\"version\":%q,\"driver\":%q,\"sessions\":%d}\n",
		!s.stopping.Load(), version, s.driver.Name(), s.node.Running())
}

// imageSource gives the node what it wants to know of an image.
type imageSource struct{ b *base }

func (i imageSource) Tree(ctx context.Context, id cloche.ImageID) (string, error) {
	return i.b.images.Tree(ctx, id)
}

func (i imageSource) Config(ctx context.Context, id cloche.ImageID) (cloche.ImageConfig, error) {
	list, err := i.b.images.List(ctx)
	if err != nil {
		return cloche.ImageConfig{}, err
	}
	for _, img := range list {
		if img.ID == id {
			return img.Config, nil
		}
	}
	return cloche.ImageConfig{}, cloche.Errorf(cloche.CodeNotFound, "the image of this sandbox is not on this server any more")
}
