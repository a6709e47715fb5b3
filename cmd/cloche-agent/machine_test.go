package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/guest/agent"
	"github.com/cloche-dev/cloche/guest/dial"
	"github.com/cloche-dev/cloche/internal/trace"
)

// The tests run the agent as process 1 of namespaces of its own on this host:
// the test binary executes itself, prepares the mounts, and becomes the agent.

const (
	envRole   = "CLOCHE_TEST_ROLE" // "prepare", then "agent"
	envDir    = "CLOCHE_TEST_DIR"  // files of this machine
	envGroups = "CLOCHE_TEST_CGROUPS"

	uidUser   = 1000
	workDir   = "/srv/box" // on a tmpfs of the machine's own
	smallDisk = "/mnt"     // a tmpfs of smallSize
	smallSize = 4 << 20
	testToken = "the-session's-token"
)

func TestMain(m *testing.M) {
	if filepath.Base(os.Args[0]) == "cloche-agent" {
		os.Exit(run(os.Args[1:])) // a child that the agent started from /proc/self/exe
	}
	switch os.Getenv(envRole) {
	case "prepare":
		fmt.Fprintln(os.Stderr, "prepare machine:", prepare())
		os.Exit(1)
	case "agent":
		os.Exit(run([]string{"init"}))
	}
	os.Exit(m.Run())
}

// prepare makes the mounts and executes the binary again; it returns on failure.
func prepare() error {
	runtime.LockOSThread()
	dir := os.Getenv(envDir)
	type mount struct {
		source, target, kind string
		flags                uintptr
		data                 string
	}
	mounts := []mount{
		{"none", "/", "", unix.MS_REC | unix.MS_PRIVATE, ""},
		{"proc", "/proc", "proc", 0, ""},
		{"tmpfs", "/srv", "tmpfs", 0, "mode=755"},
		{"tmpfs", smallDisk, "tmpfs", 0, fmt.Sprintf("size=%d,mode=1777", smallSize)},
		{filepath.Join(dir, "passwd"), "/etc/passwd", "", unix.MS_BIND, ""},
		{filepath.Join(dir, "group"), "/etc/group", "", unix.MS_BIND, ""},
		{filepath.Join(dir, "hosts"), "/etc/hosts", "", unix.MS_BIND, ""},
		{filepath.Join(dir, "meminfo"), "/proc/meminfo", "", unix.MS_BIND, ""},
		{"tmpfs", "/sys/fs/cgroup", "tmpfs", 0, ""},
	}
	if os.Getenv(envGroups) != "" {
		if err := unix.Unshare(unix.CLONE_NEWCGROUP); err != nil {
			return fmt.Errorf("unshare cgroup: %w", err)
		}
		mounts[len(mounts)-1] = mount{"cgroup2", "/sys/fs/cgroup", "cgroup2", 0, ""}
	}
	for _, m := range mounts {
		if err := unix.Mount(m.source, m.target, m.kind, m.flags, m.data); err != nil {
			return fmt.Errorf("mount %s: %w", m.target, err)
		}
	}
	env := []string{envRole + "=agent", "GORACE=" + os.Getenv("GORACE")}
	return syscall.Exec("/proc/self/exe", os.Args[:1], env)
}

// machine is one agent that runs.
type machine struct {
	t   testing.TB
	cmd *exec.Cmd
	log *logBuffer
	dir string // files of the machine that the test writes
}

// logBuffer keeps what the agent logs.
type logBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// cgroupTree gives a mount of cgroup v2 on this host, "" if there is none.
func cgroupTree() string {
	b, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return ""
	}
	for line := range strings.Lines(string(b)) {
		if before, after, ok := strings.Cut(line, " - "); ok && strings.HasPrefix(after, "cgroup2 ") {
			return strings.Fields(before)[4]
		}
	}
	return ""
}

// newMachine starts an agent, with cgroups if the host has v2.
func newMachine(t testing.TB) *machine { return startMachine(t, true) }

