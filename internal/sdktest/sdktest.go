// Package sdktest installs the published @vercel/sandbox packages, unmodified
// and pinned by lock files, for tests that use them as real clients. It is for
// tests alone.
package sdktest

import (
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

//go:embed npm
var npm embed.FS

// Versions are the releases that the server is held to: the latest of each
// generation of the protocol.
func Versions() []string { return []string{"3.5.0", "2.9.2", "1.10.2"} }

// Install returns a directory whose node_modules has that version of the SDK.
// It is made once and kept in the user's cache, never in the checkout. A test
// on a machine without Node is skipped and says so.
func Install(t testing.TB, version string) string {
	t.Helper()
	for _, tool := range []string{"node", "npm"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("SKIPPED: %s is not installed, so the SDK %s was NOT tested against this server", tool, version)
		}
	}
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	files := map[string][]byte{}
	for _, name := range []string{"package.json", "package-lock.json"} {
		if files[name], err = npm.ReadFile("npm/" + version + "/" + name); err != nil {
			t.Fatal(err)
		}
	}
	sum := sha256.Sum256(files["package-lock.json"])
	dir := filepath.Join(cache, "cloche", "npm-"+version+"-"+hex.EncodeToString(sum[:4]))
	if _, err := os.Stat(dir); err == nil {
		return dir
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o755); err != nil {
		t.Fatal(err)
	}
	tmp, err := os.MkdirTemp(filepath.Dir(dir), ".tmp-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(tmp) // nothing is there once it was renamed
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(tmp, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c := exec.CommandContext(t.Context(), "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
	c.Dir = tmp
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("npm ci of the SDK %s: %v\n%s", version, err, out)
	}
	if err := os.Rename(tmp, dir); err != nil && !os.IsExist(err) {
		if _, serr := os.Stat(dir); serr != nil { // else another test was first
			t.Fatal(err)
		}
	}
	return dir
}
