package control

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/auth"
	"github.com/cloche-dev/cloche/store"
)

// fakeNode is a Node whose machines are files in a directory, so that they
// outlive the process as machines do.
type fakeNode struct {
	dir string

	mu      sync.Mutex
	starts  int
	stops   int
	env     map[string]string // of the latest start
	onStart func(context.Context, cloche.Session) error
	onStop  func(context.Context, cloche.SessionID) error
	deaf    bool // Start does not notice the end of its context
	dead    bool // every call fails: the process is gone
}

var errDead = errors.New("the process is gone")

func (n *fakeNode) file(id cloche.SessionID) string { return filepath.Join(n.dir, string(id)) }

// hooks counts a call and returns the hook for it.
func (n *fakeNode) hooks(count *int) (start func(context.Context, cloche.Session) error, stop func(context.Context, cloche.SessionID) error, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.dead {
		return nil, nil, errDead
	}
	if count != nil {
		*count++
	}
	return n.onStart, n.onStop, nil
}

func (n *fakeNode) Start(ctx context.Context, s cloche.Session, env map[string]string) error {
	hook, _, err := n.hooks(&n.starts)
	if err != nil {
		return err
	}
	n.mu.Lock()
	n.env = env
	deaf := n.deaf
	n.mu.Unlock()
	if hook != nil {
		if err := hook(ctx, s); err != nil {
			return err
		}
	}
	if ctx.Err() != nil && !deaf {
		return ctx.Err()
	}
	return os.WriteFile(n.file(s.ID), nil, 0o600)
}

// fakeUsage is what every session uses.
var fakeUsage = cloche.Usage{ActiveCPU: time.Second, EgressBytes: 3, IngressBytes: 4}

func (n *fakeNode) Stop(ctx context.Context, id cloche.SessionID, _ time.Duration) (cloche.Usage, error) {
	_, hook, err := n.hooks(&n.stops)
	if err != nil {
		return cloche.Usage{}, err
	}
	if hook != nil {
		if err := hook(ctx, id); err != nil {
			return cloche.Usage{}, err
		}
	}
	if err := os.Remove(n.file(id)); err != nil && !os.IsNotExist(err) {
		return cloche.Usage{}, err
	}
	return fakeUsage, nil
}

func (n *fakeNode) Recover(_ context.Context, live []cloche.Session) (gone []cloche.SessionEnd, err error) {
	if _, _, err := n.hooks(nil); err != nil {
		return nil, err
	}
	have := make(map[cloche.SessionID]bool)
	for _, id := range n.machines() {
		have[id] = true
	}
	for _, s := range live {
		if !have[s.ID] {
			gone = append(gone, cloche.SessionEnd{ID: s.ID, Cause: "the machine crashed", Usage: fakeUsage})
		}
		delete(have, s.ID)
	}
	for id := range have {
		if err := os.Remove(n.file(id)); err != nil {
			return nil, err
		}
	}
	return gone, nil
}

// machines lists what exists.
func (n *fakeNode) machines() []cloche.SessionID {
	entries, err := os.ReadDir(n.dir)
	if err != nil {
		panic(err)
	}
	var ids []cloche.SessionID
	for _, e := range entries {
		ids = append(ids, cloche.SessionID(e.Name()))
	}
	return ids
}

func (n *fakeNode) machine(id cloche.SessionID) error {
	if _, err := os.Stat(n.file(id)); err != nil {
		return cloche.Errorf(cloche.CodeGone, "no machine")
	}
	return nil
}

func (n *fakeNode) Usage(_ context.Context, id cloche.SessionID) (cloche.Usage, error) {
	return fakeUsage, n.machine(id)
}

func (n *fakeNode) Run(_ context.Context, id cloche.SessionID, r cloche.RunCommand) (cloche.Command, error) {
	return cloche.Command{ID: cloche.NewCommandID(), SessionID: id, Name: r.Name, Args: r.Args}, n.machine(id)
}

