package vercel

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/cloche-dev/cloche"
)

var update = flag.Bool("update", false, "write testdata/wire.golden from what the API answers")

// still is a Service in which nothing changes: fixed ids, fixed times.
type still struct{ Service }

const (
	stillSession = cloche.SessionID("sbx_0000000000000000000000000s")
	stillCommand = cloche.CommandID("cmd_0000000000000000000000000c")
)

func instantOf(s int64) time.Time { return time.UnixMilli(1_700_000_000_000 + s*1000) }

func (still) view(state cloche.SessionState) cloche.SandboxView {
	b := cloche.Sandbox{
		ID: "box_0000000000000000000000000b", Name: "drv", Image: "universal@sha256:00", User: "ubuntu",
		WorkDir: "/vercel/sandbox", VCPUs: 2, MemoryMiB: 4096, Timeout: 2 * time.Minute, Env: map[string]string{"SECRET": "never shown"},
		Tags: map[string]string{"env": "test"}, Region: "sfo1", SessionID: stillSession, CreatedAt: instantOf(0), UpdatedAt: instantOf(2),
	}
	s := cloche.Session{
		ID: stillSession, SandboxID: b.ID, State: state, WorkDir: b.WorkDir, VCPUs: 2, MemoryMiB: 4096,
		Timeout: b.Timeout, RequestedAt: instantOf(0), StartedAt: instantOf(1), UpdatedAt: instantOf(2),
	}
	if state.Final() {
		s.StopRequestedAt, s.EndedAt = instantOf(60), instantOf(61)
		s.Usage = cloche.Usage{ActiveCPU: 1500 * time.Millisecond, Duration: time.Minute}
		b.Total = s.Usage
	}
	if state == cloche.Aborted {
		s.Cause = "the machine crashed"
	}
	return cloche.SandboxView{Sandbox: b, Session: s}
}

func (s still) CreateSandbox(context.Context, cloche.Principal, cloche.CreateSandbox) (cloche.SandboxView, error) {
	return s.view(cloche.Running), nil
}

func (s still) GetSandbox(_ context.Context, _ cloche.Principal, name string, resume bool) (cloche.SandboxView, bool, error) {
	switch name {
	case "drv":
		return s.view(cloche.Running), resume, nil
	case "crashed":
		return s.view(cloche.Aborted), false, nil
	}
	return cloche.SandboxView{}, false, cloche.Errorf(cloche.CodeNotFound, "there is no sandbox %q", name)
}

func (s still) ListSandboxes(context.Context, cloche.Principal, cloche.ListSandboxes) ([]cloche.SandboxView, string, error) {
	return []cloche.SandboxView{s.view(cloche.Stopped)}, "cursor", nil
}

func (s still) UpdateSandbox(context.Context, cloche.Principal, string, cloche.UpdateSandbox) (cloche.SandboxView, error) {
	return s.view(cloche.Running), nil
}

func (s still) DeleteSandbox(context.Context, cloche.Principal, string) (cloche.SandboxView, error) {
	return s.view(cloche.Stopped), nil
}

func (s still) ListSessions(context.Context, cloche.Principal, cloche.ListSessions) ([]cloche.Session, string, error) {
	return []cloche.Session{s.view(cloche.Stopped).Session}, "", nil
}

func (s still) GetSession(context.Context, cloche.Principal, cloche.SessionID) (cloche.SandboxView, error) {
	return s.view(cloche.Running), nil
}

func (s still) StopSession(context.Context, cloche.Principal, cloche.SessionID) (cloche.SandboxView, error) {
	return s.view(cloche.Stopped), nil
}

func (s still) ExtendTimeout(_ context.Context, _ cloche.Principal, _ cloche.SessionID, d time.Duration) (cloche.Session, error) {
	if d > cloche.MaxTimeout {
		return cloche.Session{}, cloche.Errorf(cloche.CodeTimeoutInvalid, "a session lasts at most 24 hours")
	}
	v := s.view(cloche.Running).Session
	v.Timeout += d
	return v, nil
}

