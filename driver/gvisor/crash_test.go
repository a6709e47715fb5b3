package gvisor_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
	"github.com/cloche-dev/cloche/driver/drivertest"
	"github.com/cloche-dev/cloche/driver/gvisor"
	"github.com/cloche-dev/cloche/internal/failpoint"
)

// childVar makes TestMain run child instead of the tests.
const childVar = "CLOCHE_TEST_GVISOR_CHILD"

// job is what a child process does, from start to end.
type job struct {
	Dir, Agent, Exe string
	Spec            driver.Spec
	Release         bool // after the start
}

// child is the life of a server in short. A failpoint kills it on the way.
func child(arg string) error {
	var j job
	if err := json.Unmarshal([]byte(arg), &j); err != nil {
		return err
	}
	ctx := context.Background()
	d, err := gvisor.New(gvisor.Config{Dir: j.Dir, AgentPath: j.Agent, Exe: j.Exe})
	if err != nil {
		return err
	}
	m, err := d.Start(ctx, j.Spec)
	if err != nil {
		return err
	}
	if j.Release {
		if err := m.Release(ctx); err != nil {
			return err
		}
	}
	return d.Close()
}

// failpoints lists the marks in the sources of this package.
func failpoints(t *testing.T) []string {
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, f := range files {
		src, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`failpoint\.Here\("([^"]+)"\)`).FindAllSubmatch(src, -1) {
			names = append(names, string(m[1]))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

// TestKilledAtFailpoints kills a server at every failpoint. The next server
// finds what is left, says how it ended or goes on with it, and removes it.
func TestKilledAtFailpoints(t *testing.T) {
	exe := needHost(t)
	agent, image := drivertest.Agent(t), drivertest.Image(t)
	names := failpoints(t)
	if len(names) < 10 {
		t.Fatalf("found only the failpoints %v", names)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			j := newJob(t, agent, image, exe)
			j.Release = !strings.HasPrefix(name, "gvisor/start/")
			j.run(t, name)
			j.checkRemove(t, name)
		})
	}
}

// TestKilledAtAnyTime kills a server, and nothing else, at many moments of a
// start, so that what it has started goes on without it.
func TestKilledAtAnyTime(t *testing.T) {
	exe := needHost(t)
	agent, image := drivertest.Agent(t), drivertest.Image(t)
	for delay := 5 * time.Millisecond; delay < 400*time.Millisecond; delay = delay * 4 / 3 {
		t.Run(fmt.Sprint(delay), func(t *testing.T) {
			j := newJob(t, agent, image, exe)
			ctx, cancel := context.WithTimeout(t.Context(), delay)
			defer cancel()
			cmd := j.command(t, ctx, "")
			err := cmd.Run()
			// It ended just when it was to be killed, or it was killed.
			exit := (*exec.ExitError)(nil)
			if err != nil && !errors.As(err, &exit) && !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
			j.checkRemove(t, "")
		})
	}
}

// needHost skips the test where no machine can run, and returns what the driver
// is to run again.
func needHost(t *testing.T) (exe string) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: machines need root")
	}
	exe = executable(t)
	if err := gvisor.Probe(t.Context(), "", exe); err != nil {
		t.Skipf("SKIPPED: this host cannot run gVisor: %v", err)
	}
	return exe
}

func newJob(t *testing.T, agent, image, exe string) job {
	dir := t.TempDir()
	j := job{Dir: filepath.Join(dir, "driver"), Agent: agent, Exe: exe, Spec: driver.Spec{
		ID: cloche.NewSessionID(), Hostname: "box", VCPUs: 1, MemoryMiB: 256,
		Root: driver.Root{Image: image, Top: filepath.Join(dir, "top")},
	}}
	if err := os.Mkdir(j.Spec.Root.Top, 0o700); err != nil {
		t.Fatal(err)
	}
	return j
}

func (j job) command(t *testing.T, ctx context.Context, point string) *exec.Cmd {
	arg, err := json.Marshal(j)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(ctx, "/proc/self/exe")
	cmd.Env = append(os.Environ(), childVar+"="+string(arg), failpoint.EnvVar+"="+point)
	return cmd
}

// run lets the child run into the failpoint.
func (j job) run(t *testing.T, point string) {
	var stderr bytes.Buffer
	cmd := j.command(t, t.Context(), point)
	cmd.Stderr = &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.Sys().(syscall.WaitStatus).Signal() != syscall.SIGKILL {
		t.Fatalf("the child was not killed at %s: %v\n%s", point, err, &stderr)
	}
}

// checkRemove is the next server.
func (j job) checkRemove(t *testing.T, point string) {
	ctx := t.Context()
	d, err := gvisor.New(gvisor.Config{Dir: j.Dir, AgentPath: j.Agent, Exe: j.Exe})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	ids, err := d.List(ctx)
	if err != nil {
		t.Fatal(err)
	}
	m, err := d.Recover(ctx, j.Spec.ID)
	if listed := slices.Contains(ids, j.Spec.ID); listed != (err == nil) {
		t.Errorf("listed: %v, Recover: %v", listed, err)
	}
	switch {
	case point == "gvisor/start/after-started":
		c, err := m.Dial(ctx)
		if err != nil {
			t.Errorf("the machine that was started does not go on: %v", err)
			break
		}
		_ = c.Close()
	case err == nil && strings.HasPrefix(point, "gvisor/start/"):
		if exit, err := m.Wait(ctx); err != nil || exit.Cause != driver.ExitCrashed {
			t.Errorf("exit = %+v, %v, want crashed", exit, err)
		}
	case err == nil && strings.HasPrefix(point, "gvisor/release/"):
		if exit, err := m.Wait(ctx); err != nil || exit.Cause != driver.ExitKilled {
			t.Errorf("exit = %+v, %v, want killed", exit, err)
		}
	}
	for range 2 {
		if err := d.Remove(ctx, j.Spec.ID); err != nil {
			t.Errorf("Remove: %v", err)
		}
	}
	for _, l := range drivertest.Leftovers(t, j.Dir, j.Spec.ID) {
		t.Errorf("left over: %s", l)
	}
	if ids, err := d.List(ctx); err != nil || len(ids) != 0 {
		t.Errorf("List = %v, %v", ids, err)
	}
}