func startMachine(t testing.TB, groups bool) *machine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("SKIPPED TIER: needs root, to make namespaces for process 1")
	}
	dir := t.TempDir()
	write := func(name, content string) {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("passwd", "root:x:0:0:root:/root:/bin/bash\nubuntu:x:1000:1000::/srv:/bin/bash\nother:x:1001:1001::/srv/other:/bin/sh\n")
	write("group", "root:x:0:\nubuntu:x:1000:\nother:x:1001:\nshared:x:2000:ubuntu,other\n")
	write("hosts", "127.0.0.1 localhost\n")
	m := &machine{t: t, log: &logBuffer{}, dir: dir}
	m.fakeMemory(1_000_000, 900_000)
	m.cmd = exec.Command("/proc/self/exe")
	m.cmd.Env = []string{envRole + "=prepare", envDir + "=" + dir, "GORACE=" + os.Getenv("GORACE"), "PATH=" + os.Getenv("PATH")}
	m.cmd.Stdout, m.cmd.Stderr = m.log, m.log
	m.cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWPID | unix.CLONE_NEWNS | unix.CLONE_NEWUTS |
		unix.CLONE_NEWNET | unix.CLONE_NEWIPC}
	tree := cgroupTree()
	if groups && tree == "" {
		t.Log("SKIPPED TIER: no cgroup v2 on this host: the agent runs without cgroups")
	}
	if groups && tree != "" {
		top := filepath.Join(tree, fmt.Sprintf("cloche-agent-test-%d-%p", os.Getpid(), m))
		if err := os.Mkdir(top, 0o755); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { removeTree(t, top) })
		f, err := os.Open(top)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		m.cmd.SysProcAttr.UseCgroupFD, m.cmd.SysProcAttr.CgroupFD = true, int(f.Fd())
		m.cmd.Env = append(m.cmd.Env, envGroups+"=1")
	}
	if err := m.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.stop)
	return m
}

// stop kills process 1 and with it the machine.
func (m *machine) stop() {
	if err := m.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		m.t.Error(err)
	}
	_ = m.cmd.Wait() // killed
	log := m.log.String()
	if strings.Contains(log, "DATA RACE") || strings.Contains(log, "panic") || strings.Contains(log, "fatal error") {
		m.t.Error("the agent reported a fault")
	}
	if m.t.Failed() {
		m.t.Logf("agent's log:\n%s", log)
	}
}

// removeTree removes a cgroup with those below it, which are empty or about to be.
func removeTree(t testing.TB, top string) {
	var dirs []string
	err := filepath.WalkDir(top, func(p string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, p)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	for i := len(dirs) - 1; i >= 0; i-- {
		dir := dirs[i]
		eventually(t, "cgroup "+dir+" is removed", func() bool { return os.Remove(dir) == nil })
	}
}

// eventually polls cond, which has no event to wait for.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	timeout := time.NewTimer(20 * time.Second)
	defer timeout.Stop()
	for !cond() {
		select {
		case <-tick.C:
		case <-timeout.C:
			t.Errorf("timeout: %s", what)
			return
		}
	}
}

// hostPipes is the host's end of a channel.
type hostPipes struct{ r, w *os.File }

func (c *hostPipes) Read(p []byte) (int, error)  { return c.r.Read(p) }
func (c *hostPipes) Write(p []byte) (int, error) { return c.w.Write(p) }
func (c *hostPipes) Close() error                { return errors.Join(c.r.Close(), c.w.Close()) }
func (c *hostPipes) LocalAddr() net.Addr         { return &net.UnixAddr{} }
func (c *hostPipes) RemoteAddr() net.Addr        { return &net.UnixAddr{} }
func (c *hostPipes) SetDeadline(t time.Time) error {
	return errors.Join(c.r.SetReadDeadline(t), c.w.SetWriteDeadline(t))
}
func (c *hostPipes) SetReadDeadline(t time.Time) error  { return c.r.SetReadDeadline(t) }
func (c *hostPipes) SetWriteDeadline(t time.Time) error { return c.w.SetWriteDeadline(t) }

