package e2e

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
	"github.com/cloche-dev/cloche/internal/testenv"
)

// route is a route of docs/api.md, which a test of api/vercel holds to the code.
type route struct{ method, path string }

var documentedRoute = regexp.MustCompile("`(GET|POST|PATCH|PUT|DELETE) (/v[0-9]+/[^` ]*)`")

// documentedRoutes reads them.
func documentedRoutes(t *testing.T) []route {
	t.Helper()
	doc, err := os.ReadFile(filepath.Join(testenv.ModuleRoot(t), "docs", "api.md"))
	if err != nil {
		t.Fatal(err)
	}
	var all []route
	for _, m := range documentedRoute.FindAllStringSubmatch(string(doc), -1) {
		if r := (route{m[1], m[2]}); !slices.Contains(all, r) {
			all = append(all, r)
		}
	}
	if len(all) < 50 {
		t.Fatalf("only %d routes in docs/api.md: %v", len(all), all)
	}
	return all
}

// body is one that the route would accept.
func (r route) body() (kind, body string) {
	for suffix, body := range map[string]string{
		"/cmd": `{"command":"touch","args":["/tmp/foreign"]}`, "/kill": `{"signal":9}`, "/extend-timeout": `{"duration":1000}`,
		"/network-policy": `{"mode":"deny-all"}`, "/fs/mkdir": `{"path":"/tmp/foreign"}`, "/fs/read": `{"path":"/etc/passwd"}`,
		"/sandboxes/{name}": `{"tags":{"by":"a stranger"},"resources":{"vcpus":1}}`,
	} {
		if r.method != http.MethodGet && strings.HasSuffix(r.path, suffix) {
			return "application/json", body
		}
	}
	if strings.HasSuffix(r.path, "/fs/write") {
		return "application/x-tar", string(make([]byte, 1024))
	}
	return "application/json", "{}"
}

// call makes a request with an Authorization header, none if it is empty.
func (s *server) call(method, path, kind, body, authorization string) (int, http.Header, string) {
	s.t.Helper()
	req, err := http.NewRequestWithContext(s.t.Context(), method, s.url+path, strings.NewReader(body))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", kind)
	if authorization != "" {
		req.Header.Set("Authorization", authorization)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		s.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		s.t.Fatalf("%s %s: %v", method, path, err)
	}
	return resp.StatusCode, resp.Header, string(b)
}

// TestEveryRouteNeedsAToken: every route, by every prefix, with no token and
// with those that are none.
func TestEveryRouteNeedsAToken(t *testing.T) {
	s := newServer(t)
	v := s.create(client.Create{Name: "guarded"})
	jwt := strings.Split(s.token("default", "default", "--jwt"), ".")
	forged := jwt[0] + "." + jwt[1] + ".clo_" + strings.Repeat("0", 64)
	fill := strings.NewReplacer("{name}", "guarded", "{sid}", string(v.Session.ID), "{cid}", string(cloche.NewCommandID()))
	for _, r := range documentedRoutes(t) {
		for _, prefix := range []string{"", "/api"} {
			for _, authorization := range []string{
				"", "Bearer", "Bearer ", "Bearer clo_", "Bearer " + forged, "Bearer " + jwt[0] + "." + jwt[1] + ".",
				"Basic Y2xvOg==", "bearer", jwt[2], "Bearer clo_" + strings.Repeat("x", 10_000),
			} {
				kind, body := r.body()
				code, _, answer := s.call(r.method, prefix+fill.Replace(r.path), kind, body, authorization)
				if code != http.StatusUnauthorized || !strings.Contains(answer, `"code":"unauthorized"`) {
					t.Errorf("%s %s%s with %.40q: %d %s", r.method, prefix, r.path, authorization, code, answer)
				}
			}
		}
	}
	alive(s, v, "requests without a token")
}