func (still) command(ended bool) cloche.Command {
	c := cloche.Command{
		ID: stillCommand, SessionID: stillSession, Name: "sh", Args: []string{"-c", "echo ü"},
		WorkDir: "/vercel/sandbox", StartedAt: instantOf(5),
	}
	if ended {
		c.Exit = &cloche.Exit{Code: 137, Signal: 9, Cause: cloche.CauseOOM, Duration: 1234 * time.Millisecond}
	}
	return c
}

func (s still) RunCommand(context.Context, cloche.Principal, cloche.SessionID, cloche.RunCommand) (cloche.Command, error) {
	return s.command(false), nil
}

func (s still) GetCommand(context.Context, cloche.Principal, cloche.SessionID, cloche.CommandID) (cloche.Command, error) {
	c := s.command(false)
	c.Args, c.Lost = nil, true
	return c, nil
}

func (s still) ListCommands(context.Context, cloche.Principal, cloche.SessionID) ([]cloche.Command, error) {
	return []cloche.Command{s.command(true)}, nil
}

func (s still) WaitCommand(context.Context, cloche.Principal, cloche.SessionID, cloche.CommandID) (cloche.Command, error) {
	return s.command(true), nil
}

func (s still) SignalCommand(context.Context, cloche.Principal, cloche.SessionID, cloche.CommandID, int) (cloche.Command, error) {
	return s.command(false), nil
}

func (still) CommandLogs(context.Context, cloche.Principal, cloche.SessionID, cloche.CommandID) (cloche.LogReader, error) {
	c := &fakeCommand{changed: make(chan struct{}), log: []cloche.LogEntry{
		{Stream: cloche.Stdout, Data: []byte("out ü\n")}, {Stream: cloche.Stderr, Data: []byte("err\n")},
		{Stream: cloche.StreamNotice, Data: []byte("[the log reached its bound]\n")},
	}}
	c.c.Exit = &cloche.Exit{}
	return &fakeLog{c: c, cut: -1}, nil
}

func (still) MakeDir(_ context.Context, _ cloche.Principal, _ cloche.SessionID, d cloche.MakeDir) error {
	if d.Path == "olddir" {
		return cloche.Errorf(cloche.CodeConflict, "olddir exists")
	}
	return nil
}

