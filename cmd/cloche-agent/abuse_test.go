package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/guest/dial"
)

func TestR1_ForkBombLeavesRoom(t *testing.T) {
	m := newMachine(t)
	c := m.client()
	cfg := testConfig()
	cfg.PIDs = 64
	if _, err := c.Configure(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	bomb := "import os, time\nprint(flush=True)\nwhile True:\n  try: os.fork(); os.setsid()\n  except OSError: time.sleep(0.005)"
	id, st := begin(t, c, guest.Start{Argv: []string{"python3", "-c", bomb}})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	eventually(t, "the bomb has gone off", func() bool {
		st, err := c.Run(ctx, cloche.NewCommandID(), script("true"), nil)
		if err == nil {
			_ = st.Close()
		}
		return cloche.ErrorCode(err) == cloche.CodeExhausted
	})
	for range 20 {
		if _, err := c.Ping(ctx); err != nil {
			t.Fatalf("the agent does not answer: %v", err)
		}
	}
	if r := execute(t, c, guest.Start{Sudo: true, Argv: []string{"echo", "alive"}}, nil); string(r.stdout) != "alive\n" {
		t.Errorf("a command beside the bomb: %+v", r)
	}
	if _, err := c.Signal(ctx, id, int(unix.SIGKILL)); err != nil {
		t.Fatal(err)
	}
	if r, err := collect(st); err != nil || r.exit.Signal != 9 && r.exit.Code == 0 {
		t.Errorf("the bomb: %+v, %v", r.exit, err)
	}
	eventually(t, "commands of the user work again", func() bool {
		st, err := c.Run(t.Context(), cloche.NewCommandID(), script("echo again"), nil)
		if cloche.ErrorCode(err) == cloche.CodeExhausted {
			return false
		}
		if err != nil {
			t.Fatal(err)
		}
		r, err := collect(st)
		return err == nil && string(r.stdout) == "again\n"
	})
}

func TestR1_MassKillByAUser(t *testing.T) {
	m, c := configured(t)
	if r := sh(t, c, "kill -9 -1; kill -9 1 2>/dev/null || echo refused"); r.exit.Signal != 9 && !strings.Contains(string(r.stdout), "refused") {
		t.Errorf("%+v", r)
	}
	if r := sh(t, c, "kill -9 1 2>/dev/null || echo refused; kill -9 $(ls /proc | grep '^[0-9]*$') 2>/dev/null"); string(r.stdout) != "refused\n" {
		t.Errorf("%q %+v", r.stdout, r.exit)
	}
	if r := execute(t, c, guest.Start{Sudo: true, Argv: []string{"sh", "-c", "for s in HUP INT QUIT TERM USR1 USR2 ALRM XCPU 34 64; do kill -$s 1; done; echo sent"}}, nil); string(r.stdout) != "sent\n" {
		t.Errorf("signals by root: %q %q", r.stdout, r.stderr)
	}
	// Not even while a thread of the agent has the user's ids.
	var wg sync.WaitGroup
	stop := make(chan struct{})
	wg.Go(func() {
		for {
			select {
			case <-stop:
				return
			default:
				_ = c.MakeDir(context.Background(), guest.FileRequest{Path: []byte("made")})
			}
		}
	})
	sh(t, c, "i=0; while [ $i -lt 300 ]; do kill -9 1; kill -9 -1; for p in /proc/1/task/*; do kill -9 ${p##*/}; done; i=$((i+1)); done 2>/dev/null")
	close(stop)
	wg.Wait()
	if r := sh(t, c, "echo alive"); string(r.stdout) != "alive\n" || m.cmd.ProcessState != nil {
		t.Errorf("after a mass kill: %+v", r)
	}
}

func TestR1_NoDescriptorsLeft(t *testing.T) {
	m, c := configured(t)
	limit := unix.Rlimit{Cur: 60, Max: 60}
	if err := unix.Prlimit(m.cmd.Process.Pid, unix.RLIMIT_NOFILE, &limit, nil); err != nil {
		t.Fatal(err)
	}
	var ids []cloche.CommandID
	refused := 0
	for range 30 {
		id := cloche.NewCommandID()
		st, err := c.Run(t.Context(), id, guest.Start{Argv: []string{"sleep", "1000"}}, nil)
		switch {
		case err == nil:
			ids = append(ids, id)
			defer func() { _ = st.Close() }()
		case cloche.ErrorCode(err) == cloche.CodeExhausted:
			refused++
		default:
			t.Fatalf("with no descriptors: %v", err)
		}
	}
	if len(ids) == 0 || refused == 0 {
		t.Fatalf("%d started, %d refused", len(ids), refused)
	}
	if _, err := read(t, c, "/etc/passwd"); err != nil && cloche.ErrorCode(err) != cloche.CodeExhausted {
		t.Errorf("a file with no descriptors: %v", err)
	}
	if _, err := c.Ping(t.Context()); err != nil {
		t.Errorf("ping with no descriptors: %v", err)
	}
	for _, id := range ids {
		// The kill takes a descriptor itself; there is one, because each command that
		// was refused gave back what it had.
		if _, err := c.Signal(t.Context(), id, 9); err != nil {
			t.Errorf("kill with no descriptors: %v", err)
		}
	}
	eventually(t, "commands work again", func() bool {
		st, err := c.Run(t.Context(), cloche.NewCommandID(), script("echo again"), nil)
		if err != nil {
			return false
		}
		r, err := collect(st)
		return err == nil && string(r.stdout) == "again\n"
	})
}

func TestR1_FullDisk(t *testing.T) {
	_, c := configured(t)
	sh(t, c, "head -c 100000000 /dev/zero > "+smallDisk+"/filler; head -c 100000000 /dev/zero > /srv/box/unused & wait; rm -f /srv/box/unused")
	if r := sh(t, c, "cd "+smallDisk+" && echo works"); string(r.stdout) != "works\n" {
		t.Errorf("a command on a full disk: %+v", r)
	}
	big := make([]byte, 1<<20)
	_, err := c.WriteFiles(t.Context(), guest.FileRequest{WorkDir: []byte(smallDisk)}, strings.NewReader(string(archive(t, false, file{name: "big", data: big}))))
	if cloche.ErrorCode(err) != cloche.CodeExhausted || !strings.Contains(err.Error(), "no space") {
		t.Errorf("a write into a full disk: %v", err)
	}
	if r := sh(t, c, "ls -A "+smallDisk); string(r.stdout) != "filler\n" {
		t.Errorf("a failed write left %q", r.stdout)
	}
}

// fakeMemory puts a file that the test writes in the place of /proc/meminfo.
func (m *machine) fakeMemory(total, free int) {
	m.t.Helper()
	content := fmt.Sprintf("MemTotal:     %10d kB\nMemFree:      %10d kB\nMemAvailable: %10d kB\n", total, free, free)
	name := filepath.Join(m.dir, "meminfo")
	f, err := os.OpenFile(name, os.O_RDWR|os.O_CREATE, 0o644)
	if err != nil {
		m.t.Fatal(err)
	}
	if _, err := f.WriteAt([]byte(content), 0); err != nil {
		m.t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		m.t.Fatal(err)
	}
}

func TestE6_GuardKillsTheGreediestWithCauseOOM(t *testing.T) {
	bothWays(t, func(t *testing.T, m *machine, c *dial.Client) {
		_, small := begin(t, c, script("echo; read x < /dev/zero"))
		hog := "import time; x = b'x' * 80_000_000; print('ready', flush=True); time.sleep(1000)"
		_, big := begin(t, c, guest.Start{Argv: []string{"python3", "-c", hog}})
		_, parent := begin(t, c, script("python3 -c \""+strings.Replace(hog, "80_", "60_", 1)+"\"; exit $?"))
		m.fakeMemory(1_000_000, 50_000)
		r, err := collect(big)
		m.fakeMemory(1_000_000, 900_000)
		if err != nil || r.exit.Code != 137 || r.exit.Cause != cloche.CauseOOM {
			t.Errorf("the greediest: %+v, %v", r.exit, err)
		}
		m.fakeMemory(1_000_000, 50_000)
		r, err = collect(parent)
		m.fakeMemory(1_000_000, 900_000)
		if err != nil || r.exit.Code != 137 || r.exit.Cause != cloche.CauseOOM || r.exit.Signal != 0 {
			t.Errorf("the parent of the next: %+v, %v", r.exit, err)
		}
		_ = small.Close()
		p, err := c.Ping(t.Context())
		if err != nil || p.OOMKills < 2 {
			t.Errorf("ping %+v, %v", p, err)
		}
		if r := sh(t, c, "echo alive"); string(r.stdout) != "alive\n" || r.exit.Cause != "" {
			t.Errorf("%+v", r)
		}
	})
}

func TestShutdownEndsEverything(t *testing.T) {
	m, c := configured(t)
	_, polite := begin(t, c, script("trap 'echo bye; exit 5' TERM; echo; while :; do sleep 0.05; done"))
	_, stubborn := begin(t, c, script("trap '' TERM; echo; while :; do sleep 0.05; done"))
	sh(t, c, "setsid sleep 4444 > /dev/null 2>&1 & kill -STOP $!")
	if err := c.Shutdown(t.Context(), 500*time.Millisecond); err != nil {
		t.Fatal(err)
	}
	if r, err := collect(polite); err != nil || r.exit.Code != 5 || !strings.HasSuffix(string(r.stdout), "bye\n") {
		t.Errorf("polite: %+v, %v", r, err)
	}
	if r, err := collect(stubborn); err != nil || r.exit.Signal != 9 {
		t.Errorf("stubborn: %+v, %v", r, err)
	}
	if _, err := c.Run(t.Context(), cloche.NewCommandID(), script("true"), nil); cloche.ErrorCode(err) != cloche.CodeStopping {
		t.Errorf("a command after the shutdown: %v", err)
	}
	if err := c.Shutdown(t.Context(), time.Second); err != nil {
		t.Errorf("again: %v", err)
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", m.cmd.Process.Pid, m.cmd.Process.Pid))
	if err != nil || strings.TrimSpace(string(b)) != "" {
		t.Errorf("children left: %q, %v", b, err)
	}
}

func TestConfigureOnce(t *testing.T) {
	m := newMachine(t)
	c := m.client()
	if _, err := c.Run(t.Context(), cloche.NewCommandID(), script("true"), nil); cloche.ErrorCode(err) != cloche.CodeConflict {
		t.Errorf("a command before the configuration: %v", err)
	}
	for _, bad := range []guest.Config{{WorkDir: "relative"}, {WorkDir: "/x", User: "nobody-here"}, {WorkDir: "/etc/passwd"},
		{WorkDir: "/x", Hostname: "a b"}, {WorkDir: "/x", Env: map[string]string{"": ""}}, {WorkDir: "/x", PIDs: -1}} {
		if _, err := c.Configure(t.Context(), bad); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	cfg := testConfig()
	cfg.WorkDir = "/srv/deep/below/box"
	want := guest.Identity{UID: 1000, GID: 1000, Home: "/srv", WorkDir: cfg.WorkDir}
	for range 2 {
		if id, err := c.Configure(t.Context(), cfg); err != nil || id != want {
			t.Errorf("%+v, %v", id, err)
		}
	}
	if _, err := c.Configure(t.Context(), testConfig()); cloche.ErrorCode(err) != cloche.CodeConflict {
		t.Errorf("another configuration: %v", err)
	}
	r := sh(t, c, "hostname; stat -c %U:%a . ..; getent hosts testbox >/dev/null && echo known; grep -c testbox /etc/hosts")
	if got := string(r.stdout); got != "testbox\nubuntu:755\nroot:755\nknown\n1\n" {
		t.Errorf("%q %q", got, r.stderr)
	}
	if _, err := c.SetClock(t.Context(), time.Now()); err != nil {
		t.Errorf("set clock: %v", err)
	}
	p, err := c.Ping(t.Context())
	if err != nil || time.Since(p.Time).Abs() > time.Minute || p.AgentBytes <= 0 || p.Commands != 1 {
		t.Errorf("ping %+v, %v", p, err)
	}
}
