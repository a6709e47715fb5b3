package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/cloche-dev/cloche/internal/testenv"
)

// TestScripts runs testdata/script/*.txtar: the whole behaviour of the built
// binary, against one server. CLOCHE_URL and CLOCHE_TOKEN are set, with a
// project for each script; the server's data directory is $DATA.
func TestScripts(t *testing.T) {
	s := newServer(t, "--stop-sandboxes") // they are in many projects
	testscript.Run(t, testscript.Params{
		Dir:                 filepath.Join("testdata", "script"),
		RequireExplicitExec: true,
		Setup: func(env *testscript.Env) error {
			script := filepath.Base(env.WorkDir)
			env.Setenv("PATH", filepath.Dir(testenv.Cloche(t))+string(os.PathListSeparator)+env.Getenv("PATH"))
			env.Setenv("CLOCHE_URL", s.url)
			env.Setenv("CLOCHE_TOKEN", s.token("scripts", script))
			env.Setenv("DATA", s.data)
			return nil
		},
		Cmds: map[string]func(*testscript.TestScript, bool, []string){
			"exits":   exits,
			"until":   until,
			"rawfile": rawFile,
		},
	})
}

// exits CODE COMMAND ARGS... runs a command and compares its exit code.
func exits(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exits CODE COMMAND ARGS...")
	}
	script := `"$@"; code=$?; [ $code = ` + args[0] + ` ] || { echo "exit code $code, want ` + args[0] + `" >&2; exit 1; }`
	ts.Check(ts.Exec("sh", append([]string{"-c", script, "sh"}, args[1:]...)...))
}

// until COMMAND ARGS... runs a command again and again until it succeeds, or
// with ! until it fails.
func until(ts *testscript.TestScript, neg bool, args []string) {
	if len(args) < 1 {
		ts.Fatalf("usage: until COMMAND ARGS...")
	}
	deadline := time.Now().Add(time.Minute)
	for {
		err := ts.Exec(args[0], args[1:]...)
		if (err == nil) != neg {
			return
		}
		if time.Now().After(deadline) {
			ts.Fatalf("until %s: %v", strings.Join(args, " "), err)
		}
		<-time.After(100 * time.Millisecond)
	}
}

// rawFile DIR makes files whose names and contents are not text.
func rawFile(ts *testscript.TestScript, _ bool, args []string) {
	all := make([]byte, 256)
	for i := range all {
		all[i] = byte(i)
	}
	dir := ts.MkAbs(args[0])
	for _, name := range []string{"\xff\xfe bytes", "new\nline", "ünïcode", "-dash", "*", "trailing ", strings.Repeat("l", 255)} {
		ts.Check(os.WriteFile(filepath.Join(dir, name), all, 0o640))
	}
}
