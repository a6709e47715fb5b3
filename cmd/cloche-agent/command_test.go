package main

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/guest/dial"
)

// bothWays runs a test on a machine with cgroups and on one without.
func bothWays(t *testing.T, f func(t *testing.T, m *machine, c *dial.Client)) {
	for name, groups := range map[string]bool{"cgroups": true, "sessions": false} {
		t.Run(name, func(t *testing.T) {
			m := startMachine(t, groups)
			c := m.client()
			if _, err := c.Configure(t.Context(), testConfig()); err != nil {
				t.Fatal(err)
			}
			f(t, m, c)
		})
	}
}

// begin starts a shell script and waits for its first line of output.
func begin(t *testing.T, c *dial.Client, s guest.Start) (cloche.CommandID, *dial.Stream) {
	t.Helper()
	id := cloche.NewCommandID()
	st, err := c.Run(t.Context(), id, s, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = st.Close() })
	e, err := st.Next()
	if err != nil || e.Exit != nil {
		t.Fatalf("first event %+v, %v", e, err)
	}
	return id, st
}

func script(s string) guest.Start { return guest.Start{Argv: []string{"/bin/sh", "-c", s}} }

// alive counts the processes of the machine whose command line begins with mark.
func alive(t *testing.T, c *dial.Client, mark string) int {
	t.Helper()
	r := execute(t, c, guest.Start{User: "root", Argv: []string{"/bin/sh", "-c",
		`for p in /proc/[0-9]*; do tr '\0' ' ' < $p/cmdline 2>/dev/null; echo; done | grep -c "^$0" || true`, mark}}, nil)
	n := 0
	if _, err := fmt.Sscan(string(r.stdout), &n); err != nil {
		t.Fatalf("count: %q %q %v", r.stdout, r.stderr, err)
	}
	return n
}

func TestRunReportsOutputAndExit(t *testing.T) {
	bothWays(t, func(t *testing.T, _ *machine, c *dial.Client) {
		r := execute(t, c, guest.Start{Argv: []string{"sh", "-c", "pwd; id -un; echo oops >&2; exit 7"}}, nil)
		if got, want := string(r.stdout), workDir+"\nubuntu\n"; got != want {
			t.Errorf("stdout %q, want %q", got, want)
		}
		if string(r.stderr) != "oops\n" || r.exit.Code != 7 || r.exit.Signal != 0 || r.exit.Cause != "" || r.exit.Duration <= 0 {
			t.Errorf("stderr %q, exit %+v", r.stderr, r.exit)
		}
		if r := sh(t, c, "echo direct > /dev/stdout; echo to-stderr > /dev/stderr"); string(r.stdout) != "direct\n" || string(r.stderr) != "to-stderr\n" {
			t.Errorf("opening /dev/stdout: %q %q", r.stdout, r.stderr)
		}
	})
}

func TestE4_ExitWhileChildHoldsThePipe(t *testing.T) {
	bothWays(t, func(t *testing.T, _ *machine, c *dial.Client) {
		r := sh(t, c, "(while :; do echo noise; echo tick >> ticks; done) & echo mine; exit 3")
		if r.exit.Code != 3 || !bytes.Contains(r.stdout, []byte("mine\n")) {
			t.Fatalf("exit %+v, stdout %.100q", r.exit, r.stdout)
		}
		// The child neither blocks nor dies, with nobody to read its output.
		before := len(sh(t, c, "cat ticks").stdout)
		eventually(t, "the child goes on", func() bool { return len(sh(t, c, "cat ticks").stdout) > before+200_000/len("noise\n")*len("tick\n") })
		all, err := c.Status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Signal(t.Context(), all[0].ID, int(unix.SIGKILL)); err != nil {
			t.Fatal(err)
		}
		size := string(sh(t, c, "sleep 0.1; wc -c < ticks").stdout)
		if again := string(sh(t, c, "sleep 0.1; wc -c < ticks").stdout); again != size {
			t.Errorf("the child that was left behind outlived a kill of its command: %s, then %s", size, again)
		}
	})
}