// captured are requests as the SDK makes them, and a few that are wrong.
func captured() [][3]string {
	const session, cmd = "/api/v2/sandboxes/sessions/" + string(stillSession), "/cmd/" + string(stillCommand)
	const v1 = "/api/v1/sandboxes/" + string(stillSession)
	const team, both = "?teamId=team_self", "?teamId=team_self&projectId=prj_self"
	return [][3]string{
		{"POST", "/api/v3/sandboxes" + team, `{"projectId":"prj_self","ports":[],"timeout":120000,"resources":{"vcpus":2},"name":"drv","env":{"BASEVAR":"b"},"tags":{"env":"test"},"region":"sfo1"}`},
		{"POST", "/api/v3/sandboxes" + team, `{"projectId":"prj_self","ports":[3000,8080]}`},
		{"GET", "/api/v2/sandboxes" + team + "&project=prj_self&limit=1&sortBy=name&namePrefix=drv-&tags=a%3Ab", ""},
		{"GET", "/api/v2/sandboxes/drv" + both + "&resume=true", ""},
		{"GET", "/api/v2/sandboxes/crashed" + both, ""},
		{"GET", "/api/v2/sandboxes/none" + both, ""},
		{"PATCH", "/api/v2/sandboxes/drv" + both, `{"resources":{"vcpus":4,"memory":8192},"timeout":600000,"networkPolicy":{"mode":"deny-all"},"tags":{"a":"b"},"keepLastSnapshots":null}`},
		{"PATCH", "/api/v2/sandboxes/drv" + both, `{"networkPolicy":{"mode":"allow-all"}}`},
		{"POST", "/api/v2/sandboxes/drv/fork" + both, `{"resources":{"vcpus":1}}`},
		{"DELETE", "/api/v2/sandboxes/drv" + both, ""},
		{"GET", "/api/v2/sandboxes/sessions" + team + "&project=prj_self&name=drv", ""},
		{"GET", session + team, ""},
		{"POST", session + "/cmd" + team, `{"command":"sh","args":["-c","echo ü"],"env":{},"sudo":false,"wait":true,"logs":true}`},
		{"POST", session + "/cmd" + team, `{"command":"sh","args":["-c","echo ü"],"env":{},"sudo":false,"wait":true}`},
		{"POST", session + "/cmd" + team, `{"command":"sh","args":["-c","echo ü"],"env":{},"sudo":false}`},
		{"GET", session + "/cmd" + team, ""},
		{"GET", session + cmd + team, ""},
		{"GET", session + cmd + team + "&wait=true", ""},
		{"GET", session + cmd + "/logs" + team, ""},
		{"POST", session + cmd + "/kill" + team, `{"signal":15}`},
		{"POST", session + "/extend-timeout" + team, `{"duration":60000}`},
		{"POST", session + "/extend-timeout" + team, `{"duration":432000000}`},
		{"POST", session + "/fs/mkdir" + team, `{"path":"newdir"}`},
		{"POST", session + "/fs/mkdir" + team, `{"path":"olddir"}`},
		{"POST", session + "/interactive" + team, `{}`},
		{"POST", session + "/network-policy" + team, `{"mode":"deny-all"}`},
		{"POST", session + "/network-policy" + team, `{"allow":["*.npmjs.org"]}`},
		{"POST", session + "/snapshot" + team, `{"expiration":0}`},
		{"POST", session + "/stop" + team, ""},
		{"GET", "/api/v2/sandboxes/snapshots" + team + "&project=prj_self&name=drv&limit=1", ""},
		{"GET", "/api/v2/sandboxes/snapshots/tree" + team + "&project=prj_self&snapshotId=snap_x&sortOrder=desc", ""},
		{"DELETE", "/api/v2/sandboxes/snapshots/snap_x" + team, ""},
		{"GET", "/api/v2/sandboxes/drives" + both + "&namePrefix=d", ""},
		{"POST", "/api/v2/sandboxes/drives/d" + team, `{"projectId":"prj_self","maxSizeBytes":1024}`},
		{"DELETE", "/api/v2/sandboxes/drives/d" + both, ""},
		{"GET", "/api/v2/user", ""},
		{"POST", "/api/v1/sandboxes" + team, `{"projectId":"prj_self","ports":[]}`},
		{"GET", "/api/v1/sandboxes" + team + "&project=prj_self", ""},
		{"GET", v1 + team, ""},
		{"POST", v1 + "/" + string(stillCommand) + "/kill" + team, `{"signal":2}`},
		{"POST", v1 + "/extend-timeout" + team, `{"duration":60000}`},
		{"POST", v1 + "/stop" + team, ""},
	}
}

// TestGoldenWire sends each captured request of the SDK and compares the whole
// answer. A change of the file is a change of the wire.
func TestGoldenWire(t *testing.T) {
	s := start(t, still{})
	var got bytes.Buffer
	for _, try := range captured() {
		method, path, sent := try[0], try[1], try[2]
		res, body := s.call(t, method, path, sent)
		fmt.Fprintf(&got, "%s %s\n", method, strings.TrimPrefix(path, "/api"))
		if sent != "" {
			fmt.Fprintf(&got, "> %s\n", sent)
		}
		fmt.Fprintf(&got, "%d %s\n", res.StatusCode, res.Header.Get("Content-Type"))
		for line := range strings.Lines(body) {
			var b bytes.Buffer
			if err := json.Indent(&b, []byte(line), "", "  "); err != nil {
				t.Fatalf("%s: %v", line, err)
			}
			if strings.Contains(res.Header.Get("Content-Type"), "ndjson") {
				b.Reset()
				b.WriteString(strings.TrimSuffix(line, "\n"))
			}
			got.Write(append(b.Bytes(), '\n'))
		}
		got.WriteByte('\n')
	}
	const golden = "testdata/wire.golden"
	if *update {
		if err := os.WriteFile(golden, got.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got.String()); diff != "" {
		t.Errorf("the wire changed (-want +got):\n%s", diff)
	}
	if bytes.Contains(got.Bytes(), []byte("never shown")) {
		t.Error("the environment of a sandbox is in an answer")
	}
}
