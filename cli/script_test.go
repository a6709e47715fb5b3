package cli

import (
	"context"
	"io"
	"log"
	"net/http/httptest"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"cloche": func() {
			// As cmd/cloche does it.
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			os.Exit(Main(ctx, os.Args[1:], os.Environ(), os.Stdin, os.Stdout, os.Stderr,
				Doctor(), Bench(), Command{Name: "extra", Help: "Given by the caller.", Cmd: &extraCmd{}}))
		},
	})
}

// extraCmd stands for a command that the caller of Main adds.
type extraCmd struct {
	Word string `arg:"" optional:""`
}

func (e *extraCmd) Run(_ context.Context, env *Env) error {
	_, err := io.WriteString(env.Stdout, "extra "+e.Word+"\n")
	return err
}

// TestScripts runs testdata/*.txtar: the whole behaviour of the command line
// against the fake server. CLOCHE_URL and CLOCHE_TOKEN are set, and the files
// of sandbox NAME are in $BOX/NAME.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata",
		Setup: func(env *testscript.Env) error {
			f := newFake(filepath.Join(env.WorkDir, "box"))
			s := httptest.NewUnstartedServer(f.handler())
			s.Config.ErrorLog = log.New(io.Discard, "", 0)
			s.Start()
			env.Defer(func() {
				s.CloseClientConnections()
				f.close()
				s.Close()
			})
			// A program with the race detector sleeps for 1 s at its exit.
			env.Setenv("GORACE", "atexit_sleep_ms=10")
			env.Setenv("CLOCHE_URL", s.URL)
			env.Setenv("CLOCHE_TOKEN", fakeToken)
			env.Setenv("BOX", f.root)
			env.Values["fake"] = f
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"requests": requests,
			"exits":    exits,
			"boxes":    boxes,
			"rawfile":  rawFile,
		},
	})
}

// requests METHOD-AND-PATH-PREFIX asserts that such a request was made.
func requests(ts *testscript.TestScript, neg bool, args []string) {
	f := ts.Value("fake").(*fake)
	f.mu.Lock()
	defer f.mu.Unlock()
	found := false
	for _, r := range f.requests {
		found = found || strings.HasPrefix(r, strings.Join(args, " "))
	}
	if found == neg {
		ts.Fatalf("requests: %s", strings.Join(f.requests, "\n"))
	}
}

// exits CODE COMMAND ARGS... runs a command and compares its exit code.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND ARGS...")
	}
	script := `"$@"; code=$?; [ $code = ` + args[0] + ` ] || { echo "exit code $code, want ` + args[0] + `" >&2; exit 1; }`
	ts.Check(ts.Exec("sh", append([]string{"-c", script, "sh"}, args[1:]...)...))
}

// boxes NAME... asserts which sandboxes there are.
func boxes(ts *testscript.TestScript, _ bool, want []string) {
	f := ts.Value("fake").(*fake)
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.boxes) != len(want) {
		ts.Fatalf("%d sandboxes, want %d", len(f.boxes), len(want))
	}
	for _, name := range want {
		if f.boxes[name] == nil {
			ts.Fatalf("no sandbox %s", name)
		}
	}
}

// rawFile DIR makes files whose names and contents are not text.
func rawFile(ts *testscript.TestScript, _ bool, args []string) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	dir := ts.MkAbs(args[0])
	for _, name := range []string{"\xff\xfe bytes", "new\nline", "ünïcode", strings.Repeat("l", 200)} {
		ts.Check(os.WriteFile(filepath.Join(dir, name), all, 0o640))
	}
}
