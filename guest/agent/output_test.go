package agent

import (
	"bytes"
	"context"
	"errors"
	"testing"
	"testing/synctest"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

// put adds data as a pump would.
func put(o *output, stream guest.FrameType, data []byte) {
	for len(data) > 0 {
		room := o.reserve()
		if room == 0 {
			return
		}
		n := min(room, len(data))
		o.commit(stream, data[:n], room)
		data = data[n:]
	}
}

// drain reads frames until nothing is left and returns the bytes of output.
func drain(t *testing.T, o *output, cur *cursor) []byte {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var out []byte
	for {
		buf, ended, err := o.append(ctx, cur, nil, maxSend)
		r := guest.NewFrameReader(bytes.NewReader(buf))
		for {
			ft, payload, ferr := r.Next()
			if ferr != nil {
				break
			}
			if ft == guest.FrameStdout || ft == guest.FrameStderr {
				out = append(out, payload...)
			}
		}
		if err != nil || ended {
			return out
		}
	}
}

func TestOutputStopsAtTheWindowAndGoesOnWithAcks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(outputBudget)
		o := newOutput(b)
		data := bytes.Repeat([]byte("0123456789"), guest.Window/4)
		done := make(chan struct{})
		go func() {
			defer close(done)
			put(o, guest.FrameStdout, data)
		}()
		synctest.Wait()
		if n := o.produced(); n > guest.Window || n < guest.Window/2 {
			t.Errorf("%d bytes without an acknowledgement", n)
		}
		var cur cursor
		var got []byte
		for len(got) < len(data) {
			got = append(got, drain(t, o, &cur)...)
			if err := o.ack(cur.offset); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
		}
		<-done
		if !bytes.Equal(got, data) {
			t.Error("other bytes came out")
		}
		if o.cost != 0 || o.borrowed != 0 || b.free != outputBudget {
			t.Errorf("all is acknowledged: cost %d, borrowed %d, free %d", o.cost, o.borrowed, b.free)
		}
		if err := o.ack(int64(len(data)) + 1); cloche.ErrorCode(err) != cloche.CodeInvalid {
			t.Errorf("an acknowledgement of what was not produced: %v", err)
		}
	})
}

func TestOutputOfManyCommandsStaysInTheBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBudget(100 << 10)
		var all []*output
		for range 20 {
			o := newOutput(b)
			all = append(all, o)
			go put(o, guest.FrameStderr, make([]byte, 1<<20))
		}
		synctest.Wait()
		var sum int64
		for _, o := range all {
			if o.produced() == 0 {
				t.Error("a command may not even have its floor")
			}
			sum += o.produced()
		}
		if most := int64(100<<10 + len(all)*outputFloor); sum > most {
			t.Errorf("%d bytes kept, more than %d", sum, most)
		}
		// With the floor alone each goes on to its end.
		for _, o := range all {
			var cur cursor
			for n := 0; n < 1<<20; {
				n += len(drain(t, o, &cur))
				if err := o.ack(cur.offset); err != nil {
					t.Fatal(err)
				}
				synctest.Wait()
			}
		}
		if b.free != 100<<10 {
			t.Errorf("%d of the budget came back", b.free)
		}
	})
}

func TestOutputInSmallPieces(t *testing.T) {
	o := newOutput(newBudget(outputBudget))
	for i := range 1000 {
		put(o, guest.FrameStdout+guest.FrameType(i%2), []byte{byte(i)})
	}
	if o.cost > 1000*(chunkCost+1) {
		t.Errorf("cost %d", o.cost)
	}
	cur := cursor{offset: 300}
	if got := drain(t, o, &cur); len(got) != 700 || got[0] != byte(300%256) {
		t.Errorf("%d bytes from 300", len(got))
	}
	if err := o.ack(500); err != nil {
		t.Fatal(err)
	}
	if o.from(0) != 500 || o.from(600) != 600 {
		t.Errorf("goes on from %d and %d", o.from(0), o.from(600))
	}
	o.finish(cloche.Exit{Code: 3})
	buf, ended, err := o.append(t.Context(), &cursor{offset: 1000}, nil, maxSend)
	if ft, _, ferr := guest.NewFrameReader(bytes.NewReader(buf)).Next(); err != nil || !ended || ferr != nil || ft != guest.FrameExit {
		t.Errorf("the end: %v %v %v", ended, err, ft)
	}
	o.drop()
	if o.cost != 0 || o.reserve() != 0 {
		t.Errorf("after drop: cost %d", o.cost)
	}
	if _, _, err := o.append(t.Context(), &cursor{}, nil, maxSend); cloche.ErrorCode(err) != cloche.CodeNotFound {
		t.Errorf("after drop: %v", err)
	}
}

func TestInputHasCredit(t *testing.T) {
	o := newOutput(newBudget(outputBudget))
	in := newInput(o, nil, false, true)
	if err := in.push(make([]byte, guest.StdinWindow)); err != nil {
		t.Fatal(err)
	}
	if err := in.push([]byte{1}); cloche.ErrorCode(err) != cloche.CodeInvalid {
		t.Errorf("beyond the window: %v", err)
	}
	in.stop()
	in.run()
	if o.inputAck != guest.StdinWindow {
		t.Errorf("%d acknowledged", o.inputAck)
	}
	if err := in.push(make([]byte, 10)); err != nil || o.inputAck != guest.StdinWindow+10 {
		t.Errorf("after the end: %v, %d acknowledged", err, o.inputAck)
	}
	closed := newInput(o, nil, false, false)
	if err := closed.push([]byte{1}); !errors.Is(err, &cloche.Error{Code: cloche.CodeInvalid}) {
		t.Errorf("to a command without input: %v", err)
	}
}
