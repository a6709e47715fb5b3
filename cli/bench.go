package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/cloche-dev/cloche"
	"github.com/cloche-dev/cloche/client"
)

// Bench is the command `cloche bench`: it measures a server over HTTP, and the
// same work done by other tools of the host. It asserts nothing: figures are for
// people, next to what they are meant to be.
func Bench() Command {
	return Command{Name: "bench", Help: "Measure a server, next to runsc, runc and bwrap.", Cmd: &benchCmd{}}
}

// benchCmd is `cloche bench`.
type benchCmd struct {
	Only   []string `help:"Parts to measure: create, burst, exec, file, idle. Default: all." enum:"create,burst,exec,file,idle" placeholder:"PART"`
	Data   string   `help:"Start a server of our own on this data directory, which has the image." placeholder:"DIR"`
	PID    int      `help:"Process of the server at CLOCHE_URL, for its memory." placeholder:"PID"`
	Image  string   `help:"Image of the sandboxes." placeholder:"IMAGE"`
	Tree   string   `help:"Root file system for the other tools; found below --data if there is one image." placeholder:"DIR"`
	Runsc  string   `help:"runsc." default:"runsc" placeholder:"PATH"`
	Runc   string   `help:"runc." default:"runc" placeholder:"PATH"`
	Bwrap  string   `help:"bwrap." default:"bwrap" placeholder:"PATH"`
	Rounds int      `help:"Rounds of create, and of each exec." default:"30" placeholder:"N"`
	Burst  int      `help:"Sandboxes at once." default:"20" placeholder:"N"`
	Idle   int      `help:"Idle sandboxes." default:"50" placeholder:"N"`

	jsonFlag `embed:""`
}

// Help is the text below the flags.
func (b *benchCmd) Help() string {
	return `With --data, or with CLOCHE_URL, CLOCHE_TOKEN and --pid. Sandboxes that it makes are removed. What cannot be measured is said at the end.

Examples:
  sudo cloche bench --data /var/lib/cloche --runsc /usr/local/bin/runsc
  cloche bench --only exec,file --json`
}

// figure is one measured number.
type figure struct {
	Part   string  `json:"part"`
	Name   string  `json:"name"`
	Value  float64 `json:"value"`
	Unit   string  `json:"unit"` // ms, MB/s, MB, "" for a count or a ratio
	Target string  `json:"target,omitempty"`
	Met    *bool   `json:"met,omitempty"` // absent without a target
}

// benchReport is all that a run of bench found.
type benchReport struct {
	At      time.Time `json:"at"`
	Host    hostFacts `json:"host"`
	Figures []figure  `json:"figures"`
	Skipped []string  `json:"skipped"`
}

// bench is a run of the benchmark.
type bench struct {
	benchCmd
	env    *Env
	c      *client.Client
	prefix string // of the names of its sandboxes
	report benchReport
}

// Run measures and prints.
func (b *benchCmd) Run(ctx context.Context, env *Env) (err error) {
	run := &bench{benchCmd: *b, env: env, prefix: fmt.Sprintf("bench-%x-", time.Now().UnixNano()&0xffffff)}
	run.report = benchReport{At: time.Now().UTC(), Host: readHost("/"), Skipped: []string{}}
	if b.Data != "" {
		server, err := startServer(ctx, env, b.Data)
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, server.Close()) }()
		run.c, run.PID = server.client, server.pid()
	} else if run.c, err = env.Client(); err != nil {
		return fmt.Errorf("%w; or give --data DIR, for a server of our own", err)
	}
	defer run.c.Close()
	defer func() { err = errors.Join(err, run.removeAll(ctx)) }()
	for _, part := range []struct {
		name    string
		measure func(context.Context) error
	}{
		{"create", run.create}, {"burst", run.burst}, {"exec", run.exec}, {"file", run.file}, {"idle", run.idle},
	} {
		if len(b.Only) > 0 && !slices.Contains(b.Only, part.name) {
			continue
		}
		if err := part.measure(ctx); err != nil {
			return fmt.Errorf("%s: %w", part.name, err)
		}
	}
	if b.JSON {
		return printJSON(env.Stdout, run.report)
	}
	return run.report.print(env.Stdout)
}

