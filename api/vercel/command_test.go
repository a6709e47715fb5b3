package vercel

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/internal/frames"
)

func TestCommandStream(t *testing.T) {
	s := start(t, nil)
	path := "/api/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	res, body := s.call(t, "POST", path, `{"command":"sh","args":["-c","printf 'a\\377\\303\\274'; exit 3"],"wait":true,"logs":true}`)
	if ct := res.Header["Content-Type"]; len(ct) != 1 || ct[0] != "application/x-ndjson" {
		t.Fatalf("content-type %q", ct)
	}
	lines := strings.Split(strings.TrimSuffix(body, "\n"), "\n")
	if len(lines) != 3 || lines[1] != `{"stream":"stdout","data":"a\ufffd\u00fc"}` {
		t.Fatalf("lines %q", lines)
	}
	if !strings.Contains(lines[0], `"exitCode":null`) || !strings.Contains(lines[2], `"exitCode":3`) || !strings.Contains(lines[2], `"durationMs":`) {
		t.Errorf("lines %q", lines)
	}
	// Lines of output come only to those who ask: older clients accept two.
	if _, body = s.call(t, "POST", path, `{"command":"echo","args":["x"],"wait":true}`); strings.Count(body, "\n") != 2 || strings.Contains(body, `"stream"`) {
		t.Errorf("without logs: %q", body)
	}
	// Args with anything in them are ASCII on the wire.
	if _, body = s.call(t, "POST", path, `{"command":"true","args":["ü𝄞"],"wait":true}`); !strings.Contains(body, `"\u00fc\ud834\udd1e"`) {
		t.Errorf("args: %q", body)
	}
	if res, body = s.call(t, "GET", path, ""); strings.Count(body, `"id":"cmd_`) != 3 {
		t.Errorf("list: %d %s", res.StatusCode, body)
	}
}

// TestE6Signal: death by a signal is 128+n, with the signal beside it.
func TestE6Signal(t *testing.T) {
	s := start(t, nil)
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	_, body := s.call(t, "POST", path, `{"command":"sh","args":["-c","kill -11 $$"],"wait":true}`)
	if !strings.Contains(body, `"exitCode":139`) || !strings.Contains(body, `"signal":11`) {
		t.Errorf("%s", body)
	}
	_, body = s.call(t, "POST", path, `{"command":"sleep","args":["30"],"wait":true,"timeout":50}`)
	if !strings.Contains(body, `"exitCode":137`) || !strings.Contains(body, `"cause":"timeout"`) {
		t.Errorf("%s", body)
	}
	for _, signal := range []string{"0", "65", "-9"} {
		res, body := s.call(t, "POST", path+"/"+string(cloche.NewCommandID())+"/kill", `{"signal":`+signal+`}`)
		wantError(t, res, body, 400, cloche.CodeInvalid)
	}
}

// TestE1SilentStream: a stream that has nothing to say says that it is there.
func TestE1SilentStream(t *testing.T) {
	s := start(t, nil, func(c *Config) { c.Heartbeat = 5 * time.Millisecond })
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	_, body := s.call(t, "POST", path, `{"command":"sh","args":["-c","sleep 0.2; echo x"],"wait":true,"logs":true}`)
	if n := strings.Count(body, "\n\n"); n < 3 {
		t.Errorf("%d signs of life in %q", n, body)
	}
	res, body := s.call(t, "POST", path, `{"command":"sleep","args":["0.2"],"wait":true,"logs":true}`, "Accept", frames.MediaType)
	types := frameTypes(t, strings.NewReader(body))
	if ct := res.Header.Get("Content-Type"); ct != frames.MediaType || len(types) < 5 || types[1] != frames.Idle {
		t.Errorf("%s: frames %v", ct, types)
	}
}

func frameTypes(t *testing.T, r io.Reader) []frames.Type {
	t.Helper()
	var types []frames.Type
	for f := frames.NewReader(r); ; {
		typ, _, err := f.Next()
		if err == io.EOF {
			return types
		}
		if err != nil {
			t.Fatal(err)
		}
		types = append(types, typ)
	}
}

