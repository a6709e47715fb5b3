package cli

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

// createCmd is `cloche create`.
type createCmd struct {
	createFlags   `embed:""`
	NonPersistent bool `help:"Do not save the files when the sandbox stops."`
	jsonFlag      `embed:""`
}

// Help is the text below the flags.
func (c *createCmd) Help() string {
	return `Prints the name of the sandbox.

Examples:
  cloche create --name build --timeout 2h --vcpus 4
  name=$(cloche create) && cloche exec "$name" -- uname -a`
}

// Run makes the sandbox.
func (c *createCmd) Run(ctx context.Context, env *Env) error {
	request, err := c.create(env)
	if err != nil {
		return err
	}
	if c.NonPersistent {
		persistent := false
		request.Persistent = &persistent
	}
	api, err := env.Client()
	if err != nil {
		return err
	}
	defer api.Close()
	p := startProgress(env, "starting a sandbox", nil)
	view, err := api.Create(ctx, request)
	p.Done()
	if err != nil {
		return err
	}
	if c.JSON {
		return printJSON(env.Stdout, view)
	}
	_, err = fmt.Fprintln(env.Stdout, view.Sandbox.Name)
	return err
}

// lsCmd is `cloche ls`.
type lsCmd struct {
	All        bool   `short:"a" help:"Also those that do not run."`
	NamePrefix string `help:"Only those whose name begins so." placeholder:"PREFIX"`
	Tag        string `help:"Only those with this tag." placeholder:"K=V"`
	SortBy     string `help:"createdAt, name or statusUpdatedAt." enum:"createdAt,name,statusUpdatedAt" default:"createdAt"`
	SortOrder  string `help:"asc or desc." enum:"asc,desc" default:"desc"`
	Limit      int    `help:"At most so many; 0 is all." default:"0" placeholder:"N"`
	jsonFlag   `embed:""`
}

// Help is the text below the flags.
func (l *lsCmd) Help() string {
	return `Examples:
  cloche ls
  cloche ls --all --sort-by name --sort-order asc
  cloche ls --json | jq -r '.[].name'`
}

// Run prints the list.
func (l *lsCmd) Run(ctx context.Context, env *Env) error {
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	query := client.List{
		NamePrefix: l.NamePrefix, Tag: strings.Replace(l.Tag, "=", ":", 1),
		SortBy: l.SortBy, Ascending: l.SortOrder == "asc",
	}
	if l.NamePrefix != "" {
		query.SortBy = "name" // the only order that the wire allows with a prefix
	}
	all, err := pages(query, l.Limit, func(q client.List) ([]client.Sandbox, string, error) {
		list, next, err := c.Sandboxes(ctx, q)
		if !l.All {
			list = slices.DeleteFunc(list, func(s client.Sandbox) bool { return s.Status != cloche.Running })
		}
		return list, next, err
	})
	if err != nil {
		return err
	}
	if l.JSON {
		return printJSON(env.Stdout, all)
	}
	t := newTable(env.Stdout, "NAME", "STATUS", "CREATED", "STOPS IN", "VCPUS", "MEMORY", "IMAGE")
	for _, s := range all {
		stops := ""
		if s.Status == cloche.Running && s.ExpiresAt != 0 {
			stops = in(s.ExpiresAt.Time())
		}
		t.row(s.Name, string(s.Status), ago(s.CreatedAt), stops, strconv.Itoa(s.VCPUs), memory(s.MemoryMiB), image(s.Image))
	}
	return t.flush()
}

// pages collects up to limit items of a paged list, 0 being all of them. It is
// never nil.
func pages[T any](q client.List, limit int, get func(client.List) ([]T, string, error)) ([]T, error) {
	all := []T{}
	q.Limit = cloche.MaxPageSize
	for {
		page, next, err := get(q)
		if err != nil {
			return nil, err
		}
		all = append(all, page...)
		if limit > 0 && len(all) >= limit {
			return all[:limit], nil
		}
		if next == "" {
			return all, nil
		}
		q.Cursor = next
	}
}

