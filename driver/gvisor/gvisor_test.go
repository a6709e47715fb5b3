package gvisor_test

import (
	"fmt"
	"os"
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

func TestSuite(t *testing.T) {
	needHost(t)
	agent := drivertest.Agent(t)
	drivertest.Suite(t, drivertest.Config{
		New: func(t testing.TB, dir string) driver.Driver {
			d, err := gvisor.New(gvisor.Config{Dir: dir, AgentPath: agent})
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