func (n *fakeNode) Command(_ context.Context, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error) {
	return cloche.Command{ID: cmd, SessionID: id}, nil
}

func (n *fakeNode) Commands(_ context.Context, id cloche.SessionID) ([]cloche.Command, error) {
	return []cloche.Command{{SessionID: id}}, nil
}

func (n *fakeNode) Wait(ctx context.Context, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error) {
	return n.Command(ctx, id, cmd)
}

func (n *fakeNode) Signal(_ context.Context, id cloche.SessionID, cmd cloche.CommandID, _ int) (cloche.Command, error) {
	return cloche.Command{ID: cmd, SessionID: id}, n.machine(id)
}

type emptyLog struct{}

func (emptyLog) Next(context.Context) (cloche.LogEntry, error) { return cloche.LogEntry{}, io.EOF }
func (emptyLog) Cut()                                          {}
func (emptyLog) Close() error                                  { return nil }

func (n *fakeNode) Logs(context.Context, cloche.SessionID, cloche.CommandID) (cloche.LogReader, error) {
	return emptyLog{}, nil
}

// logDir holds a file for each session that has logs, as long as it exists.
func (n *fakeNode) logDir() string { return filepath.Join(filepath.Dir(n.dir), "logs") }

func (n *fakeNode) Logged(context.Context) (ids []cloche.SessionID, err error) {
	entries, err := os.ReadDir(n.logDir())
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, e := range entries {
		ids = append(ids, cloche.SessionID(e.Name()))
	}
	return ids, nil
}

