package cli

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

const (
	// fileSize is the size of the file that is written and read: 100 MB.
	fileSize = 100_000_000
	// settleTime is how long idle sandboxes are left alone before they are
	// measured.
	settleTime = 5 * time.Second
	// sampleTime is how often the server's memory is looked at.
	sampleTime = 20 * time.Millisecond
)

// box makes a sandbox.
func (b *bench) box(ctx context.Context, name string) (client.View, error) {
	return b.c.Create(ctx, client.Create{Name: name, Image: b.Image, Timeout: time.Hour})
}

// mustRun runs a command that has to succeed, and returns how long it took.
func (b *bench) mustRun(ctx context.Context, id cloche.SessionID, argv ...string) (time.Duration, error) {
	started := time.Now()
	cmd, err := b.c.Run(ctx, id, client.Run{Command: argv[0], Args: argv[1:]})
	if err != nil {
		return 0, err
	}
	if *cmd.ExitCode != 0 {
		return 0, fmt.Errorf("%s: exit code %d", argv[0], *cmd.ExitCode)
	}
	return time.Since(started), nil
}

// fresh makes a sandbox, runs echo in it, and returns how long both took. The
// sandbox stays.
func (b *bench) fresh(ctx context.Context, name string) (time.Duration, error) {
	started := time.Now()
	v, err := b.box(ctx, name)
	if err != nil {
		return 0, err
	}
	_, err = b.mustRun(ctx, v.Session.ID, "echo", "hello")
	return time.Since(started), err
}

// create compares a fresh sandbox with the same command in other tools. They
// take turns, so that what else the host does falls on all of them.
func (b *bench) create(ctx context.Context) (err error) {
	peers, err := b.peers(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, peers.Close()) }()
	p := b.progress("create")
	defer p.Done()
	ours := make([]float64, 0, b.Rounds)
	theirs := map[string][]float64{}
	for n := range b.Rounds + 1 {
		name := b.name("create", n)
		took, err := b.fresh(ctx, name)
		if err != nil {
			return err
		}
		if err := b.remove(ctx, name); err != nil {
			return err
		}
		if n > 0 { // the first one fills caches
			ours = append(ours, milliseconds(took))
		}
		for _, peer := range peers.list {
			took, err := peer.run(ctx, n)
			if err != nil {
				return fmt.Errorf("%s: %w", peer.name, err)
			}
			if n > 0 {
				theirs[peer.name] = append(theirs[peer.name], milliseconds(took))
			}
		}
	}
	p50, p95 := percentile(ours, 50), percentile(ours, 95)
	if runsc := theirs["runsc"]; len(runsc) > 0 {
		b.atMost("create", "create and echo, p50", p50, "ms", 1.5*percentile(runsc, 50), " (1.5 of runsc)")
		b.atMost("create", "create and echo, p95", p95, "ms", 3*percentile(runsc, 50), " (3 of runsc's p50)")
	} else {
		b.add("create", "create and echo, p50", p50, "ms")
		b.add("create", "create and echo, p95", p95, "ms")
	}
	for _, peer := range peers.list {
		b.add("create", peer.name+", p50", percentile(theirs[peer.name], 50), "ms")
		b.add("create", peer.name+", p95", percentile(theirs[peer.name], 95), "ms")
	}
	return nil
}

// progress shows which part runs.
func (b *bench) progress(part string) *progress {
	return startProgress(b.env, "measuring "+part, nil)
}

// burst makes many sandboxes at once.
func (b *bench) burst(ctx context.Context) error {
	p := b.progress("burst")
	defer p.Done()
	var alone []float64
	for n := range 3 {
		d, err := b.fresh(ctx, b.name("alone", n))
		if err != nil {
			return err
		}
		alone = append(alone, milliseconds(d))
	}
	one := percentile(alone, 50)
	if err := b.removeAll(ctx); err != nil {
		return err
	}
	took, err := b.together(ctx, "burst", b.Burst)
	if err != nil {
		b.skip("%d sandboxes at once: not all of them came up: %v", b.Burst, err)
		return b.removeAll(ctx)
	}
	name := fmt.Sprintf("slowest of %d at once", b.Burst)
	b.atMost("burst", name, percentile(took, 100), "ms", 15*one, " (15 of one alone)")
	b.add("burst", "one alone, p50 of 3", one, "ms")
	b.add("burst", fmt.Sprintf("p50 of %d at once", b.Burst), percentile(took, 50), "ms")
	return b.removeAll(ctx)
}

// together makes n sandboxes at once, numbered from 1, and returns how long
// each took in milliseconds.
func (b *bench) together(ctx context.Context, part string, n int) ([]float64, error) {
	took := make([]float64, n)
	errs := make([]error, n)
	var all sync.WaitGroup
	for i := range n {
		all.Go(func() {
			var d time.Duration
			d, errs[i] = b.fresh(ctx, b.name(part, i+1))
			took[i] = milliseconds(d)
		})
	}
	all.Wait()
	return took, errors.Join(errs...)
}

