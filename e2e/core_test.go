package e2e

import (
	"archive/tar"
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

func sha256sum(b []byte) string {
	sum := sha256.Sum256(b)
	return hex.EncodeToString(sum[:])
}

// TestMainPath is DESIGN's main path, by our own client.
func TestMainPath(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{Name: "main", Env: map[string]string{"BASE": "b"}})
	if v.Sandbox.Name != "main" || v.Session.WorkDir != cloche.DefaultWorkDir {
		t.Errorf("view %+v", v)
	}
	res := s.sh(v, `id -un; pwd; echo $BASE $HOME; echo err >&2; exit 3`)
	if res.stdout != "ubuntu\n/vercel/sandbox\nb /vercel\n" || res.stderr != "err\n" || res.code != 3 {
		t.Errorf("got %+v", res)
	}
	if res := s.sh(v, "sudo id -un; sudo sh -c 'echo $HOME $SUDO_USER'"); res.stdout != "root\n/root ubuntu\n" {
		t.Errorf("sudo: %+v", res)
	}
	if _, err := s.c.StopSession(t.Context(), v.Session.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := s.try(v.Session.ID, client.Run{Command: "true"}); cloche.ErrorCode(err) != cloche.CodeGone {
		t.Errorf("run after the stop: %v", err)
	}
	if log := logOf(s, v.Session.ID, res.cmd.ID); log != "ubuntu\n/vercel/sandbox\nb /vercel\nerr\n" {
		t.Errorf("log after the stop: %q", log)
	}
}

// TestSizeInside: what a program sees of its machine is the sandbox's size.
func TestSizeInside(t *testing.T) {
	s := newServer(t)
	for _, vcpus := range []int{1, 2, 4} {
		v := s.create(client.Create{VCPUs: vcpus})
		want := fmt.Sprintf("%d %d %d", vcpus, vcpus, vcpus)
		res := s.sh(v, `echo $(nproc) $(python3 -c 'import os; print(os.cpu_count())') $(node -p 'os.cpus().length')`)
		if strings.TrimSpace(res.stdout) != want {
			t.Errorf("%d vCPUs: %q, want %q (%s)", vcpus, res.stdout, want, res.stderr)
		}
		mem := int64(vcpus) * cloche.MemoryMiBPerVCPU << 20
		res = s.sh(v, `free -b | awk '/Mem:/{print $2}'; df -B1 --output=size /dev/shm | tail -1`)
		var total, shm int64
		if _, err := fmt.Sscan(res.stdout, &total, &shm); err != nil {
			t.Fatalf("%q: %v", res.stdout, err)
		}
		if total > mem || total < mem*95/100 || shm > mem/2 || shm < mem*45/100 {
			t.Errorf("%d vCPUs: memory %d, /dev/shm %d, want %d and half of it", vcpus, total, shm, mem)
		}
		if err := s.c.DeleteSandbox(t.Context(), v.Sandbox.Name); err != nil {
			t.Error(err)
		}
	}
}

// TestF1_Sizes writes and reads files around every size that a buffer could
// have, and compares digests.
func TestF1_Sizes(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	sizes := []int64{0, 1}
	for _, n := range []int64{4 << 10, 18 << 10, 64 << 10, 96 << 10, 128 << 10, 1 << 20, 16 << 20, 32 << 20} {
		sizes = append(sizes, n-1, n, n+1)
	}
	if os.Getenv("CLOCHE_SOAK") != "" {
		sizes = append(sizes, 2<<30)
	}
	for _, size := range sizes {
		h := sha256.New()
		name := fmt.Sprintf("dir/%d", size)
		if err := s.c.WriteFiles(t.Context(), v.Session.ID, cloche.DefaultWorkDir,
			tarOf(t, name, size, io.TeeReader(rand.Reader, h))); err != nil {
			t.Fatalf("write %d bytes: %v", size, err)
		}
		want := hex.EncodeToString(h.Sum(nil))
		if res := s.sh(v, "sha256sum "+name); !strings.HasPrefix(res.stdout, want) {
			t.Errorf("%d bytes arrived as %q, want %s", size, res.stdout, want)
		}
		f, err := s.c.ReadFile(t.Context(), v.Session.ID, name)
		if err != nil {
			t.Fatalf("read %d bytes: %v", size, err)
		}
		back := sha256.New()
		n, err := io.Copy(back, f)
		if err != nil || n != size || hex.EncodeToString(back.Sum(nil)) != want {
			t.Errorf("%d bytes came back as %d, %v", size, n, err)
		}
		if err := f.Close(); err != nil {
			t.Error(err)
		}
	}
}

// tarOf streams an archive of one file.
func tarOf(t *testing.T, name string, size int64, content io.Reader) io.Reader {
	r, w := io.Pipe()
	go func() { // ends when the reader has all or goes away
		tw := tar.NewWriter(w)
		err := tw.WriteHeader(&tar.Header{Name: name, Size: size, Mode: 0o644, Typeflag: tar.TypeReg})
		if err == nil {
			_, err = io.CopyN(tw, content, size)
		}
		w.CloseWithError(errors.Join(err, tw.Close()))
	}()
	return r
}

// TestE6_ExitTruth: 128+n for signals, 127 and 126, timeouts, and causes.
func TestE6_ExitTruth(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	for _, n := range []int{1, 2, 6, 9, 11, 15} {
		res := s.sh(v, fmt.Sprintf("kill -%d $$", n))
		if res.code != 128+n || res.cmd.Signal != n {
			t.Errorf("signal %d: code %d, signal %d", n, res.code, res.cmd.Signal)
		}
	}
	res, err := s.try(v.Session.ID, client.Run{Command: "no-such-program"})
	if err != nil || res.code != 127 || !strings.Contains(res.stderr, "no-such-program") {
		t.Errorf("missing executable: %+v, %v", res, err)
	}
	res, err = s.try(v.Session.ID, client.Run{Command: "/etc/passwd"})
	if err != nil || res.code != 126 {
		t.Errorf("not executable: %+v, %v", res, err)
	}
	start := time.Now()
	res, err = s.try(v.Session.ID, client.Run{Command: "bash", Timeout: 500 * time.Millisecond,
		Args: []string{"-c", "setsid sleep 1000 & while true; do :; done"}})
	if err != nil || res.code != 137 || res.cmd.Cause != cloche.CauseTimeout || time.Since(start) > 20*time.Second {
		t.Errorf("timeout: %+v, %v after %s", res, err, time.Since(start))
	}
	if res := s.sh(v, "pgrep -x sleep"); res.stdout != "" {
		t.Errorf("a child with its own session outlived the timeout: %q", res.stdout)
	}
	if _, err := s.try(v.Session.ID, client.Run{Command: "true", WorkDir: "/no/such/dir"}); cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("missing directory: %v", err)
	}
}

