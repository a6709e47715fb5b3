package vercel

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
)

// fake is a Service in memory whose commands are processes of this machine, in
// a directory of the test, so that the official SDKs have something to talk to.
type fake struct {
	root string

	mu       sync.Mutex
	boxes    map[string]*cloche.SandboxView // by team/project/name
	sessions map[cloche.SessionID]*fakeSession
	created  []cloche.CreateSandbox
	killed   []int // signals, in order
	running  sync.WaitGroup

	// onCreate, if set, is called before a create goes on.
	onCreate func(context.Context) error
}

type fakeSession struct {
	key      string
	s        cloche.Session
	commands map[cloche.CommandID]*fakeCommand
	order    []cloche.CommandID
}

func newFake(t testing.TB) *fake {
	f := &fake{root: t.TempDir(), boxes: map[string]*cloche.SandboxView{}, sessions: map[cloche.SessionID]*fakeSession{}}
	if err := os.MkdirAll(f.root+cloche.DefaultWorkDir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		f.mu.Lock()
		for _, s := range f.sessions {
			s.killAll()
		}
		f.mu.Unlock()
		f.running.Wait()
	})
	return f
}

func (s *fakeSession) killAll() {
	for _, c := range s.commands {
		c.signal(syscall.SIGKILL)
	}
}

func key(p cloche.Principal, name string) string { return p.Team + "/" + p.Project + "/" + name }

