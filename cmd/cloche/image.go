package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/mattn/go-isatty"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/cli"
	"github.com/cloche-dev/cloche/image"
)

type imageCmd struct {
	Build imageBuildCmd `cmd:"" help:"Build an image from Debian's packages: universal."`
	Pull  imagePullCmd  `cmd:"" help:"Pull a linux/amd64 image from an OCI registry."`
	Ls    imageLsCmd    `cmd:"" aliases:"list" help:"List the images of this server."`
	Rm    imageRmCmd    `cmd:"" aliases:"remove" help:"Remove an image that no sandbox uses."`
}

// adminFlags are those of the commands that manage a data directory.
type adminFlags struct {
	Data string `required:"" placeholder:"DIR" help:"Data directory of the server."`
	JSON bool   `name:"json" help:"Print JSON."`
}

type imageBuildCmd struct {
	adminFlags
	Name      string `arg:"" help:"Name of the recipe: universal."`
	IfMissing bool   `xor:"when" help:"Do nothing if the image is there already."`
	Refresh   bool   `xor:"when" help:"Install today's packages, although a build of this recipe is in the cache."`
}

// Run builds an image and prints its digest.
func (c *imageBuildCmd) Run(ctx context.Context, env *cli.Env) error {
	return c.make(ctx, env, imageRequest{Build: c.Name, IfMissing: c.IfMissing, Refresh: c.Refresh})
}

type imagePullCmd struct {
	adminFlags
	Ref       string `arg:"" help:"Reference: repository, repository:tag or repository@sha256:…"`
	IfMissing bool   `help:"Do nothing if the image is there already."`
}

// Run pulls an image and prints its digest.
func (c *imagePullCmd) Run(ctx context.Context, env *cli.Env) error {
	return c.make(ctx, env, imageRequest{Pull: c.Ref, IfMissing: c.IfMissing})
}

func (c *adminFlags) make(ctx context.Context, env *cli.Env, r imageRequest) error {
	return c.admin(ctx, env, func(a admin) error {
		show := newProgress(env.Stderr)
		img, err := a.MakeImage(ctx, r, show.step)
		show.end()
		if err != nil {
			return err
		}
		return c.print(env.Stdout, []cloche.Image{img})
	})
}

func (c *adminFlags) admin(ctx context.Context, env *cli.Env, f func(admin) error) error {
	log, err := newLogger(env.Stderr, "text", "warn")
	if err != nil {
		return err
	}
	return withAdmin(ctx, c.Data, log, f)
}

type imageLsCmd struct{ adminFlags }

// Run lists images.
func (c *imageLsCmd) Run(ctx context.Context, env *cli.Env) error {
	return c.admin(ctx, env, func(a admin) error {
		list, err := a.Images(ctx)
		if err != nil {
			return err
		}
		if len(list) == 0 && !c.JSON {
			_, err := fmt.Fprintln(env.Stderr, "no images; make the default one with: cloche image build universal --data", c.Data)
			return err
		}
		return c.print(env.Stdout, list)
	})
}

type imageRmCmd struct {
	adminFlags
	Ref string `arg:"" help:"Name, or name@sha256:… for one of several."`
}

// Run removes an image.
func (c *imageRmCmd) Run(ctx context.Context, env *cli.Env) error {
	return c.admin(ctx, env, func(a admin) error { return a.RemoveImage(ctx, c.Ref) })
}

func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

func (c *adminFlags) print(w io.Writer, list []cloche.Image) error {
	if c.JSON {
		return printJSON(w, list)
	}
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NAME\tDIGEST\tSIZE\tFILES\tCREATED")
	for _, i := range list {
		fmt.Fprintf(t, "%s\t%.19s\t%s\t%d\t%s\n", i.Name, i.Digest, humanize.IBytes(uint64(i.SizeBytes)), i.Files, humanize.Time(i.CreatedAt))
	}
	return t.Flush() // carries the errors of the lines above
}

// progress draws how far a build has come: one line a step, redrawn in place on
// a terminal.
type progress struct {
	w    io.Writer
	tty  bool
	name string
	last time.Time
}

func newProgress(w io.Writer) *progress {
	f, ok := w.(*os.File)
	return &progress{w: w, tty: ok && isatty.IsTerminal(f.Fd())}
}

// redraw bounds how often a line is redrawn.
const redraw = 100 * time.Millisecond

// step shows one report. Errors of the terminal are not the build's.
func (p *progress) step(s image.Step) {
	if !p.tty {
		if s.Name != p.name {
			fmt.Fprintf(p.w, "%s …\n", s.Name)
		}
		p.name = s.Name
		return
	}
	if s.Name != p.name && p.name != "" {
		fmt.Fprintln(p.w)
	}
	if s.Name == p.name && !s.End && time.Since(p.last) < redraw {
		return
	}
	p.name, p.last = s.Name, time.Now()
	text := s.Name
	switch {
	case s.Total > 0:
		const width = 24
		full := int(min(s.Done, s.Total) * width / s.Total)
		text = fmt.Sprintf("%-28s [%-*s] %3d %%  %s", s.Name, width, bar[:full], 100*s.Done/s.Total, humanize.IBytes(uint64(s.Done)))
	case s.Done > 0:
		text = fmt.Sprintf("%-28s %s", s.Name, humanize.IBytes(uint64(s.Done)))
	}
	if s.Detail != "" {
		text += "  " + s.Detail
	}
	fmt.Fprintf(p.w, "\r\x1b[K%.110s", text)
}

const bar = "########################"

func (p *progress) end() {
	if p.tty && p.name != "" {
		fmt.Fprintln(p.w)
	}
}
