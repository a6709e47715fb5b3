package drivertest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/driver"
)

// testSize: the machine shows the size that was asked for, also one processor,
// and more than the host has.
func testSize(t *testing.T, e *env) {
	if !e.c.Isolates {
		t.Skip("SKIPPED: this driver does not limit anything")
	}
	for _, size := range []struct{ vcpus, mib int }{{1, 256}, {3, 1024}, {e.d.Capabilities().MaxVCPUs, 512}} {
		spec := e.spec(t)
		spec.VCPUs, spec.MemoryMiB = size.vcpus, size.mib
		m := e.start(t, spec)
		s := e.session(t, m, spec)
		out := e.sh(t, s, `nproc; grep -c ^processor /proc/cpuinfo; awk '/MemTotal/{print $2}' /proc/meminfo;
			df -k /dev/shm | awk 'NR==2{print $2}'; stat -c %a /tmp /dev/shm; touch /tmp/x /dev/shm/x && echo writable`)
		kib := size.mib << 10
		want := fmt.Sprintf("%d\n%d\n%d\n%d\n1777\n1777\nwritable\n", size.vcpus, size.vcpus, kib, kib/2)
		if out != want {
			t.Errorf("with %d vCPUs and %d MiB: %q, want %q", size.vcpus, size.mib, out, want)
		}
		if err := m.Release(e.ctx); err != nil {
			t.Fatal(err)
		}
	}
}

// testCPUBound: a machine of one processor uses no more, also with two busy
// processes.
func testCPUBound(t *testing.T, e *env) {
	if !e.c.Isolates {
		t.Skip("SKIPPED: this driver does not limit anything")
	}
	spec := e.spec(t)
	m := e.start(t, spec)
	s := e.session(t, m, spec)
	before, err := m.Stats(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	e.sh(t, s, "for i in 1 2; do timeout 3 sh -c 'while :; do :; done' & done; wait")
	after, err := m.Stats(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	// Both are measured from outside, so a slow host changes nothing; a period
	// of the quota (0.1 s) at each end may be on top.
	used, wall := after.CPU-before.CPU, time.Since(start)
	if used > wall+wall/20+200*time.Millisecond || used < wall/10 {
		t.Errorf("used %v of CPU in %v", used, wall)
	}
	t.Logf("used %v of CPU in %v", used, wall)
}

// testKillWhileDialing kills a machine under dials that are under way: each
// succeeds or fails at once, none hangs.
func testKillWhileDialing(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	e.session(t, m, spec)
	var wg sync.WaitGroup
	ready := make(chan struct{}, 64)
	for range 4 {
		wg.Go(func() {
			for {
				c, err := m.Dial(e.ctx)
				if err != nil {
					wantCode(t, "Dial", err, cloche.CodeGone)
					return
				}
				_ = c.Close() // only the dial is tested
				select {
				case ready <- struct{}{}:
				default:
				}
			}
		})
	}
	<-ready
	if err := m.Kill(e.ctx); err != nil {
		t.Errorf("Kill: %v", err)
	}
	wg.Wait()
}

func testDeadline(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	c, err := m.Dial(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	start := time.Now()
	if err := c.SetReadDeadline(start.Add(50 * time.Millisecond)); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("Read = %v, want the deadline's error", err)
	}
	if d := time.Since(start); d < 50*time.Millisecond || d > 10*time.Second {
		t.Errorf("the deadline of 50 ms came after %v", d)
	}
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	if c, err := m.Dial(ctx); err == nil {
		t.Error("Dial with an ended context succeeded")
		_ = c.Close()
	}
}

func testManyChannels(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	e.session(t, m, spec)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			s, err := open(e.ctx, m)
			if err != nil {
				t.Errorf("channel %d: %v", i, err)
				return
			}
			defer s.Close()
			big := 300_000 * (i + 1)
			out, exit, err := s.run(e.ctx, fmt.Sprintf("head -c %d /dev/zero | tr '\\0' %d", big, i))
			if err != nil || exit.Code != 0 || out != strings.Repeat(fmt.Sprint(i), big) {
				t.Errorf("channel %d: %d bytes, %+v, %v", i, len(out), exit, err)
			}
		})
	}
	wg.Wait()
}