// TestForeignProject walks every route with the ids of another project. The
// answer is the one for what does not exist, word for word, and nothing happens.
func TestForeignProject(t *testing.T) {
	s := newServer(t, "--stop-sandboxes") // they are in two projects
	mine := s.create(client.Create{Name: "mine", Tags: map[string]string{"k": "v"}})
	long, err := s.c.Start(t.Context(), mine.Session.ID, client.Run{Command: "sleep", Args: []string{"600"}})
	if err != nil {
		t.Fatal(err)
	}
	stranger := "Bearer " + s.token("default", "another")
	real := strings.NewReplacer("{name}", "mine", "{sid}", string(mine.Session.ID), "{cid}", string(long.ID))
	none := strings.NewReplacer("{name}", "none", "{sid}", string(cloche.NewSessionID()), "{cid}", string(cloche.NewCommandID()))
	ids := regexp.MustCompile(`\b(mine|none|(sbx|cmd|req)_[0-9A-Za-z]+)\b`)
	for _, r := range documentedRoutes(t) {
		// A create makes something of the stranger's own.
		if r.method == http.MethodPost && strings.HasSuffix(r.path, "/sandboxes") || strings.Contains(r.path, "{action}") {
			continue
		}
		kind, body := r.body()
		code, _, answer := s.call(r.method, real.Replace(r.path), kind, body, stranger)
		wantCode, _, want := s.call(r.method, none.Replace(r.path), kind, body, stranger)
		if got, want := ids.ReplaceAllString(answer, "ID"), ids.ReplaceAllString(want, "ID"); code != wantCode || got != want {
			t.Errorf("%s %s tells what is there from what is not:\n%d %s\n%d %s", r.method, r.path, code, got, wantCode, want)
		}
		switch {
		case code == http.StatusBadRequest && strings.Contains(answer, `"not_implemented"`):
		case strings.Contains(r.path, "{name}") || strings.Contains(r.path, "{sid}"):
			if code != http.StatusNotFound {
				t.Errorf("%s %s: %d %s", r.method, r.path, code, answer)
			}
		case code != http.StatusOK || strings.Contains(answer, "mine") || strings.Contains(answer, string(mine.Session.ID)):
			t.Errorf("%s %s: %d %s", r.method, r.path, code, answer)
		}
	}
	// Naming the project does not help.
	for _, query := range []string{"?projectId=default", "?project=default", "?teamId=default&projectId=default"} {
		if code, _, answer := s.call("GET", "/v2/sandboxes/mine"+query, "application/json", "", stranger); code != http.StatusForbidden {
			t.Errorf("%s: %d %s", query, code, answer)
		}
	}
	foreignNames(s, mine, long, stranger)

	got, err := s.c.GetSandbox(t.Context(), "mine", false)
	if err != nil || got.Session.ID != mine.Session.ID || got.Session.Timeout != mine.Session.Timeout || got.Sandbox.Tags["k"] != "v" || got.Sandbox.VCPUs != mine.Sandbox.VCPUs {
		t.Errorf("after the stranger: %+v, %v", got, err)
	}
	if cmd, err := s.c.GetCommand(t.Context(), mine.Session.ID, long.ID); err != nil || cmd.ExitCode != nil {
		t.Errorf("the command after the stranger: %+v, %v", cmd, err)
	}
	if res := s.sh(mine, "ls /tmp/foreign"); res.code == 0 {
		t.Errorf("the stranger left %q", res.stdout)
	}
}

// foreignNames: a name is a project's own, and a command is a session's own.
func foreignNames(s *server, mine client.View, long client.Command, stranger string) {
	other, err := client.New(s.url, strings.TrimPrefix(stranger, "Bearer "))
	if err != nil {
		s.t.Fatal(err)
	}
	theirs, err := other.Create(s.t.Context(), client.Create{Name: "mine"})
	if err != nil || theirs.Session.ID == mine.Session.ID {
		s.t.Fatalf("the same name in another project: %+v, %v", theirs, err)
	}
	path := fmt.Sprintf("/v2/sandboxes/sessions/%s/cmd/%s", theirs.Session.ID, long.ID)
	for method, path := range map[string]string{"GET": path + "/logs", "POST": path + "/kill"} {
		if code, _, answer := s.call(method, path, "application/json", "", stranger); code != http.StatusNotFound {
			s.t.Errorf("%s %s: %d %s", method, path, code, answer)
		}
	}
	if err := other.DeleteSandbox(s.t.Context(), "mine"); err != nil {
		s.t.Error(err)
	}
	alive(s, mine, "the deletion of its namesake")
}

// TestUnknownRoutes: whatever is not a route is a JSON error too.
func TestUnknownRoutes(t *testing.T) {
	s := newServer(t)
	token := "Bearer " + s.token("default", "default")
	for path, want := range map[string]int{
		"/": 404, "/v2": 404, "/v9/sandboxes": 404, "/api/v2/sandboxes/a/b/c/d": 404, "/e2b/sandboxes": 404, "/cloche/v1/x": 404, "/v2/nothing": 404,
	} {
		code, header, body := s.call("GET", path, "application/json", "", token)
		if code != want || !strings.HasPrefix(header.Get("Content-Type"), "application/json") || !strings.Contains(body, `"error":{"code":`) {
			t.Errorf("%s: %d %s %s", path, code, header.Get("Content-Type"), body)
		}
	}
	code, header, body := s.call("PUT", "/v2/sandboxes", "application/json", "{}", token)
	if code != http.StatusMethodNotAllowed || header.Get("Allow") == "" || !strings.Contains(body, `"error":{"code":`) {
		t.Errorf("PUT: %d %q %s", code, header.Get("Allow"), body)
	}
	for _, body := range []string{"{", `"x"`, "[]", `{"name":5}`, "\xff", `{"timeout":"5m"}`, strings.Repeat("[", 100_000), `{"env":{"A":1}}`, `{"args":3}`} {
		code, _, answer := s.call("POST", "/v3/sandboxes", "application/json", body, token)
		if body == `{"args":3}` { // no field of a create
			if code/100 != 2 {
				t.Errorf("an unknown field: %d %s", code, answer)
			}
			continue
		}
		if code != http.StatusBadRequest || !strings.Contains(answer, `"bad_request"`) {
			t.Errorf("%.20q: %d %s", body, code, answer)
		}
	}
	if code, _, answer := s.call("POST", "/v3/sandboxes", "application/json", `{"name":"`+string(bytes.Repeat([]byte("x"), 2<<20))+`"}`, token); code != http.StatusRequestEntityTooLarge {
		t.Errorf("2 MB of JSON: %d %.100s", code, answer)
	}
}
