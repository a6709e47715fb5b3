package node_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/node"
)

// host is everything that outlives a node's process: machines with their agents
// and the directories. Nodes are made on it and closed as processes would be.
type host struct {
	t   *testing.T
	dir string

	mu       sync.Mutex
	machines map[cloche.SessionID]*machine
	tops     map[cloche.SessionID]bool
	startErr error
	ends     chan cloche.SessionEnd
}

func newHost(t *testing.T) *host {
	return &host{
		t: t, dir: t.TempDir(), machines: map[cloche.SessionID]*machine{},
		tops: map[cloche.SessionID]bool{}, ends: make(chan cloche.SessionEnd, 16),
	}
}

// node returns a fresh node on the host; maxLog 0 is the default.
func (h *host) node(maxLog int64) *node.Node {
	n := node.New(node.Config{
		Driver: h, Images: images{}, Tops: tops{h}, MaxLog: maxLog,
		Dial: func(open func(context.Context) (net.Conn, error), token string) node.Guest {
			return &channel{open: open, token: token, h: h}
		},
		LogDir: filepath.Join(h.dir, "logs"), RunDir: filepath.Join(h.dir, "run"),
		Ended: func(_ context.Context, e cloche.SessionEnd) { h.ends <- e },
		Log:   slog.New(slog.DiscardHandler),
	})
	h.t.Cleanup(func() {
		if err := n.Close(); err != nil {
			h.t.Errorf("close node: %v", err)
		}
	})
	return n
}

func (h *host) machine(id cloche.SessionID) *machine {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.machines[id]
}

// wantNothing fails the test if a session has left something on the host.
func (h *host) wantNothing(t *testing.T) {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.tops) != 0 || len(h.machines) != 0 {
		t.Errorf("left: tops %v, machines %v", h.tops, h.machines)
	}
}

type images struct{}

func (images) Tree(context.Context, cloche.ImageID) (string, error) { return "/image", nil }
func (images) Config(context.Context, cloche.ImageID) (cloche.ImageConfig, error) {
	return cloche.ImageConfig{}, nil
}

type tops struct{ h *host }

func (t tops) Make(_ context.Context, id cloche.SessionID) (string, error) {
	t.h.mu.Lock()
	defer t.h.mu.Unlock()
	t.h.tops[id] = true
	return "/top", nil
}

func (t tops) Remove(_ context.Context, id cloche.SessionID) error {
	t.h.mu.Lock()
	defer t.h.mu.Unlock()
	delete(t.h.tops, id)
	return nil
}

func (t tops) List(context.Context) (ids []cloche.SessionID, _ error) {
	t.h.mu.Lock()
	defer t.h.mu.Unlock()
	for id := range t.h.tops {
		ids = append(ids, id)
	}
	return ids, nil
}

// host as a driver.

func (h *host) Name() string                      { return "scripted" }
func (h *host) Capabilities() driver.Capabilities { return driver.Capabilities{MaxVCPUs: 1} }
func (h *host) Close() error                      { return nil }

func (h *host) Start(_ context.Context, s driver.Spec) (driver.Machine, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.startErr != nil {
		return nil, h.startErr
	}
	m := &machine{id: s.ID, h: h, ended: make(chan struct{}), commands: map[cloche.CommandID]*process{}, silent: make(chan struct{})}
	h.machines[s.ID] = m
	return m, nil
}

func (h *host) Recover(_ context.Context, id cloche.SessionID) (driver.Machine, error) {
	if m := h.machine(id); m != nil {
		return m, nil
	}
	return nil, cloche.Errorf(cloche.CodeNotFound, "no machine %s", id)
}

func (h *host) List(context.Context) (ids []cloche.SessionID, _ error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range h.machines {
		ids = append(ids, id)
	}
	return ids, nil
}

func (h *host) Remove(ctx context.Context, id cloche.SessionID) error {
	if m := h.machine(id); m != nil {
		return m.Release(ctx)
	}
	return nil
}