func (f *fake) CreateSandbox(ctx context.Context, p cloche.Principal, c cloche.CreateSandbox) (cloche.SandboxView, error) {
	if f.onCreate != nil {
		if err := f.onCreate(ctx); err != nil {
			return cloche.SandboxView{}, err
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.created = append(f.created, c)
	if c.Name == "" {
		c.Name = fmt.Sprintf("box-%d", len(f.boxes))
	}
	if f.boxes[key(p, c.Name)] != nil {
		return cloche.SandboxView{}, cloche.Errorf(cloche.CodeConflict, "the name %q is taken", c.Name)
	}
	now := time.Now()
	b := cloche.Sandbox{
		ID: cloche.NewSandboxID(), Team: p.Team, Project: p.Project, Name: c.Name, Runtime: c.Runtime,
		Image: "universal@sha256:00", WorkDir: cloche.DefaultWorkDir, User: "ubuntu", VCPUs: max(c.VCPUs, 1),
		MemoryMiB: max(c.VCPUs, 1) * cloche.MemoryMiBPerVCPU, Timeout: c.Timeout, Env: c.Env, Tags: c.Tags,
		Region: c.Region, CreatedAt: now, UpdatedAt: now,
	}
	if b.Timeout == 0 {
		b.Timeout = cloche.DefaultTimeout
	}
	v := &cloche.SandboxView{Sandbox: b}
	f.boxes[key(p, c.Name)] = v
	f.startLocked(v)
	return *v, nil
}

func (f *fake) startLocked(v *cloche.SandboxView) {
	now := time.Now()
	b := v.Sandbox
	s := cloche.Session{
		ID: cloche.NewSessionID(), SandboxID: b.ID, Team: b.Team, Project: b.Project, State: cloche.Running,
		Runtime: b.Runtime, WorkDir: b.WorkDir, VCPUs: b.VCPUs, MemoryMiB: b.MemoryMiB, Timeout: b.Timeout,
		Region: b.Region, RequestedAt: now, StartedAt: now, UpdatedAt: now,
	}
	v.Sandbox.SessionID, v.Session = s.ID, s
	f.sessions[s.ID] = &fakeSession{key: b.Team + "/" + b.Project + "/" + b.Name, s: s, commands: map[cloche.CommandID]*fakeCommand{}}
}

func (f *fake) box(p cloche.Principal, name string) (*cloche.SandboxView, error) {
	v := f.boxes[key(p, name)]
	if v == nil {
		return nil, cloche.Errorf(cloche.CodeNotFound, "there is no sandbox %q", name)
	}
	v.Session = f.sessions[v.Sandbox.SessionID].s
	return v, nil
}

func (f *fake) GetSandbox(_ context.Context, p cloche.Principal, name string, resume bool) (cloche.SandboxView, bool, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, err := f.box(p, name)
	if err != nil {
		return cloche.SandboxView{}, false, err
	}
	if resume && v.Session.State.Final() {
		f.startLocked(v)
		return *v, true, nil
	}
	return *v, false, nil
}

func (f *fake) ListSandboxes(_ context.Context, p cloche.Principal, l cloche.ListSandboxes) ([]cloche.SandboxView, string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []cloche.SandboxView
	for k, v := range f.boxes {
		if !strings.HasPrefix(k, key(p, l.NamePrefix)) {
			continue
		}
		if l.TagKey != "" && v.Sandbox.Tags[l.TagKey] != l.TagValue {
			continue
		}
		v.Session = f.sessions[v.Sandbox.SessionID].s
		all = append(all, *v)
	}
	slices.SortFunc(all, func(a, b cloche.SandboxView) int {
		order := strings.Compare(string(a.Sandbox.ID), string(b.Sandbox.ID))
		if l.Sort == cloche.SortName {
			order = strings.Compare(a.Sandbox.Name, b.Sandbox.Name)
		}
		if !l.Ascending {
			order = -order
		}
		return order
	})
	return cut(all, l.Page)
}

// cut makes a page with an offset for a cursor.
func cut[T any](all []T, p cloche.Page) ([]T, string, error) {
	from := 0
	if p.Cursor != "" {
		n, err := strconv.Atoi(p.Cursor)
		if err != nil || n > len(all) {
			return nil, "", cloche.Errorf(cloche.CodeInvalid, "the cursor is not valid")
		}
		from = n
	}
	limit := p.Limit
	if limit == 0 {
		limit = cloche.DefaultPageSize
	}
	if from+limit >= len(all) {
		return all[from:], "", nil
	}
	return all[from : from+limit], strconv.Itoa(from + limit), nil
}

func (f *fake) UpdateSandbox(_ context.Context, p cloche.Principal, name string, u cloche.UpdateSandbox) (cloche.SandboxView, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, err := f.box(p, name)
	if err != nil {
		return cloche.SandboxView{}, err
	}
	if u.VCPUs != nil {
		v.Sandbox.VCPUs, v.Sandbox.MemoryMiB = *u.VCPUs, *u.VCPUs*cloche.MemoryMiBPerVCPU
	}
	if u.Timeout != nil {
		v.Sandbox.Timeout = *u.Timeout
	}
	if u.Tags != nil {
		v.Sandbox.Tags = *u.Tags
	}
	return *v, nil
}

func (f *fake) DeleteSandbox(_ context.Context, p cloche.Principal, name string) (cloche.SandboxView, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, err := f.box(p, name)
	if err != nil {
		return cloche.SandboxView{}, err
	}
	f.stopLocked(v)
	delete(f.boxes, key(p, name))
	return *v, nil
}

func (f *fake) stopLocked(v *cloche.SandboxView) {
	s := f.sessions[v.Sandbox.SessionID]
	if !s.s.State.Final() {
		s.killAll()
		s.s.State, s.s.EndedAt, s.s.UpdatedAt = cloche.Stopped, time.Now(), time.Now()
		s.s.Usage = cloche.Usage{Duration: time.Since(s.s.StartedAt)}
	}
	v.Session = s.s
}

func (f *fake) ListSessions(_ context.Context, p cloche.Principal, l cloche.ListSessions) ([]cloche.Session, string, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []cloche.Session
	for _, s := range f.sessions {
		if s.s.Team == p.Team && s.s.Project == p.Project && (l.Sandbox == "" || s.key == key(p, l.Sandbox)) {
			all = append(all, s.s)
		}
	}
	slices.SortFunc(all, func(a, b cloche.Session) int {
		order := strings.Compare(string(b.ID), string(a.ID))
		if t := b.RequestedAt.Compare(a.RequestedAt); t != 0 {
			order = t
		}
		if l.Ascending {
			order = -order
		}
		return order
	})
	return cut(all, l.Page)
}

func (f *fake) find(p cloche.Principal, id cloche.SessionID) (*cloche.SandboxView, *fakeSession, error) {
	s := f.sessions[id]
	if s == nil || s.s.Team != p.Team || s.s.Project != p.Project || f.boxes[s.key] == nil {
		return nil, nil, cloche.Errorf(cloche.CodeNotFound, "there is no session %q", id)
	}
	return f.boxes[s.key], s, nil
}

func (f *fake) live(p cloche.Principal, id cloche.SessionID) (*fakeSession, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, s, err := f.find(p, id)
	if err == nil && s.s.State.Final() {
		err = cloche.Errorf(cloche.CodeGone, "the session has ended")
	}
	return s, err
}

func (f *fake) GetSession(_ context.Context, p cloche.Principal, id cloche.SessionID) (cloche.SandboxView, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, s, err := f.find(p, id)
	if err != nil {
		return cloche.SandboxView{}, err
	}
	return cloche.SandboxView{Sandbox: v.Sandbox, Session: s.s}, nil
}

func (f *fake) StopSession(_ context.Context, p cloche.Principal, id cloche.SessionID) (cloche.SandboxView, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v, s, err := f.find(p, id)
	if err != nil {
		return cloche.SandboxView{}, err
	}
	if v.Sandbox.SessionID == id {
		f.stopLocked(v)
	}
	return cloche.SandboxView{Sandbox: v.Sandbox, Session: s.s}, nil
}

func (f *fake) ExtendTimeout(_ context.Context, p cloche.Principal, id cloche.SessionID, d time.Duration) (cloche.Session, error) {
	s, err := f.live(p, id)
	if err != nil {
		return cloche.Session{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if s.s.Timeout+d > cloche.MaxTimeout {
		return cloche.Session{}, cloche.Errorf(cloche.CodeTimeoutInvalid, "at most %v are allowed", cloche.MaxTimeout)
	}
	s.s.Timeout += d
	return s.s, nil
}

func (f *fake) MakeDir(_ context.Context, p cloche.Principal, id cloche.SessionID, d cloche.MakeDir) error {
	if _, err := f.live(p, id); err != nil {
		return err
	}
	err := os.Mkdir(f.resolve(d.WorkDir, d.Path), 0o755)
	if errors.Is(err, fs.ErrExist) {
		return cloche.Errorf(cloche.CodeConflict, "%s exists", d.Path)
	}
	return err
}

func (f *fake) resolve(dir, path string) string {
	if !filepath.IsAbs(path) {
		if dir == "" {
			dir = cloche.DefaultWorkDir
		}
		path = filepath.Join(dir, path)
	}
	return filepath.Join(f.root, path)
}

func (f *fake) WriteFiles(_ context.Context, p cloche.Principal, id cloche.SessionID, w cloche.WriteFiles, body io.Reader) error {
	if _, err := f.live(p, id); err != nil {
		return err
	}
	if w.Gzip {
		z, err := gzip.NewReader(body)
		if err != nil {
			return cloche.Errorf(cloche.CodeInvalid, "the body is not gzip")
		}
		body = z
	}
	for t := tar.NewReader(body); ; {
		h, err := t.Next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return cloche.Errorf(cloche.CodeInvalid, "the body is not a tar archive")
		}
		name := f.resolve(w.WorkDir, h.Name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			return err
		}
		data, err := io.ReadAll(t)
		if err != nil {
			return cloche.Errorf(cloche.CodeInvalid, "the archive is cut")
		}
		if err := os.WriteFile(name, data, h.FileInfo().Mode().Perm()); err != nil {
			return err
		}
	}
}

func (f *fake) ReadFile(_ context.Context, p cloche.Principal, id cloche.SessionID, r cloche.ReadFile) (cloche.FileInfo, io.ReadCloser, error) {
	if _, err := f.live(p, id); err != nil {
		return cloche.FileInfo{}, nil, err
	}
	file, err := os.Open(f.resolve(r.WorkDir, r.Path))
	if errors.Is(err, fs.ErrNotExist) {
		return cloche.FileInfo{}, nil, cloche.Errorf(cloche.CodeNotFound, "there is no file %q", r.Path)
	}
	if err != nil {
		return cloche.FileInfo{}, nil, err
	}
	info, err := file.Stat()
	if err == nil && info.IsDir() {
		err = cloche.Errorf(cloche.CodeInvalid, "%s is a directory", r.Path)
	}
	if err != nil {
		file.Close()
		return cloche.FileInfo{}, nil, err
	}
	return cloche.FileInfo{Size: info.Size(), Mode: uint32(info.Mode().Perm())}, file, nil
}

// fakeCommand is a process of this machine, and its log.
type fakeCommand struct {
	mu      sync.Mutex
	c       cloche.Command
	process *os.Process // nil if it never started
	log     []cloche.LogEntry
	changed chan struct{} // closed and replaced at each change
}

func (c *fakeCommand) update(change func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	change()
	close(c.changed)
	c.changed = make(chan struct{})
}

func (c *fakeCommand) signal(n syscall.Signal) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.process != nil && c.c.Exit == nil {
		_ = syscall.Kill(-c.process.Pid, n) // it may have ended just now
	}
}

type fakePipe struct {
	c      *fakeCommand
	stream cloche.Stream
}

func (p fakePipe) Write(b []byte) (int, error) {
	p.c.update(func() { p.c.log = append(p.c.log, cloche.LogEntry{Stream: p.stream, Data: bytes.Clone(b)}) })
	return len(b), nil
}

func (f *fake) RunCommand(_ context.Context, p cloche.Principal, id cloche.SessionID, r cloche.RunCommand) (cloche.Command, error) {
	s, err := f.live(p, id)
	if err != nil {
		return cloche.Command{}, err
	}
	dir := f.resolve(cloche.DefaultWorkDir, r.WorkDir)
	c := &fakeCommand{changed: make(chan struct{}), c: cloche.Command{
		ID: cloche.NewCommandID(), SessionID: id, Name: r.Name, Args: r.Args,
		WorkDir: strings.TrimPrefix(dir, f.root), StartedAt: time.Now(),
	}}
	x := exec.Command(r.Name, r.Args...)
	x.Dir, x.SysProcAttr, x.Stdin = dir, &syscall.SysProcAttr{Setpgid: true}, r.Stdin
	x.Stdout, x.Stderr = fakePipe{c, cloche.Stdout}, fakePipe{c, cloche.Stderr}
	f.mu.Lock()
	env := f.boxes[s.key].Sandbox.Env
	f.mu.Unlock()
	x.Env = append(os.Environ(), "LC_ALL=C")
	for _, m := range []map[string]string{env, r.Env} {
		for k, v := range m {
			x.Env = append(x.Env, k+"="+v)
		}
	}
	x.WaitDelay = 100 * time.Millisecond
	if err := x.Start(); err != nil {
		_, _ = fakePipe{c, cloche.Stderr}.Write([]byte(r.Name + ": not found\n"))
		c.c.Exit = &cloche.Exit{Code: 127}
	} else {
		c.process = x.Process
		f.running.Go(func() { c.wait(x, r.Timeout) })
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	s.commands[c.c.ID] = c
	s.order = append(s.order, c.c.ID)
	c.mu.Lock()
	defer c.mu.Unlock()
	out := c.c
	out.Exit = nil
	return out, nil
}

func (c *fakeCommand) wait(x *exec.Cmd, timeout time.Duration) {
	if timeout > 0 {
		defer time.AfterFunc(timeout, func() { c.signal(syscall.SIGKILL) }).Stop()
	}
	_ = x.Wait() // its state says how it ended
	e := &cloche.Exit{Code: x.ProcessState.ExitCode(), Duration: time.Since(c.c.StartedAt)}
	if st := x.ProcessState.Sys().(syscall.WaitStatus); st.Signaled() {
		e.Signal, e.Code = int(st.Signal()), 128+int(st.Signal())
		if timeout > 0 && e.Duration >= timeout {
			e.Cause = cloche.CauseTimeout
		}
	}
	c.update(func() { c.c.Exit = e })
}

func (f *fake) command(p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (*fakeCommand, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	_, s, err := f.find(p, id)
	if err != nil {
		return nil, err
	}
	if s.commands[cmd] == nil {
		return nil, cloche.Errorf(cloche.CodeNotFound, "there is no command %q", cmd)
	}
	return s.commands[cmd], nil
}

func (f *fake) GetCommand(_ context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error) {
	c, err := f.command(p, id, cmd)
	if err != nil {
		return cloche.Command{}, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.c, nil
}

func (f *fake) ListCommands(ctx context.Context, p cloche.Principal, id cloche.SessionID) ([]cloche.Command, error) {
	f.mu.Lock()
	_, s, err := f.find(p, id)
	f.mu.Unlock()
	if err != nil {
		return nil, err
	}
	var out []cloche.Command
	for _, cid := range s.order {
		c, err := f.GetCommand(ctx, p, id, cid)
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	return out, nil
}

func (f *fake) WaitCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.Command, error) {
	c, err := f.command(p, id, cmd)
	if err != nil {
		return cloche.Command{}, err
	}
	for {
		c.mu.Lock()
		out, changed := c.c, c.changed
		c.mu.Unlock()
		if out.Exit != nil {
			return out, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return cloche.Command{}, ctx.Err()
		}
	}
}

func (f *fake) SignalCommand(ctx context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID, signal int) (cloche.Command, error) {
	c, err := f.command(p, id, cmd)
	if err != nil {
		return cloche.Command{}, err
	}
	f.mu.Lock()
	f.killed = append(f.killed, signal)
	f.mu.Unlock()
	c.signal(syscall.Signal(signal))
	return f.GetCommand(ctx, p, id, cmd)
}

type fakeLog struct {
	c    *fakeCommand
	next int
	cut  int // negative = the log ends with the command
}

func (f *fake) CommandLogs(_ context.Context, p cloche.Principal, id cloche.SessionID, cmd cloche.CommandID) (cloche.LogReader, error) {
	c, err := f.command(p, id, cmd)
	if err != nil {
		return nil, err
	}
	return &fakeLog{c: c, cut: -1}, nil
}

func (l *fakeLog) Next(ctx context.Context) (cloche.LogEntry, error) {
	for {
		l.c.mu.Lock()
		log, exit, changed := l.c.log, l.c.c.Exit, l.c.changed
		l.c.mu.Unlock()
		if l.cut >= 0 && l.next >= l.cut {
			return cloche.LogEntry{}, io.EOF
		}
		if l.next < len(log) {
			l.next++
			return log[l.next-1], nil
		}
		if exit != nil {
			return cloche.LogEntry{}, io.EOF
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return cloche.LogEntry{}, ctx.Err()
		}
	}
}

func (l *fakeLog) Cut() {
	l.c.mu.Lock()
	defer l.c.mu.Unlock()
	if l.cut < 0 && l.c.c.Exit == nil {
		l.cut = len(l.c.log)
	}
}

func (l *fakeLog) Close() error { return nil }

// tokens maps each token that a test may use to its principal.
type tokens map[string]cloche.Principal

func (t tokens) Authenticate(_ context.Context, bearer string) (cloche.Principal, error) {
	p, ok := t[bearer]
	if !ok {
		return p, cloche.Errorf(cloche.CodeUnauthorized, "the token is not valid")
	}
	return p, nil
}

const testToken = "secret-token"

var testTokens = tokens{
	testToken:     {Token: "tok_a", Team: "team_self", Project: "prj_self"},
	"other-token": {Token: "tok_b", Team: "team_other", Project: "prj_other"},
}