func TestE4_TenThousandOrphansLeaveNoZombie(t *testing.T) {
	_, c := configured(t)
	n := 10_000
	if raceEnabled {
		n = 3_000
	}
	r := sh(t, c, fmt.Sprintf("i=0; while [ $i -lt %d ]; do (: &); i=$((i+1)); done; echo done", n))
	if string(r.stdout) != "done\n" || r.exit.Code != 0 {
		t.Fatalf("%q %q %+v", r.stdout, r.stderr, r.exit)
	}
	eventually(t, "no zombie", func() bool {
		r := sh(t, c, "grep -h ^State: /proc/[0-9]*/status 2>/dev/null | grep -c Z")
		return string(r.stdout) == "0\n"
	})
}

func TestE5_StdinEndsUnlessSent(t *testing.T) {
	_, c := configured(t)
	if r := execute(t, c, guest.Start{Argv: []string{"cat"}}, nil); r.exit.Code != 0 || len(r.stdout) != 0 {
		t.Errorf("cat without input: %+v", r)
	}
	data := make([]byte, 5<<20)
	_, _ = rand.Read(data) // never fails
	r := execute(t, c, guest.Start{Argv: []string{"cat"}}, bytes.NewReader(data))
	if r.exit.Code != 0 || sha256.Sum256(r.stdout) != sha256.Sum256(data) {
		t.Errorf("cat of %d bytes: %d came back, %+v", len(data), len(r.stdout), r.exit)
	}
	// A command that does not read its input ends all the same.
	if r := execute(t, c, guest.Start{Argv: []string{"head", "-c", "1"}}, bytes.NewReader(data)); r.exit.Code != 0 || len(r.stdout) != 1 {
		t.Errorf("head: %+v", r)
	}
	pr, pw := io.Pipe() // an input that never ends
	defer func() { _ = pw.Close() }()
	if r := execute(t, c, guest.Start{Argv: []string{"true"}}, pr); r.exit.Code != 0 {
		t.Errorf("true with an open input: %+v", r)
	}
}

func TestE6_EverySignalIsReported(t *testing.T) {
	_, c := configured(t)
	harmless := map[int]bool{17: true, 18: true, 19: true, 20: true, 21: true, 22: true, 23: true, 28: true}
	for n := 1; n <= 64; n++ {
		if harmless[n] {
			continue
		}
		id := cloche.NewCommandID()
		st, err := c.Run(t.Context(), id, guest.Start{Argv: []string{"sleep", "1000"}}, nil)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Signal(t.Context(), id, n); err != nil {
			t.Fatalf("signal %d: %v", n, err)
		}
		r, err := collect(st)
		if err != nil {
			t.Fatal(err)
		}
		if r.exit.Code != 128+n || r.exit.Signal != n || r.exit.Cause != "" {
			t.Errorf("signal %d: %+v", n, r.exit)
		}
		if err := c.Forget(t.Context(), id); err != nil {
			t.Errorf("forget: %v", err)
		}
	}
	for _, n := range []int{0, -1, 65} {
		id, _ := begin(t, c, script("echo; sleep 1000"))
		if _, err := c.Signal(t.Context(), id, n); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("signal %d: %v", n, err)
		}
	}
}

// TestE6_WhatTheHostIgnoresIsNotIgnored: a server that was started in the
// background of a script ignores SIGINT; its commands do not.
func TestE6_WhatTheHostIgnoresIsNotIgnored(t *testing.T) {
	signal.Ignore(unix.SIGINT, unix.SIGQUIT)
	defer signal.Reset(unix.SIGINT, unix.SIGQUIT)
	_, c := configured(t)
	for _, n := range []unix.Signal{unix.SIGINT, unix.SIGQUIT} {
		id, st := begin(t, c, script("echo; exec sleep 1000"))
		if _, err := c.Signal(t.Context(), id, int(n)); err != nil {
			t.Fatal(err)
		}
		if r, err := collect(st); err != nil || r.exit.Signal != int(n) {
			t.Errorf("%v: %+v, %v", n, r.exit, err)
		}
	}
}

