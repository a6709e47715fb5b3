package gvisor_test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

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

// executable is what the driver runs again: this test, or under the race
// detector, which needs cgo, a static program made for it.
func executable(t *testing.T) string {
	t.Helper()
	if !raceEnabled {
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
