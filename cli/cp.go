package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"unicode/utf8"

	"github.com/dustin/go-humanize"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

// cpCmd is `cloche cp`.
type cpCmd struct {
	Source string `arg:"" complete:"place" help:"File or directory; NAME:PATH is one in a sandbox."`
	Target string `arg:"" complete:"place" help:"Where to; NAME:PATH is in a sandbox, - is standard output."`
	Quiet  bool   `short:"q" help:"Show no progress."`
}

// Help is the text below the flags.
func (c *cpCmd) Help() string {
	return `Directories are copied with all that is in them. If the target is a directory, the copy is put into it; "SRC/." means what is in SRC. A relative path in a sandbox is below its working directory. A local file whose name has a colon is written ./a:b.

An entry that cannot be read or made is reported and the others are copied; the exit code is then 1. Files come out with the permissions that they have inside, but owned by you, without set-user-ID bits, and without devices or links that lead out of the copy.

Examples:
  cloche cp main.py build:
  cloche cp src/. build:/vercel/sandbox/src
  cloche cp build:out/report.pdf .
  cloche cp build:/var/log - | less`
}

// Run copies.
func (c *cpCmd) Run(ctx context.Context, env *Env) error {
	from, to := parsePlace(c.Source), parsePlace(c.Target)
	if (from.sandbox == "") == (to.sandbox == "") {
		return cloche.Errorf(cloche.CodeInvalid, "exactly one of %q and %q must be in a sandbox, as NAME:PATH", c.Source, c.Target)
	}
	api, err := env.Client()
	if err != nil {
		return err
	}
	defer api.Close()
	view, err := getSandbox(ctx, api, from.sandbox+to.sandbox, false)
	if err != nil {
		return err
	}
	job := &copying{c: api, env: env, session: view.Session}
	if !c.Quiet {
		p := startProgress(env, "copying", func() string { return humanize.IBytes(uint64(job.bytes.Load())) })
		defer p.Done()
		job.clear = p.Done
	}
	if to.sandbox != "" {
		err = job.upload(ctx, from.path, to.path)
	} else {
		err = job.download(ctx, from.path, to.path)
	}
	return job.result(err)
}

// copying is one run of cp.
type copying struct {
	c       *client.Client
	env     *Env
	session client.Session
	bytes   atomic.Int64 // of contents, so far
	clear   func()       // ends the progress line; may be nil
	links   bool         // whoever unpacks makes links

	mu  sync.Mutex
	bad int // entries that were reported; guarded by mu
}

// entry reports an entry that is left out, or not whole.
func (j *copying) entry(name string, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.clear != nil {
		j.clear()
	}
	j.bad++
	fmt.Fprintf(j.env.Stderr, "cloche: %s: %v\n", printable(name), cause(err))
}

// reported is the number of entries that were reported.
func (j *copying) reported() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.bad
}

// cause drops the path from a file system error: the report has one already.
func cause(err error) error {
	var p *os.PathError
	if errors.As(err, &p) {
		return p.Err
	}
	var l *os.LinkError
	if errors.As(err, &l) {
		return l.Err
	}
	return err
}

// result is the error of the whole copy.
func (j *copying) result(err error) error {
	if n := j.reported(); err == nil && n > 0 {
		return fmt.Errorf("%d of the entries could not be copied, the others were", n)
	}
	return err
}

// count counts the bytes that pass.
func (j *copying) count(r io.Reader) io.Reader { return &counter{r, &j.bytes} }

type counter struct {
	r io.Reader
	n *atomic.Int64
}

// Read reads and counts.
func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// place is a side of a copy. sandbox is "" for this host.
type place struct{ sandbox, path string }

// parsePlace splits NAME:PATH. What begins like a path is one, whatever comes
// after it.
func parsePlace(arg string) place {
	name, rest, ok := strings.Cut(arg, ":")
	if !ok || name == "" || strings.ContainsRune(name, '/') || name[0] == '.' {
		return place{path: arg}
	}
	return place{sandbox: name, path: rest}
}

// remote makes a path in the sandbox absolute, and says whether it was written
// as a directory.
func (j *copying) remote(p string) (abs string, dir bool) {
	dir = p == "" || p == "." || strings.HasSuffix(p, "/") || strings.HasSuffix(p, "/.") || strings.HasSuffix(p, "/..")
	if !path.IsAbs(p) {
		p = path.Join(j.session.WorkDir, p)
	}
	return path.Clean(p), dir
}

// isDir asks the sandbox. An image without test(1) says no.
func (j *copying) isDir(ctx context.Context, p string) (bool, error) {
	cmd, err := j.c.Run(ctx, j.session.ID, withPaths(client.Run{Command: "test", Args: []string{"-d"}}, p))
	return err == nil && *cmd.ExitCode == 0, err
}

// withPaths adds paths in the sandbox to the arguments of a command. Arguments
// are text; with paths that are not, xargs reads them from standard input.
func withPaths(r client.Run, paths ...string) client.Run {
	if !slices.ContainsFunc(paths, func(p string) bool { return !utf8.ValidString(p) }) {
		r.Args = append(r.Args, paths...)
		return r
	}
	r.Args = append([]string{"-0", r.Command}, r.Args...)
	r.Command, r.Stdin = "xargs", strings.NewReader(strings.Join(paths, "\x00")+"\x00")
	return r
}

// contents reports whether p means what is in a directory, not the directory.
func contents(p string) bool { return p == "." || strings.HasSuffix(p, "/.") }

// localTarget is where a copy called base goes if the user said target.
func localTarget(target, base string) string {
	info, err := os.Stat(target)
	if err == nil && info.IsDir() || strings.HasSuffix(target, "/") {
		return filepath.Join(target, base)
	}
	return target
}
