package e2e

import (
	"context"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cloche-dev/cloche/client"
)

// TestHostileImageTrees: an image whose tree has links, pipes and files where
// mount points and the agent's files belong. A start may fail, in time; what
// runs sees nothing of the host, and nothing on the host is made or changed.
func TestHostileImageTrees(t *testing.T) {
	data := freshData(t)
	tree := ownImage(t, data)
	marker := filepath.Join(t.TempDir(), "marker")
	if err := os.MkdirAll(filepath.Join(marker, "cloche"), 0o777); err != nil {
		t.Fatal(err)
	}
	for _, f := range []string{"agent", "cloche/agent", "passwd", "hosts"} {
		if err := os.WriteFile(filepath.Join(marker, f), []byte("needle-of-the-host\n"), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	s := &server{t: t, data: data}
	s.start()
	t.Cleanup(s.finish)
	before := listing(t, marker)
	refused := 0
	for name, plant := range hostileTrees(marker) {
		t.Run(name, func(t *testing.T) {
			undo := plant.into(t, tree)
			defer undo()
			s.t = t
			started := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			v, err := s.c.Create(ctx, client.Create{VCPUs: 1})
			if ctx.Err() != nil {
				t.Errorf("create did not return: %v", err)
			}
			t.Logf("create: %v after %s", err, time.Since(started).Round(time.Millisecond))
			if err != nil {
				refused++
			} else {
				hostUnseen(s, v)
				if err := s.c.DeleteSandbox(context.Background(), v.Sandbox.Name); err != nil {
					t.Errorf("delete: %v", err)
				}
			}
			if after := listing(t, marker); after != before {
				t.Errorf("the host's files changed:\n%s\nwere\n%s", after, before)
			}
		})
	}
	s.t = t
	if refused < 10 { // /run as a file, and the like, cannot start
		t.Errorf("only %d trees were refused: is it this image that sandboxes start from?", refused)
	}
}

// hostUnseen runs what an image could have bent towards the host. Commands may
// fail in a tree that lacks its parts.
func hostUnseen(s *server, v client.View) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(s.t.Context(), 20*time.Second)
	defer cancel()
	var out strings.Builder
	_, err := s.c.Run(ctx, v.Session.ID, client.Run{Command: "/bin/bash", Sudo: true, Stdout: &out, Stderr: &out, Args: []string{"-c",
		"for d in /run /run/cloche /dev /dev/shm /proc /sys /tmp /etc /vercel /vercel/sandbox /state /l /root /home/*; do ls -la $d/ $d/*; echo guest > $d/guest; cat $d/passwd $d/hosts $d/agent | head -c 300; done 2>&1 | tr -d '\\000'; cat /proc/self/mountinfo"}})
	if ctx.Err() != nil {
		s.t.Errorf("the look around did not return: %v", err)
	}
	for _, needle := range []string{"needle-of-the-host", s.data, "spec.json", "runsc-"} {
		if strings.Contains(out.String(), needle) {
			s.t.Errorf("the machine shows %q:\n%s", needle, out.String())
		}
	}
}

// ownImage gives a data directory a copy of the template's image, of hard links,
// and returns its tree. What is planted must replace files, never write them.
func ownImage(t *testing.T, data string) (tree string) {
	t.Helper()
	images := filepath.Join(data, "images")
	from, err := filepath.EvalSymlinks(images)
	if err == nil {
		err = os.Remove(images)
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-al", from, images).CombinedOutput(); err != nil {
		t.Fatalf("copy images: %v\n%s", err, out)
	}
	trees, err := filepath.Glob(filepath.Join(images, "img_*", "*", "bin"))
	if err != nil || len(trees) == 0 {
		t.Fatalf("trees: %q, %v", trees, err)
	}
	return filepath.Dir(trees[len(trees)-1]) // the latest: ids are in order of time
}

// planted is what stands at a path of a tree.
type planted struct {
	path, link string
	kind       fs.FileMode // 0 = a link to link, else a pipe, a directory or a file
}

func hostileTrees(marker string) map[string]planted {
	up := strings.Repeat("../", 24)
	trees := map[string]planted{
		"run is a file":           {path: "run", kind: 0o644},
		"run is itself":           {path: "run", link: "run"},
		"run is missing":          {path: "run", kind: fs.ModeIrregular},
		"run/cloche is a file":    {path: "run/cloche", kind: 0o644},
		"run/cloche is a pipe":    {path: "run/cloche", kind: fs.ModeNamedPipe},
		"agent is a directory":    {path: "run/cloche/agent", kind: fs.ModeDir},
		"agent is a pipe":         {path: "run/cloche/agent", kind: fs.ModeNamedPipe},
		"dev is a file":           {path: "dev", kind: 0o644},
		"proc is a pipe":          {path: "proc", kind: fs.ModeNamedPipe},
		"tmp is a file":           {path: "tmp", kind: 0o644},
		"etc/passwd is a pipe":    {path: "etc/passwd", kind: fs.ModeNamedPipe},
		"etc/group is a pipe":     {path: "etc/group", kind: fs.ModeNamedPipe},
		"etc/passwd is endless":   {path: "etc/passwd", link: "/dev/zero"},
		"etc/hosts is a pipe":     {path: "etc/hosts", kind: fs.ModeNamedPipe},
		"etc/passwd is directory": {path: "etc/passwd", kind: fs.ModeDir},
		"proc is sys":             {path: "proc", link: "sys"},
		"vercel is a file":        {path: "vercel", kind: 0o644},
	}
	for _, p := range []string{"run", "run/cloche", "run/cloche/agent", "dev", "dev/shm", "dev/pts", "proc", "sys", "sys/fs", "tmp", "etc/passwd", "etc/hosts", "vercel", "vercel/sandbox"} {
		trees[p+" leads up"] = planted{path: p, link: up + marker}
		trees[p+" leads to the host"] = planted{path: p, link: marker}
	}
	for _, p := range []string{"run", "dev", "run/cloche/agent", "vercel"} {
		trees[p+" leads through proc"] = planted{path: p, link: "/proc/self/root" + marker}
		trees[p+" leads to process 1"] = planted{path: p, link: "/proc/1/root/" + up + marker}
		trees[p+" leads to the state"] = planted{path: p, link: "/state"}
		trees[p+" leads beside the root"] = planted{path: p, link: "/none/../../state"}
	}
	return trees
}

// into puts p into a tree and returns what takes it out again.
func (p planted) into(t *testing.T, tree string) (undo func()) {
	t.Helper()
	path := filepath.Join(tree, p.path)
	aside := tree + "-aside"
	var undos []func()
	for dir := p.path; ; {
		// The parents that this makes go again, the topmost last.
		dir = filepath.Dir(dir)
		if dir == "." {
			break
		}
		if _, err := os.Lstat(filepath.Join(tree, dir)); err == nil {
			break
		}
		gone := filepath.Join(tree, dir)
		undos = append(undos, func() { check(t, os.Remove(gone)) })
	}
	check(t, os.MkdirAll(filepath.Dir(path), 0o755))
	if err := os.Rename(path, aside); err == nil {
		undos = append([]func(){func() { check(t, os.Rename(aside, path)) }}, undos...)
	}
	undos = append([]func(){func() { check(t, os.RemoveAll(path)) }}, undos...)
	switch {
	case p.kind == 0:
		check(t, os.Symlink(p.link, path))
	case p.kind == fs.ModeDir:
		check(t, os.Mkdir(path, 0o755))
	case p.kind == fs.ModeNamedPipe:
		check(t, syscall.Mkfifo(path, 0o644))
	case p.kind.IsRegular():
		check(t, os.WriteFile(path, nil, p.kind))
	}
	return func() {
		for _, f := range undos {
			f()
		}
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// listing is every name, size and content of a directory of small files.
func listing(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	check(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			fmt.Fprintf(&b, "%s/\n", path)
			return err
		}
		text, err := os.ReadFile(path)
		fmt.Fprintf(&b, "%s %q\n", path, text)
		return err
	}))
	return b.String()
}