func TestE7_TimeoutKillsAllOfTheCommand(t *testing.T) {
	bothWays(t, func(t *testing.T, _ *machine, c *dial.Client) {
		s := script("setsid sleep 4242 & setsid sh -c 'trap \"\" TERM; sleep 4242; sleep 4242' & (sleep 4242 &); trap '' TERM; sleep 4242; sleep 4242")
		s.Timeout = 300 * time.Millisecond
		r := execute(t, c, s, nil)
		if r.exit.Code != 137 || r.exit.Signal != 9 || r.exit.Cause != cloche.CauseTimeout {
			t.Errorf("exit %+v", r.exit)
		}
		eventually(t, "every process is gone", func() bool { return alive(t, c, "sleep 4242") == 0 })
		s = script("exit 4")
		s.Timeout = time.Hour
		if r := execute(t, c, s, nil); r.exit.Code != 4 || r.exit.Cause != "" {
			t.Errorf("a command within its timeout: %+v", r.exit)
		}
	})
}

func TestSignalsReachProcessesThatCalledSetsid(t *testing.T) {
	bothWays(t, func(t *testing.T, _ *machine, c *dial.Client) {
		for _, sig := range []unix.Signal{unix.SIGTERM, unix.SIGKILL} {
			id, st := begin(t, c, script("setsid sleep 4343 & (setsid sleep 4343 &); setsid setsid sleep 4343 & sleep 0.2; echo; wait"))
			if n := alive(t, c, "sleep 4343"); n != 3 {
				t.Fatalf("%d children", n)
			}
			if _, err := c.Signal(t.Context(), id, int(sig)); err != nil {
				t.Fatal(err)
			}
			r, err := collect(st)
			if err != nil || r.exit.Signal != int(sig) {
				t.Errorf("%v: %+v, %v", sig, r.exit, err)
			}
			eventually(t, "every process is gone", func() bool { return alive(t, c, "sleep 4343") == 0 })
		}
	})
}

func TestCommandsThatCannotBeExecuted(t *testing.T) {
	_, c := configured(t)
	sh(t, c, "echo text > plain; echo text > notexec; chmod 755 notexec; printf '#!/no/such/interpreter\\n' > bad; chmod 755 bad; mkdir dir")
	for _, tc := range []struct {
		name string
		code int
		says string
	}{
		{"no-such-command", 127, "command not found"},
		{"./missing", 127, "no such file"},
		{"./bad", 127, "interpreter"},
		{"./plain", 126, "permission denied"},
		{"./dir", 126, "directory"},
		{"./notexec", 126, "format"},
	} {
		r := execute(t, c, guest.Start{Argv: []string{tc.name, "arg"}}, nil)
		if r.exit.Code != tc.code || r.exit.Signal != 0 || !strings.Contains(string(r.stderr), tc.says) ||
			!strings.Contains(string(r.stderr), tc.name) || len(r.stdout) != 0 {
			t.Errorf("%s: %+v, stderr %q", tc.name, r.exit, r.stderr)
		}
	}
}

func TestF2_ArgumentsUpToTheKernelsLimit(t *testing.T) {
	_, c := configured(t)
	arg := strings.Repeat("x", 100<<10)
	r := execute(t, c, guest.Start{Argv: []string{"printf", "%s", arg}}, nil)
	if string(r.stdout) != arg {
		t.Errorf("an argument of 100 KiB: %d bytes came back, %+v %q", len(r.stdout), r.exit, r.stderr)
	}
	_, err := c.Run(t.Context(), cloche.NewCommandID(), guest.Start{Argv: []string{"true", strings.Repeat("x", 200<<10)}}, nil)
	if cloche.ErrorCode(err) != cloche.CodeInvalid || !strings.Contains(err.Error(), "longer than the kernel takes") {
		t.Errorf("an argument of 200 KiB: %v", err)
	}
	data := strings.Repeat("y", 200<<10)
	if r := execute(t, c, guest.Start{Argv: []string{"cat"}}, strings.NewReader(data)); string(r.stdout) != data {
		t.Errorf("200 KiB on standard input: %d bytes came back", len(r.stdout))
	}
}

