package agent

import (
	"context"
	"sync"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/guest"
)

const (
	// outputBudget bounds the kept output of all commands together, beyond
	// outputFloor for each: while the host is away every process waits sooner.
	outputBudget = 48 << 20
	outputFloor  = 32 << 10

	minRead   = 16 << 10 // a pump waits until it may read that much
	maxRead   = guest.MaxFrame
	chunkCost = 64 // bookkeeping of one chunk, counted against the window
)

// budget is memory that all outputs share.
type budget struct {
	mu    sync.Mutex
	free  int
	freed chan struct{} // closed and replaced when free grows
}

func newBudget(n int) *budget { return &budget{free: n, freed: make(chan struct{})} }

// take takes n and returns nil, or the channel to wait on before the next try.
func (b *budget) take(n int) <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.free < n {
		return b.freed
	}
	b.free -= n
	return nil
}

func (b *budget) give(n int) {
	if n == 0 {
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.free += n
	close(b.freed)
	b.freed = make(chan struct{})
}

// chunk is output of one stream. Its data only ever grows at the end, so a
// reader may hold a slice of it without the lock.
type chunk struct {
	stream guest.FrameType
	offset int64
	data   []byte
}

// output is the window of one command: what was read from its pipes and is not
// acknowledged.
type output struct {
	budget *budget

	mu       sync.Mutex
	chunks   []chunk
	base     int64 // oldest offset kept
	end      int64 // bytes produced
	cost     int   // of the chunks, and of reads in progress
	borrowed int   // the part of cost that is the budget's
	dropped  bool  // forgotten: nothing is kept any more
	exit     *cloche.Exit
	inputAck int64         // bytes of input that left the agent
	change   chan struct{} // closed and replaced at every change
}

func newOutput(b *budget) *output { return &output{budget: b, change: make(chan struct{})} }

func (o *output) changedLocked() {
	close(o.change)
	o.change = make(chan struct{})
}

// reserve waits until a read of some size fits into the window and returns that
// size; commit must follow. It returns 0 once the output is dropped.
func (o *output) reserve() int {
	for {
		o.mu.Lock()
		if o.dropped {
			o.mu.Unlock()
			return 0
		}
		wait := (<-chan struct{})(o.change)
		n := min(maxRead, guest.Window-o.cost-chunkCost)
		if n < minRead {
			o.mu.Unlock()
			<-wait
			continue
		}
		borrow := min(max(o.cost+n+chunkCost-outputFloor, 0), n+chunkCost)
		freed := o.budget.take(borrow)
		if freed != nil && o.cost+minRead+chunkCost <= outputFloor {
			n, borrow, freed = outputFloor-o.cost-chunkCost, 0, nil // what each may have
		}
		if freed == nil {
			o.cost += n + chunkCost
			o.borrowed += borrow
			o.mu.Unlock()
			return n
		}
		o.mu.Unlock()
		select {
		case <-wait:
		case <-freed:
		}
	}
}

// commit adds what was read after reserve returned reserved.
func (o *output) commit(stream guest.FrameType, data []byte, reserved int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	used := 0
	if len(data) > 0 && !o.dropped {
		used = o.addLocked(stream, data)
	}
	o.releaseLocked(reserved + chunkCost - used)
	if len(data) > 0 {
		o.changedLocked()
	}
}

// addLocked appends data and returns what it costs.
func (o *output) addLocked(stream guest.FrameType, data []byte) int {
	offset := o.end
	o.end += int64(len(data))
	if k := len(o.chunks) - 1; k >= 0 {
		if last := &o.chunks[k]; last.stream == stream && len(last.data)+len(data) <= maxRead {
			last.data = append(last.data, data...)
			return len(data)
		}
	}
	o.chunks = append(o.chunks, chunk{stream, offset, append([]byte(nil), data...)})
	return len(data) + chunkCost
}

func (o *output) releaseLocked(n int) {
	o.cost -= n
	back := min(n, o.borrowed)
	o.borrowed -= back
	o.budget.give(back)
}

// ack forgets everything before offset. It fails for an offset that has not
// been produced.
func (o *output) ack(offset int64) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if offset > o.end {
		return cloche.Errorf(cloche.CodeInvalid, "acknowledged %d of %d bytes of output", offset, o.end)
	}
	if offset <= o.base {
		return nil
	}
	o.base = offset
	freed, n := 0, 0
	for ; n < len(o.chunks); n++ {
		c := &o.chunks[n]
		if c.offset+int64(len(c.data)) > offset {
			break
		}
		freed += len(c.data) + chunkCost
		c.data = nil // the array behind the slice is still there
	}
	o.chunks = o.chunks[n:]
	if freed > 0 {
		o.releaseLocked(freed)
		o.changedLocked()
	}
	return nil
}

// finish marks the end: no commit follows.
func (o *output) finish(e cloche.Exit) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.exit = &e
	o.changedLocked()
}

// drop forgets everything and ends all waiting.
func (o *output) drop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	freed := 0
	for _, c := range o.chunks {
		freed += len(c.data) + chunkCost
	}
	o.chunks, o.base, o.dropped = nil, o.end, true
	o.releaseLocked(freed)
	o.changedLocked()
}

// inputDone counts input that has left the agent.
func (o *output) inputDone(n int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.inputAck += int64(n)
	o.changedLocked()
}

// produced is the number of bytes so far.
func (o *output) produced() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.end
}

// cursor is one reader's place in an output.
type cursor struct {
	offset   int64
	inputAck int64
}

// append waits for something after cur, appends it to buf as frames, at most
// about limit bytes, and moves cur. ended is true once FrameExit is among them. It
// returns an error when ctx ends or the output is dropped.
func (o *output) append(ctx context.Context, cur *cursor, buf []byte, limit int) (frames []byte, ended bool, err error) {
	for {
		o.mu.Lock()
		change := o.change
		if o.dropped {
			o.mu.Unlock()
			return buf, false, cloche.Errorf(cloche.CodeNotFound, "the command is forgotten")
		}
		// Acknowledged by a newer stream than this cursor's.
		cur.offset = max(cur.offset, o.base)
		if o.inputAck > cur.inputAck {
			cur.inputAck = o.inputAck
			buf = guest.AppendAck(buf, guest.FrameStdinAck, cur.inputAck)
		}
		for _, c := range o.chunks {
			from := cur.offset - c.offset
			if from >= int64(len(c.data)) {
				continue
			}
			if len(buf) > 0 && len(buf)+len(c.data)-int(from) > limit {
				break
			}
			buf = guest.AppendFrame(buf, c.stream, c.data[from:])
			cur.offset = c.offset + int64(len(c.data))
		}
		if cur.offset == o.end && o.exit != nil {
			o.mu.Unlock()
			buf, err = appendJSON(buf, guest.FrameExit, *o.exit)
			return buf, true, err
		}
		o.mu.Unlock()
		if len(buf) > 0 {
			return buf, false, nil
		}
		select {
		case <-change:
		case <-ctx.Done():
			return buf, false, ctx.Err()
		}
	}
}

// from is offset, or the oldest one kept if that is later.
func (o *output) from(offset int64) int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return max(offset, o.base)
}
