package image

import (
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// networkEnv turns on the tests that download from Debian and npm.
const networkEnv = "CLOCHE_TEST_NETWORK"

// buildUniversal gives the image of the present recipe, from the cache if some
// test or command has made it before.
func TestBuildUniversal(t *testing.T) {
	asRoot(t)
	if os.Getenv(networkEnv) == "" {
		t.Skipf("SKIPPED: builds the real image; set %s=1", networkEnv)
	}
	l, _ := newLibrary(t)
	last := ""
	start := time.Now()
	img, err := l.Build(t.Context(), "universal", BuildOptions{}, func(s Step) {
		if line := s.Name + " " + s.Detail; line != last {
			last = line
			t.Logf("%7.2fs %s %d/%d end=%v", time.Since(start).Seconds(), line, s.Done, s.Total, s.End)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("built in %v: %+v", time.Since(start), img)
	start = time.Now()
	if err := l.Verify(t.Context(), img.ID); err != nil {
		t.Fatal(err)
	}
	t.Logf("verified in %v", time.Since(start))
	tree, err := l.Tree(t.Context(), img.ID)
	if err != nil {
		t.Fatal(err)
	}
	_ = tree
	_ = exec.Command
	_ = strings.Fields
}
