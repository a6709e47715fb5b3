package agent

import (
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"golang.org/x/sys/unix"
)

// maxProcFile bounds what is read of one file of /proc or of a cgroup.
const maxProcFile = 4 << 20

// readBounded reads the start of a small file without ever blocking on it.
func readBounded(path string, limit int64) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(io.LimitReader(f, limit))
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return b, err
}

// pids lists the processes of the machine but process 1.
func pids() ([]int, error) {
	d, err := os.Open("/proc")
	if err != nil {
		return nil, err
	}
	names, err := d.Readdirnames(-1)
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	var out []int
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid > 1 {
			out = append(out, pid)
		}
	}
	return out, err
}

// procStat is the part of /proc/PID/stat that the agent needs.
type procStat struct {
	state           byte
	parent, session int
	rssPages        int64
}

// readStat reads /proc/PID/stat; ok is false for a process that is gone.
func readStat(pid int) (procStat, bool) {
	b, err := readBounded(filepath.Join("/proc", strconv.Itoa(pid), "stat"), maxProcFile)
	if err != nil {
		return procStat{}, false
	}
	return parseStat(b)
}

// parseStat reads the line of proc_pid_stat(5). The name in it may hold any
// bytes, the last ')' ends it.
func parseStat(b []byte) (procStat, bool) {
	i := bytes.LastIndexByte(b, ')')
	if i < 0 {
		return procStat{}, false
	}
	const state, parent, session, rss = 0, 1, 3, 21 // after the name
	f := bytes.Fields(b[i+1:])
	if len(f) <= rss || len(f[state]) != 1 {
		return procStat{}, false
	}
	var err error
	number := func(i int) int64 {
		n, nerr := strconv.ParseInt(string(f[i]), 10, 64)
		if nerr != nil {
			err = nerr
		}
		return n
	}
	s := procStat{f[state][0], int(number(parent)), int(number(session)), number(rss)}
	return s, err == nil
}

// parsePIDs reads cgroup.procs.
func parsePIDs(b []byte) []int {
	var out []int
	for _, f := range bytes.Fields(b) {
		if pid, err := strconv.Atoi(string(f)); err == nil && pid > 1 {
			out = append(out, pid)
		}
	}
	return out
}
