package vercel

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
)

// TestBadBodies: each is a clear error, with the name of the field where there
// is one, and nothing happens.
func TestBadBodies(t *testing.T) {
	s := start(t, nil)
	session := string(s.box(t))
	made := len(s.fake.created)
	type try struct{ path, body, says string }
	cmd, dir := "/v2/sandboxes/sessions/"+session+"/cmd", "/v2/sandboxes/sessions/"+session+"/fs/mkdir"
	tries := []try{
		{"/v3/sandboxes", `{`, "JSON"},
		{"/v3/sandboxes", `[]`, "object"},
		{"/v3/sandboxes", `null`, "object"},
		{"/v3/sandboxes", `{} {}`, "JSON"},
		{"/v3/sandboxes", "{\"name\":\"\xff\"}", "UTF-8"},
		{"/v3/sandboxes", `{"x":` + strings.Repeat(`[`, 100_000) + strings.Repeat(`]`, 100_000) + `}`, "JSON"},
		{"/v3/sandboxes", `{"name":5}`, `"name"`},
		{"/v3/sandboxes", `{"name":""}`, "name"},
		{"/v3/sandboxes", `{"name":"sessions"}`, "reserved"},
		{"/v3/sandboxes", `{"name":"` + strings.Repeat("n", 500) + `"}`, "name"},
		{"/v3/sandboxes", `{"resources":{"vcpus":1.5}}`, `"resources.vcpus"`},
		{"/v3/sandboxes", `{"resources":{"vcpus":0}}`, "vcpus"},
		{"/v3/sandboxes", `{"resources":{"vcpus":1000}}`, "vcpus"},
		{"/v3/sandboxes", `{"resources":{"vcpus":1,"memory":7}}`, "memory"},
		{"/v3/sandboxes", `{"timeout":"1m"}`, `"timeout"`},
		{"/v3/sandboxes", `{"env":{"A":1}}`, `"env`},
		{"/v3/sandboxes", `{"env":{"A":null}}`, `"env"`},
		{"/v3/sandboxes", `{"env":[]}`, `"env"`},
		{"/v3/sandboxes", `{"tags":{"A":null}}`, `"tags"`},
		{"/v3/sandboxes", `{"networkPolicy":"deny-all"}`, `"networkPolicy"`},
		{"/v3/sandboxes", `{"image":"a","runtime":"node24"}`, "exclude"},
		{cmd, ``, `"command"`},
		{cmd, `{"command":""}`, `"command"`},
		{cmd, `{"command":"a","args":"b"}`, `"args"`},
		{cmd, `{"command":"a","args":["b",null]}`, `"args"`},
		{cmd, `{"command":"a","args":["\u0000"]}`, "NUL"},
		{cmd, `{"command":"a","sudo":"yes"}`, `"sudo"`},
		{cmd, `{"command":"a","timeout":-1}`, `"timeout"`},
		{dir, `{}`, `"path"`},
		{dir, `{"path":"\u0000"}`, "NUL"},
		{dir, `{"path":"` + strings.Repeat("p", 5000) + `"}`, "4096"},
	}
	for _, try := range tries {
		res, body := s.call(t, "POST", try.path, try.body)
		if e := wantError(t, res, body, 400, cloche.CodeInvalid); !strings.Contains(e.Message, try.says) {
			t.Errorf("%.80s: %q does not say %s", try.body, e.Message, try.says)
		}
	}
	for _, body := range []string{`{"timeout":0}`, `{"timeout":-5}`, `{"timeout":1e300}`} {
		res, answer := s.call(t, "POST", "/v3/sandboxes", body)
		wantError(t, res, answer, 400, cloche.CodeTimeoutInvalid)
	}
	res, body := s.call(t, "POST", "/v3/sandboxes", `{"x":"`+strings.Repeat("x", maxBody)+`"}`)
	wantError(t, res, body, 413, cloche.CodeTooLarge)
	if n := len(s.fake.created); n != made {
		t.Errorf("%d sandboxes were made", n-made)
	}
}

