package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// A process that cloche starts gets none of the descriptors that cloche was
// started with.
func TestKeepDescriptors(t *testing.T) {
	// A shell opens fd 7 for us, as a parent that does not care would.
	c := exec.Command("bash", "-c", `exec 7</dev/null; exec "$0" -test.run TestChildOfKeepDescriptors -test.v`, os.Args[0])
	c.Env = append(os.Environ(), "CLOCHE_TEST_CHILD=1")
	out, err := c.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !strings.Contains(string(out), "child sees: 0 1 2 3\n") { // 3 is ls's own
		t.Errorf("descriptors leak:\n%s", out)
	}
}

// TestChildOfKeepDescriptors is the process of the test above.
func TestChildOfKeepDescriptors(t *testing.T) {
	if os.Getenv("CLOCHE_TEST_CHILD") == "" {
		t.Skip("run by TestKeepDescriptors")
	}
	if err := keepDescriptors(); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("ls", "/proc/self/fd").Output()
	if err != nil {
		t.Fatal(err)
	}
	os.Stdout.WriteString("child sees: " + strings.Join(strings.Fields(string(out)), " ") + "\n")
}
