// Package agent is process 1 of every machine: it starts commands and keeps
// their output until the host has it, moves files as the user that asked, reaps
// what others leave behind, and guards the machine's memory so that the greediest
// command dies and not the machine. It speaks package guest on the channels that
// a Transport gives it. It knows nothing of the host but its requests, trusts
// nothing else in the machine, and bounds all that it keeps.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/internal/trace"
)

// memoryLimit is where the Go runtime starts to collect hard: above what the
// outputs of all commands (outputBudget) and a few channels can hold.
const memoryLimit = 160 << 20

// umask is the agent's, and so the one that commands start with.
const umask = 0o022

// Agent is the whole of process 1. Make it with New; its methods may be called
// concurrently.
type Agent struct {
	log    *slog.Logger
	noise  noise
	reaper *reaper
	groups grouper
	null   *os.File // the real /dev/null, opened before anybody could replace it; nil = none
	budget *budget
	guard  *guard

	accounts *accounts

	// mu guards what is below.
	mu       sync.Mutex
	token    string        // the session's, once the first channel brought it
	config   *guest.Config // nil until configured
	commands map[cloche.CommandID]*command
	stopping bool // Shutdown has begun: no new commands

	transfers atomic.Int64 // reads and writes of files in progress

	work    sync.WaitGroup // goroutines of commands
	buffers buffers
	left    leftovers
	rest    unswept
}

// Version names this build in the handshake, for the host's log.
func Version() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return "cloche-agent"
	}
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			return "cloche-agent " + s.Value
		}
	}
	return "cloche-agent " + info.Main.Version
}

// Logger returns the agent's log: JSON lines on standard error, with the host's
// request id in each line that a request caused.
func Logger() *slog.Logger {
	return slog.New(trace.Handler{Handler: slog.NewJSONHandler(os.Stderr, nil)})
}

// New prepares process 1: it becomes its own session, with an umask, limits and
// cgroups. It fails in any process but process 1, because it signals and reaps
// whatever it finds.
func New(log *slog.Logger) (*Agent, error) {
	if os.Getpid() != 1 {
		return nil, errors.New("the agent only runs as process 1")
	}
	debug.SetMemoryLimit(memoryLimit)
	unix.Umask(umask)
	if err := defaultSignals(); err != nil {
		return nil, err
	}
	null, err := openNull()
	if err != nil {
		log.Warn("no /dev/null: commands get a closed pipe as input", "error", err)
	}
	a := &Agent{
		log:      log,
		noise:    noise{log: log},
		reaper:   newReaper(),
		groups:   newGrouper(log),
		null:     null,
		budget:   newBudget(outputBudget),
		accounts: newAccounts(),
		commands: make(map[cloche.CommandID]*command),
	}
	a.guard = newGuard(a)
	return a, nil
}

// Run serves the channels of t until ctx ends or t fails.
func (a *Agent) Run(ctx context.Context, t Transport) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	wg.Go(func() { a.reaper.run(ctx) })
	wg.Go(func() { a.guard.run(ctx) })
	err := a.serve(ctx, t)
	cancel()
	wg.Wait()
	return err
}

// openNull opens /dev/null if it is the null device.
func openNull() (*os.File, error) {
	f, err := os.OpenFile("/dev/null", os.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	var st unix.Stat_t
	err = unix.Fstat(int(f.Fd()), &st)
	if err == nil && (st.Mode&unix.S_IFMT != unix.S_IFCHR || st.Rdev != unix.Mkdev(1, 3)) {
		err = errors.New("not the null device")
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// command finds a command by its id as it came in the request's path.
func (a *Agent) command(id string) (*command, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.commands[cloche.CommandID(id)]; c != nil && c.started {
		return c, nil
	}
	return nil, cloche.Errorf(cloche.CodeNotFound, "no command %.64q in this machine", id)
}

// configured returns the configuration, or an error before there is one.
func (a *Agent) configured() (guest.Config, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.config == nil {
		return guest.Config{}, cloche.Errorf(cloche.CodeConflict, "the machine is not configured yet")
	}
	return *a.config, nil
}

// ping answers the heartbeat.
func (a *Agent) ping() guest.Ping {
	a.mu.Lock()
	n := len(a.commands)
	a.mu.Unlock()
	return guest.Ping{
		Time:       time.Now(),
		Commands:   n,
		AgentBytes: agentBytes(),
		OOMKills:   a.guard.kills(),
	}
}

// setClock sets the wall clock.
func setClock(c guest.Clock) error {
	ts := unix.NsecToTimespec(c.Time.UnixNano())
	if err := unix.ClockSettime(unix.CLOCK_REALTIME, &ts); err != nil {
		if errors.Is(err, unix.EPERM) || errors.Is(err, unix.ENOSYS) {
			return cloche.Errorf(cloche.CodeNotImplemented, "this machine's clock cannot be set from inside")
		}
		return fmt.Errorf("set clock: %w", err)
	}
	return nil
}
