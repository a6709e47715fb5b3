package cloche_test

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestSoakRunsWhatIsLong: a package with tests that only `make soak` runs is one
// that it does run.
func TestSoakRunsWhatIsLong(t *testing.T) {
	out, err := exec.Command("make", "--no-print-directory", "-n", "soak").CombinedOutput()
	if err != nil {
		t.Fatalf("make -n soak: %v\n%s", err, out)
	}
	var run []string
	for line := range strings.Lines(string(out)) {
		if strings.Contains(line, "CLOCHE_SOAK=1") {
			run = append(run, regexp.MustCompile(`\./\S+`).FindAllString(line, -1)...)
		}
	}
	if len(run) == 0 {
		t.Fatalf("make soak tests nothing:\n%s", out)
	}
	long := regexp.MustCompile(`testenv\.Soak\(|CLOCHE_SOAK`)
	found := false
	err = filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") || path == "makefile_test.go" {
			return err
		}
		text, err := os.ReadFile(path)
		if err != nil || !long.Match(text) {
			return err
		}
		found = true
		dir, covered := "./"+filepath.Dir(path), false
		for _, p := range run {
			base, deep := strings.CutSuffix(p, "/...")
			covered = covered || dir == base || deep && strings.HasPrefix(dir, base+"/")
		}
		if !covered {
			t.Errorf("%s has long tests, and make soak does not run its package", path)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	if !found {
		t.Error("no long tests found at all")
	}
}
