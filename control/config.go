package control

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloche-dev/cloche"
)

// Config holds an operator's limits. Zero fields take the defaults.
type Config struct {
	// MaxTimeout is the longest total lifetime of a session; 0 = cloche.MaxTimeout.
	MaxTimeout time.Duration

	// MaxVCPUs is the most that one sandbox may have; 0 = cloche.MaxVCPUs.
	MaxVCPUs int

	// MaxSessions is the number of sessions that may be live at once; 0 = 1000.
	MaxSessions int

	// Disk tells the free and the total bytes of where sessions write; nil =
	// the disk is not watched. No session starts below MinFreeBytes (0 = 1 GiB)
	// or below MinFreePercent of the total (0 = no such bound).
	Disk           func() (free, total int64, err error)
	MinFreeBytes   int64
	MinFreePercent int

	// StartTimeout bounds the making of a machine; 0 = 1 minute.
	StartTimeout time.Duration

	// StopGrace is between SIGTERM and SIGKILL when a session stops; 0 = 5 s.
	StopGrace time.Duration

	Log *slog.Logger // nil = slog.Default()
}

// stopWait bounds how long a caller waits for a session to end. The client's
// own bound is 300 s without headers (@vercel/sandbox 3.5.0, undici).
const stopWait = 2 * time.Minute

func (cfg Config) withDefaults() Config {
	cfg.MaxTimeout = orDefault(cfg.MaxTimeout, cloche.MaxTimeout)
	cfg.MaxVCPUs = orDefault(cfg.MaxVCPUs, cloche.MaxVCPUs)
	cfg.MaxSessions = orDefault(cfg.MaxSessions, 1000)
	cfg.MinFreeBytes = orDefault(cfg.MinFreeBytes, 1<<30)
	cfg.StartTimeout = orDefault(cfg.StartTimeout, time.Minute)
	cfg.StopGrace = orDefault(cfg.StopGrace, 5*time.Second)
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	return cfg
}

func orDefault[T int | int64 | time.Duration](v, d T) T {
	if v == 0 {
		return d
	}
	return v
}

// Control is the engine that turns requests into sessions. All methods may be
// called concurrently, after Recover has returned.
type Control struct {
	store  Store
	node   Node
	images Images
	cfg    Config
	log    *slog.Logger

	// ctx is the life of what must go on without its caller. It ends when
	// Close stops waiting for that.
	ctx     context.Context
	cancel  context.CancelFunc
	closing chan struct{} // closed when Close begins
	work    sync.WaitGroup

	mu       sync.Mutex
	closed   bool
	lives    map[cloche.SessionID]*life // every session that is not final
	creating map[boxName]*creation      // names whose creation is in flight

	count counters
}

// boxName is a sandbox's name in its project.
type boxName struct{ team, project, name string }

// New returns a Control. Recover comes next.
func New(store Store, node Node, images Images, cfg Config) *Control {
	cfg = cfg.withDefaults()
	ctx, cancel := context.WithCancel(context.Background())
	return &Control{
		store:    store,
		node:     node,
		images:   images,
		cfg:      cfg,
		log:      cfg.Log,
		ctx:      ctx,
		cancel:   cancel,
		closing:  make(chan struct{}),
		lives:    make(map[cloche.SessionID]*life),
		creating: make(map[boxName]*creation),
	}
}

// Close refuses new work and waits for what is in flight, until ctx ends; then
// it cuts that off, as a crash would, and waits for it. Sessions stay as they
// are: the next Recover finds them. It is idempotent.
func (c *Control) Close(ctx context.Context) {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		close(c.closing)
	}
	c.mu.Unlock()
	for _, l := range c.everyLife() {
		l.disarm()
	}
	defer context.AfterFunc(ctx, c.cancel)()
	c.work.Wait()
	c.cancel()
}

// begin registers work that Close waits for; the caller calls end after it.
// Once Close has begun it is CodeUnavailable.
func (c *Control) begin() (end func(), err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, cloche.Errorf(cloche.CodeUnavailable, "the server is shutting down; try again in a moment")
	}
	c.work.Add(1)
	return c.work.Done, nil
}

// wait blocks until done, and says so if it ended otherwise: ctx ended, limit
// passed (CodeStopping) or Close gave up (CodeUnavailable).
func (c *Control) wait(ctx context.Context, done <-chan struct{}, limit time.Duration) error {
	t := time.NewTimer(limit)
	defer t.Stop()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-t.C:
		return cloche.Errorf(cloche.CodeStopping, "the session is still stopping; try again in a moment")
	case <-c.ctx.Done():
		return cloche.Errorf(cloche.CodeUnavailable, "the server is shutting down; try again in a moment")
	}
}

// counters count since the process began.
type counters struct {
	created, createFailed, resumed, resumeFailed, refused atomic.Int64
	stopped, timedOut, aborted                            atomic.Int64
}

// Stats is what Control has done since it was made, and what it has now.
type Stats struct {
	Live     int // sessions that are not final
	Starting int // of those, without a machine yet
	Ending   int // of those, on their way to the end

	Created, CreateFailed int64 // sandboxes
	Resumed, ResumeFailed int64 // sessions of sandboxes that existed
	Refused               int64 // by a limit of this host
	Stopped               int64 // sessions ended on request
	TimedOut              int64 // sessions ended by their timeout
	Aborted               int64 // sessions whose machine ended by itself
}

// Stats returns the present figures.
func (c *Control) Stats() Stats {
	st := Stats{
		Created:      c.count.created.Load(),
		CreateFailed: c.count.createFailed.Load(),
		Resumed:      c.count.resumed.Load(),
		ResumeFailed: c.count.resumeFailed.Load(),
		Refused:      c.count.refused.Load(),
		Stopped:      c.count.stopped.Load(),
		TimedOut:     c.count.timedOut.Load(),
		Aborted:      c.count.aborted.Load(),
	}
	all := c.everyLife()
	st.Live = len(all)
	for _, l := range all {
		switch l.phase() {
		case starting:
			st.Starting++
		case ending:
			st.Ending++
		}
	}
	return st
}
