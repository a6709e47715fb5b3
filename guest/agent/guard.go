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
	guardFast = 10 * time.Millisecond  // between looks when memory could fill before the next
	guardSlow = 100 * time.Millisecond // when it could not
	guardWait = 2 * time.Second        // for a kill to show

	// guardPercent of the machine's memory in use is where the guard acts.
	guardPercent = 90

	// fillRate bounds how fast one CPU can fill memory, in bytes per second.
	fillRate = 4 << 30

	// rssFloor keeps the guard from shooting bystanders: below it no process
	// alone is the cause, and the command with the largest sum is killed.
	rssFloor = 16 << 20

	meminfoFile = "/proc/meminfo"
)

// guard kills the greediest process before the machine runs out of memory, which
// would end all of it.
type guard struct {
	agent *Agent
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
	buf := make([]byte, 4096)
	for ctx.Err() == nil {
		n, err := f.ReadAt(buf, 0)
		total, free, ok := parseMeminfo(buf[:n])
		if !ok {
			g.agent.log.Error("no memory guard: /proc/meminfo is not readable", "error", err)
			return
		}
		room := free - total/100*(100-guardPercent)
		if room <= 0 {
			g.act(ctx)
			room = 0
		}
		pause(ctx, interval(room))
	}
}

// interval is the time in which room bytes cannot fill up.
func interval(room int64) time.Duration {
	perSecond := int64(fillRate) * int64(runtime.NumCPU())
	d := time.Duration(room * 1000 / perSecond * int64(time.Millisecond))
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

// act kills the largest process, or the largest command if no process stands
// out, and waits for it to be gone.
func (g *guard) act(ctx context.Context) {
	pid, rss, err := largest()
	if err != nil || pid == 0 {
		g.agent.log.Error("memory is nearly full, and there is no process to kill", "error", err)
		pause(ctx, guardSlow)
		return
	}
	id := g.agent.groups.owner(pid)
	if rss < rssFloor && g.actOnCommand(ctx) {
		return
	}
	if id != "" {
		g.agent.markOOM(id)
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return // it is gone
	}
	g.count.Add(1)
	g.agent.log.Warn("memory is nearly full: killed the largest process", "pid", pid, "rss", rss, "command", id)
	g.await(ctx, []int{pid})
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

// largest finds the process with the most resident memory, in bytes.
func largest() (pid int, rss int64, err error) {
	all, err := pids()
	if err != nil {
		return 0, 0, fmt.Errorf("list processes: %w", err)
	}
	for _, p := range all {
		if n := sumRSS([]int{p}); n > rss {
			pid, rss = p, n
		}
	}
	return pid, rss, nil
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
