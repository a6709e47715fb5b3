package drivertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// AgentVar names the environment variable with the path of an agent that is
// built already, for hosts without Go.
const AgentVar = "CLOCHE_TEST_AGENT"

// Agent builds the agent as it is shipped, static and stripped, and returns its
// path.
func Agent(t testing.TB) string {
	t.Helper()
	if path := os.Getenv(AgentVar); path != "" {
		return path
	}
	path := filepath.Join(t.TempDir(), "cloche-agent")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", path, "github.com/cloche-dev/cloche/cmd/cloche-agent")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build agent: %v\n%s", err, out)
	}
	return path
}
