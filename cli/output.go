package cli

import (
	"encoding/json"
	"fmt"
	"io"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/dustin/go-humanize"
	"golang.org/x/term"

	"github.com/cloche-dev/cloche/client"
)

// jsonFlag is the flag that every command with an answer has.
type jsonFlag struct {
	JSON bool `name:"json" help:"Print JSON."`
}

// printJSON writes v, indented, with a newline.
func printJSON(w io.Writer, v any) error {
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	e.SetIndent("", "  ")
	return e.Encode(v)
}

// table writes rows in aligned columns under a heading.
type table struct{ w *tabwriter.Writer }

func newTable(w io.Writer, heading ...string) *table {
	t := &table{w: tabwriter.NewWriter(w, 0, 8, 2, ' ', 0)}
	if len(heading) > 0 {
		t.row(heading...)
	}
	return t
}

// row writes one row. Cells come from the server and from inside sandboxes, so
// nothing in them may move the cursor or make a column.
func (t *table) row(cells ...string) {
	for i, c := range cells {
		cells[i] = printable(c)
		if cells[i] == "" {
			cells[i] = "-"
		}
	}
	fmt.Fprintln(t.w, strings.Join(cells, "\t"))
}

func (t *table) flush() error { return t.w.Flush() }

// printable quotes text that a terminal would act on.
func printable(s string) string {
	for _, r := range s {
		if r < ' ' || r == 0x7f || (r >= 0x80 && r < 0xa0) || r == '\uFFFD' {
			return fmt.Sprintf("%q", s)
		}
	}
	return s
}

// ago is a moment in the past for people.
func ago(m client.Millis) string {
	if m == 0 {
		return ""
	}
	return humanize.RelTime(m.Time(), time.Now(), "ago", "from now")
}

// in is how long it is until t, in the largest two units.
func in(t time.Time) string { return short(time.Until(t)) }

// short is a duration for people: 1h5m, 4m10s, 3s, 120ms.
func short(d time.Duration) string {
	switch {
	case d < 0:
		return "0s"
	case d < time.Second:
		return d.Round(time.Millisecond).String()
	case d < 10*time.Second:
		return d.Round(100 * time.Millisecond).String()
	case d < time.Hour:
		d = d.Round(time.Second)
	default:
		d = d.Round(time.Minute)
	}
	s := d.String()
	if cut, ok := strings.CutSuffix(s, "m0s"); ok {
		s = cut + "m"
	}
	if cut, ok := strings.CutSuffix(s, "h0m"); ok {
		s = cut + "h"
	}
	return s
}

// progress is a line on a terminal that says what goes on; elsewhere it is
// nothing. Done waits for it, and may be called more than once.
type progress struct {
	w    io.Writer
	what string
	stop chan struct{}
	once sync.Once
	done sync.WaitGroup
}

// startProgress shows what, with the time that it has taken, from half a second
// on. more, if not nil, is added to the line; it is called from another
// goroutine.
func startProgress(env *Env, what string, more func() string) *progress {
	p := &progress{w: env.Stderr, what: what, stop: make(chan struct{})}
	if !isTerminal(env.Stderr) {
		return p
	}
	p.done.Go(func() { p.show(more) })
	return p
}

func (p *progress) show(more func() string) {
	started := time.Now()
	tick := time.NewTicker(250 * time.Millisecond)
	defer tick.Stop()
	shown := false
	for {
		select {
		case <-p.stop:
			if shown {
				fmt.Fprint(p.w, "\r\x1b[K")
			}
			return
		case <-tick.C:
		}
		elapsed := time.Since(started)
		if elapsed < 500*time.Millisecond {
			continue
		}
		shown = true
		line := p.what + " " + short(elapsed.Round(100*time.Millisecond))
		if more != nil {
			line += "  " + more()
		}
		fmt.Fprintf(p.w, "\r\x1b[K%s", line)
	}
}

// Done removes the line.
func (p *progress) Done() {
	p.once.Do(func() { close(p.stop) })
	p.done.Wait()
}

func isTerminal(w any) bool {
	f := file(w)
	return f != nil && term.IsTerminal(int(f.Fd()))
}