// machine is a machine and the agent in it.
type machine struct {
	id cloche.SessionID
	h  *host

	mu       sync.Mutex
	ended    chan struct{}
	exit     driver.Exit
	commands map[cloche.CommandID]*process
	token    string
	silent   chan struct{} // closed: the agent answers nothing any more
}

func (m *machine) ID() cloche.SessionID                   { return m.id }
func (m *machine) Dial(context.Context) (net.Conn, error) { return nil, errors.New("unused") }
func (m *machine) Stats(context.Context) (driver.Stats, error) {
	return driver.Stats{CPU: time.Second}, nil
}

func (m *machine) Wait(ctx context.Context) (driver.Exit, error) {
	select {
	case <-m.ended:
		return m.exit, nil
	case <-ctx.Done():
		return driver.Exit{}, ctx.Err()
	}
}

// end ends the machine as something from outside would.
func (m *machine) end(cause driver.ExitCause) {
	m.mu.Lock()
	defer m.mu.Unlock()
	select {
	case <-m.ended:
	default:
		m.exit = driver.Exit{Cause: cause}
		close(m.ended)
	}
}

func (m *machine) Kill(context.Context) error { m.end(driver.ExitKilled); return nil }
func (m *machine) Release(context.Context) error {
	m.end(driver.ExitKilled)
	m.h.mu.Lock()
	defer m.h.mu.Unlock()
	delete(m.h.machines, m.id)
	return nil
}

// process is a command in the agent: the test writes its output and ends it.
type process struct {
	mu      sync.Mutex
	output  []cloche.LogEntry
	acked   int64
	exit    *cloche.Exit
	changed chan struct{}
	start   guest.Start
	cuts    int   // streams to break after the next piece of output
	skip    int64 // bytes of output that each new stream claims to be lost
}

// print adds output.
func (p *process) print(stream cloche.Stream, data string) {
	p.update(func() { p.output = append(p.output, cloche.LogEntry{Stream: stream, Data: []byte(data)}) })
}

// end ends the process.
func (p *process) end(e cloche.Exit) { p.update(func() { p.exit = &e }) }

func (p *process) update(f func()) {
	p.mu.Lock()
	defer p.mu.Unlock()
	f()
	close(p.changed)
	p.changed = make(chan struct{})
}

// process returns the only command of the machine.
func (m *machine) process(t *testing.T) *process {
	t.Helper()
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.commands {
		return p
	}
	t.Fatal("no command in the machine")
	return nil
}

// channel is one node's connection to an agent.
type channel struct {
	open   func(context.Context) (net.Conn, error)
	token  string
	h      *host
	mu     sync.Mutex
	closed bool
}

var errChannel = cloche.Errorf(cloche.CodeUnavailable, "the channel is broken")

// agent returns the machine at the other end.
func (c *channel) agent() (*machine, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, errChannel
	}
	c.h.mu.Lock()
	defer c.h.mu.Unlock()
	for _, m := range c.h.machines {
		if m.token != c.token && m.token != "" {
			continue
		}
		m.token = c.token
		select {
		case <-m.ended:
			return nil, cloche.Errorf(cloche.CodeGone, "the machine has ended")
		case <-m.silent:
			return nil, errChannel
		default:
			return m, nil
		}
	}
	return nil, errChannel
}

func (c *channel) Configure(context.Context, guest.Config) (guest.Identity, error) {
	_, err := c.agent()
	return guest.Identity{}, err
}

func (c *channel) Ping(context.Context) (guest.Ping, error) {
	_, err := c.agent()
	return guest.Ping{}, err
}

func (c *channel) Run(ctx context.Context, id cloche.CommandID, s guest.Start, _ io.Reader) (node.Stream, error) {
	m, err := c.agent()
	if err != nil {
		return nil, err
	}
	if s.Argv[0] == "cannot" {
		return nil, cloche.Errorf(cloche.CodeInvalid, "no such directory")
	}
	m.mu.Lock()
	m.commands[id] = &process{changed: make(chan struct{}), start: s}
	m.mu.Unlock()
	return c.Attach(ctx, id, 0)
}

