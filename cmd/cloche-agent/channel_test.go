package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
	"github.com/cloche-dev/cloche/guest/agent"
	"github.com/cloche-dev/cloche/guest/dial"
)

// shake opens a channel, says hello and returns the answer.
func shake(t *testing.T, m *machine, h guest.Hello) (guest.Welcome, error) {
	t.Helper()
	conn, err := m.open(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if err := guest.WriteHello(conn, h); err != nil {
		t.Fatal(err)
	}
	return guest.ReadWelcome(bufio.NewReader(conn), h.Nonce)
}

func TestE3_VersionsThatDoNotMeetAreSaidAtOnce(t *testing.T) {
	m := newMachine(t)
	for _, r := range [][2]int{{guest.MaxVersion + 1, guest.MaxVersion + 5}, {-3, guest.MinVersion - 1}, {3, 2}} {
		w, err := shake(t, m, guest.Hello{Nonce: "n", Token: testToken, Min: r[0], Max: r[1]})
		if err != nil || w.Error == nil || w.Error.Code != guest.CodeVersion || w.Min != guest.MinVersion || w.Max != guest.MaxVersion {
			t.Errorf("%v: %+v, %v", r, w, err)
		}
	}
	w, err := shake(t, m, guest.Hello{Nonce: "n", Token: testToken, Min: 0, Max: 1000})
	if err != nil || w.Error != nil || w.Version != guest.MaxVersion {
		t.Errorf("a host that speaks more: %+v, %v", w, err)
	}
}

func TestTokenIsTheFirstOnes(t *testing.T) {
	m, c := configured(t)
	for _, token := range []string{"", "another", testToken + "x"} {
		w, err := shake(t, m, guest.Hello{Nonce: "n", Token: token, Min: 1, Max: 1})
		if err != nil || w.Error == nil || w.Error.Code != cloche.CodeUnauthorized {
			t.Errorf("%q: %+v, %v", token, w, err)
		}
	}
	other := dial.New(m.open, "another", slog.New(slog.DiscardHandler))
	defer func() { _ = other.Close() }()
	if _, err := other.Ping(t.Context()); cloche.ErrorCode(err) != cloche.CodeUnavailable {
		t.Errorf("a client with another token: %v", err)
	}
	if _, err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestBadHandshakesAreCutOff(t *testing.T) {
	m, c := configured(t)
	for name, line := range map[string]string{
		"no prefix": "hello\n", "not JSON": "cloche {\n", "no nonce": "cloche {}\n", "long": "cloche " + strings.Repeat("x", 2*guest.MaxHello),
		"long nonce": `cloche {"nonce":"` + strings.Repeat("x", 1000) + `"}` + "\n", "HTTP": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "binary": "\x00\xff\n",
	} {
		conn, err := m.open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, line); err != nil && !errors.Is(err, unix.EPIPE) {
			t.Errorf("%s: %v", name, err)
		}
		if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(conn); err != nil || len(b) != 0 {
			t.Errorf("%s: %q, %v", name, b, err)
		}
		_ = conn.Close()
	}
	if _, err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestSilentPeersDoNotWedgeTheAgent(t *testing.T) {
	m, c := configured(t)
	for range 40 { // more than there are places
		conn, err := m.open(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
	}
	if _, err := c.Ping(t.Context()); err != nil {
		t.Errorf("the channel that was there: %v", err)
	}
	if _, err := m.client().Ping(t.Context()); err != nil {
		t.Errorf("a new channel: %v", err)
	}
	// Channels with the token are bounded too: the newest are served.
	var last *dial.Client
	for range 10 {
		last = m.client()
		if _, err := last.Ping(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := last.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	if _, err := c.Ping(t.Context()); err != nil { // its channel was ended: this makes a new one, or fails once
		if _, err := c.Ping(t.Context()); err != nil {
			t.Errorf("a client whose channel was ended: %v", err)
		}
	}
}

// inside runs f on a thread in the machine's network namespace.
func inside(t *testing.T, m *machine, f func() error) error {
	t.Helper()
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good
		ns, err := os.Open("/proc/" + itoa(m.cmd.Process.Pid) + "/ns/net")
		if err == nil {
			err = errors.Join(unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET), ns.Close())
		}
		if err == nil {
			err = f()
		}
		result <- err
	}()
	return <-result
}

func TestHostileHandOvers(t *testing.T) {
	m, c := configured(t)
	null, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = null.Close() }()
	err = inside(t, m, func() error { return agent.Hand(null, null) })
	if err == nil {
		t.Error("a device was taken as a channel")
	}
	send := func(oob []byte) error {
		return inside(t, m, func() error {
			conn, err := net.Dial("unix", "@cloche/agent")
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			if _, _, err := conn.(*net.UnixConn).WriteMsgUnix([]byte{1}, oob, nil); err != nil {
				return err
			}
			if err := conn.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
				return err
			}
			_, err = conn.Read(make([]byte, 1))
			return err
		})
	}
	fd := int(null.Fd())
	for name, oob := range map[string][]byte{"none": nil, "one": unix.UnixRights(fd), "five": unix.UnixRights(fd, fd, fd, fd, fd)} {
		if err := send(oob); !errors.Is(err, io.EOF) && !errors.Is(err, unix.ECONNRESET) {
			t.Errorf("%s descriptors: %v", name, err)
		}
	}
	// Connections that say nothing take the places for a while only.
	for range 20 {
		err := inside(t, m, func() error {
			conn, err := net.Dial("unix", "@cloche/agent")
			if err == nil {
				t.Cleanup(func() { _ = conn.Close() })
			}
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	if _, err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
	before := descriptors(t, m)
	for range 20 {
		_ = send(unix.UnixRights(fd, fd, fd, fd, fd)) // judged above
	}
	eventually(t, "no descriptor leaks", func() bool { return descriptors(t, m) <= before })
	if _, err := m.client().Ping(t.Context()); err != nil {
		t.Errorf("a new channel: %v", err)
	}
}

func descriptors(t *testing.T, m *machine) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/" + itoa(m.cmd.Process.Pid) + "/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestOnlyRootMayHandOver(t *testing.T) {
	m, c := configured(t)
	bin := buildAgent(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	hand := func(uid uint32) error {
		return inside(t, m, func() error {
			cmd := exec.Command(bin, "hand")
			cmd.Stdin, cmd.Stdout = r, w
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
			return cmd.Run()
		})
	}
	if err := hand(uidUser); err == nil {
		t.Error("a user handed a channel over")
	}
	if err := hand(0); err != nil {
		t.Errorf("root: %v", err)
	}
	_ = w.Close()
	if _, err := c.Ping(t.Context()); err != nil {
		t.Error(err)
	}
}

// buildAgent builds the real binary, as it is shipped.
func buildAgent(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "cloche-agent-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	bin := dir + "/cloche-agent"
	cmd := exec.Command("go", "build", "-o", bin, ".")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build: %v\n%s", err, out)
	}
	return bin
}

func TestTheRealBinary(t *testing.T) {
	bin := buildAgent(t)
	for _, args := range [][]string{{}, {"init"}, {"init", "x"}, {"fail"}, {"fail", "x", "y"}, {"hand"}, {"other"}} {
		cmd := exec.CommandContext(t.Context(), bin, args...)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() == 0 || len(out) == 0 {
			t.Errorf("%q: %v, %q", args, err, out)
		}
	}
	out, err := exec.CommandContext(t.Context(), bin, "fail", "126", "why").CombinedOutput()
	var exit *exec.ExitError
	if !errors.As(err, &exit) || exit.ExitCode() != 126 || string(out) != "cloche: why\n" {
		t.Errorf("fail: %v, %q", err, out)
	}
}

func TestU7_RequestIDReachesTheLog(t *testing.T) {
	m, c := configured(t)
	ctx := withRequestID(t.Context(), "req_of-this-test")
	st, err := c.Run(ctx, cloche.NewCommandID(), script("true"), nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := collect(st); err != nil {
		t.Fatal(err)
	}
	if log := m.log.String(); !strings.Contains(log, `"request":"req_of-this-test"`) || !strings.Contains(log, "command started") {
		t.Errorf("not in the log:\n%s", log)
	}
}

func TestManyStreamsShareOneConnection(t *testing.T) {
	_, c := configured(t)
	const streams = 64
	results := make(chan error, streams)
	for i := range streams {
		go func() {
			want := strings.Repeat(itoa(i)+"\n", 3000)
			st, err := c.Run(context.Background(), cloche.NewCommandID(), guest.Start{Argv: []string{"cat"}}, bytes.NewReader([]byte(want)))
			if err == nil {
				var r result
				if r, err = collect(st); err == nil && string(r.stdout) != want {
					err = errors.New("other output came back")
				}
			}
			results <- err
		}()
	}
	for range streams {
		if err := <-results; err != nil {
			t.Error(err)
		}
	}
}