// exec runs commands in a sandbox that is there.
func (b *bench) exec(ctx context.Context) error {
	p := b.progress("exec")
	defer p.Done()
	name := b.name("exec", 0)
	v, err := b.box(ctx, name)
	if err != nil {
		return err
	}
	for _, test := range []struct {
		argv  []string
		bound float64 // ms
	}{
		{[]string{"true"}, 8}, {[]string{"python3", "-c", "1"}, 60},
	} {
		what := "exec " + strings.Join(test.argv, " ")
		if _, err := b.mustRun(ctx, v.Session.ID, test.argv...); err != nil {
			b.skip("%s: %v", what, err)
			continue
		}
		took := make([]float64, 0, b.Rounds)
		for range b.Rounds {
			d, err := b.mustRun(ctx, v.Session.ID, test.argv...)
			if err != nil {
				return err
			}
			took = append(took, milliseconds(d))
		}
		b.atMost("exec", what+", p50", percentile(took, 50), "ms", test.bound, "")
		b.add("exec", what+", p95", percentile(took, 95), "ms")
	}
	return b.remove(ctx, name)
}

// file writes and reads a large file of random bytes, and watches the server's
// memory meanwhile.
func (b *bench) file(ctx context.Context) error {
	p := b.progress("file")
	defer p.Done()
	name := b.name("file", 0)
	v, err := b.box(ctx, name)
	if err != nil {
		return err
	}
	before, memErr := residentMB(b.PID)
	stop := b.watch()
	started := time.Now()
	if err := b.c.WriteFiles(ctx, v.Session.ID, v.Session.WorkDir, randomFile(fileSize)); err != nil {
		return err
	}
	b.atLeast("file", "write 100 MB", fileSize/1e6/time.Since(started).Seconds(), "MB/s", 150)
	started = time.Now()
	f, err := b.c.ReadFile(ctx, v.Session.ID, "file")
	if err != nil {
		return err
	}
	n, err := io.Copy(io.Discard, f)
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if n != fileSize {
		return fmt.Errorf("%d bytes came back of %d", n, fileSize)
	}
	b.atLeast("file", "read 100 MB", fileSize/1e6/time.Since(started).Seconds(), "MB/s", 150)
	most := stop()
	if after, err := residentMB(b.PID); err == nil && memErr == nil {
		b.add("file", "server's RSS before", before, "MB")
		b.add("file", "server's RSS after", after, "MB")
		// Far below the file, and above what a garbage collector needs.
		b.atMost("file", "growth of the server's RSS meanwhile", max(most-before, 0), "MB", 25, "")
	} else {
		b.skip("the server's memory: %v", errors.Join(memErr, err))
	}
	return b.remove(ctx, name)
}

// watch samples the server's memory until stop, which returns the most of it.
func (b *bench) watch() (stop func() float64) {
	var most float64
	var done sync.WaitGroup
	var ended atomic.Bool
	done.Go(func() {
		tick := time.NewTicker(sampleTime)
		defer tick.Stop()
		for range tick.C {
			if mb, err := residentMB(b.PID); err == nil {
				most = max(most, mb)
			}
			if ended.Load() {
				return
			}
		}
	})
	return func() float64 {
		ended.Store(true)
		done.Wait()
		return most
	}
}

// randomFile is a tar stream with one file of random bytes, called "file".
func randomFile(size int64) io.Reader {
	r, w := io.Pipe()
	go func() {
		tw := tar.NewWriter(w)
		err := tw.WriteHeader(&tar.Header{Name: "file", Typeflag: tar.TypeReg, Mode: 0o644, Size: size})
		if err == nil {
			// In pieces as large as a program writes that sends a file.
			_, err = io.CopyBuffer(tw, io.LimitReader(rand.NewChaCha8([32]byte{}), size), make([]byte, 256<<10))
		}
		if err == nil {
			err = tw.Close()
		}
		w.CloseWithError(err)
	}()
	return r
}

// idle measures the memory of sandboxes that do nothing.
func (b *bench) idle(ctx context.Context) error {
	p := b.progress("idle")
	defer p.Done()
	var sessions []cloche.SessionID
	for n := range b.Idle {
		v, err := b.box(ctx, b.name("idle", n))
		if err != nil {
			return fmt.Errorf("sandbox %d of %d: %w", n+1, b.Idle, err)
		}
		sessions = append(sessions, v.Session.ID)
	}
	select {
	case <-time.After(settleTime):
	case <-ctx.Done():
		return ctx.Err()
	}
	if mb, processes, err := sandboxesPSS("/proc", sessions); err != nil || processes == 0 {
		b.skip("memory of idle sandboxes: %d processes found, %v", processes, err)
	} else {
		b.atMost("idle", fmt.Sprintf("PSS of each of %d sandboxes", b.Idle), mb/float64(b.Idle), "MB", 25, "")
		b.add("idle", "processes of each", float64(processes)/float64(b.Idle), "")
	}
	if mb, err := pssMB("/proc", b.PID); err != nil {
		b.skip("memory of the server: %v", err)
	} else {
		b.atMost("idle", "PSS of the server", mb, "MB", 120, "")
	}
	return b.removeAll(ctx)
}
