package gvisor

import (
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/cloche-dev/cloche"
)

// SandboxPID is the process that is the machine.
func SandboxPID(t testing.TB, dir string, id cloche.SessionID) int {
	data, err := os.ReadFile(filepath.Join(dir, "machines", string(id), fileRecord))
	if err != nil {
		t.Fatal(err)
	}
	var r record
	if err := json.Unmarshal(data, &r); err != nil {
		t.Fatal(err)
	}
	return r.Sandbox.PID
}