func TestEnvironment(t *testing.T) {
	_, c := configured(t)
	env := func(s guest.Start) map[string]string {
		t.Helper()
		s.Argv = []string{"env", "-0"}
		out := map[string]string{}
		for kv := range strings.SplitSeq(strings.TrimRight(string(execute(t, c, s, nil).stdout), "\x00"), "\x00") {
			k, v, _ := strings.Cut(kv, "=")
			out[k] = v
		}
		return out
	}
	check := func(got map[string]string, want map[string]string) {
		t.Helper()
		for k, v := range want {
			if got[k] != v {
				t.Errorf("%s=%q, want %q", k, got[k], v)
			}
		}
	}
	own := map[string]string{"OWN": "1\n2", "BOTH": "start"}
	base := map[string]string{"FROM_CONFIG": "config", "BOTH": "start", "OWN": "1\n2", "LANG": "C.UTF-8"}
	got := env(guest.Start{Env: own})
	check(got, base)
	check(got, map[string]string{"HOME": "/srv", "USER": "ubuntu", "LOGNAME": "ubuntu", "SHELL": "/bin/bash", "SUDO_USER": ""})
	if len(got) != 9 { // and PATH
		t.Errorf("more in the environment than was put there: %v", got)
	}
	got = env(guest.Start{Env: own, Sudo: true})
	check(got, base)
	check(got, map[string]string{"HOME": "/root", "USER": "root", "LOGNAME": "root", "SUDO_USER": "ubuntu", "SUDO_UID": "1000", "SUDO_GID": "1000"})
	check(env(guest.Start{User: "other"}), map[string]string{"HOME": "/srv/other", "USER": "other", "SHELL": "/bin/sh"})
	check(env(guest.Start{Env: map[string]string{"PATH": "/bin:/x"}}), map[string]string{"PATH": "/bin:/x"})

	r := execute(t, c, guest.Start{Argv: []string{"env"}, Env: map[string]string{"PATH": "/nowhere"}}, nil)
	if r.exit.Code != 127 {
		t.Errorf("a command is looked up in the PATH that it will have: %+v", r)
	}
	for _, k := range []string{"", "A=B", "A\x00"} {
		if _, err := c.Run(t.Context(), cloche.NewCommandID(), guest.Start{Argv: []string{"true"}, Env: map[string]string{k: ""}}, nil); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("variable %q: %v", k, err)
		}
	}
}

func TestUsersAndDirectories(t *testing.T) {
	_, c := configured(t)
	for _, tc := range []struct {
		user, sudo bool
		name, want string
	}{
		{name: "", want: "1000 1000 1000 2000"},
		{name: "root", want: "0 0 0"},
		{name: "other", want: "1001 1001 1001 2000"},
		{name: "1001", want: "1001 1001 1001 2000"},
		{name: "4711", want: "4711 0 0"},
		{name: "4711:shared", want: "4711 2000 2000"},
		{name: "", sudo: true, want: "0 0 0"},
	} {
		r := execute(t, c, guest.Start{User: tc.name, Sudo: tc.sudo, Argv: []string{"sh", "-c", "echo $(id -u) $(id -g) $(id -G)"}}, nil)
		if got := strings.TrimSpace(string(r.stdout)); got != tc.want {
			t.Errorf("user %q: %s, want %s (%s)", tc.name, got, tc.want, r.stderr)
		}
	}
	sh(t, c, "mkdir -p sub/dir private; chmod 700 private; ln -s sub link")
	for dir, want := range map[string]string{"": workDir, "sub/dir": workDir + "/sub/dir", "sub/..": workDir, "/": "/", "link": workDir + "/sub"} {
		r := execute(t, c, guest.Start{Argv: []string{"/bin/pwd", "-P"}, WorkDir: dir}, nil)
		if got := strings.TrimSpace(string(r.stdout)); got != want {
			t.Errorf("directory %q: %s, want %s", dir, got, want)
		}
	}
	bad := []guest.Start{
		{WorkDir: "no/such/dir"}, {WorkDir: "/etc/passwd"}, {WorkDir: "private", User: "other"}, {WorkDir: "a\x00b"},
		{User: "nobody-here"}, {User: "root:nogroup-here"}, {User: "99999999999"}, {Argv: []string{""}}, {Argv: []string{"a\x00b"}}, {Timeout: -1},
	}
	for _, s := range bad {
		if s.Argv == nil {
			s.Argv = []string{"true"}
		}
		_, err := c.Run(t.Context(), cloche.NewCommandID(), s, nil)
		if cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%+v: %v", s, err)
		}
		if s.WorkDir == "no/such/dir" && !strings.Contains(err.Error(), workDir+"/no/such/dir") {
			t.Errorf("the missing directory is not named: %v", err)
		}
	}
}

