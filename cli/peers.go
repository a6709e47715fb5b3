package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// peer is another tool that runs a command in isolation.
type peer struct {
	name string
	// argv is the command line of the nth run, the path of the tool first.
	argv func(n int) []string
	dir  string // it runs in
}

// run does what a fresh sandbox does, and returns how long it took.
func (p *peer) run(ctx context.Context, n int) (time.Duration, error) {
	argv := p.argv(n)
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Dir = p.dir
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	started := time.Now()
	err := cmd.Run()
	took := time.Since(started)
	if err != nil {
		return 0, fmt.Errorf("%w: %s", err, strings.TrimSpace(errs.String()))
	}
	if out.String() != "hello\n" {
		return 0, fmt.Errorf("it printed %q", out.String())
	}
	return took, nil
}

// peerSet is the peers that this host has.
type peerSet struct {
	list []*peer
	dir  string // of their bundle and state
}

// Close removes their files. runsc leaves an empty network namespace mounted in
// its state directory (runsc/sandbox, "null-netns").
func (s *peerSet) Close() error {
	netns := filepath.Join(s.dir, stateDir, "null-netns")
	err := unix.Unmount(netns, unix.MNT_DETACH)
	if err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.EPERM) {
		return fmt.Errorf("unmount %s: %w", netns, err)
	}
	if err := os.RemoveAll(s.dir); err != nil {
		return fmt.Errorf("bundle: %w", err)
	}
	return nil
}

// stateDir is where runc and runsc keep what runs, in the bundle.
const stateDir = "state"

// peers finds the other tools, and tries each once. What is not there or does
// not work is said, and left out.
func (b *bench) peers(ctx context.Context) (*peerSet, error) {
	dir, err := os.MkdirTemp("", "cloche-bench-*")
	if err != nil {
		return nil, fmt.Errorf("bundle: %w", err)
	}
	set := &peerSet{dir: dir}
	tree := b.findTree()
	if tree == "" {
		b.skip("runsc, runc and bwrap: give the root file system that they shall run on with --tree DIR")
		return set, nil
	}
	if tree, err = filepath.Abs(tree); err != nil {
		return nil, errors.Join(fmt.Errorf("tree: %w", err), set.Close())
	}
	if err := writeBundle(dir, tree); err != nil {
		return nil, errors.Join(fmt.Errorf("bundle: %w", err), set.Close())
	}
	state := filepath.Join(dir, stateDir)
	for _, p := range []struct {
		name, path string
		args       func(id string) []string
	}{
		// The tree is read-only in the bundle; what is written goes to memory.
		{"runsc", b.Runsc, func(id string) []string {
			return []string{"--root", state, "--network=none", "--overlay2=root:memory", "run", "--bundle", dir, id}
		}},
		{"runc", b.Runc, func(id string) []string {
			return []string{"--root", state, "run", "--bundle", dir, id}
		}},
		{"bwrap", b.Bwrap, func(string) []string {
			return []string{"--unshare-all", "--ro-bind", tree, "/", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp",
				"--setenv", "PATH", guestPath, "--", "echo", "hello"}
		}},
	} {
		program, err := exec.LookPath(p.path)
		if err != nil {
			b.skip("%s: %v; name it with --%s PATH", p.name, err, p.name)
			continue
		}
		one := &peer{name: p.name, dir: dir, argv: func(n int) []string {
			return append([]string{program}, p.args("cloche-bench-"+p.name+"-"+strconv.Itoa(os.Getpid())+"-"+strconv.Itoa(n))...)
		}}
		if _, err := one.run(ctx, -1); err != nil {
			b.skip("%s: %v", p.name, err)
			continue
		}
		set.list = append(set.list, one)
	}
	return set, nil
}

const guestPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// writeBundle writes the config.json that runc and runsc read: echo hello, as
// root, in namespaces of its own, on a read-only tree.
func writeBundle(dir, tree string) error {
	type m = map[string]any
	mount := func(at, kind string, options ...string) m {
		return m{"destination": at, "type": kind, "source": kind, "options": append([]string{"nosuid"}, options...)}
	}
	var namespaces []m
	for _, kind := range []string{"pid", "network", "ipc", "uts", "mount"} {
		namespaces = append(namespaces, m{"type": kind})
	}
	config := m{
		"ociVersion": "1.0.2",
		"process": m{
			"user": m{"uid": 0, "gid": 0}, "args": []string{"echo", "hello"},
			"env": []string{"PATH=" + guestPath}, "cwd": "/", "noNewPrivileges": true,
		},
		"root":     m{"path": tree, "readonly": true},
		"hostname": "bench",
		"mounts": []m{
			mount("/proc", "proc"), mount("/dev", "tmpfs", "strictatime", "mode=755", "size=65536k"), mount("/tmp", "tmpfs"),
		},
		"linux": m{"namespaces": namespaces},
	}
	b, err := json.MarshalIndent(config, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600)
}
