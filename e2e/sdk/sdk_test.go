// Package sdk runs the tests of the npm package in sdk/js, with the official
// SDKs installed beside it.
package sdk

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloche-dev/cloche/internal/sdktest"
)

// TestPackage runs node's own test runner: the result is its exit status.
func TestPackage(t *testing.T) {
	var dirs []string
	for _, version := range sdktest.Versions() {
		dirs = append(dirs, sdktest.Install(t, version))
	}
	c := exec.CommandContext(t.Context(), "node", "--test", "test/")
	c.Dir = filepath.Join("..", "..", "sdk", "js")
	c.Env = append(os.Environ(), "SDK_DIRS="+strings.Join(dirs, string(os.PathListSeparator)))
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
