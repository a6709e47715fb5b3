package e2e

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloche-dev/cloche/internal/sdktest"
	"github.com/cloche-dev/cloche/internal/testenv"
)

// token makes a token of a team and a project, opaque or as a JWT.
func (s *server) token(team, project string, flags ...string) string {
	s.t.Helper()
	args := append([]string{"token", "create", "--data", s.data, "--team", team, "--project", project}, flags...)
	out, err := exec.Command(testenv.Cloche(s.t), args...).Output()
	if err != nil {
		s.t.Fatalf("cloche token create: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// TestSDK runs programs that use the official SDKs, unmodified, against one
// server. Each program has a project of its own. Those of api/vercel run there
// against a fake too; those here need machines.
func TestSDK(t *testing.T) {
	s := newServer(t, "--stop-sandboxes") // they are in many projects
	shared := filepath.Join(testenv.ModuleRoot(t), "api", "vercel", "testdata", "sdk")
	programs := map[string][]string{
		"3.5.0":  {filepath.Join(shared, "v3.mjs"), "testdata/sdk/machine.mjs", "testdata/sdk/fs.mjs", "testdata/sdk/users.mjs"},
		"2.9.2":  {filepath.Join(shared, "v3.mjs"), "testdata/sdk/machine.mjs", "testdata/sdk/fs.mjs", "testdata/sdk/users.mjs"},
		"1.10.2": {filepath.Join(shared, "v1.mjs"), "testdata/sdk/fs.mjs"},
	}
	for _, version := range sdktest.Versions() {
		if len(programs[version]) == 0 {
			t.Errorf("no program for the SDK %s", version)
		}
		for _, program := range programs[version] {
			name := strings.TrimSuffix(filepath.Base(program), ".mjs")
			t.Run(version+"/"+name, func(t *testing.T) {
				dir := sdktest.Install(t, version)
				team, project := "team_"+version, "prj_"+name
				c := exec.CommandContext(t.Context(), "node", program)
				c.Env = append(os.Environ(), "SDK_DIR="+dir, "BASE="+s.url,
					"TOKEN="+s.token(team, project), "TEAM="+team, "PROJECT="+project,
					"OTHER_TOKEN="+s.token("team_other", "prj_other"), "OTHER_TEAM=team_other", "OTHER_PROJECT=prj_other")
				out, err := c.CombinedOutput()
				if err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
				t.Logf("%s", out)
			})
		}
	}
}

// TestPreload runs the example of the README as it stands there: an unmodified
// program with an unmodified SDK, pointed here by the preload and two variables.
func TestPreload(t *testing.T) {
	s := newServer(t)
	root := testenv.ModuleRoot(t)
	example, err := os.ReadFile(filepath.Join(root, "examples", "agent.mjs"))
	if err != nil {
		t.Fatal(err)
	}
	// Node finds packages from where the program is, so it goes beside them.
	dir := t.TempDir()
	program := filepath.Join(dir, "agent.mjs")
	if err := os.WriteFile(program, example, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, version := range sdktest.Versions() {
		if strings.HasPrefix(version, "1.") {
			continue // its commands have no timeout
		}
		t.Run(version, func(t *testing.T) {
			modules := filepath.Join(dir, "node_modules")
			if err := os.Symlink(filepath.Join(sdktest.Install(t, version), "node_modules"), modules); err != nil {
				t.Fatal(err)
			}
			defer os.Remove(modules) // the next version's takes its place
			c := exec.CommandContext(t.Context(), "node", "--import", filepath.Join(root, "sdk", "js", "register.js"), program)
			c.Env = append(os.Environ(), "CLOCHE_URL="+s.url, "VERCEL_OIDC_TOKEN="+s.token("default", "default", "--jwt"))
			out, err := c.CombinedOutput()
			if err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			for _, want := range []string{
				`exit 0: {"primes": [2, 3, 5, 7, 11, 13,`, "stdout: tick 5 on", "exit 137 after", "nothing of the host in", "6. stop",
			} {
				if !strings.Contains(string(out), want) {
					t.Errorf("no %q in the output:\n%s", want, out)
				}
			}
		})
	}
	if code, body := s.get("/healthz"); code != 200 || !strings.Contains(body, `"sessions":0`) {
		t.Errorf("after the examples: %d %s", code, body)
	}
}
