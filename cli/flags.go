package cli

import (
	"fmt"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/cloche-dev/cloche"
)

// Duration is a flag: a number and a unit of ms, s, m, h or d, or several of
// them ("1h30m").
type Duration time.Duration

// UnmarshalText parses a flag's value. A negative one is an error.
func (d *Duration) UnmarshalText(text []byte) error {
	s := strings.TrimSpace(string(text))
	var total time.Duration
	if days, rest, ok := strings.Cut(s, "d"); ok {
		n, err := strconv.ParseFloat(days, 64)
		if err != nil {
			return errDuration(s)
		}
		total, s = time.Duration(n*24*float64(time.Hour)), rest
	}
	if s != "" || total == 0 {
		rest, err := time.ParseDuration(s)
		if err != nil {
			return errDuration(string(text))
		}
		total += rest
	}
	if total <= 0 {
		return errDuration(string(text))
	}
	*d = Duration(total)
	return nil
}

func errDuration(s string) error {
	return fmt.Errorf("%q is not a duration like 90s, 15m, 1h30m or 2d", s)
}

// parseEnv reads K=V pairs; a K alone takes its value from this process.
func parseEnv(pairs []string, getenv func(string) string) (map[string]string, error) {
	if len(pairs) == 0 {
		return nil, nil
	}
	env := make(map[string]string, len(pairs))
	for _, pair := range pairs {
		k, v, ok := strings.Cut(pair, "=")
		if !ok {
			v = getenv(k)
		}
		env[k] = v
	}
	return env, cloche.CheckEnv(env)
}

// parseTags reads K=V pairs.
func parseTags(pairs []string) (map[string]string, error) {
	if len(pairs) == 0 {
		return nil, nil
	}
	tags := make(map[string]string, len(pairs))
	for _, pair := range pairs {
		k, v, ok := strings.Cut(pair, "=")
		if !ok || k == "" {
			return nil, cloche.Errorf(cloche.CodeInvalid, "the tag %q is not of the form KEY=VALUE", pair)
		}
		tags[k] = v
	}
	return tags, nil
}

// parseSignal reads a signal's number or its name, with or without SIG.
func parseSignal(s string) (int, error) {
	if n, err := strconv.Atoi(s); err == nil && n >= 1 && n <= 64 {
		return n, nil
	}
	name := strings.ToUpper(s)
	if !strings.HasPrefix(name, "SIG") {
		name = "SIG" + name
	}
	if n := unix.SignalNum(name); n != 0 {
		return int(n), nil
	}
	return 0, cloche.Errorf(cloche.CodeInvalid, "%q is no signal; use a name like TERM, INT, KILL, HUP, USR1, or a number from 1 to 64", s)
}

// signalName is the inverse of parseSignal, for people.
func signalName(n int) string {
	if s := unix.SignalName(syscall.Signal(n)); s != "" {
		return s
	}
	return "signal " + strconv.Itoa(n)
}