// add notes a figure without a target.
func (b *bench) add(part, name string, value float64, unit string) {
	b.report.Figures = append(b.report.Figures, figure{Part: part, Name: name, Value: value, Unit: unit})
}

// atMost notes a figure that should not be over a bound.
func (b *bench) atMost(part, name string, value float64, unit string, bound float64, why string) {
	met := value <= bound
	b.bounded(part, name, value, unit, "at most "+number(bound)+" "+unit+why, met)
}

// atLeast notes a figure that should not be below a bound.
func (b *bench) atLeast(part, name string, value float64, unit string, bound float64) {
	b.bounded(part, name, value, unit, "at least "+number(bound)+" "+unit, value >= bound)
}

func (b *bench) bounded(part, name string, value float64, unit, target string, met bool) {
	b.report.Figures = append(b.report.Figures, figure{
		Part: part, Name: name, Value: value, Unit: unit, Target: strings.TrimSpace(target), Met: &met,
	})
}

// skip says what was not measured, at once and in the report.
func (b *bench) skip(format string, args ...any) {
	s := fmt.Sprintf(format, args...)
	b.report.Skipped = append(b.report.Skipped, s)
	fmt.Fprintln(b.env.Stderr, "cloche: NOT MEASURED:", s)
}

// name makes the name of the nth sandbox of a part.
func (b *bench) name(part string, n int) string { return b.prefix + part + "-" + strconv.Itoa(n) }

// removeAll removes what a part left behind when it failed.
func (b *bench) removeAll(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	left, err := pages(client.List{NamePrefix: b.prefix, SortBy: "name"}, 0, func(q client.List) ([]client.Sandbox, string, error) {
		return b.c.Sandboxes(ctx, q)
	})
	for _, s := range left {
		err = errors.Join(err, b.remove(ctx, s.Name))
	}
	return err
}

func (b *bench) remove(ctx context.Context, name string) error {
	err := b.c.DeleteSandbox(ctx, name)
	if code(err) == cloche.CodeNotFound {
		return nil
	}
	return err
}

// print writes the report for people.
func (r *benchReport) print(w io.Writer) error {
	h := r.Host
	fmt.Fprintf(w, "%s, %d cores, %s of memory, Linux %s, load %s before, %s\n\n",
		h.CPU, h.Cores, memory(h.MemoryMiB), h.Kernel, h.Load, r.At.Format(time.DateTime))
	t := newTable(w, "PART", "FIGURE", "VALUE", "MET", "TARGET")
	for _, f := range r.Figures {
		mark := ""
		if f.Met != nil {
			mark = map[bool]string{true: "yes", false: "NO"}[*f.Met]
		}
		t.row(f.Part, f.Name, strings.TrimSpace(number(f.Value)+" "+f.Unit), mark, f.Target)
	}
	err := t.flush()
	for _, s := range r.Skipped {
		_, err = fmt.Fprintln(w, "not measured:", s)
	}
	return err
}

// number prints a value with three digits that mean something.
func number(v float64) string {
	switch {
	case v == float64(int64(v)) || v >= 100:
		return strconv.FormatFloat(v, 'f', 0, 64)
	case v >= 10:
		return strconv.FormatFloat(v, 'f', 1, 64)
	}
	return strconv.FormatFloat(v, 'f', 2, 64)
}

// percentile returns the value below which p of 100 values are, by the nearest
// rank. values is not empty; it gets sorted.
func percentile(values []float64, p int) float64 {
	slices.Sort(values)
	rank := (len(values)*p + 99) / 100
	return values[max(rank, 1)-1]
}

func milliseconds(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// findTree finds the root file system for the other tools, "" if there is none
// or more than one.
func (b *bench) findTree() string {
	if b.Tree != "" || b.Data == "" {
		return b.Tree
	}
	trees, err := filepath.Glob(filepath.Join(b.Data, "images", "img_*", "tree"))
	if err != nil || len(trees) != 1 {
		return ""
	}
	return trees[0]
}
