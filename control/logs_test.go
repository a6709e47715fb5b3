package control

import (
	"slices"
	"testing"

	"github.com/cloche-dev/cloche"
)

// Nobody can read the logs of a deleted sandbox, so that they go with it; those
// of a stopped one stay.
func TestLogsGoWithTheirSandbox(t *testing.T) {
	r := newRig(t, Config{})
	kept, gone, stray := r.create("kept"), r.create("gone"), cloche.NewSessionID()
	for _, id := range []cloche.SessionID{kept.Session.ID, gone.Session.ID, stray} {
		r.node.hasLogs(t, id)
	}
	if _, err := r.StopSession(t.Context(), me, kept.Session.ID); err != nil {
		t.Fatal(err)
	}
	if _, err := r.DeleteSandbox(t.Context(), me, "gone"); err != nil {
		t.Fatal(err)
	}
	r.close() // waits for what goes on in the background
	wantLogs(t, r, kept.Session.ID, stray)

	// What a crash left is found by the next start.
	r.open()
	r.close()
	wantLogs(t, r, kept.Session.ID)
	r.open()
}

func wantLogs(t *testing.T, r *rig, want ...cloche.SessionID) {
	t.Helper()
	got, err := r.node.Logged(t.Context())
	slices.Sort(want)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("logs of %v, want %v (%v)", got, want, err)
	}
}