// TestToleratedBodies: unknown and private fields, nulls, duplicate keys.
func TestToleratedBodies(t *testing.T) {
	s := start(t, nil)
	for _, body := range []string{
		"", "{}", `{"__interactive":true,"whatever":{"a":[1]}}`, `{"name":"first","name":"second"}`,
		`{"ports":[],"mounts":{},"failoverRegions":[],"source":null,"keepLastSnapshots":null,"networkPolicy":null}`,
		`{"persistent":false,"networkPolicy":{"mode":"deny-all"},"timeout":1500.5,"region":"fra1","projectId":"prj_self"}`,
	} {
		if res, answer := s.call(t, "POST", "/v3/sandboxes", body); res.StatusCode != 200 {
			t.Errorf("%s: %d %s", body, res.StatusCode, answer)
		}
	}
	last := s.fake.created[len(s.fake.created)-1]
	if !last.Ephemeral || last.Timeout != 1501*time.Millisecond || last.Region != "fra1" {
		t.Errorf("the last create became %+v", last)
	}
	if s.fake.created[3].Name != "second" {
		t.Errorf("of two equal keys the last counts: %+v", s.fake.created[3])
	}
}

// TestLegacyPathsHaveARuntime: only /v3 leaves the base system to the server.
func TestLegacyPathsHaveARuntime(t *testing.T) {
	s := start(t, nil)
	for _, try := range []struct{ path, body, runtime string }{
		{"/v1/sandboxes", "{}", "node24"}, {"/v2/sandboxes", "{}", "node24"}, {"/v3/sandboxes", "{}", ""},
		{"/v2/sandboxes", `{"runtime":"python3.13"}`, "python3.13"}, {"/v2/sandboxes", `{"image":"debian"}`, ""},
	} {
		if res, body := s.call(t, "POST", try.path, try.body); res.StatusCode != 200 {
			t.Fatalf("%s %s: %s", try.path, try.body, body)
		}
		if got := s.fake.created[len(s.fake.created)-1].Runtime; got != try.runtime {
			t.Errorf("%s %s: runtime %q, want %q", try.path, try.body, got, try.runtime)
		}
	}
}

func TestBadQueries(t *testing.T) {
	s := start(t, nil)
	for _, path := range []string{
		"/v2/sandboxes?limit=0", "/v2/sandboxes?limit=x", "/v2/sandboxes?limit=-1", "/v2/sandboxes?sortOrder=up",
		"/v2/sandboxes?sortBy=size", "/v2/sandboxes?tags=nocolon", "/v2/sandboxes?tags=a:b&tags=c:d",
		"/v2/sandboxes/x?resume=yes", "/v2/sandboxes/sessions?limit=1.5", "/v1/sandboxes?until=yesterday",
	} {
		res, body := s.call(t, "GET", path, "")
		wantError(t, res, body, 400, cloche.CodeInvalid)
	}
	if res, body := s.call(t, "GET", "/v2/sandboxes?limit=100000&tags=a:b:c&project=prj_self&teamId=team_self", ""); res.StatusCode != 200 || body != `{"sandboxes":[],"pagination":{"count":0,"next":null}}` {
		t.Errorf("%d %s", res.StatusCode, body)
	}
}

// FuzzBodies: no body makes the API panic, and what it accepts it can state.
func FuzzBodies(f *testing.F) {
	for _, s := range []string{
		`{"projectId":"p","ports":[],"timeout":120000,"resources":{"vcpus":2},"env":{"A":"b"},"tags":{"a":"b"}}`,
		`{"command":"sh","args":["-c","x"],"env":{},"sudo":false,"wait":true,"logs":true,"timeout":5}`,
		`{"path":"newdir","pathBytes":"AP8=","cwd":"/"}`, `{"networkPolicy":{"mode":"custom"}}`, `{"source":{"type":"git"}}`, `[]`, "\xff",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, in []byte) {
		var c createBody
		var u updateBody
		var r runBody
		var p pathBody
		for _, err := range []error{
			func() error {
				if err := unmarshal(in, &c); err != nil {
					return err
				}
				_, err := c.request()
				return err
			}(),
			func() error {
				if err := unmarshal(in, &u); err != nil {
					return err
				}
				_, err := u.request()
				return err
			}(),
			func() error {
				if err := unmarshal(in, &r); err != nil {
					return err
				}
				_, err := r.request()
				return err
			}(),
			func() error {
				if err := unmarshal(in, &p); err != nil {
					return err
				}
				_, err := p.path()
				return err
			}(),
		} {
			if err == nil {
				continue
			}
			code := cloche.ErrorCode(err)
			if statuses[code] >= 500 {
				t.Errorf("%q: %v is not the caller's fault", in, err)
			}
			if _, err := json.Marshal(public(err)); err != nil {
				t.Error(err)
			}
		}
	})
}