func (c *channel) Attach(ctx context.Context, id cloche.CommandID, offset int64) (node.Stream, error) {
	m, err := c.agent()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	p := m.commands[id]
	if p == nil {
		return nil, cloche.Errorf(cloche.CodeNotFound, "no command %s", id)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	pos := max(offset, p.acked)
	if pos > 0 {
		pos += p.skip
	}
	return &stream{ctx: ctx, c: c, m: m, p: p, pos: pos}, nil
}

func (c *channel) Commands(context.Context) (list []guest.Status, _ error) {
	m, err := c.agent()
	if err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range m.commands {
		list = append(list, guest.Status{ID: id})
	}
	return list, nil
}

func (c *channel) Signal(_ context.Context, id cloche.CommandID, signal int) error {
	m, err := c.agent()
	if err != nil {
		return err
	}
	m.mu.Lock()
	p := m.commands[id]
	m.mu.Unlock()
	if p == nil {
		return cloche.Errorf(cloche.CodeNotFound, "no command %s", id)
	}
	p.end(cloche.Exit{Code: 128 + signal, Signal: signal})
	return nil
}

func (c *channel) Forget(_ context.Context, id cloche.CommandID) error {
	m, err := c.agent()
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.commands, id)
	return nil
}

func (c *channel) ReadFile(context.Context, guest.FileRequest) (cloche.FileInfo, io.ReadCloser, error) {
	return cloche.FileInfo{}, nil, errChannel
}
func (c *channel) MakeDir(context.Context, guest.FileRequest) error { return errChannel }
func (c *channel) WriteFiles(context.Context, guest.FileRequest, io.Reader) error {
	return errChannel
}

func (c *channel) Shutdown(context.Context, time.Duration) error {
	m, err := c.agent()
	if err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, p := range m.commands {
		p.end(cloche.Exit{Code: 143, Signal: 15})
	}
	return nil
}

func (c *channel) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	return nil
}

// stream gives a process's output from pos on.
type stream struct {
	ctx context.Context
	c   *channel
	m   *machine
	p   *process
	pos int64
}

func (s *stream) Started() guest.Started {
	return guest.Started{PID: 7, WorkDir: "/resolved", StartedAt: time.Unix(1, 0), Offset: s.pos}
}

func (s *stream) Next() (cloche.LogEntry, *cloche.Exit, error) {
	for {
		if _, err := s.c.agent(); err != nil {
			return cloche.LogEntry{}, nil, err
		}
		s.p.mu.Lock()
		if s.p.cuts > 0 && s.pos > 0 {
			s.p.cuts--
			s.p.mu.Unlock()
			return cloche.LogEntry{}, nil, errChannel
		}
		e, ok := s.p.at(s.pos)
		exit, changed := s.p.exit, s.p.changed
		s.p.mu.Unlock()
		if ok {
			s.pos += int64(len(e.Data))
			return e, nil, nil
		}
		if exit != nil {
			return cloche.LogEntry{}, exit, nil
		}
		select {
		case <-changed:
		case <-s.m.ended:
		case <-s.ctx.Done():
			return cloche.LogEntry{}, nil, s.ctx.Err()
		}
	}
}

// at returns what is left at an offset of the piece that it falls into.
func (p *process) at(pos int64) (cloche.LogEntry, bool) {
	for _, e := range p.output {
		if n := int64(len(e.Data)); pos >= n {
			pos -= n
			continue
		}
		return cloche.LogEntry{Stream: e.Stream, Data: e.Data[pos:]}, true
	}
	return cloche.LogEntry{}, false
}

func (s *stream) Ack(offset int64) error {
	s.p.mu.Lock()
	defer s.p.mu.Unlock()
	s.p.acked = offset
	return nil
}

func (s *stream) Close() error { return nil }

// logFiles returns the names of all logs.
func (h *host) logFiles() []string {
	names, err := filepath.Glob(filepath.Join(h.dir, "logs", "*", "*"))
	if err != nil {
		h.t.Fatal(err)
	}
	return names
}

// corrupt appends a torn record to a log, as a killed writer leaves it.
func corrupt(t *testing.T, name string) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_APPEND, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprint(f, "\x01\x00\x00\x00\xffhalf"); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
}
