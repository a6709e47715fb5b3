package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

// hostFacts name the host of a measurement.
type hostFacts struct {
	CPU       string `json:"cpu"`
	Cores     int    `json:"cores"`
	MemoryMiB int    `json:"memoryMiB"`
	Kernel    string `json:"kernel"`
	Load      string `json:"load"` // average over a minute, before the measurement
}

func readHost(root string) hostFacts {
	h := hostFacts{CPU: "unknown CPU", Cores: runtime.NumCPU()}
	if s := field(filepath.Join(root, "proc/cpuinfo"), "model name"); s != "" {
		h.CPU = s
	}
	kib, _ := strconv.Atoi(strings.TrimSuffix(field(filepath.Join(root, "proc/meminfo"), "MemTotal"), " kB"))
	h.MemoryMiB = kib >> 10
	var u unix.Utsname
	if unix.Uname(&u) == nil {
		h.Kernel = unix.ByteSliceToString(u.Release[:])
	}
	load, _ := os.ReadFile(filepath.Join(root, "proc/loadavg"))
	h.Load, _, _ = strings.Cut(string(load), " ")
	return h
}

// field returns the value of the first line "key : value" of a file.
func field(file, key string) string {
	b, _ := os.ReadFile(file)
	for line := range strings.Lines(string(b)) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == key {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// kilobytes reads a field of a process in kB as MB (10^6 bytes).
func kilobytes(file, key string) (float64, error) {
	n, err := strconv.ParseFloat(strings.TrimSuffix(field(file, key), " kB"), 64)
	if err != nil {
		return 0, fmt.Errorf("%s has no %s", file, key)
	}
	return n * 1024 / 1e6, nil
}

// residentMB is the RSS of a process.
func residentMB(pid int) (float64, error) {
	if pid == 0 {
		return 0, errors.New("no --pid was given")
	}
	return kilobytes(fmt.Sprintf("/proc/%d/status", pid), "VmRSS")
}

// pssMB is the proportional set size of a process: what it shares with others
// counts in parts.
func pssMB(proc string, pid int) (float64, error) {
	if pid == 0 {
		return 0, errors.New("no --pid was given")
	}
	return kilobytes(filepath.Join(proc, strconv.Itoa(pid), "smaps_rollup"), "Pss")
}

// sandboxesPSS adds up the processes of sessions. A process is one of theirs if
// a session's id stands in the name of its cgroup or in its command line.
func sandboxesPSS(proc string, sessions []cloche.SessionID) (mb float64, processes int, err error) {
	dirs, err := os.ReadDir(proc)
	if err != nil {
		return 0, 0, err
	}
	for _, d := range dirs {
		pid, err := strconv.Atoi(d.Name())
		if err != nil || !belongs(filepath.Join(proc, d.Name()), sessions) {
			continue
		}
		pss, err := pssMB(proc, pid)
		if errors.Is(err, fs.ErrPermission) {
			return 0, 0, err
		}
		if err != nil {
			continue // it has ended, or has no memory of its own: a kernel thread or a zombie
		}
		mb += pss
		processes++
	}
	return mb, processes, nil
}

func belongs(dir string, sessions []cloche.SessionID) bool {
	for _, name := range []string{"cgroup", "cmdline"} {
		b, _ := os.ReadFile(filepath.Join(dir, name))
		for _, id := range sessions {
			if strings.Contains(string(b), string(id)) {
				return true
			}
		}
	}
	return false
}

// startTime is how long our own server may take to come up: it may have to
// recover.
const startTime = 2 * time.Minute

// ownServer is a server that bench started.
type ownServer struct {
	cmd    *exec.Cmd
	client *client.Client
	log    *tail
	stdout sync.WaitGroup
}

// startServer runs this binary's serve on a free port, and makes a token.
func startServer(ctx context.Context, env *Env, data string) (*ownServer, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("this program's file: %w", err)
	}
	s := &ownServer{log: &tail{}}
	s.cmd = exec.Command(self, "serve", "--data", data, "--listen", "127.0.0.1:0")
	s.cmd.Stderr = s.log
	// Ctrl-C is ours: the server ends after the sandboxes are removed.
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p := startProgress(env, "starting a server", nil)
	defer p.Done()
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the server: %w", err)
	}
	ready := make(chan string, 1)
	s.stdout.Go(func() {
		line, _ := bufio.NewReader(out).ReadString('\n')
		ready <- strings.TrimSpace(line)
		_, _ = io.Copy(io.Discard, out)
	})
	var line string
	select {
	case line = <-ready:
	case <-time.After(startTime):
	case <-ctx.Done():
	}
	address, ok := strings.CutPrefix(line, "ready ")
	if !ok {
		return nil, errors.Join(fmt.Errorf("the server did not come up: %s", s.log), s.Close())
	}
	token, err := exec.CommandContext(ctx, self, "token", "create", "--data", data).Output()
	if err == nil {
		s.client, err = client.New(address, strings.TrimSpace(string(token)))
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("make a token: %w", err), s.Close())
	}
	return s, nil
}

func (s *ownServer) pid() int { return s.cmd.Process.Pid }

// Close ends the server and waits for it.
func (s *ownServer) Close() error {
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("end the server: %w", err)
	}
	s.stdout.Wait()
	if err := s.cmd.Wait(); err != nil {
		return fmt.Errorf("the server ended badly: %w: %s", err, s.log)
	}
	return nil
}

// maxTail is how much of a log is kept to explain a failure.
const maxTail = 4 << 10

// tail keeps the end of what is written. It is safe for concurrent use.
type tail struct {
	mu sync.Mutex
	b  []byte
}

// Write keeps p.
func (t *tail) Write(p []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.b = append(t.b, p...)
	t.b = t.b[max(0, len(t.b)-maxTail):]
	return len(p), nil
}

// String is the end of what was written.
func (t *tail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return strings.TrimSpace(string(t.b))
}
