package cli

import (
	"bytes"
	"os"
	"os/exec"
	"testing"
)

// TestPeersLeaveNothing runs the other tools that this host has on its own root
// file system.
func TestPeersLeaveNothing(t *testing.T) {
	if _, err := exec.LookPath("bwrap"); err != nil || os.Geteuid() != 0 {
		t.Skip("SKIPPED: it takes root, and bwrap at least")
	}
	t.Setenv("TMPDIR", t.TempDir())
	var said bytes.Buffer
	b := &bench{env: &Env{Stderr: &said}, benchCmd: benchCmd{Tree: "/", Runsc: "no-such-runsc", Runc: "runc", Bwrap: "bwrap"}}
	set, err := b.peers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range set.list {
		if took, err := p.run(t.Context(), 1); err != nil || took <= 0 {
			t.Errorf("%s: %s, %v", p.name, took, err)
		}
	}
	if err := set.Close(); err != nil {
		t.Error(err)
	}
	left, err := os.ReadDir(os.TempDir())
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
	if len(b.report.Skipped)+len(set.list) != 3 || !bytes.Contains(said.Bytes(), []byte("no-such-runsc")) {
		t.Errorf("%d peers, said: %s", len(set.list), said.String())
	}
}
