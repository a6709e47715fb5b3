package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestDataDirOfOthers: a directory with somebody else's files stays as it is.
func TestDataDirOfOthers(t *testing.T) {
	dir := t.TempDir()
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"lost+found", "precious"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := openDataDir(dir); err == nil || !strings.Contains(err.Error(), "precious") {
		t.Errorf("a directory of others: %v", err)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("it was changed: %v, %v", info.Mode(), err)
	}
	if err := os.Remove(filepath.Join(dir, "precious")); err != nil {
		t.Fatal(err)
	}
	if _, err := openDataDir(dir); err != nil {
		t.Errorf("the root of a file system of its own: %v", err)
	}
	for _, name := range []string{"lock", "precious"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := openDataDir(dir); err != nil {
		t.Errorf("a data directory with one more file: %v", err)
	}
}