// TestE4_BackgroundChild: a command ends when its first process does, whoever
// holds its pipe; what it left behind goes on.
func TestE4_BackgroundChild(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	start := time.Now()
	res := s.sh(v, "(while true; do echo noise; sleep 0.1; done) & echo started; exit 4")
	if res.code != 4 || !strings.Contains(res.stdout, "started") || time.Since(start) > 20*time.Second {
		t.Errorf("got %+v after %s", res, time.Since(start))
	}
	if res := s.sh(v, "sleep 0.5; pgrep -fc 'echo noise'"); strings.TrimSpace(res.stdout) == "0" {
		t.Error("the background process did not survive its parent")
	}
}

// TestE5_Stdin: EOF at once unless the caller sends some, and byte for byte.
func TestE5_Stdin(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	if res := s.sh(v, "cat; echo done"); res.stdout != "done\n" {
		t.Errorf("without input: %+v", res)
	}
	in := make([]byte, 3<<20)
	if _, err := rand.Read(in); err != nil {
		t.Fatal(err)
	}
	res, err := s.try(v.Session.ID, client.Run{Command: "cat", Stdin: bytes.NewReader(in)})
	if err != nil || res.stdout != string(in) {
		t.Errorf("%d bytes went through cat as %d, %v", len(in), len(res.stdout), err)
	}
}

