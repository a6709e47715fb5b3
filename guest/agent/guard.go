package agent

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"runtime"
	"runtime/metrics"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

const (
	guardFast   = 10 * time.Millisecond  // between looks when memory could fill before the next
	guardSlow   = 100 * time.Millisecond // when it could not
	guardWait   = 2 * time.Second        // for a process to go
	guardSettle = 500 * time.Millisecond // for its memory to come back

	// The guard acts when less than this is free: a tenth of the memory, but
	// no less than minReserve, because gVisor's own memory, some 50 MiB, comes
	// out of the same limit and is in none of the guest's figures; and no more
	// than a quarter.
	reserveTenth   = 10
	minReserve     = 64 << 20
	reserveQuarter = 4

	// fillRate bounds how fast one CPU can fill memory, in bytes per second.
	fillRate = 4 << 30

	// rssFloor keeps the guard from shooting bystanders: below it no process
	// alone is the cause. If memory stays full then, the command whose
	// processes are largest together is.
	rssFloor = 16 << 20

	// manyFold is how much more all processes have than the largest one when the
	// guard looks at commands and not at processes.
	manyFold = 8

	meminfoFile = "/proc/meminfo"
)

// guard kills the greediest process before the machine runs out of memory, which
// would end all of it.
type guard struct {
	agent *Agent
	info  *os.File // of /proc/meminfo
	count atomic.Int64
}

func newGuard(a *Agent) *guard { return &guard{agent: a} }

func (g *guard) kills() int { return int(g.count.Load()) }

// run looks at the memory until ctx ends.
func (g *guard) run(ctx context.Context) {
	f, err := os.Open(meminfoFile)
	if err != nil {
		g.agent.log.Error("no memory guard", "error", err)
		return
	}
	defer func() { _ = f.Close() }() // read only
	g.info = f
	var last time.Time // of a kill
	for ctx.Err() == nil {
		room, err := g.room()
		if err != nil {
			g.agent.log.Error("no memory guard", "error", err)
			return
		}
		if room <= 0 && g.act(ctx, time.Since(last) > guardWait) {
			g.recover(ctx)
			last = time.Now()
		}
		pause(ctx, interval(room))
	}
}

// room is how much more may be used before the guard acts, negative if it is
// past that.
func (g *guard) room() (int64, error) {
	var buf [4096]byte
	n, err := g.info.ReadAt(buf[:], 0)
	total, free, ok := parseMeminfo(buf[:n])
	if !ok {
		return 0, fmt.Errorf("/proc/meminfo is not as expected: %w", err)
	}
	return free - reserve(total), nil
}

func reserve(total int64) int64 {
	return min(max(total/reserveTenth, minReserve), total/reserveQuarter)
}

// recover waits until there is room again, up to guardSettle: memory comes back
// a while after the process that had it has gone.
func (g *guard) recover(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, guardSettle)
	defer cancel()
	for ctx.Err() == nil {
		if room, err := g.room(); err != nil || room > 0 {
			return
		}
		pause(ctx, guardFast)
	}
}

// interval is the time in which room bytes cannot fill up.
func interval(room int64) time.Duration {
	perSecond := int64(fillRate) * int64(runtime.NumCPU())
	d := time.Duration(max(room, 0) * 1000 / perSecond * int64(time.Millisecond))
	return min(max(d, guardFast), guardSlow)
}

// parseMeminfo finds MemTotal and MemAvailable, in bytes.
func parseMeminfo(b []byte) (total, free int64, ok bool) {
	field := func(name string) int64 {
		i := bytes.Index(b, []byte(name))
		if i < 0 {
			return -1
		}
		f := bytes.Fields(b[i+len(name):])
		if len(f) == 0 {
			return -1
		}
		n, err := strconv.ParseInt(string(f[0]), 10, 53)
		if err != nil {
			return -1
		}
		return n << 10
	}
	total, free = field("MemTotal:"), field("MemAvailable:")
	return total, free, total > 0 && free >= 0
}

// act kills the largest process and waits for it to be gone; false if it killed
// none. If no process stands out, or it is a small part of what all have, it kills
// the largest command, provided that no earlier kill may still be on its way to
// show: one by one, hundreds of processes are not killed as fast as they grow.
func (g *guard) act(ctx context.Context, settled bool) bool {
	pid, rss, all, err := largest()
	if err != nil {
		g.agent.log.Error("memory is nearly full", "error", err)
		return false
	}
	if rss < rssFloor {
		return settled && g.actOnCommand(ctx)
	}
	id := g.agent.groups.owner(pid)
	if all > manyFold*rss && settled {
		return g.actOnCommand(ctx)
	}
	if id != "" {
		g.agent.markOOM(id)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return false // it is gone
	}
	g.count.Add(1)
	g.agent.log.Warn("memory is nearly full: killed the largest process", "pid", pid, "rss", rss, "command", id)
	g.await(ctx, []int{pid})
	return true
}

// actOnCommand kills the command whose processes are largest together; false if
// none has a process.
func (g *guard) actOnCommand(ctx context.Context) bool {
	g.agent.mu.Lock()
	var all []*command
	for _, c := range g.agent.commands {
		if c.started {
			all = append(all, c)
		}
	}
	g.agent.mu.Unlock()
	var worst *command
	var members []int
	var most int64
	for _, c := range all {
		pids, err := c.group.pids()
		if err != nil {
			continue
		}
		if sum := sumRSS(pids); sum > most {
			worst, members, most = c, pids, sum
		}
	}
	if worst == nil {
		return false
	}
	g.agent.markOOM(worst.id)
	if err := worst.group.kill(); err != nil {
		g.agent.log.Error("kill for memory", "command", worst.id, "error", err)
		return false
	}
	g.count.Add(1)
	g.agent.log.Warn("memory is nearly full: killed the largest command", "rss", most, "command", worst.id)
	g.await(ctx, members)
	return true
}

// await waits until none of pids lives, so that the next look sees the effect.
func (g *guard) await(ctx context.Context, pids []int) {
	ctx, cancel := context.WithTimeout(ctx, guardWait)
	defer cancel()
	for _, pid := range pids {
		for ctx.Err() == nil {
			if st, ok := readStat(pid); !ok || st.state == 'Z' || st.state == 'X' {
				break
			}
			pause(ctx, guardFast)
		}
	}
}

// largest finds the process with the most resident memory, and what all have
// together, in bytes.
func largest() (pid int, rss, sum int64, err error) {
	all, err := pids()
	if err != nil {
		return 0, 0, 0, fmt.Errorf("list processes: %w", err)
	}
	for _, p := range all {
		n := sumRSS([]int{p})
		if sum += n; n > rss {
			pid, rss = p, n
		}
	}
	return pid, rss, sum, nil
}

func sumRSS(pids []int) int64 {
	var sum int64
	for _, pid := range pids {
		if st, ok := readStat(pid); ok && st.state != 'Z' && st.state != 'X' {
			sum += st.rssPages * int64(os.Getpagesize())
		}
	}
	return sum
}

// agentBytes is the memory that the Go runtime holds.
func agentBytes() int64 {
	s := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(s)
	return int64(s[0].Value.Uint64() - s[1].Value.Uint64())
}