func (n *fakeNode) DropLogs(_ context.Context, id cloche.SessionID) error {
	err := os.Remove(filepath.Join(n.logDir(), string(id)))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// hasLogs makes a log for a session, as a command in it would.
func (n *fakeNode) hasLogs(t testing.TB, id cloche.SessionID) {
	t.Helper()
	if err := os.MkdirAll(n.logDir(), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(n.logDir(), string(id)), nil, 0o600); err != nil {
		t.Fatal(err)
	}
}

func (n *fakeNode) MakeDir(_ context.Context, id cloche.SessionID, _ cloche.MakeDir) error {
	return n.machine(id)
}

func (n *fakeNode) WriteFiles(_ context.Context, id cloche.SessionID, _ cloche.WriteFiles, tar io.Reader) error {
	if _, err := io.Copy(io.Discard, tar); err != nil {
		return err
	}
	return n.machine(id)
}

func (n *fakeNode) ReadFile(_ context.Context, id cloche.SessionID, _ cloche.ReadFile) (cloche.FileInfo, io.ReadCloser, error) {
	return cloche.FileInfo{}, io.NopCloser(nil), n.machine(id)
}

func (n *fakeNode) set(change func(*fakeNode)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	change(n)
}

func (n *fakeNode) calls() (starts, stops int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.starts, n.stops
}

// fakeImages has one image, with two runtimes.
type fakeImages struct{}

var universal = cloche.Image{
	ID: cloche.NewImageID(), Name: "universal", Digest: "sha256:00",
	Config: cloche.ImageConfig{
		User: "ubuntu", WorkDir: "/vercel/sandbox", Env: map[string]string{"PATH": "/usr/bin"},
		Runtimes: map[string]cloche.Runtime{
			"node24": {Path: "/vercel/runtimes/node24/bin", User: "vercel-sandbox"},
			"node22": {Path: "/vercel/runtimes/node22/bin", User: "vercel-sandbox"},
		},
	},
}

func (fakeImages) Image(_ context.Context, ref string) (cloche.Image, error) {
	if ref != "" && ref != "universal" {
		return cloche.Image{}, cloche.Errorf(cloche.CodeNotFound, "there is no image %q; run cloche image pull", ref)
	}
	return universal, nil
}

// rig is a Control on a real store and a fake node in a directory.
type rig struct {
	*Control
	t     testing.TB
	dir   string
	store *store.Store
	node  *fakeNode
	cfg   Config
}

var me = cloche.Principal{Team: "team", Project: "project"}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newRig(t testing.TB, cfg Config) *rig {
	t.Helper()
	if cfg.Log == nil {
		cfg.Log = quiet()
	}
	r := &rig{t: t, dir: scratch(t), cfg: cfg}
	if err := os.Mkdir(filepath.Join(r.dir, "machines"), 0o700); err != nil {
		t.Fatal(err)
	}
	r.open()
	t.Cleanup(r.close)
	return r
}

// scratch is a directory in memory if the host has one: a test that kills a
// process needs no disk, and each commit is an fsync.
func scratch(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "cloche-test-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// openStore opens the store of a data directory as the wiring does.
func openStore(dir string) (*store.Store, error) {
	key, err := auth.OpenKey(filepath.Join(dir, "secrets"))
	if err != nil {
		return nil, err
	}
	return store.Open(context.Background(), filepath.Join(dir, "cloche.db"), key)
}

// open is the start of a process.
func (r *rig) open() {
	r.t.Helper()
	s, err := openStore(r.dir)
	if err != nil {
		r.t.Fatal(err)
	}
	r.store = s
	r.node = &fakeNode{dir: filepath.Join(r.dir, "machines")}
	r.Control = New(s, r.node, fakeImages{}, r.cfg)
	if err := r.Recover(context.Background()); err != nil {
		r.t.Fatal(err)
	}
}

// close is the orderly end of a process.
func (r *rig) close() {
	r.Close(context.Background())
	if err := r.store.Close(); err != nil {
		r.t.Error(err)
	}
}

// crash is the sudden end of a process: from here on it reaches nothing.
func (r *rig) crash() {
	r.node.set(func(n *fakeNode) { n.dead = true })
	if err := r.store.Close(); err != nil {
		r.t.Error(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	r.Close(ctx)
}

func (r *rig) create(name string) cloche.SandboxView {
	r.t.Helper()
	v, err := r.CreateSandbox(context.Background(), me, cloche.CreateSandbox{Name: name})
	if err != nil {
		r.t.Fatal(err)
	}
	return v
}

// state returns the state of a session from its record.
func (r *rig) state(id cloche.SessionID) cloche.SessionState {
	r.t.Helper()
	s, err := r.store.Session(context.Background(), id)
	if err != nil {
		r.t.Fatal(err)
	}
	return s.State
}

func wantCode(t testing.TB, err error, want cloche.Code) {
	t.Helper()
	if got := cloche.ErrorCode(err); got != want {
		t.Errorf("error %v has code %q, want %q", err, got, want)
	}
}

// checkConverged fails the test unless records and machines agree and nothing
// is on its way.
func checkConverged(t fataler, s Store, n *fakeNode) {
	t.Helper()
	live, err := s.LiveSessions(context.Background())
	if err != nil {
		t.Fatalf("live sessions: %v", err)
	}
	have := make(map[cloche.SessionID]bool)
	for _, id := range n.machines() {
		have[id] = true
	}
	boxes := make(map[cloche.SandboxID]bool)
	for _, v := range live {
		if v.State != cloche.Running {
			t.Fatalf("session %s is still %s", v.ID, v.State)
		}
		if !have[v.ID] {
			t.Fatalf("session %s runs without a machine", v.ID)
		}
		delete(have, v.ID)
		if boxes[v.SandboxID] {
			t.Fatalf("sandbox %s has two live sessions", v.SandboxID)
		}
		boxes[v.SandboxID] = true
		b, err := s.SandboxByID(context.Background(), v.SandboxID)
		if err != nil || b.SessionID != v.ID {
			t.Fatalf("running session %s: its sandbox has %s as latest, %v", v.ID, b.SessionID, err)
		}
	}
	if len(have) != 0 {
		t.Fatalf("machines without a running session: %v", have)
	}
}

// fataler is what testing.T and rapid.T have in common here.
type fataler interface {
	Helper()
	Fatalf(format string, args ...any)
}