// TestDisconnectKills: closing the connection is how clients cancel a command
// that they wait for. Detached ones and readers of logs end nothing.
func TestDisconnectKills(t *testing.T) {
	s := start(t, nil, func(c *Config) { c.Heartbeat = 5 * time.Millisecond })
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	for _, body := range []string{
		`{"command":"sleep","args":["30"],"wait":true,"logs":true}`,
		`{"command":"sleep","args":["30"],"wait":true}`,
		`{"command":"yes","wait":true,"logs":true}`,
	} {
		before := len(s.signals())
		ctx, cancel := context.WithCancel(t.Context())
		res, err := s.Client().Do(s.request(t, "POST", path, strings.NewReader(body)).WithContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		cmd := firstLine(t, res.Body)
		cancel()
		res.Body.Close()
		eventually(t, "the command is killed", func() bool { return len(s.signals()) > before })
		_, answer := s.call(t, "GET", path+"/"+string(cmd.ID)+"?wait=true", "")
		if !strings.Contains(answer, `"exitCode":137`) {
			t.Errorf("%s", answer)
		}
	}
	before := len(s.signals())
	_, answer := s.call(t, "POST", path, `{"command":"sleep","args":["30"]}`)
	var detached commandAnswer
	if err := json.Unmarshal([]byte(answer), &detached); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	res, err := s.Client().Do(s.request(t, "GET", path+"/"+string(detached.Command.ID)+"/logs", nil).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	res.Body.Close()
	if _, answer := s.call(t, "GET", path+"/"+string(detached.Command.ID), ""); !strings.Contains(answer, `"exitCode":null`) || len(s.signals()) != before {
		t.Errorf("%s", answer)
	}
}

func (s *server) signals() []int {
	s.fake.mu.Lock()
	defer s.fake.mu.Unlock()
	return s.fake.killed
}

func firstLine(t *testing.T, r io.Reader) commandBody {
	t.Helper()
	line, err := bufio.NewReaderSize(r, 16).ReadBytes('\n')
	if err != nil {
		t.Fatal(err)
	}
	var a commandAnswer
	if err := json.Unmarshal(line, &a); err != nil {
		t.Fatal(err)
	}
	return a.Command
}

// TestShutdownKillsNothing: the server going down ends streams with a reason,
// and commands live on.
func TestShutdownKillsNothing(t *testing.T) {
	s := start(t, nil)
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	res, err := s.Client().Do(s.request(t, "POST", path, strings.NewReader(`{"command":"sleep","args":["30"],"wait":true,"logs":true}`)))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	body := bufio.NewReader(res.Body)
	cmd := firstLine(t, body)
	logs, err := s.Client().Do(s.request(t, "GET", path+"/"+string(cmd.ID)+"/logs", nil))
	if err != nil {
		t.Fatal(err)
	}
	defer logs.Body.Close()
	s.shutdown(ErrShutdown)
	for _, r := range []io.Reader{body, logs.Body} {
		rest, err := io.ReadAll(r)
		if err != nil || !strings.Contains(string(rest), `{"stream":"error","data":{"code":"unavailable"`) {
			t.Errorf("%q %v", rest, err)
		}
	}
	if len(s.signals()) != 0 {
		t.Error("the command was killed")
	}
}

// TestLogsUpToNow: with follow=false a log ends with what is in it, in both
// forms, of a command that is silent and of one that never is; of one that has
// ended it is the whole.
func TestLogsUpToNow(t *testing.T) {
	s := start(t, nil)
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	begin := func(line string) (logs string) {
		_, answer := s.call(t, "POST", path, `{"command":"sh","args":["-c",`+line+`]}`)
		var a commandAnswer
		if err := json.Unmarshal([]byte(answer), &a); err != nil {
			t.Fatal(err)
		}
		logs = path + "/" + string(a.Command.ID) + "/logs"
		eventually(t, "it has printed", func() bool {
			_, body := s.call(t, "GET", logs+"?follow=false", "")
			return body != ""
		})
		return logs
	}
	for _, line := range []string{`"echo so far; exec sleep 60"`, `"echo so far"`} {
		logs := begin(line)
		if _, body := s.call(t, "GET", logs+"?follow=false", ""); body != `{"stream":"stdout","data":"so far\n"}`+"\n" {
			t.Errorf("%s: %q", line, body)
		}
		_, body := s.call(t, "GET", logs+"?follow=false", "", "Accept", frames.MediaType)
		if got := frameTypes(t, strings.NewReader(body)); len(got) != 2 || got[0] != frames.Stdout || got[1] != frames.End {
			t.Errorf("%s: frames %v", line, got)
		}
	}
	logs := begin(`"exec yes"`)
	for _, accept := range []string{ndjson, frames.MediaType} {
		if _, body := s.call(t, "GET", logs+"?follow=false", "", "Accept", accept); !strings.Contains(body, "y") {
			t.Errorf("%s: %q", accept, body)
		}
	}
	if _, answer := s.call(t, "GET", strings.TrimSuffix(logs, "/logs"), ""); !strings.Contains(answer, `"exitCode":null`) {
		t.Errorf("%s", answer)
	}
	res, body := s.call(t, "GET", logs+"?follow=perhaps", "")
	wantError(t, res, body, 400, cloche.CodeInvalid)
}

// lostLog is a Service whose commands end without anybody seeing it.
type lostLog struct{ *fake }

func (l lostLog) WaitCommand(context.Context, cloche.Principal, cloche.SessionID, cloche.CommandID) (cloche.Command, error) {
	return cloche.Command{}, cloche.Errorf(cloche.CodeGone, "the machine ended first")
}

func (l lostLog) CommandLogs(context.Context, cloche.Principal, cloche.SessionID, cloche.CommandID) (cloche.LogReader, error) {
	return &brokenLog{}, nil
}

type brokenLog struct{ read bool }

func (b *brokenLog) Next(context.Context) (cloche.LogEntry, error) {
	if b.read {
		return cloche.LogEntry{}, cloche.Errorf(cloche.CodeGone, "the machine ended first")
	}
	b.read = true
	return cloche.LogEntry{Stream: cloche.Stdout, Data: []byte("\xf0\x9d")}, nil
}

func (b *brokenLog) Cut()         {}
func (b *brokenLog) Close() error { return nil }

// TestBrokenStreamSaysSo: an end that nobody saw is no end, in every form.
func TestBrokenStreamSaysSo(t *testing.T) {
	f := newFake(t)
	s := start(t, lostLog{f})
	s.fake = f
	session := string(s.box(t))
	cmd := "/v2/sandboxes/sessions/" + session + "/cmd"
	failure := `{"stream":"error","data":{"code":"sandbox_stopped","message":"the machine ended first"}}` + "\n"
	for _, body := range []string{`{"command":"true","wait":true,"logs":true}`, `{"command":"true","wait":true}`} {
		if _, answer := s.call(t, "POST", cmd, body); !strings.HasSuffix(answer, failure) || strings.Contains(answer, `"exitCode":0`) {
			t.Errorf("%s: %q", body, answer)
		}
	}
	some := string(cloche.NewCommandID())
	if _, answer := s.call(t, "GET", cmd+"/"+some+"/logs", ""); answer != `{"stream":"stdout","data":"\ufffd\ufffd"}`+"\n"+failure {
		t.Errorf("logs: %q", answer)
	}
	res, answer := s.call(t, "GET", cmd+"/"+some+"?wait=true", "")
	wantError(t, res, answer, 410, cloche.CodeGone)
	_, answer = s.call(t, "GET", cmd+"/"+some+"/logs", "", "Accept", frames.MediaType)
	if types := frameTypes(t, strings.NewReader(answer)); types[len(types)-1] != frames.Failure {
		t.Errorf("frames %v", types)
	}
}

// TestStdin: what the client sends reaches the command while its output comes
// back, byte for byte; the end of one is the end of the other.
func TestStdin(t *testing.T) {
	s := start(t, nil)
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	in, send := io.Pipe()
	r := s.request(t, "POST", path, in, frames.StdinHeader, frames.StdinStream, "Accept", frames.MediaType)
	go send.Write([]byte(`{"command":"cat","wait":true,"logs":true}` + "\n")) // ends with the test's request
	res, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	f := frames.NewReader(res.Body)
	next := func(want frames.Type) string {
		t.Helper()
		typ, p, err := f.Next()
		if err != nil || typ != want {
			t.Fatalf("frame %d %q %v, want %d", typ, p, err, want)
		}
		return string(p)
	}
	next(frames.Command)
	for _, piece := range []string{"\x00\xff\n", "{\"not\":\"a frame\"}", strings.Repeat("x", 3000)} {
		if _, err := send.Write([]byte(piece)); err != nil {
			t.Fatal(err)
		}
		if got := next(frames.Stdout); got != piece {
			t.Fatalf("%q came back as %q", piece, got)
		}
	}
	send.Close()
	if end := next(frames.End); !strings.Contains(end, `"exitCode":0`) {
		t.Errorf("end %s", end)
	}
	if _, _, err := f.Next(); err != io.EOF {
		t.Errorf("after the end: %v", err)
	}
}

// TestStdinOfACommandThatDoesNotRead: a command ends when it ends, whatever the
// client still has to say.
func TestStdinOfACommandThatDoesNotRead(t *testing.T) {
	s := start(t, nil)
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	in, send := io.Pipe()
	defer send.Close()
	go send.Write([]byte(`{"command":"true","wait":true}` + "\n" + strings.Repeat("x", 100_000))) // fails when the request is over
	res, body := s.send(t, s.request(t, "POST", path, in, frames.StdinHeader, frames.StdinStream))
	if !strings.Contains(body, `"exitCode":0`) {
		t.Errorf("%d %s", res.StatusCode, body)
	}
}

// TestStdinThatBreaksOff: a client that vanishes is not an end of its input.
func TestStdinThatBreaksOff(t *testing.T) {
	s := start(t, nil)
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	in, send := io.Pipe()
	go send.Write([]byte(`{"command":"cat","wait":true,"logs":true}` + "\n"))
	res, err := s.Client().Do(s.request(t, "POST", path, in, frames.StdinHeader, frames.StdinStream))
	if err != nil {
		t.Fatal(err)
	}
	firstLine(t, res.Body)
	send.CloseWithError(errors.New("broken"))
	res.Body.Close()
	eventually(t, "the command is killed", func() bool { return len(s.signals()) == 1 })
}

func TestStdinNeedsAWait(t *testing.T) {
	s := start(t, nil)
	path := "/v2/sandboxes/sessions/" + string(s.box(t)) + "/cmd"
	for body, code := range map[string]cloche.Code{
		`{"command":"true"}` + "\nx": cloche.CodeInvalid,
		`{"command":` + "\nx":        cloche.CodeInvalid,
		"":                           cloche.CodeInvalid,
		`{"command":"` + strings.Repeat("x", maxCommandBody) + `"}`: cloche.CodeTooLarge,
	} {
		res, answer := s.call(t, "POST", path, body, frames.StdinHeader, frames.StdinStream)
		wantError(t, res, answer, statuses[code], code)
	}
}

// TestGoneIsNotMissing: calls on a session that has ended say so with 410, which
// is what makes clients resume; 404 is for what is not there.
func TestGoneIsNotMissing(t *testing.T) {
	s := start(t, nil)
	id := s.box(t)
	if _, err := s.fake.StopSession(t.Context(), testTokens[testToken], id); err != nil {
		t.Fatal(err)
	}
	for _, v := range []string{"/v2/sandboxes/sessions/", "/v1/sandboxes/"} {
		for suffix, body := range map[string]string{
			"/cmd": `{"command":"true"}`, "/fs/mkdir": `{"path":"x"}`, "/fs/read": `{"path":"x"}`,
			"/extend-timeout": `{"duration":1000}`, "/network-policy": `{"mode":"deny-all"}`,
		} {
			res, answer := s.call(t, "POST", v+string(id)+suffix, body)
			wantError(t, res, answer, 410, cloche.CodeGone)
			res, answer = s.call(t, "POST", v+string(cloche.NewSessionID())+suffix, body)
			wantError(t, res, answer, 404, cloche.CodeNotFound)
		}
		if res, answer := s.call(t, "POST", v+string(id)+"/stop", ""); res.StatusCode != http.StatusOK {
			t.Errorf("stop of a stopped session: %s", answer)
		}
	}
}
