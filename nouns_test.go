package cloche_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/cloche-dev/cloche"
)

// IDs of one kind have one length, do not repeat and sort by their time; what
// is no ID, a path above all, is never taken for one.
func TestIDs(t *testing.T) {
	seen := map[cloche.SessionID]bool{}
	for range 1000 {
		id := cloche.NewSessionID()
		if !id.Valid() || len(id) != len("sbx_")+26 || seen[id] {
			t.Fatalf("id %q", id)
		}
		seen[id] = true
	}
	good := string(cloche.NewSessionID())
	for _, bad := range []string{
		"", "sbx_", good[:len(good)-1], good + "0", strings.ToUpper(good), "box_" + good[4:],
		"sbx_../../../../../../../etc", "sbx_" + strings.Repeat("u", 26), good[:len(good)-1] + "/",
	} {
		if cloche.SessionID(bad).Valid() {
			t.Errorf("%q is taken for an id", bad)
		}
	}
}

// Final states are left by nothing, and every other one leads to an end.
func TestTransitions(t *testing.T) {
	for _, from := range cloche.SessionStates() {
		var next []cloche.SessionState
		for _, to := range cloche.SessionStates() {
			if got, err := from.To(to); err == nil {
				next = append(next, got)
			} else if got != from || cloche.ErrorCode(err) != cloche.CodeConflict {
				t.Errorf("%s to %s: %s, %v", from, to, got, err)
			}
		}
		if from.Final() != (len(next) == 0) {
			t.Errorf("%s: final is %t, next %v", from, from.Final(), next)
		}
		if slices.Contains(next, from) || slices.Contains(next, cloche.Pending) {
			t.Errorf("%s goes back: %v", from, next)
		}
	}
}

// Reserved names would collide with paths of the API.
func TestCheckName(t *testing.T) {
	for _, good := range []string{"a", "my-box.1_x", strings.Repeat("n", cloche.MaxNameLen)} {
		if err := cloche.CheckName(good); err != nil {
			t.Errorf("%q: %v", good, err)
		}
	}
	for _, bad := range []string{"", "-a", "a-", "a/b", "..", "a\xff", "sessions", "Snapshots", "drives", strings.Repeat("n", cloche.MaxNameLen+1)} {
		if err := cloche.CheckName(bad); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
