package e2e

import (
	_ "embed"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloche-dev/cloche/client"
)

//go:embed testdata/evil-agent.py
var evilAgent []byte

// evilModes are what the false agent does with the channel; its text says how.
// Those of the first line never list their commands, so that they are given up
// and ended when the server starts; the others go on with their streams.
var evilModes = [][]string{
	{"silent", "stale", "refuse", "ping", "settings", "unknown", "window", "noanswer", "headers", "1xx", "rst", "json", "deep"},
	{"goaway", "ids", "break", "gap", "zero", "empty", "flood", "ack", "exit"},
}

// TestRootAsTheAgent: root in a machine mounts a program of its own over the
// agent, so that the next channel is its own, and says to the server whatever
// would harm it. A start of the server waits for all of them together no longer
// than for one; the server stays within bounds, another sandbox works, and those
// of the false agents can be ended.
func TestRootAsTheAgent(t *testing.T) {
	s := newServer(t)
	quiet := s.create(client.Create{VCPUs: 1})
	for _, modes := range evilModes {
		var evil []client.View
		for _, mode := range modes {
			v := s.create(client.Create{VCPUs: 1})
			plantEvilAgent(s, v, mode)
			evil = append(evil, v)
		}
		s.kill()
		began := time.Now()
		s.start()
		if took := time.Since(began); took > 30*time.Second {
			t.Errorf("the server started in %s", took)
		}
		worst, rss, fds := watch(s, quiet)
		t.Logf("%v: start %s, %d MiB, %d descriptors, slowest command of the neighbour %s", modes, time.Since(began).Round(time.Millisecond), rss, fds, worst.Round(time.Millisecond))
		if rss > 300 || fds > 300 || worst > 5*time.Second {
			t.Error("that is too much")
		}
		var wg sync.WaitGroup
		for _, v := range evil {
			wg.Go(func() {
				if err := s.c.DeleteSandbox(t.Context(), v.Sandbox.Name); err != nil {
					t.Errorf("delete: %v", err)
				}
			})
		}
		began = time.Now()
		wg.Wait()
		if took := time.Since(began); took > 40*time.Second {
			t.Errorf("the deletes took %s", took)
		}
	}
}

// watch runs commands in a sandbox for a while and returns the slowest one, and
// the most memory, in MiB, and descriptors that the server had.
func watch(s *server, v client.View) (worst time.Duration, rss, fds int) {
	s.t.Helper()
	pid := s.cmd.Process.Pid
	for began := time.Now(); time.Since(began) < 4*time.Second; {
		at := time.Now()
		alive(s, v, "false agents")
		worst = max(worst, time.Since(at))
		rss = max(rss, residentMiB(s.t, pid))
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		check(s.t, err)
		fds = max(fds, len(open))
	}
	return worst, rss, fds
}

// plantEvilAgent leaves two commands running and the false agent where the next
// channel is handed over.
func plantEvilAgent(s *server, v client.View, mode string) {
	s.t.Helper()
	var ids []string
	for range 2 {
		c, err := s.c.Start(s.t.Context(), v.Session.ID, client.Run{Command: "sleep", Args: []string{"600"}})
		if err != nil {
			s.t.Fatal(err)
		}
		ids = append(ids, string(c.ID))
	}
	for name, content := range map[string]string{"evil": string(evilAgent), "mode": mode, "cmds": strings.Join(ids, "\n")} {
		if err := s.c.WriteFiles(s.t.Context(), v.Session.ID, "/tmp", tarOf(s.t, name, int64(len(content)), strings.NewReader(content))); err != nil {
			s.t.Fatal(err)
		}
	}
	if res := s.sh(v, "sudo mount -t tmpfs none /run/cloche && sudo install -m 755 /tmp/evil /run/cloche/agent && head -c 2 /run/cloche/agent"); res.stdout != "#!" {
		s.t.Fatalf("mount over the agent: %+v", res)
	}
}
