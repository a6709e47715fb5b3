package main

import (
	"testing"

	"github.com/cloche-dev/cloche/guest"
)

func TestRunReportsOutputAndExit(t *testing.T) {
	for _, groups := range []bool{true, false} {
		m := startMachine(t, groups)
		c := m.client()
		id, err := c.Configure(t.Context(), testConfig())
		if err != nil {
			t.Fatal(err)
		}
		if id.UID != uidUser || id.Home != "/srv" || id.WorkDir != workDir {
			t.Errorf("identity %+v", id)
		}
		r := execute(t, c, guest.Start{Argv: []string{"sh", "-c", "pwd; id -un; echo oops >&2; exit 7"}}, nil)
		if got, want := string(r.stdout), workDir+"\nubuntu\n"; got != want {
			t.Errorf("stdout %q, want %q", got, want)
		}
		if string(r.stderr) != "oops\n" || r.exit.Code != 7 || r.exit.Signal != 0 || r.exit.Duration <= 0 {
			t.Errorf("stderr %q, exit %+v", r.stderr, r.exit)
		}
	}
}
