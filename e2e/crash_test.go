package e2e

import (
	"bytes"
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
	"github.com/cloche-dev/cloche/internal/testenv"
)

// failpoints lists every failpoint.Here in the sources that the server reaches.
// It reads the code, so that a new one is in the test by being there.
func failpoints(t *testing.T) []string {
	t.Helper()
	var names []string
	root := testenv.ModuleRoot(t)
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") {
			return err
		}
		f, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		ast.Inspect(f, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok || len(call.Args) != 1 {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || sel.Sel.Name != "Here" {
				return true
			}
			lit, ok := call.Args[0].(*ast.BasicLit)
			if !ok {
				t.Errorf("%s: a failpoint's name is a literal", path)
				return true
			}
			name, err := strconv.Unquote(lit.Value)
			if err != nil {
				t.Error(err)
			}
			names = append(names, name)
			return true
		})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(names)
	for i := 1; i < len(names); i++ {
		if names[i] == names[i-1] {
			t.Errorf("two failpoints are called %s", names[i])
		}
	}
	if len(names) < 10 {
		t.Fatalf("only %d failpoints: %v", len(names), names)
	}
	return names
}

// elsewhere are failpoints that the life of a sandbox does not pass; the test
// named kills at them.
var elsewhere = map[string]string{
	"image/":                  "image: TestCrash",
	"fake/":                   "driver/fake is for tests alone",
	"auth/":                   "control: TestL1KilledAtAnyStepConverges, a first start",
	"control/end/before-name": "control: as above, a creation that fails",
	"control/end/after-name":  "control: as above, a creation that fails",
	"control/extend/":         "control: as above, an extension",
	"control/update/":         "control: as above, an update",
}

// TestCrashAtEveryFailpoint lives through a sandbox's life once for each
// failpoint, with a server that is killed there, and starts the server again:
// it comes up, what it had answered is still so, the state converges, and at
// the end nothing is left on the host.
func TestCrashAtEveryFailpoint(t *testing.T) {
	testenv.Root(t)
	for _, name := range failpoints(t) {
		skip := false
		for prefix := range elsewhere {
			skip = skip || strings.HasPrefix(name, prefix)
		}
		if skip {
			continue
		}
		t.Run(name, func(t *testing.T) { crashAt(t, name) })
	}
}

func crashAt(t *testing.T, name string) {
	s := newServer(t)
	// A bystander from before must survive everything.
	bystander := s.create(client.Create{Name: "bystander"})
	long, err := s.c.Start(t.Context(), bystander.Session.ID, client.Run{
		Command: "bash", Args: []string{"-c", "for i in $(seq 1000); do echo line $i; sleep 0.02; done"}})
	if err != nil {
		t.Fatal(err)
	}
	s.stop()
	// Some are passed in the start itself: then there is no server to talk to.
	if err := s.tryStart(failpointEnv(name)); err == nil {
		live(s)
	}
	if s.cmd != nil {
		if !s.died(5 * time.Second) {
			// Nothing of a sandbox's life passes it, or it kills a helper process.
			if !strings.Contains(s.log.String(), "failpoint") && !strings.HasPrefix(name, "gvisor/") {
				t.Errorf("the server did not die at %s: nothing passes it", name)
			}
			s.kill()
		}
	}
	s.start()

	// The one that was being made is there whole, or not at all.
	if v, err := s.c.GetSandbox(t.Context(), "victim", false); err == nil {
		settled(s, v.Session.ID)
	} else if cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("get victim: %v", err)
	}
	// The name is free, or the sandbox can be deleted and made again.
	if err := s.c.DeleteSandbox(t.Context(), "victim"); err != nil && cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("delete victim: %v", err)
	}
	v := s.create(client.Create{Name: "victim"})
	if res := s.sh(v, "echo again"); res.stdout != "again\n" || res.code != 0 {
		t.Errorf("in the new victim: %+v", res)
	}

	// The bystander runs on, its command too, and its log is whole.
	if res := s.sh(bystander, "echo here"); res.stdout != "here\n" {
		t.Errorf("in the bystander: %+v", res)
	}
	if _, err := s.c.Kill(t.Context(), bystander.Session.ID, long.ID, 9); err != nil {
		t.Errorf("kill the bystander's command: %v", err)
	}
	wholeLog(s, bystander.Session.ID, long.ID)
}

