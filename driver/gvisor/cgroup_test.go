package gvisor

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"syscall"
	"testing"

	"github.com/cloche-dev/cloche"
)

// TestUnifiedOnHybrid exercises what of version 2 needs no controller on a host
// of version 1, whose unified hierarchy has none.
func TestUnifiedOnHybrid(t *testing.T) {
	const mount = cgroupRoot + "/unified"
	if os.Geteuid() != 0 || !isDir(mount) {
		t.Skip("SKIPPED: needs root and a cgroup2 beside version 1")
	}
	v := v2{mount, "/cloche-test-" + string(cloche.NewSessionID())}
	id := cloche.NewSessionID()
	if v.exists(id) {
		t.Error("exists before it was made")
	}
	if procs, err := v.procs(id); err != nil || len(procs) != 0 {
		t.Errorf("procs of none = %v, %v", procs, err)
	}
	if err := os.MkdirAll(v.path(id), 0o755); err != nil {
		t.Fatal(err)
	}
	defer v.tidy()
	dir, err := v.dir(id)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	cmd := exec.Command("sh", "-c", "sleep 1000 & wait")
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	procs, err := v.procs(id)
	if err != nil || len(procs) == 0 || procs[0] != cmd.Process.Pid {
		t.Errorf("procs = %v, %v, want %d first", procs, err, cmd.Process.Pid)
	}
	if names, err := v.list(); err != nil || len(names) != 1 || names[0] != string(id) {
		t.Errorf("list = %v, %v", names, err)
	}
	if err := killAll(t.Context(), v, id); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the process ended by itself")
	}
	for range 2 {
		if err := v.remove(id); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if v.exists(id) {
		t.Error("exists after its removal")
	}
}

// TestCgroup is the life of a cgroup on the hierarchy that this host has, from
// before it is made until after it is gone.
func TestCgroup(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root")
	}
	h, err := openHierarchy("/cloche-test-" + string(cloche.NewSessionID()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.tidy)
	id := cloche.NewSessionID()
	checkGone(t, h, id)
	if err := h.create(id, limits{vcpus: 1, memoryBytes: 32 << 20}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = h.remove(id) }) // if the test failed
	if !h.exists(id) {
		t.Error("does not exist")
	}
	if names, err := h.list(); err != nil || !slices.Contains(names, string(id)) {
		t.Errorf("list = %v, %v", names, err)
	}
	if err := startIn(t, h, id, "head -c 100000000 /dev/zero | tail -c 100000000 >/dev/null").Wait(); err == nil {
		t.Error("a process took more than the cgroup's memory")
	}
	cmd := startIn(t, h, id, "sleep 1000 & wait")
	if procs, err := h.procs(id); err != nil || !slices.Contains(procs, cmd.Process.Pid) {
		t.Errorf("procs = %v, %v, want %d", procs, err, cmd.Process.Pid)
	}
	if err := killAll(t.Context(), h, id); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the process ended by itself")
	}
	u, err := h.stat(id)
	if err != nil || u.cpu <= 0 || u.oomKills == 0 || u.peak < 16<<20 || u.peak > 32<<20 {
		t.Errorf("stat = %+v, %v", u, err)
	}
	if err := h.remove(id); err != nil {
		t.Errorf("remove: %v", err)
	}
	checkGone(t, h, id)
}

// startIn starts a shell that is in the cgroup before it runs anything.
func startIn(t *testing.T, h hierarchy, id cloche.SessionID, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("sh", "-c", "read go; "+script)
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	dir, err := h.dir(id)
	if err != nil {
		t.Fatal(err)
	}
	if dir != nil {
		defer dir.Close()
		cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(h.add(id, cmd.Process.Pid), in.Close()); err != nil {
		t.Fatal(err)
	}
	return cmd
}

// checkGone: what is not there can be asked for, killed and removed.
func checkGone(t *testing.T, h hierarchy, id cloche.SessionID) {
	t.Helper()
	if h.exists(id) {
		t.Error("exists")
	}
	if procs, err := h.procs(id); err != nil || len(procs) != 0 {
		t.Errorf("procs of none = %v, %v", procs, err)
	}
	if err := errors.Join(h.kill(id), h.remove(id)); err != nil {
		t.Errorf("kill or remove of none: %v", err)
	}
	if u, err := h.stat(id); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("stat of none = %+v, %v", u, err)
	}
}

// TestKillAllGivesUp: what does not end is an error, at the end of the context.
func TestKillAllGivesUp(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := killAll(ctx, immortal{}, ""); err == nil {
		t.Error("no error for a process that does not end")
	}
}

type immortal struct{ hierarchy }

func (immortal) threads(cloche.SessionID) (int, error) { return 1, nil }
func (immortal) kill(cloche.SessionID) error           { return nil }

func TestSizeFlags(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	spec := `{"annotations":{"dev.cloche.vcpus":"1","dev.cloche.memory-bytes":"1073741824"}}`
	if err := os.WriteFile(path, []byte(spec), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	fd := "--spec-fd=" + strconv.Itoa(int(f.Fd()))
	for name, c := range map[string]struct{ in, want []string }{
		"boot": {
			[]string{"runsc-sandbox", "--root=/x", "boot", "--cpu-num", "2", fd, "id"},
			[]string{"runsc-sandbox", "--root=/x", "boot", "--cpu-num", "2", fd,
				"--cpu-num=1", "--total-memory=1073741824", "--total-host-memory=536870912", "id"},
		},
		"gofer":   {[]string{"runsc-gofer", "gofer", fd, "id"}, []string{"runsc-gofer", "gofer", fd, "id"}},
		"no spec": {[]string{"runsc-sandbox", "boot", "id"}, []string{"runsc-sandbox", "boot", "id"}},
		"bad fd":  {[]string{"runsc-sandbox", "boot", "--spec-fd=x", "id"}, []string{"runsc-sandbox", "boot", "--spec-fd=x", "id"}},
	} {
		if got := sizeFlags(c.in); !slices.Equal(got, c.want) {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestProbe(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("SKIPPED: needs root")
	}
	for _, c := range Checks(t.Context(), t.TempDir(), "") {
		if c.Name == "" || c.Why == "" || c.Fix == "" {
			t.Errorf("incomplete: %+v", c)
		}
		if c.Err != nil {
			t.Logf("%s: %v", c.Name, c.Err)
		}
	}
	// A starter that is no starter: the check fails and says so.
	if err := checkOverlay(t.Context(), "", "/bin/false"); err == nil {
		t.Error("no error where nothing can be mounted")
	}
}
