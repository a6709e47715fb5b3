// Package e2e runs the built binary as its users do: the server as a process,
// the command line, the real SDKs from npm, and programs inside that mean harm.
// It needs root.
package e2e

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
	"github.com/cloche-dev/cloche/internal/failpoint"
	"github.com/cloche-dev/cloche/internal/testenv"
)

// server is a `cloche serve` process on a data directory. It may be killed and
// started again; the data directory and what runs on it stay.
type server struct {
	t    *testing.T
	data string
	cmd  *exec.Cmd
	exit chan error
	url  string
	c    *client.Client
	log  *lockedBuffer
	args []string
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// newServer starts a server on a fresh data directory that has the universal
// image. At the end of the test its sandboxes are stopped, and nothing may be
// left of them.
func newServer(t *testing.T, args ...string) *server {
	t.Helper()
	s := &server{t: t, data: freshData(t), args: args}
	s.start()
	t.Cleanup(s.finish)
	return s
}

// in is the server for a subtest, which must not start or stop it.
func (s *server) in(t *testing.T) *server {
	c := *s
	c.t = t
	return &c
}

// finish stops what runs and checks what is left.
func (s *server) finish() {
	if s.cmd == nil {
		s.start()
	}
	list, _, err := s.c.Sandboxes(context.Background(), client.List{Limit: 100})
	if err != nil {
		s.t.Errorf("list sandboxes at the end: %v", err)
	}
	for _, b := range list {
		if err := s.c.DeleteSandbox(context.Background(), b.Name); err != nil {
			s.t.Errorf("delete %s at the end: %v", b.Name, err)
		}
	}
	s.stop()
	if left := leftovers(s.data); len(left) > 0 {
		s.t.Errorf("left behind:\n  %s", strings.Join(left, "\n  "))
	}
	if s.t.Failed() {
		s.t.Logf("server log:\n%s", tail(s.log.String(), 60))
	}
}

func tail(text string, lines int) string {
	all := strings.Split(text, "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// freshData makes a data directory that shares the images of the template.
func freshData(t *testing.T) string {
	t.Helper()
	testenv.Root(t)
	template := templateData(t)
	dir := filepath.Join(t.TempDir(), "data")
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Join(template, "images"), filepath.Join(dir, "images")); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"cloche.db", "secrets"} {
		if out, err := exec.Command("cp", "-a", filepath.Join(template, name), dir).CombinedOutput(); err != nil {
			t.Fatalf("copy %s: %v\n%s", name, err, out)
		}
	}
	return dir
}

// templateData makes, once for each recipe, a data directory with the universal image
// and nothing else.
func templateData(t *testing.T) string {
	t.Helper()
	dir := filepath.Join(testenv.CacheDir(t), "e2e-data")
	// Another run of the tests may be at it.
	lock, err := os.OpenFile(dir+".lock", os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Close() // releases it
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(testenv.Cloche(t), "image", "build", "universal", "--data", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("cloche image build universal: %v\n%s", err, out)
	}
	return dir
}

// start starts the process and waits until it serves. env is added to its
// environment.
func (s *server) start(env ...string) {
	s.t.Helper()
	if err := s.tryStart(env...); err != nil {
		s.t.Fatalf("start server: %v\n%s", err, tail(s.log.String(), 40))
	}
}

func (s *server) tryStart(env ...string) error {
	args := append([]string{"serve", "--data", s.data, "--listen", "127.0.0.1:0", "--log-level", "debug"}, s.args...)
	cmd := exec.Command(testenv.Cloche(s.t), args...)
	cmd.Env = append(os.Environ(), env...)
	if s.log == nil {
		s.log = &lockedBuffer{}
	}
	cmd.Stderr = s.log
	// Machines must not die with us, nor with a terminal's Ctrl-C.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	line, rerr := bufio.NewReader(stdout).ReadString('\n')
	exit := make(chan error, 1)
	go func() { exit <- cmd.Wait() }() // ends with the process
	if rerr != nil {
		return fmt.Errorf("no ready line (%w): %w", rerr, <-exit)
	}
	url, ok := strings.CutPrefix(strings.TrimSpace(line), "ready ")
	if !ok {
		return fmt.Errorf("first line %q", line)
	}
	s.cmd, s.exit, s.url = cmd, exit, url
	token, err := exec.Command(testenv.Cloche(s.t), "token", "create", "--data", s.data).Output()
	if err != nil {
		return fmt.Errorf("cloche token create: %w", err)
	}
	s.c, err = client.New(url, strings.TrimSpace(string(token)))
	return err
}

// kill ends the process as kill -9 would.
func (s *server) kill() {
	s.t.Helper()
	if err := s.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		s.t.Fatal(err)
	}
	<-s.exit
	s.cmd = nil
}

// died waits until the process has ended by itself.
func (s *server) died(within time.Duration) bool {
	select {
	case <-s.exit:
		s.cmd = nil
		return true
	case <-time.After(within):
		return false
	}
}

// stop ends the process as systemd would, and wants exit code 0.
func (s *server) stop() {
	s.t.Helper()
	if err := s.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		s.t.Fatal(err)
	}
	if err := <-s.exit; err != nil {
		s.t.Errorf("server after SIGTERM: %v", err)
	}
	s.cmd = nil
}

