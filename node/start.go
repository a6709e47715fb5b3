package node

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/internal/atomicfile"
	"github.com/cloche-dev/cloche/internal/cleanup"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// session is one running machine.
type session struct {
	id      cloche.SessionID
	machine driver.Machine
	guest   Guest

	// pumps counts the goroutines that copy output into logs.
	pumps sync.WaitGroup

	mu       sync.Mutex
	stopping bool
	commands map[cloche.CommandID]*command // running ones

	ended      []cloche.CommandID // that the agent may forget
	forgetting bool               // a goroutine will tell it
}

// Start makes the session's top, machine and channel, and returns once the
// agent has answered. On an error nothing is left behind. env is the sandbox's
// environment, over the image's.
func (n *Node) Start(ctx context.Context, s cloche.Session, env map[string]string) (err error) {
	if !s.ID.Valid() {
		return cloche.Errorf(cloche.CodeInvalid, "%q is not a session id", s.ID)
	}
	tree, err := n.cfg.Images.Tree(ctx, s.ImageID)
	if err != nil {
		return err
	}
	image, err := n.cfg.Images.Config(ctx, s.ImageID)
	if err != nil {
		return err
	}
	var undo cleanup.Stack
	defer func() {
		if err != nil {
			err = errors.Join(err, undo.Unwind(ctx))
		}
	}()

	failpoint.Here("node/start/before-top")
	top, err := n.cfg.Tops.Make(ctx, s.ID)
	if err != nil {
		return fmt.Errorf("top: %w", err)
	}
	undo.Push("top", func(ctx context.Context) error { return n.cfg.Tops.Remove(ctx, s.ID) })
	failpoint.Here("node/start/after-top")

	token, err := n.writeToken(s.ID)
	if err != nil {
		return fmt.Errorf("channel token: %w", err)
	}
	undo.Push("channel token", func(context.Context) error { return n.removeToken(s.ID) })
	failpoint.Here("node/start/after-token")

	m, err := n.cfg.Driver.Start(ctx, driver.Spec{
		ID: s.ID, Hostname: hostname(s.ID), VCPUs: s.VCPUs, MemoryMiB: s.MemoryMiB,
		Root: driver.Root{Image: tree, Top: top},
	})
	if err != nil {
		return fmt.Errorf("machine: %w", err)
	}
	undo.Push("machine", m.Release)
	failpoint.Here("node/start/after-machine")

	live := n.newSession(m, token)
	undo.Push("channel", func(context.Context) error { return live.guest.Close() })
	if err := live.configure(ctx, n.guestConfig(s, image, env)); err != nil {
		return fmt.Errorf("agent: %w", err)
	}
	failpoint.Here("node/start/after-agent")
	n.adopt(live)
	undo.Release()
	return nil
}

// newSession makes the live session of a machine. It does not connect yet.
func (n *Node) newSession(m driver.Machine, token string) *session {
	return &session{id: m.ID(), machine: m, guest: n.cfg.Dial(m.Dial, token), commands: map[cloche.CommandID]*command{}}
}

// adopt publishes a live session and watches its machine.
func (n *Node) adopt(s *session) {
	n.mu.Lock()
	n.sessions[s.id] = s
	n.mu.Unlock()
	n.wg.Go(func() { n.watch(s) })
}

func (n *Node) guestConfig(s cloche.Session, image cloche.ImageConfig, env map[string]string) guest.Config {
	all := maps.Clone(image.Env)
	if all == nil {
		all = map[string]string{}
	}
	if r, ok := image.Runtimes[s.Runtime]; ok {
		all["PATH"] = strings.TrimSuffix(r.Path+":"+all["PATH"], ":")
	}
	maps.Copy(all, env)
	return guest.Config{
		Hostname: hostname(s.ID), User: s.User, WorkDir: s.WorkDir, Env: all,
		MemoryBytes: int64(s.MemoryMiB) << 20, PIDs: n.cfg.PIDs,
		SetClock: n.cfg.Driver.Capabilities().SetClock,
	}
}

// configure waits for the agent and tells it about the machine.
func (s *session) configure(ctx context.Context, c guest.Config) error {
	ctx, cancel := context.WithTimeout(ctx, helloTimeout)
	defer cancel()
	_, err := retry(ctx, s.machine, func() (guest.Identity, error) { return s.guest.Configure(ctx, c) })
	return err
}

// retry calls f until it succeeds, fails for good, or the machine or ctx ends.
// A channel that does not work yet is CodeUnavailable.
func retry[T any](ctx context.Context, m driver.Machine, f func() (T, error)) (T, error) {
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		v, err := f()
		if cloche.ErrorCode(err) != cloche.CodeUnavailable {
			return v, err
		}
		exit, werr := waitEnd(ctx, m, pause)
		if werr == nil {
			return v, fmt.Errorf("the machine ended (%s %s): %w", exit.Cause, exit.Detail, err)
		}
		if ctx.Err() != nil {
			return v, fmt.Errorf("the agent does not answer: %w", err)
		}
	}
}

// Between two tries of what an agent refused. An agent that always refuses must
// not keep this process busy.
const (
	minPause = 5 * time.Millisecond
	maxPause = time.Second
	calm     = 10 * time.Second // of work, after which a failure is the first again
)

// waitEnd pauses, and returns early, without an error, if the machine ends.
func waitEnd(ctx context.Context, m driver.Machine, pause time.Duration) (driver.Exit, error) {
	ctx, cancel := context.WithTimeout(ctx, pause)
	defer cancel()
	return m.Wait(ctx)
}

// hostname is the sandbox's name for itself: a part of the session's id, so
// that no two machines share one.
func hostname(id cloche.SessionID) string {
	return "cloche-" + string(id[len(id)-12:])
}

func (n *Node) tokenPath(id cloche.SessionID) string {
	return filepath.Join(n.cfg.RunDir, string(id)+".token")
}

// writeToken makes the token that the agent of this session will know its host
// by. It is on disk before the machine exists, so that a later process finds it.
func (n *Node) writeToken(id cloche.SessionID) (string, error) {
	if err := os.MkdirAll(n.cfg.RunDir, 0o700); err != nil {
		return "", err
	}
	token := rand.Text()
	return token, atomicfile.Write(n.tokenPath(id), []byte(token), 0o600)
}

func (n *Node) removeToken(id cloche.SessionID) error {
	err := os.Remove(n.tokenPath(id))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}