// image shortens the digest of an image's reference.
func image(ref string) string {
	name, digest, ok := strings.Cut(ref, "@sha256:")
	if !ok {
		return ref
	}
	return name + "@" + digest[:min(12, len(digest))]
}

func memory(mib int) string { return humanize.IBytes(uint64(mib) << 20) }

// getCmd is `cloche get`.
type getCmd struct {
	Name     string `arg:"" complete:"sandbox" help:"Sandbox."`
	jsonFlag `embed:""`
}

// Run prints the sandbox.
func (g *getCmd) Run(ctx context.Context, env *Env) error {
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	view, err := getSandbox(ctx, c, g.Name, false)
	if err != nil {
		return err
	}
	if g.JSON {
		return printJSON(env.Stdout, view)
	}
	box, session := view.Sandbox, view.Session
	t := newTable(env.Stdout)
	t.row("name", box.Name)
	t.row("status", string(session.Status))
	t.row("session", string(session.ID))
	t.row("image", box.Image)
	t.row("runtime", session.Runtime)
	t.row("working directory", session.WorkDir)
	t.row("vcpus", strconv.Itoa(session.VCPUs))
	t.row("memory", memory(session.MemoryMiB))
	t.row("created", stamp(box.CreatedAt))
	t.row("started", stamp(session.StartedAt))
	switch {
	case session.Status == cloche.Running:
		t.row("stops in", in(session.Deadline()))
	case session.StoppedAt != 0:
		t.row("stopped", stamp(session.StoppedAt))
	}
	if session.Cause != "" {
		t.row("cause", session.Cause)
	}
	t.row("timeout", short(session.Timeout.Duration()))
	t.row("persistent", strconv.FormatBool(box.Persistent))
	if mode, ok := session.NetworkPolicy["mode"].(string); ok {
		t.row("network", mode)
	}
	for _, r := range view.Routes {
		t.row("port "+strconv.Itoa(r.Port), r.URL)
	}
	for _, k := range slices.Sorted(maps.Keys(box.Tags)) {
		t.row("tag "+k, box.Tags[k])
	}
	t.row("cpu used", short((box.TotalActiveCPU + session.ActiveCPU).Duration()))
	return t.flush()
}

// stamp is a moment, exact and for people.
func stamp(m client.Millis) string {
	if m == 0 {
		return ""
	}
	return m.Time().Format(time.DateTime) + " (" + ago(m) + ")"
}

// extendCmd is `cloche extend`.
type extendCmd struct {
	Name     string   `arg:"" complete:"sandbox" help:"Sandbox."`
	Duration Duration `arg:"" help:"Time to add: 30m, 2h."`
	jsonFlag `embed:""`
}

// Run extends the timeout.
func (e *extendCmd) Run(ctx context.Context, env *Env) error {
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	view, err := getSandbox(ctx, c, e.Name, false)
	if err != nil {
		return err
	}
	session, err := c.ExtendTimeout(ctx, view.Session.ID, time.Duration(e.Duration))
	if err != nil {
		return err
	}
	if e.JSON {
		return printJSON(env.Stdout, session)
	}
	_, err = fmt.Fprintf(env.Stdout, "%s stops in %s\n", e.Name, in(session.Deadline()))
	return err
}

// stopCmd is `cloche stop`.
type stopCmd struct {
	Names    []string `arg:"" name:"name" complete:"sandbox" help:"Sandboxes."`
	jsonFlag `embed:""`
}

// Run stops the sandboxes; one that fails does not keep the others running.
func (s *stopCmd) Run(ctx context.Context, env *Env) error {
	return each(env, s.Names, s.JSON, "stopping", func(c *client.Client, name string) error {
		view, err := getSandbox(ctx, c, name, false)
		if err != nil || view.Session.Status.Final() {
			return err
		}
		_, err = c.StopSession(ctx, view.Session.ID)
		return err
	})
}

// rmCmd is `cloche rm`.
type rmCmd struct {
	Names    []string `arg:"" name:"name" complete:"sandbox" help:"Sandboxes."`
	Force    bool     `short:"f" help:"A sandbox that is not there is no error."`
	jsonFlag `embed:""`
}