// get fetches a path of the server without a token.
func (s *server) get(path string) (int, string) {
	s.t.Helper()
	resp, err := http.Get(s.url + path)
	if err != nil {
		s.t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// create makes a sandbox.
func (s *server) create(r client.Create) client.View {
	s.t.Helper()
	v, err := s.c.Create(s.t.Context(), r)
	if err != nil {
		s.t.Fatalf("create: %v", err)
	}
	return v
}

// result is a command that has ended.
type result struct {
	stdout, stderr string
	code           int
	cmd            client.Command
}

// try runs a command to its end.
func (s *server) try(id cloche.SessionID, r client.Run) (result, error) {
	var out, errOut bytes.Buffer
	r.Stdout, r.Stderr = &out, &errOut
	cmd, err := s.c.Run(s.t.Context(), id, r)
	res := result{stdout: out.String(), stderr: errOut.String(), cmd: cmd, code: -1}
	if cmd.ExitCode != nil {
		res.code = *cmd.ExitCode
	}
	return res, err
}

// sh runs a shell line to its end and wants an answer, whatever its exit code.
func (s *server) sh(v client.View, line string) result {
	s.t.Helper()
	res, err := s.try(v.Session.ID, client.Run{Command: "bash", Args: []string{"-c", line}})
	if err != nil {
		s.t.Fatalf("%s: %v", line, err)
	}
	return res
}

// leftovers lists what is on the host of a server's machines: processes,
// cgroups, mounts, and files of sessions. The cgroup of a data directory's
// machines is named by it, and every process of a machine is in it.
func leftovers(data string) []string {
	var left []string
	cgroup := machinesCgroup(data)
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d os.DirEntry, err error) error {
		if err == nil && d.IsDir() && strings.Contains(path, cgroup+"/") {
			left = append(left, "cgroup: "+path)
		}
		return nil // cgroups come and go
	})
	procs, _ := filepath.Glob("/proc/[0-9]*/cgroup") // the pattern is valid
	for _, p := range procs {
		if b, err := os.ReadFile(p); err == nil && strings.Contains(string(b), cgroup) {
			cmdline, _ := os.ReadFile(filepath.Join(filepath.Dir(p), "cmdline")) // it may end meanwhile
			left = append(left, "process: "+p+": "+strings.ReplaceAll(string(cmdline), "\x00", " "))
		}
	}
	if mounts, err := os.ReadFile("/proc/self/mountinfo"); err == nil {
		for _, l := range strings.Split(string(mounts), "\n") {
			if strings.Contains(l, data+"/") {
				left = append(left, "mount: "+l)
			}
		}
	}
	for _, pattern := range []string{"pool/tops/*", "run/sessions/*", "run/gvisor/machines/*"} {
		names, _ := filepath.Glob(filepath.Join(data, pattern)) // the pattern is valid
		left = append(left, names...)
	}
	return left
}

// machinesCgroup is the name of the cgroup of a data directory's machines, as
// driver/gvisor makes it.
func machinesCgroup(data string) string {
	sum := sha256.Sum256([]byte(filepath.Join(data, "run", "gvisor")))
	return "cloche-" + hex.EncodeToString(sum[:4])
}

// failpointEnv arms a failpoint in a server.
func failpointEnv(name string) string { return failpoint.EnvVar + "=" + name }