// TestTimeout: a session stops by itself, also if its server was away.
func TestTimeout(t *testing.T) {
	s := newServer(t)
	away := s.create(client.Create{Timeout: 3 * time.Second})
	s.kill()
	<-time.After(3 * time.Second)
	s.start()
	here := s.create(client.Create{Timeout: 2 * time.Second})
	for _, v := range []client.View{away, here} {
		deadline := time.Now().Add(20 * time.Second)
		for {
			got, err := s.c.GetSandbox(t.Context(), v.Sandbox.Name, false)
			if err != nil {
				t.Fatal(err)
			}
			if cloche.SessionState(got.Session.Status) == cloche.Stopped {
				break
			}
			if time.Now().After(deadline) {
				t.Fatalf("still %s", got.Session.Status)
			}
			<-time.After(100 * time.Millisecond)
		}
	}
}

// TestTwentyAtOnce: all succeed.
func TestTwentyAtOnce(t *testing.T) {
	s := newServer(t)
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			v, err := s.c.Create(t.Context(), client.Create{})
			if err != nil {
				t.Errorf("create %d: %v", i, err)
				return
			}
			res, err := s.try(v.Session.ID, client.Run{Command: "echo", Args: []string{"hello"}})
			if err != nil || res.stdout != "hello\n" {
				t.Errorf("in %d: %+v, %v", i, res, err)
			}
		})
	}
	wg.Wait()
}

// TestHealthAndMetrics: no token needed, and the numbers move.
func TestHealthAndMetrics(t *testing.T) {
	s := newServer(t)
	s.create(client.Create{})
	if code, body := s.get("/healthz"); code != 200 || !strings.Contains(body, `"sessions":1`) {
		t.Errorf("healthz: %d %s", code, body)
	}
	code, body := s.get("/metrics")
	if code != 200 || !strings.Contains(body, "cloche_sessions_running 1") || !strings.Contains(body, "cloche_http_request_duration_seconds_count") {
		t.Errorf("metrics: %d %s", code, body)
	}
}

// TestU7_OneRequestID: a request's id is in its answer and in the log.
func TestU7_OneRequestID(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	res, err := s.try(v.Session.ID, client.Run{Command: "true"})
	if err != nil || res.code != 0 {
		t.Fatalf("%+v, %v", res, err)
	}
	if log := s.log.String(); !strings.Contains(log, "request=req_") {
		t.Errorf("no request id in the log:\n%s", tail(log, 20))
	}
}

// TestSecretsAtRest: a stolen database holds no token and no environment.
func TestSecretsAtRest(t *testing.T) {
	s := newServer(t)
	s.create(client.Create{Env: map[string]string{"KEY": "needle-in-the-database"}})
	names, err := filepath.Glob(filepath.Join(s.data, "cloche.db*"))
	if err != nil || len(names) == 0 {
		t.Fatalf("%v, %v", names, err)
	}
	for _, name := range names {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, needle := range []string{"needle-in-the-database", "clo_"} {
			if bytes.Contains(b, []byte(needle)) {
				t.Errorf("%s holds %q", filepath.Base(name), needle)
			}
		}
	}
}

// TestCPULimit: two busy loops in a sandbox of one vCPU get one CPU's time, and
// the accounting says so.
func TestCPULimit(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{VCPUs: 1})
	start := time.Now()
	if _, err := s.try(v.Session.ID, client.Run{Command: "bash", Timeout: 3 * time.Second,
		Args: []string{"-c", "while :; do :; done & while :; do :; done"}}); err != nil {
		t.Fatal(err)
	}
	busy := time.Since(start)
	ended, err := s.c.StopSession(t.Context(), v.Session.ID)
	if err != nil {
		t.Fatal(err)
	}
	cpu := ended.ActiveCPU.Duration()
	// The start of the machine costs some; on a loaded host the loops get less.
	if cpu < busy/4 || cpu > busy*13/10+time.Second {
		t.Errorf("%s of CPU time in %s of two loops on one vCPU", cpu, busy)
	}
}