// testConcurrent calls everything at once on one machine, from two drivers'
// views of it, while it is removed.
func testConcurrent(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	e.session(t, m, spec)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			if _, err := m.Wait(e.ctx); err != nil {
				t.Errorf("Wait: %v", err)
			}
		})
		wg.Go(func() {
			if _, err := m.Stats(e.ctx); err != nil {
				t.Errorf("Stats: %v", err)
			}
		})
		wg.Go(func() {
			r, err := e.d.Recover(e.ctx, spec.ID)
			if err != nil {
				wantCode(t, "Recover", err, cloche.CodeNotFound)
				return
			}
			if err := r.Kill(e.ctx); err != nil {
				t.Errorf("Kill: %v", err)
			}
		})
		wg.Go(func() {
			if err := e.d.Remove(e.ctx, spec.ID); err != nil {
				t.Errorf("Remove: %v", err)
			}
		})
		wg.Go(func() {
			if err := m.Release(e.ctx); err != nil {
				t.Errorf("Release: %v", err)
			}
		})
	}
	wg.Wait()
	e.wait(t, m, driver.ExitKilled)
	e.noLeftovers(t, spec.ID)
}

// testTwenty starts twenty machines at once, runs a command in each and
// releases them all at once.
func testTwenty(t *testing.T, e *env) {
	var wg sync.WaitGroup
	for i := range 20 {
		spec := e.spec(t)
		wg.Go(func() {
			start := time.Now()
			m, err := e.d.Start(e.ctx, spec)
			if err != nil {
				t.Errorf("Start %d: %v", i, err)
				return
			}
			started := time.Since(start)
			s, err := open(e.ctx, m)
			if err == nil {
				defer s.Close()
				err = s.configure(e.ctx, spec)
			}
			if err != nil {
				t.Errorf("channel %d: %v", i, err)
				return
			}
			out, exit, err := s.run(e.ctx, "echo here")
			if err != nil || exit.Code != 0 || out != "here\n" {
				t.Errorf("command %d: %q, %+v, %v", i, out, exit, err)
			}
			t.Logf("machine %d: started after %v, first command after %v", i, started, time.Since(start))
			if err := m.Release(e.ctx); err != nil {
				t.Errorf("Release %d: %v", i, err)
			}
			e.noLeftovers(t, spec.ID)
		})
	}
	wg.Wait()
}

func testStats(t *testing.T, e *env) {
	spec := e.spec(t)
	m := e.start(t, spec)
	s := e.session(t, m, spec)
	before, err := m.Stats(e.ctx)
	if err != nil {
		t.Fatal(err)
	}
	// A machine without a kernel of its own may have used less than the host
	// counts in: 10 ms.
	if before.CPU < 0 || e.c.Isolates && before.CPU == 0 || before.MemoryBytes <= 0 || before.Processes < 1 {
		t.Errorf("running: %+v", before)
	}
	e.sh(t, s, "i=0; while [ $i -lt 100000 ]; do i=$((i+1)); done")
	after, err := m.Stats(e.ctx)
	if err != nil || after.CPU <= before.CPU {
		t.Errorf("after work: %+v, before: %+v, %v", after, before, err)
	}
	if err := m.Kill(e.ctx); err != nil {
		t.Fatal(err)
	}
	ended, err := m.Stats(e.ctx)
	if err != nil || ended.CPU < after.CPU || ended.MemoryBytes != 0 || ended.Processes != 0 {
		t.Errorf("ended: %+v, before: %+v, %v", ended, after, err)
	}
	if err := m.Release(e.ctx); err != nil {
		t.Fatal(err)
	}
	released, err := m.Stats(e.ctx)
	if err != nil || released.CPU < ended.CPU {
		t.Errorf("released: %+v, before: %+v, %v", released, ended, err)
	}
}
