package fake_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/driver/drivertest"
	"github.com/cloche-dev/cloche/driver/fake"
	"github.com/cloche-dev/cloche/internal/process"
)

func TestMain(m *testing.M) {
	fake.Dispatch()
	os.Exit(m.Run())
}

func TestSuite(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: the driver suite needs root")
	}
	agent := drivertest.Agent(t)
	drivertest.Suite(t, drivertest.Config{
		New: func(t testing.TB, dir string) driver.Driver {
			d, err := fake.New(dir, agent)
			if err != nil {
				t.Fatal(err)
			}
			return d
		},
		Image: drivertest.Image(t),
		Crash: func(t testing.TB, dir string, id cloche.SessionID) {
			data, err := os.ReadFile(filepath.Join(dir, "machines", string(id), "record.json"))
			if err != nil {
				t.Fatal(err)
			}
			var r struct{ Init process.Process }
			if err := json.Unmarshal(data, &r); err != nil {
				t.Fatal(err)
			}
			if err := unix.Kill(r.Init.PID, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
		},
	})
}