// Run removes the sandboxes; one that fails does not keep the others.
func (r *rmCmd) Run(ctx context.Context, env *Env) error {
	return each(env, r.Names, r.JSON, "removing", func(c *client.Client, name string) error {
		if err := cloche.CheckName(name); err != nil {
			return err
		}
		err := c.DeleteSandbox(ctx, name)
		if r.Force && code(err) == cloche.CodeNotFound {
			return nil
		}
		return err
	})
}

// result is what became of one of several sandboxes.
type result struct {
	Name  string `json:"name"`
	Error string `json:"error,omitempty"`
}

// each does the same to several sandboxes and prints the names of those where
// it worked.
func each(env *Env, names []string, asJSON bool, what string, do func(*client.Client, string) error) error {
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	var errs []error
	results := []result{}
	for _, name := range names {
		p := startProgress(env, what+" "+name, nil)
		err := do(c, name)
		p.Done()
		r := result{Name: name}
		if err != nil {
			r.Error = err.Error()
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		} else if !asJSON {
			fmt.Fprintln(env.Stdout, name)
		}
		results = append(results, r)
	}
	if asJSON {
		errs = append(errs, printJSON(env.Stdout, results))
	}
	return errors.Join(errs...)
}

// sessionsCmd is `cloche sessions`.
type sessionsCmd struct {
	Ls sessionsLsCmd `cmd:"" aliases:"list" default:"withargs" help:"List the runs of a sandbox, the latest first."`
}

type sessionsLsCmd struct {
	Name     string `arg:"" complete:"sandbox" help:"Sandbox."`
	Limit    int    `help:"At most so many; 0 is all." default:"0" placeholder:"N"`
	jsonFlag `embed:""`
}

// Run prints the list.
func (s *sessionsLsCmd) Run(ctx context.Context, env *Env) error {
	if err := cloche.CheckName(s.Name); err != nil {
		return err
	}
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	all, err := pages(client.List{Sandbox: s.Name}, s.Limit, func(q client.List) ([]client.Session, string, error) {
		return c.Sessions(ctx, q)
	})
	if err != nil {
		return err
	}
	if s.JSON {
		return printJSON(env.Stdout, all)
	}
	t := newTable(env.Stdout, "SESSION", "STATUS", "STARTED", "DURATION", "CPU")
	for _, v := range all {
		lasted := v.Duration.Duration()
		if !v.Status.Final() && v.StartedAt != 0 {
			lasted = time.Since(v.StartedAt.Time())
		}
		t.row(string(v.ID), string(v.Status), ago(v.StartedAt), short(lasted), short(v.ActiveCPU.Duration()))
	}
	return t.flush()
}

// forkCmd is `cloche fork`.
type forkCmd struct {
	Source   string `arg:"" complete:"sandbox" help:"Sandbox to start from."`
	Name     string `help:"Name of the new sandbox; made up if absent." placeholder:"NAME"`
	jsonFlag `embed:""`
}

// Run makes the fork.
func (f *forkCmd) Run(ctx context.Context, env *Env) error {
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	view, err := c.Fork(ctx, f.Source, f.Name)
	if err != nil {
		return err
	}
	if f.JSON {
		return printJSON(env.Stdout, view)
	}
	_, err = fmt.Fprintln(env.Stdout, view.Sandbox.Name)
	return err
}

// snapshotCmd is `cloche snapshot`.
type snapshotCmd struct {
	Name string `arg:"" complete:"sandbox" help:"Sandbox."`
	Stop bool   `help:"Must be given: saving the files stops the sandbox." required:""`
}

// Run takes the snapshot.
func (s *snapshotCmd) Run(ctx context.Context, env *Env) error {
	c, err := env.Client()
	if err != nil {
		return err
	}
	defer c.Close()
	view, err := getSandbox(ctx, c, s.Name, false)
	if err != nil {
		return err
	}
	return c.Snapshot(ctx, view.Session.ID)
}
