package control

import (
	"context"
	"sync/atomic"
	"testing"

	"github.com/cloche-dev/cloche"
)

// fullStore is a store on a disk that is full until enough has been deleted.
type fullStore struct {
	Store
	full *atomic.Bool
}

func (f fullStore) UpdateSession(ctx context.Context, id cloche.SessionID, change func(*cloche.Session) error) (cloche.Session, error) {
	if f.full.Load() {
		return cloche.Session{}, cloche.Errorf(cloche.CodeExhausted, "the server's disk is full")
	}
	return f.Store.UpdateSession(ctx, id, change)
}

// A session that has filled the disk can be stopped and deleted: its machine
// and its files go first, and make the room that their record needs.
func TestStopOnAFullDisk(t *testing.T) {
	r := newRig(t, Config{})
	var full atomic.Bool
	r.close()
	r.open()
	r.Close(context.Background())
	r.Control = New(fullStore{r.store, &full}, r.node, fakeImages{}, r.cfg)
	if err := r.Recover(t.Context()); err != nil {
		t.Fatal(err)
	}
	v := r.create("greedy")
	full.Store(true)
	r.node.set(func(n *fakeNode) {
		n.onStop = func(context.Context, cloche.SessionID) error {
			full.Store(false) // its files are gone
			return nil
		}
	})
	got, err := r.StopSession(t.Context(), me, v.Session.ID)
	if err != nil || got.Session.State != cloche.Stopped {
		t.Fatalf("stopped: %s, %v", got.Session.State, err)
	}
	if _, err := r.DeleteSandbox(t.Context(), me, "greedy"); err != nil {
		t.Error(err)
	}
	checkConverged(t, r.store, r.node)
}