func TestCommandIDs(t *testing.T) {
	_, c := configured(t)
	id, st := begin(t, c, script("echo; sleep 1000"))
	if _, err := c.Run(t.Context(), id, script("true"), nil); cloche.ErrorCode(err) != cloche.CodeConflict {
		t.Errorf("a second command under an id: %v", err)
	}
	if err := c.Forget(t.Context(), id); cloche.ErrorCode(err) != cloche.CodeConflict {
		t.Errorf("forget while it runs: %v", err)
	}
	for _, bad := range []cloche.CommandID{"..", "cmd_../../../../../../../../x", "x"} {
		if _, err := c.Run(t.Context(), bad, script("true"), nil); err == nil {
			t.Errorf("the id %q was taken", bad)
		}
	}
	if _, err := c.Signal(t.Context(), cloche.NewCommandID(), 9); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("signal to nobody: %v", err)
	}
	if _, err := c.Signal(t.Context(), id, 9); err != nil {
		t.Fatal(err)
	}
	if _, err := collect(st); err != nil {
		t.Fatal(err)
	}
	all, err := c.Status(t.Context())
	if err != nil || len(all) != 1 || all[0].ID != id || all[0].Exit == nil || all[0].Exit.Signal != 9 || all[0].Output != 1 {
		t.Errorf("status %+v, %v", all, err)
	}
	if err := c.Forget(t.Context(), id); err != nil {
		t.Error(err)
	}
	if all, err := c.Status(t.Context()); err != nil || len(all) != 0 {
		t.Errorf("status after forget %+v, %v", all, err)
	}
	if _, err := c.Attach(t.Context(), id, 0); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("attach after forget: %v", err)
	}
}

func TestPTY(t *testing.T) {
	_, c := configured(t)
	st, err := c.Run(t.Context(), cloche.NewCommandID(), guest.Start{
		Argv: []string{"sh", "-c", "tty >/dev/null && echo terminal $TERM; stty size; read x; echo line $x; trap 'echo got-int' INT; echo ready; sleep 1000; stty size; read x; echo line $x; read x || echo eof"},
		PTY:  &cloche.WindowSize{Cols: 91, Rows: 17}}, readerFunc(input(t, "hello\n", "\x03", "after\n", "\x04")))
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	resized := false
	for {
		e, err := st.Next()
		if err != nil {
			t.Fatalf("after %q: %v", out.String(), err)
		}
		if e.Exit != nil {
			if e.Exit.Code != 0 {
				t.Errorf("exit %+v", e.Exit)
			}
			break
		}
		if e.Stream != cloche.Stdout {
			t.Errorf("a terminal has one stream, not %s", e.Stream)
		}
		out.Write(e.Data)
		if !resized && strings.Contains(out.String(), "ready") {
			resized = true
			if err := st.Resize(cloche.WindowSize{Cols: 33, Rows: 11}); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := st.Close(); err != nil {
		t.Error(err)
	}
	for _, want := range []string{"terminal xterm-256color", "17 91", "line hello", "got-int", "line after", "eof", "11 33"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("no %q in %q", want, out.String())
		}
	}
	r := execute(t, c, guest.Start{Argv: []string{"cat"}, PTY: &cloche.WindowSize{Cols: 80, Rows: 24}}, nil)
	if r.exit.Code != 0 {
		t.Errorf("a terminal without input is at its end: %+v", r.exit)
	}
	r = execute(t, c, guest.Start{Argv: []string{"sh", "-c", "exec <&- >&- 2>&-; sleep 0.1; echo back > /dev/tty; exit 6"}, PTY: &cloche.WindowSize{Cols: 80, Rows: 24}}, nil)
	if r.exit.Code != 6 || !strings.Contains(string(r.stdout), "back") {
		t.Errorf("a terminal that was closed for a while: %q, %+v", r.stdout, r.exit)
	}
}

type readerFunc func([]byte) (int, error)

func (f readerFunc) Read(p []byte) (int, error) { return f(p) }

// input gives each piece in a read of its own, 300 ms apart: a terminal drops
// what stands in its queue when an interrupt comes.
func input(t *testing.T, pieces ...string) func([]byte) (int, error) {
	return func(p []byte) (int, error) {
		if len(pieces) == 0 {
			<-t.Context().Done()
			return 0, io.EOF
		}
		<-time.After(300 * time.Millisecond)
		n := copy(p, pieces[0])
		pieces = pieces[1:]
		return n, nil
	}
}
