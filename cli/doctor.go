package cli

import (
	"context"
	"fmt"
	"io"
	"time"
)

// Status is the result of a Check in a word.
type Status string

// The states of a check.
const (
	OK      Status = "ok"
	Missing Status = "missing"
)

// Result is what a Check found.
type Result struct {
	Status Status `json:"status"`
	Detail string `json:"detail"`        // what is there, or what is not
	Fix    string `json:"fix,omitempty"` // the command that makes it ok; "" with OK
}

// Check is one thing that this host can do or not.
type Check struct {
	Name string
	// Why says what does not work without it.
	Why string
	// Optional: without it everything else works.
	Optional bool
	// Run finds out. It changes nothing that outlives it and returns within
	// checkTime.
	Run func(ctx context.Context) Result
}

// checkTime bounds one check: one that hangs is a result too.
const checkTime = 20 * time.Second

// Doctor is the command `cloche doctor` with the checks of HostChecks and those
// of the caller.
func Doctor(extra ...Check) Command {
	return Command{
		Name: "doctor", Help: "Say what this host can do, and what it lacks.",
		Cmd: &doctorCmd{checks: func(data string) []Check { return append(HostChecks("/", data), extra...) }},
	}
}

// doctorCmd is `cloche doctor`.
type doctorCmd struct {
	Data     string `help:"Data directory that the server has or will have." default:"/var/lib/cloche" placeholder:"DIR"`
	jsonFlag `embed:""`

	checks func(data string) []Check
}

// Help is the text below the flags.
func (d *doctorCmd) Help() string {
	return `The exit code is 1 if something is missing that a server needs. What is optional is said to be so.`
}

// finding is a check with its result.
type finding struct {
	Name     string `json:"name"`
	Optional bool   `json:"optional"`
	Why      string `json:"why"`
	Result
}

// Run makes the checks and prints them.
func (d *doctorCmd) Run(ctx context.Context, env *Env) error {
	findings := examine(ctx, d.checks(d.Data))
	bad := 0
	for _, f := range findings {
		if f.Status != OK && !f.Optional {
			bad++
		}
	}
	if d.JSON {
		if err := printJSON(env.Stdout, findings); err != nil {
			return err
		}
	} else if err := printFindings(env.Stdout, findings, bad); err != nil {
		return err
	}
	if bad > 0 {
		return &ExitError{Code: ExitFailed}
	}
	return nil
}

func examine(ctx context.Context, checks []Check) []finding {
	findings := make([]finding, 0, len(checks))
	for _, c := range checks {
		one, cancel := context.WithTimeout(ctx, checkTime)
		findings = append(findings, finding{Name: c.Name, Optional: c.Optional, Why: c.Why, Result: c.Run(one)})
		cancel()
	}
	return findings
}

func printFindings(w io.Writer, findings []finding, bad int) error {
	width := 0
	for _, f := range findings {
		width = max(width, len(f.Name))
	}
	for _, f := range findings {
		word := string(f.Status)
		if f.Status == Missing && f.Optional {
			word = "absent"
		}
		fmt.Fprintf(w, "%-7s  %-*s  %s\n", word, width, f.Name, f.Detail)
		if f.Status == OK {
			continue
		}
		why := f.Why
		if f.Optional {
			why += " (optional)"
		}
		fmt.Fprintf(w, "%9s%-*s  why: %s\n", "", width, "", why)
		if f.Fix != "" {
			fmt.Fprintf(w, "%9s%-*s  fix: %s\n", "", width, "", f.Fix)
		}
	}
	_, err := fmt.Fprintln(w, summary(bad))
	return err
}

func summary(bad int) string {
	switch bad {
	case 0:
		return "\nThis host can run sandboxes."
	case 1:
		return "\nThis host cannot run sandboxes yet: one thing is missing."
	}
	return fmt.Sprintf("\nThis host cannot run sandboxes yet: %d things are missing.", bad)
}

func ok(format string, args ...any) Result {
	return Result{Status: OK, Detail: fmt.Sprintf(format, args...)}
}

func missing(fix, format string, args ...any) Result {
	return Result{Status: Missing, Detail: fmt.Sprintf(format, args...), Fix: fix}
}