// open hands the agent two pipes, as the helper does, from inside the machine's
// network namespace.
func (m *machine) open(context.Context) (net.Conn, error) {
	toAgent, fromHost, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	toHost, fromAgent, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	for _, f := range []*os.File{fromHost, fromAgent} {
		if _, err := unix.FcntlInt(f.Fd(), unix.F_SETPIPE_SZ, 1<<20); err != nil {
			return nil, err
		}
		if err := unix.SetNonblock(int(f.Fd()), true); err != nil {
			return nil, err
		}
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends in the other namespace
		result <- m.hand(toAgent, fromAgent)
	}()
	if err := errors.Join(<-result, toAgent.Close(), fromAgent.Close()); err != nil {
		return nil, errors.Join(err, fromHost.Close(), toHost.Close())
	}
	return &hostPipes{toHost, fromHost}, nil
}

func (m *machine) hand(in, out *os.File) error {
	ns, err := os.Open(fmt.Sprintf("/proc/%d/ns/net", m.cmd.Process.Pid))
	if err != nil {
		return err
	}
	defer func() { _ = ns.Close() }()
	if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
		return err
	}
	deadline := time.Now().Add(20 * time.Second)
	for {
		err := agent.Hand(in, out)
		if err == nil || !errors.Is(err, unix.ECONNREFUSED) || time.Now().After(deadline) {
			return err
		}
		runtime.Gosched() // it is still starting
	}
}

// client returns a client of m that is closed with the test.
func (m *machine) client() *dial.Client {
	c := dial.New(m.open, testToken, slog.New(slog.DiscardHandler))
	m.t.Cleanup(func() { _ = c.Close() })
	return c
}

func testConfig() guest.Config {
	return guest.Config{Hostname: "testbox", User: "ubuntu", WorkDir: workDir, PIDs: 512,
		Env: map[string]string{"FROM_CONFIG": "config", "BOTH": "config"}}
}

// configured starts a machine and configures it.
func configured(t testing.TB) (*machine, *dial.Client) {
	t.Helper()
	m := newMachine(t)
	c := m.client()
	if _, err := c.Configure(t.Context(), testConfig()); err != nil {
		t.Fatal(err)
	}
	return m, c
}

// result is a command as a whole.
type result struct {
	stdout, stderr []byte
	exit           cloche.Exit
}

// collect reads a stream to its end, acknowledging all.
func collect(s *dial.Stream) (result, error) {
	var r result
	for {
		e, err := s.Next()
		if err != nil {
			return r, err
		}
		switch {
		case e.Exit != nil:
			r.exit = *e.Exit
			return r, s.Close()
		case e.Stream == cloche.Stdout:
			r.stdout = append(r.stdout, e.Data...)
		default:
			r.stderr = append(r.stderr, e.Data...)
		}
		s.Ack(e.Offset)
	}
}

// exec runs a command to its end.
func execute(t testing.TB, c *dial.Client, s guest.Start, stdin io.Reader) result {
	t.Helper()
	st, err := c.Run(t.Context(), cloche.NewCommandID(), s, stdin)
	if err != nil {
		t.Fatal(err)
	}
	r, err := collect(st)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// sh runs a shell script as the default user and returns its standard output.
func sh(t testing.TB, c *dial.Client, script string) result {
	t.Helper()
	return execute(t, c, guest.Start{Argv: []string{"/bin/sh", "-c", script}}, nil)
}

// memory is the resident memory of process 1 in KiB.
func (m *machine) memory() int {
	f, err := os.Open(fmt.Sprintf("/proc/%d/status", m.cmd.Process.Pid))
	if err != nil {
		m.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				m.t.Fatal(err)
			}
			return n
		}
	}
	m.t.Fatal("no VmRSS of the agent")
	return 0
}

func itoa(n int) string { return strconv.Itoa(n) }

func withRequestID(ctx context.Context, id string) context.Context { return trace.WithID(ctx, id) }
