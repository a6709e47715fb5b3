package drivertest

import (
	"bytes"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cloche-dev/cloche"
)

// Leftovers lists what the host still has of a machine: processes and mounts
// that name it, cgroups and, below dir, files with its id in their name. Its
// top is not looked at.
func Leftovers(t testing.TB, dir string, id cloche.SessionID) []string {
	t.Helper()
	var left []string
	cmdlines, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range cmdlines {
		// A process that has ended meanwhile is none.
		if data, err := os.ReadFile(path); err == nil && bytes.Contains(data, []byte(id)) {
			left = append(left, "process "+filepath.Dir(path)+": "+string(bytes.ReplaceAll(data, []byte{0}, []byte{' '})))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		if strings.Contains(line, string(id)) {
			left = append(left, "mount "+strings.TrimSpace(line))
		}
	}
	for _, root := range []string{"/sys/fs/cgroup", dir} {
		err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
			if err != nil && path != root {
				return nil // it went away
			}
			if strings.Contains(filepath.Base(path), string(id)) {
				left = append(left, path)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return left
}
