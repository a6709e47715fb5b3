package gvisor_test

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/driver/drivertest"
	"github.com/cloche-dev/cloche/driver/gvisor"
)

func TestMain(m *testing.M) {
	gvisor.Dispatch()
	if arg := os.Getenv(childVar); arg != "" {
		if err := child(arg); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// executable is what the driver runs again: this test if it is static, else a
// program made for it (the race detector needs cgo).
func executable(t *testing.T) string {
	t.Helper()
	if !cgoEnabled {
		return ""
	}
	dir := t.TempDir()
	src := filepath.Join(dir, "main.go")
	text := "package main\n\nimport \"github.com/cloche-dev/cloche/driver/gvisor\"\n\nfunc main() { gvisor.Dispatch() }\n"
	if err := os.WriteFile(src, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	exe := filepath.Join(dir, "exe")
	cmd := exec.Command("go", "build", "-o", exe, src)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return exe
}

func TestSuite(t *testing.T) {
	exe := needHost(t)
	agent := drivertest.Agent(t)
	drivertest.Suite(t, drivertest.Config{
		New: func(t testing.TB, dir string) driver.Driver {
			d, err := gvisor.New(gvisor.Config{Dir: dir, AgentPath: agent, Exe: exe})
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Image:    drivertest.Image(t),
		Isolates: true,
		Crash: func(t testing.TB, dir string, id cloche.SessionID) {
			if err := unix.Kill(gvisor.SandboxPID(t, dir, id), unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
	})
}

// TestAgentLogArrives: what the agent says is in the server's log, and in the
// next server's.
func TestAgentLogArrives(t *testing.T) {
	exe := needHost(t)
	j := newJob(t, drivertest.Agent(t), drivertest.Image(t), exe)
	var m driver.Machine
	for i := range 2 {
		lines := make(chan string, 100)
		d, err := gvisor.New(gvisor.Config{Dir: j.Dir, AgentPath: j.Agent, Exe: exe, Log: slog.New(slog.NewTextHandler(lineWriter(lines), nil))})
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			m, err = d.Start(t.Context(), j.Spec)
		} else {
			m, err = d.Recover(t.Context(), j.Spec.ID)
		}
		if err != nil {
			t.Fatal(err)
		}
		c, err := m.Dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		// No handshake: the agent complains.
		if _, err := c.Write([]byte("GET / HTTP/1.0\r\n\r\n")); err != nil {
			t.Fatal(err)
		}
		select {
		case line := <-lines:
			if !strings.Contains(line, "msg=agent") || !strings.Contains(line, string(j.Spec.ID)) {
				t.Errorf("log line %q", line)
			}
		case <-time.After(30 * time.Second):
			t.Error("no line of the agent arrived")
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if i == 1 {
			err = m.Release(t.Context())
		}
		if err := errors.Join(err, d.Close()); err != nil {
			t.Fatal(err)
		}
	}
}

// lineWriter passes on what is written, as long as there is room.
type lineWriter chan string

func (w lineWriter) Write(p []byte) (int, error) {
	select {
	case w <- string(p):
	default:
	}
	return len(p), nil
}