// live is a sandbox's life; errors are expected, for the server dies in it.
func live(s *server) {
	ctx, cancel := context.WithTimeout(s.t.Context(), 20*time.Second)
	defer cancel()
	v, err := s.c.Create(ctx, client.Create{Name: "victim"})
	if err != nil {
		return
	}
	if _, err := s.c.Run(ctx, v.Session.ID, client.Run{Command: "true"}); err != nil {
		return
	}
	if _, err := s.c.StopSession(ctx, v.Session.ID); err != nil {
		return
	}
	if _, err := s.c.GetSandbox(ctx, "victim", true); err != nil {
		return
	}
	_ = s.c.DeleteSandbox(ctx, "victim") // as above
}

// settled waits until a session is in a state that can last.
func settled(s *server, id cloche.SessionID) {
	s.t.Helper()
	deadline := time.Now().Add(time.Minute)
	for time.Now().Before(deadline) {
		v, err := s.c.GetSandbox(s.t.Context(), "victim", false)
		if err != nil {
			s.t.Errorf("get victim: %v", err)
			return
		}
		switch cloche.SessionState(v.Session.Status) {
		case cloche.Running, cloche.Stopped, cloche.Failed, cloche.Aborted:
			return
		}
		<-time.After(50 * time.Millisecond)
	}
	s.t.Errorf("session %s did not settle within a minute", id)
}

// wholeLog reads the log of a counting command and wants every line once.
func wholeLog(s *server, id cloche.SessionID, cmd cloche.CommandID) {
	s.t.Helper()
	var out bytes.Buffer
	if err := s.c.Logs(s.t.Context(), id, cmd, true, &out, &out); err != nil {
		s.t.Errorf("logs: %v", err)
	}
	lines := strings.Split(strings.TrimSuffix(out.String(), "\n"), "\n")
	if len(lines) < 5 {
		s.t.Errorf("the log has only %d lines", len(lines))
	}
	for i, l := range lines {
		if want := "line " + strconv.Itoa(i+1); l != want {
			s.t.Errorf("line %d of the log is %q, want %q", i+1, l, want)
			return
		}
	}
}

// TestKilledServerIsTakenOver kills the server at random moments of a busy
// sandbox and wants every byte of a large, hashed output exactly once.
func TestKilledServerIsTakenOver(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	cmd, err := s.c.Start(t.Context(), v.Session.ID, client.Run{
		Command: "bash", Args: []string{"-c", "for i in $(seq 400); do echo line $i; sleep 0.01; done; exit 7"}})
	if err != nil {
		t.Fatal(err)
	}
	for range 3 {
		s.kill()
		s.start()
	}
	wholeLog(s, v.Session.ID, cmd.ID)
	got, err := s.c.WaitCommand(t.Context(), v.Session.ID, cmd.ID)
	if err != nil || got.ExitCode == nil || *got.ExitCode != 7 {
		t.Errorf("exit: %+v, %v", got, err)
	}
	if n := strings.Count(logOf(s, v.Session.ID, cmd.ID), "\n"); n != 400 {
		t.Errorf("%d lines, want 400", n)
	}
}

func logOf(s *server, id cloche.SessionID, cmd cloche.CommandID) string {
	s.t.Helper()
	var out bytes.Buffer
	if err := s.c.Logs(s.t.Context(), id, cmd, false, &out, &out); err != nil {
		s.t.Errorf("logs: %v", err)
	}
	return out.String()
}

// TestOutputWhileNoServerRuns: a command goes on, and blocks at the bound of
// what its agent keeps rather than lose anything.
func TestOutputWhileNoServerRuns(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{})
	cmd, err := s.c.Start(t.Context(), v.Session.ID, client.Run{
		Command: "bash", Args: []string{"-c", "sleep 0.5; seq 1000000 | sha256sum >/tmp/sum; seq 1000000"}})
	if err != nil {
		t.Fatal(err)
	}
	s.kill()
	<-time.After(3 * time.Second)
	s.start()
	got, err := s.c.WaitCommand(t.Context(), v.Session.ID, cmd.ID)
	if err != nil || got.ExitCode == nil || *got.ExitCode != 0 {
		t.Fatalf("exit: %+v, %v", got, err)
	}
	want := s.sh(v, "cat /tmp/sum").stdout
	if sum := sha256sum([]byte(logOf(s, v.Session.ID, cmd.ID))); !strings.HasPrefix(want, sum) {
		t.Errorf("the log has sum %s, want %s", sum, want)
	}
}
